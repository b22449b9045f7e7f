"""lightning-uq-box: a Lightning module for each method, and a trainer for each network."""

import atexit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from league.jobs import (
    CNN_MOMENTUM,
    CNN_RATE,
    DROPOUT,
    NUM_CLASSES,
    PRIOR_STD,
    RATE,
    Sizes,
    Timed,
    classification,
    images,
    regression,
)
from league.lightning_trainer import TRAINER
from league.networks import MLP, SmallCNN, tensors


def _data(x: Tensor, y: Tensor, batch_size: int) -> Any:
    from lightning import LightningDataModule
    from lightning_uq_box.datamodules.utils import collate_fn_tensordataset
    from torch.utils.data import TensorDataset

    class Batches(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            options = {"batch_size": batch_size, "shuffle": True, "collate_fn": collate_fn_tensordataset}
            return DataLoader(TensorDataset(x, y), **options)

    return Batches()


def _train(module: Any, data: Any, epochs: int) -> None:
    from lightning import Trainer

    with TemporaryDirectory() as folder:
        Trainer(max_epochs=epochs, default_root_dir=folder, **TRAINER).fit(module, datamodule=data)


def _regression(sizes: Sizes, build: Callable[[], Any]) -> Timed:
    data = _data(*tensors(regression(sizes.rows)), sizes.batch_size)

    def train(epochs: int) -> None:
        for _ in range(sizes.members):
            _train(build(), data, epochs)

    return Timed(lambda: train(sizes.epochs), lambda: train(1))


def ensemble(sizes: Sizes) -> Timed:
    from lightning_uq_box.uq_methods import DeterministicRegression

    return _regression(sizes, lambda: DeterministicRegression(MLP(), nn.MSELoss()))


def cnn_ensemble(sizes: Sizes) -> Timed:
    from lightning_uq_box.uq_methods import DeterministicClassification

    data = _data(*tensors(images(sizes.rows)), sizes.batch_size)
    sgd = partial(torch.optim.SGD, lr=CNN_RATE, momentum=CNN_MOMENTUM)

    def run() -> None:
        for _ in range(sizes.members):
            module = DeterministicClassification(SmallCNN(), nn.CrossEntropyLoss(), optimizer=sgd)
            _train(module, data, sizes.epochs)

    return Timed(run)


def _mc_dropout(sizes: Sizes) -> Any:
    from lightning_uq_box.uq_methods import MCDropoutRegression

    return MCDropoutRegression(MLP(dropout=DROPOUT), sizes.draws, nn.MSELoss())


def dropout_training(sizes: Sizes) -> Timed:
    return _regression(sizes, lambda: _mc_dropout(sizes))


def dropout_prediction(sizes: Sizes) -> Timed:
    module = _mc_dropout(sizes)
    x, _ = tensors(regression(sizes.points))

    def run() -> None:
        for _ in range(sizes.calls):
            module.predict_step(x)

    return Timed(run)


def swag(sizes: Sizes) -> Timed:
    """Collects in a second training, with its own plain SGD."""
    from lightning_uq_box.uq_methods import DeterministicRegression, SWAGRegression

    data = _data(*tensors(regression(sizes.rows)), sizes.batch_size)

    def train(epochs: int) -> None:
        module, collected = MLP(), max(epochs // 2, 1)
        _train(DeterministicRegression(module, nn.MSELoss()), data, epochs - collected)
        averaged = SWAGRegression(
            module,
            max_swag_snapshots=max(collected, 2),
            snapshot_freq=-(-sizes.rows // sizes.batch_size),
            num_mc_samples=sizes.draws,
            swag_lr=1e-3,
            loss_fn=nn.MSELoss(),
        )
        _train(averaged, data, collected)
        for _ in range(sizes.draws):
            averaged.sample_state()

    return Timed(lambda: train(sizes.epochs), lambda: train(2))


def mean_field(sizes: Sizes) -> Timed:
    from lightning_uq_box.uq_methods import BNN_VI_ELBO_Regression

    def build() -> Any:
        return BNN_VI_ELBO_Regression(
            MLP(),
            nn.MSELoss(),
            burnin_epochs=0,
            beta=1.0,
            num_mc_samples_train=1,
            prior_sigma=PRIOR_STD,
            posterior_rho_init=-6.0,
        )

    return _regression(sizes, build)


def prediction(sizes: Sizes) -> Timed:
    """Reads every member from its file in each call, which is how the library keeps ensembles."""
    from lightning_uq_box.uq_methods import DeepEnsembleClassification, DeterministicClassification

    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    members = []
    for number in range(sizes.members):
        module = DeterministicClassification(MLP(NUM_CLASSES), nn.CrossEntropyLoss())
        path = Path(folder.name) / f"{number}.ckpt"
        torch.save({"state_dict": module.state_dict()}, path)
        members.append({"base_model": module, "ckpt_path": path})
    model = DeepEnsembleClassification(members, NUM_CLASSES)
    x, _ = tensors(classification(sizes.points))

    def run() -> None:
        for _ in range(sizes.calls):
            model.predict_step(x)

    return Timed(run)


def sgmcmc(sizes: Sizes) -> Timed:
    from lightning_uq_box.uq_methods import SGLDRegression

    def build() -> Any:
        return SGLDRegression(
            MLP(),
            nn.MSELoss(),
            lr=RATE,
            weight_decay=1 / (PRIOR_STD**2 * sizes.rows),
            noise_factor=sizes.rows**-0.5,
            burnin_epochs=0,
            n_sgld_samples=1,
        )

    return _regression(sizes, build)
