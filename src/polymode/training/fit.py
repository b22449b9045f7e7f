"""``fit``: the one way to train. It alone owns the device, the clock, checkpoints and the budget."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from polymode.data import Data, as_data
from polymode.errors import InputError, unknown_name
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.posteriors import Posterior, merge
from polymode.posteriors.base import Network, check_fingerprint
from polymode.surgery import Model
from polymode.training.backends import AnyBackend
from polymode.training.method import Method
from polymode.training.objective import Precision
from polymode.training.run import Epoch, Run
from polymode.training.setup import Job

AnyData = Data | DataLoader


class Options(TypedDict, total=False):
    """Keywords of ``fit``, which explains them."""

    likelihood: Required[str | Likelihood]
    epochs: Required[int]
    validation: AnyData | Sequence[AnyData] | None
    seed: int | Sequence[int]
    run_dir: str | Path | None
    resume: bool
    device: torch.device | str | None
    backend: AnyBackend
    precision: Precision
    shared_order: bool
    extend: Posterior | None
    observer: Callable[[Epoch], None] | None
    progress: bool
    checkpoint_seconds: float


@overload
def fit(method: Method, model: Model, data: AnyData, **options: Unpack[Options]) -> Posterior: ...
@overload
def fit(
    method: Method, model: Model, data: Sequence[AnyData], **options: Unpack[Options]
) -> list[Posterior]: ...
def fit(
    method: Method,
    model: Model,
    data: AnyData | Sequence[AnyData],
    *,
    likelihood: str | Likelihood,
    epochs: int,
    validation: AnyData | Sequence[AnyData] | None = None,
    seed: int | Sequence[int] = 0,
    run_dir: str | Path | None = None,
    resume: bool = False,
    device: torch.device | str | None = None,
    backend: AnyBackend = "auto",
    precision: Precision = "full",
    shared_order: bool = False,
    extend: Posterior | None = None,
    observer: Callable[[Epoch], None] | None = None,
    progress: bool = True,
    checkpoint_seconds: float = 60.0,
) -> Posterior | list[Posterior]:
    """Fit a method to data and return its posterior; a list of data sets gives a list of posteriors.

    model: a module, or better a function that builds one; it is copied, never changed.
    data: ``ArrayData`` or a ``DataLoader``; a list of ``ArrayData`` is trained side by side.
    epochs: epochs of each chain. validation: held-out data, needed by ``keep="best"``.
    seed: determines everything; a list gives each data set its own.
    run_dir: folder for checkpoints and the finished posterior; with ``resume=True`` an interrupted
        run goes on to the same bits, a finished one is read back.
    backend: "vmap", "loop", or "auto" to measure both on the first batch and take the faster.
    precision: "bfloat16" runs the forward pass in mixed precision where the device has it.
    shared_order: all chains see one order of the data instead of their own.
    extend: a finished ensemble to which the new chains are added.
    observer: called with an ``Epoch`` after every epoch.
    """
    many = isinstance(data, list | tuple)
    sources = [as_data(part) for part in (data if many else [data])]
    if not sources:
        raise InputError("The list of data sets is empty.")
    job = Job(
        method=method,
        model=model,
        sources=sources,
        validation=_validation_list(validation, len(sources), many=many),
        likelihood=make_likelihood(likelihood),
        epochs=_check_epochs(epochs),
        seeds=_seed_list(seed, len(sources)),
        first_chain=_first_chain(extend, many=many),
        device=_device(device, model),
        precision=precision,
        shared_order=shared_order,
    )
    _check_precision(precision, job.device)
    folder = _run_folder(run_dir, resume=resume)
    run = Run(job, folder)
    if extend is not None:
        _check_extension(extend, run.problem.network)
    posteriors = run.execute(backend, observer, show=progress, checkpoint_seconds=checkpoint_seconds)
    if extend is not None:
        posteriors = [merge([extend, posteriors[0]])]
    return posteriors if many else posteriors[0]


# --- reading the arguments --------------------------------------------------------------------


def _check_epochs(epochs: int) -> int:
    if not isinstance(epochs, int) or epochs < 1:
        raise InputError(f"epochs must be a whole number of at least 1, got {epochs!r}.")
    return epochs


def _seed_list(seed: int | Sequence[int], count: int) -> list[int]:
    seeds = [seed] * count if isinstance(seed, int) else list(seed)
    if len(seeds) != count:
        raise InputError(f"{len(seeds)} seeds for {count} data sets: give one seed, or one for each.")
    return seeds


def _validation_list(validation: Any, count: int, *, many: bool) -> list[Data] | None:
    if validation is None:
        return None
    sources = [as_data(part) for part in (validation if many else [validation])]
    if len(sources) != count:
        raise InputError(f"{len(sources)} validation sets for {count} data sets: give one for each.")
    return sources


def _device(device: torch.device | str | None, model: Model) -> torch.device:
    if device is not None:
        return torch.device(device)
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def _check_precision(precision: str, device: torch.device) -> None:
    if precision not in ("full", "bfloat16"):
        raise unknown_name("precision", precision, ("full", "bfloat16"))
    if precision == "bfloat16" and not torch.amp.is_autocast_available(device.type):
        raise InputError(f"Device {device.type!r} has no mixed precision: use precision='full'.")


def _first_chain(extend: Posterior | None, *, many: bool) -> int:
    if extend is None:
        return 0
    if many or extend.num_members is None:
        raise InputError("extend=... takes one finite posterior and one data set.")
    return 1 + max(int(block.labels[:, 1].max()) for block in extend.draw())


def _check_extension(extend: Posterior, network: Network) -> None:
    """Make sure, before any training, that the new members can join the old ones."""
    check_fingerprint(extend.network.fingerprint, network.fingerprint, "The posterior to extend")
    if extend.network.likelihood != network.likelihood:
        raise InputError(
            f"The posterior to extend has the likelihood {extend.network.likelihood}, the new members "
            f"{network.likelihood}: they must agree."
        )


def _run_folder(run_dir: str | Path | None, *, resume: bool) -> Path | None:
    """The folder of the run; one with something in it is never overwritten."""
    if run_dir is None:
        if resume:
            raise InputError("resume=True needs run_dir, the folder of the run to go on with.")
        return None
    folder = Path(run_dir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run_dir={str(folder)!r} is a file: choose a folder.")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise InputError(
            f"{folder} is not empty. Pass resume=True to go on with the run in it, or choose another run_dir."
        )
    return folder
