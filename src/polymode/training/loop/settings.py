"""What ``fit`` is told about computing and keeping: two immutable objects that go where they are needed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import nn

from polymode.errors import CheckpointError, InputError, require, require_whole, unknown_name
from polymode.networks.members import BACKENDS, Backend
from polymode.networks.surgery import Model
from polymode.options import option
from polymode.posteriors.base import MANIFEST
from polymode.training.contract.epoch import Epoch
from polymode.training.contract.execution import Precision
from polymode.training.contract.ranks import ALONE, Ranks
from polymode.training.keeping.progress import Reporter, reporter_for
from polymode.training.loop.arithmetic import MOST_THREADS
from polymode.training.loop.engine import KINDS, Engine, Kind

CHECKPOINT_SECONDS = (
    60.0  # between two checkpoints, unless writing them would take more of the time than this
)
WRITING_SHARE = 0.01

AnyBackend = Backend | Literal["auto"]


class ComputingSettings(TypedDict, total=False):
    """Keywords of ``fit`` that ``Computing`` is made of."""

    device: torch.device | str | None
    backend: AnyBackend
    threads: int | None
    precision: Precision
    processes: int
    engine: Engine | Kind | None
    data_parallel: bool


class Settings(ComputingSettings, total=False):
    """Keywords of ``fit`` that ``Computing`` and ``Keeping`` are made of; ``fit`` explains them."""

    run_dir: str | Path | None
    resume: bool
    checkpoint_seconds: float | None
    observer: Callable[[Epoch], None] | None
    progress: bool | Reporter
    title: str
    options: Mapping[str, Any] | None


@dataclass(frozen=True)
class Computing:
    """How to compute; what is left open is measured and decided when a run begins (``Execution``)."""

    device: torch.device | str | None = option(
        None,
        "where to train, such as cpu or cuda:0; the module's own, or the CPU, unless given",
    )
    backend: AnyBackend = option(
        "auto", "how members run: vmap, loop, compiled, or auto to measure what is fastest"
    )
    threads: int | None = option(
        None,
        "that PyTorch computes with; those that a run began with, or for a new one a single thread, unless "
        "as many as PyTorch has are measured to be faster by 15 %",
    )
    precision: Precision = option(
        "full",
        "of weights and arithmetic: bfloat16 runs the forward pass in mixed precision, double everything in "
        "64 bits",
    )
    processes: int = option(1, "divide chains and data sets among so many processes of this machine")
    engine: Engine | None = option(
        None, "who works on the parts of a run: local (processes of this machine), ray or dask"
    )

    data_parallel: bool = option(
        False, "share every minibatch among the processes of torch.distributed, which all hold all members"
    )

    def __post_init__(self) -> None:
        named: Any = self.engine
        if isinstance(named, str):
            object.__setattr__(self, "engine", Engine(named))  # type: ignore[arg-type]  # it checks the name
        require(
            self.engine is None or isinstance(self.engine, Engine),
            f"engine must be one of {', '.join(KINDS)}, or an Engine, got {self.engine!r}.",
        )
        if self.backend not in (*BACKENDS, "auto"):
            raise unknown_name("backend", self.backend, (*BACKENDS, "auto"))
        if self.precision not in get_args(Precision):
            raise unknown_name("precision", self.precision, get_args(Precision))
        if require_whole("processes", self.processes) > 1:
            require(
                self.engine is None,
                f"processes={self.processes} stands for engine=Engine('local', workers={self.processes}), "
                "and an engine is given, too: leave one out.",
            )
            object.__setattr__(self, "engine", Engine("local", workers=self.processes))
            object.__setattr__(self, "processes", 1)  # said once from here on
        if self.threads is not None:
            require(
                require_whole("threads", self.threads) <= MOST_THREADS,
                f"threads must be at most {MOST_THREADS}, got {self.threads}.",
            )
        require(
            not self.data_parallel or (self.engine is None and self.backend != "compiled"),
            "data_parallel=True shares minibatches among processes that torchrun has started: leave engine, "
            "processes and backend='compiled' out.",
        )

    def ranks(self) -> Ranks:
        """Who shares minibatches."""
        return Ranks.joined() if self.data_parallel else ALONE

    def device_of(self, model: Model) -> torch.device:
        """The device that was named, or that of a module; the CPU for a factory."""
        device = self.device
        if device is None:
            parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
            device = torch.device("cpu") if parameter is None else parameter.device
        device = usable_device(device)
        if self.precision == "bfloat16" and not torch.amp.is_autocast_available(device.type):
            raise InputError(f"Device {device.type!r} has no mixed precision: use precision='full'.")
        return device


@dataclass(frozen=True)
class Keeping:
    """What is kept of a run, and who is told about it."""

    run_dir: str | Path | None = None
    resume: bool = False
    checkpoint_seconds: float | None = None
    observer: Callable[[Epoch], None] | None = None
    progress: bool | Reporter = True
    title: str = ""
    options: Mapping[str, Any] | None = None
    reporter: Reporter = field(init=False)

    def __post_init__(self) -> None:
        given, observer = self.run_dir, self.observer
        require(given is None or isinstance(given, str | Path), f"run_dir must be a path, got {given!r}.")
        require(
            observer is None or callable(observer),
            f"observer must be a function of an Epoch, got {observer!r}.",
        )
        require(
            isinstance(self.progress, bool) or hasattr(self.progress, "begin"),
            f"progress must be True, False or a Reporter, got {self.progress!r}.",
        )
        seconds = self.checkpoint_seconds
        require(
            seconds is None or (isinstance(seconds, int | float) and seconds >= 0),
            f"checkpoint_seconds must be None or a number of at least 0, got {seconds!r}.",
        )
        object.__setattr__(self, "reporter", reporter_for(self.progress))

    def seconds_to_next(self, writing: float) -> float:
        """Least time from one checkpoint to the next, after writing it has taken so many seconds."""
        if self.checkpoint_seconds is not None:
            return self.checkpoint_seconds
        return max(CHECKPOINT_SECONDS, writing / WRITING_SHARE)

    def folder(self) -> Path | None:
        """The folder of the run; one with something in it is never overwritten."""
        if self.run_dir is None:
            if self.resume:
                raise InputError("resume=True needs run_dir, the folder of the run to go on with.")
            return None
        folder = Path(self.run_dir).resolve()
        if folder.exists() and not folder.is_dir():
            raise InputError(f"run_dir={str(folder)!r} is a file: choose a folder.")
        if not self.resume and folder.exists() and any(folder.iterdir()):
            raise InputError(
                f"{folder} is not empty. Pass resume=True to go on with the run in it, or choose another "
                "run_dir."
            )
        visible = [p for p in folder.iterdir() if not p.name.startswith(".")] if folder.exists() else []
        if visible and not (folder / MANIFEST).exists():
            raise CheckpointError(
                f"{folder} is not the folder of a run: it has no {MANIFEST}, but {visible[0].name}. Choose "
                "another run_dir."
            )
        return folder


def read_settings(settings: Settings, others: Iterable[str]) -> tuple[Computing, Keeping]:
    """The two objects, from the keywords of ``fit``; others: that it has beside them."""
    given: dict[str, Any] = dict(settings)
    known = {kind: [f.name for f in fields(kind) if f.init] for kind in (Computing, Keeping)}
    for name in given:
        if not any(name in names for names in known.values()):
            names = {*others, *(n for names in known.values() for n in names)}
            raise unknown_name("option of fit", name, names)
    computing, keeping = ({name: given[name] for name in names if name in given} for names in known.values())
    return Computing(**computing), Keeping(**keeping)


def usable_device(device: torch.device | str) -> torch.device:
    """The device, or an ``InputError`` that says why it cannot be used."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device={device!r} cannot be used: {str(error).splitlines()[0]}") from None
