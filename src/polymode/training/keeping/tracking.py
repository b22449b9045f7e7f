"""Observers that write what happens during training for other tools."""

from functools import partial
from pathlib import Path
from typing import Any

from polymode.errors import InputError
from polymode.training.contract import Epoch


class TensorBoard:
    """An observer of ``fit`` that writes TensorBoard event files: ``fit(..., observer=TensorBoard(folder))``.

    Losses, validation scores and learning rates: the mean over members, and each member where there are few.
    """

    def __init__(self, folder: str | Path, *, most_members: int = 20) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                f"Writing TensorBoard files needs tensorboard ({error}): pip install 'polymode[tensorboard]'."
            ) from None
        self._make_writer = partial(SummaryWriter, str(folder))
        self._writer: Any = None  # made with the first epoch: until then the folder belongs to nobody
        self.most_members = most_members

    def __call__(self, epoch: Epoch) -> None:
        self._writer = self._writer or self._make_writer()
        write, step = self._writer.add_scalar, epoch.epochs_done
        for name, values in {"loss": epoch.losses, **_prefixed(epoch.validation)}.items():
            write(f"{name}/mean", values.nanmean().item(), step)
            if 1 < len(values) <= self.most_members:
                for (data_set, chain, member), value in zip(epoch.labels.tolist(), values, strict=True):
                    write(f"{name}/{data_set}-{chain}-{member}", value.item(), step)
        for name, rate in epoch.learning_rates.items():
            write(f"learning_rate/{name}", rate, step)
        self._writer.flush()


def _prefixed(scores: dict) -> dict:
    return {f"validation_{name}": values for name, values in scores.items()}
