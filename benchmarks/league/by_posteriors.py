"""posteriors: transforms of a state, under ``torch.vmap`` for several chains; the loop is the user's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

from league.jobs import FRICTION, NOISE_STD, PRIOR_STD, RATE, Sizes, Timed, regression
from league.networks import MLP, shuffled, tensors

Parameters = dict[str, Tensor]


def _log_posterior(num_rows: int) -> Callable:
    """Divided by the number of rows, with which the library asks for a temperature of one over it."""
    template = MLP().requires_grad_(False)

    def log_posterior(parameters: Parameters, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        outputs = functional_call(template, parameters, (inputs,))
        squares = torch.stack([p.square().sum() for p in parameters.values()]).sum()
        fit = F.mse_loss(outputs, targets) / (2 * NOISE_STD**2)
        return -fit - squares / (2 * PRIOR_STD**2 * num_rows), outputs.detach()

    return log_posterior


def _training(sizes: Sizes, transform: Any) -> Timed:
    x, y = tensors(regression(sizes.rows))

    def alone(epochs: int) -> None:
        state = transform.init({name: p.detach() for name, p in MLP().named_parameters()})
        for _ in range(epochs):
            for batch in shuffled(x, y, sizes.batch_size):
                state, _ = transform.update(state, batch)

    def together(epochs: int) -> None:
        parameters, _ = stack_module_state([MLP() for _ in range(sizes.members)])
        state = torch.vmap(transform.init, randomness="different")(
            {name: p.detach() for name, p in parameters.items()}
        )
        update = torch.vmap(transform.update, randomness="different")
        for _ in range(epochs):
            orders = torch.stack([torch.randperm(len(x)) for _ in range(sizes.members)])
            for rows in orders.split(sizes.batch_size, 1):
                state, _ = update(state, (x[rows], y[rows]))

    train = alone if sizes.members == 1 else together
    return Timed(lambda: train(sizes.epochs), lambda: train(1))


def ensemble(sizes: Sizes) -> Timed:
    import torchopt

    import posteriors

    log_posterior = _log_posterior(sizes.rows)

    def loss(parameters: Parameters, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, outputs = log_posterior(parameters, batch)
        return -value, outputs

    return _training(sizes, posteriors.torchopt.build(loss, torchopt.adam(lr=1e-3)))


def mean_field(sizes: Sizes) -> Timed:
    import torchopt

    import posteriors

    transform = posteriors.vi.diag.build(
        _log_posterior(sizes.rows), torchopt.adam(lr=1e-3), temperature=1 / sizes.rows, init_log_sds=-6.0
    )
    return _training(sizes, transform)


def sgmcmc(sizes: Sizes) -> Timed:
    import posteriors

    log_posterior, temperature = _log_posterior(sizes.rows), 1 / sizes.rows
    if sizes.kernel == "sgld":
        transform = posteriors.sgmcmc.sgld.build(log_posterior, RATE, temperature=temperature)
    else:
        step = RATE**0.5  # its momenta are ours over the step
        transform = posteriors.sgmcmc.sghmc.build(
            log_posterior, step, alpha=FRICTION / step, temperature=temperature
        )
    return _training(sizes, transform)
