"""posteriors: transforms of a state, under ``torch.vmap`` for several chains; the loop is the user's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

from league.jobs import (
    CNN_MOMENTUM,
    CNN_RATE,
    FRICTION,
    NOISE_STD,
    PRIOR_STD,
    RATE,
    Sizes,
    Timed,
    images,
    regression,
)
from league.networks import MLP, SmallCNN, shuffled, tensors

Parameters = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


def _log_posterior(num_rows: int) -> Callable:
    """Divided by the number of rows, with which the library asks for a temperature of one over it."""
    template = MLP()

    def log_posterior(parameters: Parameters, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        outputs = functional_call(template, parameters, (inputs,))
        squares = torch.stack([p.square().sum() for p in parameters.values()]).sum()
        fit = F.mse_loss(outputs, targets) / (2 * NOISE_STD**2)
        return -fit - squares / (2 * PRIOR_STD**2 * num_rows), outputs.detach()

    return log_posterior


def _training(
    sizes: Sizes,
    transform: Any,
    arrays: tuple[np.ndarray, np.ndarray],
    factory: Callable[[], nn.Module] = MLP,
) -> Timed:
    x, y = tensors(arrays)

    def alone(epochs: int) -> None:
        state = transform.init({name: p.detach() for name, p in factory().named_parameters()})
        for _ in range(epochs):
            for batch in shuffled(x, y, sizes.batch_size):
                state, _ = transform.update(state, batch)

    def together(epochs: int) -> None:
        parameters, _ = stack_module_state([factory() for _ in range(sizes.members)])
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


def _descent(loss: Callable[[Tensor, Tensor], Tensor], module: nn.Module, optimizer: Any) -> Any:
    import posteriors

    def loss_of(parameters: Parameters, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        outputs = functional_call(module, parameters, (inputs,))
        return loss(outputs, targets), outputs.detach()

    return posteriors.torchopt.build(loss_of, optimizer)


def ensemble(sizes: Sizes) -> Timed:
    import torchopt

    transform = _descent(F.mse_loss, MLP(), torchopt.adam(lr=1e-3))
    return _training(sizes, transform, regression(sizes.rows))


def cnn_ensemble(sizes: Sizes) -> Timed:
    import torchopt

    transform = _descent(F.cross_entropy, SmallCNN(), torchopt.sgd(lr=CNN_RATE, momentum=CNN_MOMENTUM))
    return _training(sizes, transform, images(sizes.rows), SmallCNN)


def mean_field(sizes: Sizes) -> Timed:
    import torchopt

    import posteriors

    transform = posteriors.vi.diag.build(
        _log_posterior(sizes.rows), torchopt.adam(lr=1e-3), temperature=1 / sizes.rows, init_log_sds=-6.0
    )
    return _training(sizes, transform, regression(sizes.rows))


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
    return _training(sizes, transform, regression(sizes.rows))
