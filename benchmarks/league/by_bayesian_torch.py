"""bayesian-torch: layers with Gaussian weights; the loop is the user's."""

import torch
from torch import nn
from torch.nn import functional as F

from league.jobs import NUM_CLASSES, PRIOR_STD, Sizes, Timed, classification, regression
from league.networks import MLP, shuffled, tensors


def _gaussian(module: nn.Module) -> nn.Module:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    options = {
        "prior_mu": 0.0,
        "prior_sigma": PRIOR_STD,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -6.0,
        "type": "Reparameterization",
        "moped_enable": False,
        "moped_delta": 0.0,
    }
    dnn_to_bnn(module, options)
    return module


def mean_field(sizes: Sizes) -> Timed:
    from bayesian_torch.models.dnn_to_bnn import get_kl_loss

    x, y = tensors(regression(sizes.rows))

    def train(epochs: int) -> None:
        module = _gaussian(MLP())
        adam = torch.optim.Adam(module.parameters())
        for _ in range(epochs):
            for inputs, targets in shuffled(x, y, sizes.batch_size):
                loss = F.mse_loss(module(inputs), targets) / 2 + get_kl_loss(module) / sizes.rows
                adam.zero_grad()
                loss.backward()
                adam.step()

    return Timed(lambda: train(sizes.epochs), lambda: train(1))


def prediction(sizes: Sizes) -> Timed:
    """Every pass draws a network anew."""
    module = _gaussian(MLP(NUM_CLASSES)).eval()
    x, _ = tensors(classification(sizes.points))

    @torch.no_grad()
    def run() -> None:
        for _ in range(sizes.calls):
            torch.stack([module(x).softmax(-1) for _ in range(sizes.members)]).mean(0)

    return Timed(run)
