"""torch-uncertainty: its routines under its own Lightning trainer.

Members of an ensemble are trained together on the same batches, as its tutorials do.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from league.jobs import (
    CNN_MOMENTUM,
    CNN_RATE,
    DROPOUT,
    FRICTION,
    NUM_CLASSES,
    NUM_HIDDEN,
    NUM_INPUTS,
    PRIOR_STD,
    RATE,
    Sizes,
    Timed,
    classification,
    images,
    regression,
)
from league.lightning_trainer import TRAINER
from league.networks import MLP, SmallCNN, loader, moments, tensors


def _regression(
    sizes: Sizes,
    build: Callable[[], nn.Module],
    loss: Callable[[], nn.Module] = nn.MSELoss,
    optimizer: Callable = torch.optim.Adam,
    num_members: int = 1,
    validate: bool = False,
) -> Timed:
    """validate: methods that average weights do so when the routine begins to validate."""
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.routines import RegressionRoutine
    from torch_uncertainty.transforms import RepeatTarget

    x, y = tensors(regression(sizes.rows))
    batches = loader(x, y[:, 0], sizes.batch_size)
    held_out = loader(x[: sizes.batch_size], y[: sizes.batch_size, 0], sizes.batch_size) if validate else None

    def train(epochs: int) -> None:
        model = build()
        routine = RegressionRoutine(
            model,
            output_dim=1,
            loss=loss(),
            is_ensemble=num_members > 1,
            optim_recipe=optimizer(model.parameters()),
            format_batch_fn=RepeatTarget(num_members) if num_members > 1 else None,
        )
        TUTrainer(max_epochs=epochs, **TRAINER).fit(routine, batches, held_out)

    return Timed(lambda: train(sizes.epochs), lambda: train(1))


def ensemble(sizes: Sizes) -> Timed:
    from torch_uncertainty.methods.deep_ensembles import deep_ensembles

    def build() -> nn.Module:
        members = [MLP() for _ in range(sizes.members)]
        return deep_ensembles(members, task="regression", probabilistic=False)

    return _regression(sizes, build, num_members=sizes.members)


def cnn_ensemble(sizes: Sizes) -> Timed:
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.methods.deep_ensembles import deep_ensembles
    from torch_uncertainty.routines import ClassificationRoutine
    from torch_uncertainty.transforms import RepeatTarget

    batches = loader(*tensors(images(sizes.rows)), sizes.batch_size)

    def run() -> None:
        model = deep_ensembles([SmallCNN() for _ in range(sizes.members)])
        routine = ClassificationRoutine(
            model,
            num_classes=NUM_CLASSES,
            loss=nn.CrossEntropyLoss(),
            is_ensemble=True,
            optim_recipe=torch.optim.SGD(model.parameters(), lr=CNN_RATE, momentum=CNN_MOMENTUM),
            format_batch_fn=RepeatTarget(sizes.members),
        )
        TUTrainer(max_epochs=sizes.epochs, **TRAINER).fit(routine, batches)

    return Timed(run)


def batch_ensemble(sizes: Sizes) -> Timed:
    from torch_uncertainty.models.mlp import batched_mlp

    def build() -> nn.Module:
        return batched_mlp(NUM_INPUTS, 1, [NUM_HIDDEN], num_estimators=sizes.members)

    return _regression(sizes, build, num_members=sizes.members)


def dropout_training(sizes: Sizes) -> Timed:
    return _regression(sizes, lambda: _mc_dropout(sizes))


def _mc_dropout(sizes: Sizes) -> nn.Module:
    from torch_uncertainty.methods import mc_dropout

    return mc_dropout(MLP(dropout=DROPOUT), sizes.draws, task="regression", probabilistic=False)


def dropout_prediction(sizes: Sizes) -> Timed:
    model = _mc_dropout(sizes).eval()
    x, _ = tensors(regression(sizes.points))

    @torch.no_grad()
    def run() -> None:
        for _ in range(sizes.calls):
            moments(model(x).unflatten(0, (sizes.draws, len(x))))

    return Timed(run)


def swag(sizes: Sizes) -> Timed:
    """Draws all its networks anew after every epoch that it collects."""
    from torch_uncertainty.methods import SWAG

    collected = sizes.epochs // 2

    def build() -> nn.Module:
        before = sizes.epochs - collected - 1  # the first update is an epoch after it
        return SWAG(MLP(), before, 1, max_num_models=collected, num_estimators=sizes.draws)

    return _regression(sizes, build, validate=True)


def mean_field(sizes: Sizes) -> Timed:
    from torch_uncertainty.losses import ELBOLoss
    from torch_uncertainty.models.mlp import bayesian_mlp

    def loss() -> nn.Module:
        return ELBOLoss(None, nn.MSELoss(), kl_weight=1 / sizes.rows, num_samples=1)

    return _regression(sizes, lambda: bayesian_mlp(NUM_INPUTS, 1, [NUM_HIDDEN], num_samples=1), loss)


def prediction(sizes: Sizes) -> Timed:
    from torch_uncertainty.methods.deep_ensembles import deep_ensembles

    model = deep_ensembles([MLP(NUM_CLASSES) for _ in range(sizes.members)]).eval()
    x, _ = tensors(classification(sizes.points))

    @torch.no_grad()
    def run() -> None:
        for _ in range(sizes.calls):
            model(x).unflatten(0, (sizes.members, len(x))).softmax(-1).mean(0)

    return Timed(run)


def sgmcmc(sizes: Sizes) -> Timed:
    """Optimisers that add noise; several chains would share one loss, so they run one after another."""
    from torch_uncertainty.optim import SGHMC, SGLD

    options = {"noise_factor": sizes.rows**-0.5, "weight_decay": 1 / (PRIOR_STD**2 * sizes.rows)}
    if sizes.kernel == "sgld":
        chain = _regression(sizes, MLP, optimizer=partial(SGLD, lr=RATE, **options))
    else:
        chain = _regression(sizes, MLP, optimizer=partial(SGHMC, lr=RATE**0.5, friction=FRICTION, **options))

    def run() -> None:
        for _ in range(sizes.members):
            chain.run()

    return Timed(run, chain.warm_up)
