"""``fit``: the one way to train. It alone owns the device, the clock, checkpoints and the budget."""

import copy
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Required, Unpack, overload

from torch import nn
from torch.utils.data import DataLoader

from polymode.data import Data, as_data
from polymode.errors import InputError, require, require_positive
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.networks.surgery import Model
from polymode.posteriors import Particles, Posterior, merge
from polymode.posteriors.base import MANIFEST
from polymode.posteriors.network import Network
from polymode.training.contract.method import Method
from polymode.training.keeping.progress import Reporter
from polymode.training.loop.engine import Engine
from polymode.training.loop.material import Request, remarks_on
from polymode.training.loop.parts import DividedRun
from polymode.training.loop.run import Run
from polymode.training.loop.settings import Computing, Keeping, Settings, read_settings
from polymode.training.loop.work import run_apart, work_apart

AnyData = Data | DataLoader


class Options(Settings, total=False):
    """Keywords of ``fit``, which explains them."""

    likelihood: Required[str | Likelihood]
    epochs: int | None
    budget: float | None
    validation: AnyData | Sequence[AnyData] | None
    seed: int | Sequence[int]
    shared_order: bool
    initial: Posterior | Sequence[Posterior] | None
    extend: Posterior | None


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
    epochs: int | None = None,
    budget: float | None = None,
    validation: AnyData | Sequence[AnyData] | None = None,
    seed: int | Sequence[int] = 0,
    shared_order: bool = False,
    initial: Posterior | Sequence[Posterior] | None = None,
    extend: Posterior | None = None,
    **settings: Unpack[Settings],
) -> Posterior | list[Posterior]:
    """Fit a method to data and return its posterior; a list of data sets gives a list of posteriors.

    model: a function that builds a module, or a module; it is copied, never changed. Of a module the first
        chain has the weights, the layers of the others are drawn anew, and a warning says so.
    data: ``ArrayData`` or a ``DataLoader``; a list of ``ArrayData`` (of any lengths, with one batch size)
        is trained side by side.
    likelihood: a name of ``polymode.likelihoods.LIKELIHOODS`` ("categorical", "gaussian", "poisson" ...), or
        an object of ``polymode.likelihoods`` with options.
    epochs: epochs of each chain; or budget: member-epochs in all, which the method divides as suits it
        (``Method.for_budget``). validation: held-out data, needed by ``keep="best"``.
    seed: determines everything; a list gives each data set its own.
    shared_order: all chains see one order of the data instead of their own.
    initial: a posterior (or one for each data set) whose members the chains begin at, in order, instead of
        the model's weights: to continue the training of a finished ensemble. Optimisers and
        schedules begin anew, and ``epochs`` are those of this fit.
    extend: a finished ensemble to which the new chains are added.

    How to compute (``Computing``): device: where to train; the module's own, or the CPU for a factory, unless
        given. backend: "vmap", "loop", or "auto" to measure both on the first batch and take the faster.
        threads: that PyTorch computes with while this run trains; one unless as many as
        ``torch.get_num_threads()`` are faster by 15 % in the same measurement. A resumed run takes the number
        it began with; the caller's own number is restored. precision: "bfloat16" runs the forward pass in
        mixed precision where the device has it; "double" runs everything in 64 bits, whatever the model and
        the data come in. engine: who works on the run in parts, some chains on some data sets
        each: "local" (processes of this machine), "ray", "dask", or an ``Engine`` that says how many, where
        and with what. A part is a run in a folder of its own, so what a worker that died had done is not
        lost. A chain's result is the same wherever it runs, up to rounding. processes=n: the same as
        ``Engine("local", workers=n)``. data_parallel: every minibatch is shared out among the processes of
        torch.distributed (torchrun), each of which calls ``fit`` and holds all members; batch sizes, budgets
        and seeds mean what they mean in one process. The first of them writes and tells.

    What is kept (``Keeping``): run_dir: folder for the manifest, the event log, checkpoints and the finished
        posterior; with ``resume=True`` an interrupted run goes on, to the same bits on the same machine with
        the same versions and number of threads; a finished one is read back. checkpoint_seconds: least time
        between two checkpoints; None means 60, or a hundred times what writing the last one took, if that is
        longer, so that writing takes at most 1 % of the time: of a state that takes 10 s to write, a kill may
        cost 17 minutes of training. One is also written on Ctrl-C and when an observer raises. observer:
        called with an ``Epoch`` after every epoch. progress: a bar on a terminal, or a ``Reporter``. title:
        the run's name in the progress. options: JSON values for the run's manifest.
    """
    return prepared(
        method,
        model,
        data,
        likelihood=likelihood,
        epochs=epochs,
        budget=budget,
        validation=validation,
        seed=seed,
        shared_order=shared_order,
        initial=initial,
        extend=extend,
        **settings,
    ).run()


@dataclass(frozen=True)
class Fit:
    """What ``fit`` was asked for, read and checked as far as it can be without the network."""

    request: Request
    computing: Computing
    keeping: Keeping
    folder: Path | None
    extend: Posterior | None
    many: bool

    def run(self) -> Posterior | list[Posterior]:
        """Train, from wherever the run stands."""
        posteriors = self._apart() if self.computing.engine is not None else self._here()
        return posteriors if self.many else posteriors[0]

    def _here(self) -> list[Posterior]:
        run = Run(self.request, self.folder, self.computing, self.keeping)
        if self.extend is not None:
            _check_extension(self.extend, run.network)
        _remark_on(self.request)
        with _told_where(self.folder):
            posteriors = run.execute()
        return posteriors if self.extend is None else [_extended(self.extend, posteriors[0])]

    def _apart(self) -> list[Posterior]:
        _remark_on(self.request)
        with _told_where(self.folder):
            return run_apart(self.request, self.folder, self.computing, self.keeping)


def prepared(
    method: Method, model: Model, data: AnyData | Sequence[AnyData], **options: Unpack[Options]
) -> Fit:
    """Read and check the arguments of ``fit``; nothing is trained or written yet."""
    given: dict[str, Any] = dict(options)
    own = Options.__annotations__.keys() - Settings.__annotations__.keys()
    asked = {name: given.pop(name) for name in own & given.keys()}
    computing, keeping = read_settings(given, Options.__annotations__)  # type: ignore[arg-type]
    likelihood, extend = asked["likelihood"], asked.get("extend")
    _check_kinds(method, extend)
    many = isinstance(data, list | tuple)
    sources = [as_data(part) for part in (data if many else [data])]
    require(len(sources) > 0, "The list of data sets is empty.")
    method, epochs = _sized(method, asked.get("epochs"), asked.get("budget"))
    first_chain = _first_chain(extend, many=many)
    seeds = _seed_list(asked.get("seed", 0), len(sources))
    request = Request(
        method=method,
        model=_in_double(model) if computing.precision == "double" else model,
        sources=sources,
        validation=_validation_list(asked.get("validation"), len(sources), many=many),
        likelihood=make_likelihood(
            likelihood
        ).uncalibrated,  # what others learned is not about these networks
        epochs=epochs,
        seeds=seeds,
        chains=range(first_chain, first_chain + method.total_chains),
        device=computing.device_of(model),
        precision=computing.precision,
        shared_order=asked.get("shared_order", False),
        initial=_initial_list(asked.get("initial"), extend, len(sources)),
        data_sets=range(len(sources)),
        first_seed=seeds[0],
        ranks=computing.ranks(),
    )
    folder = request.ranks.first(keeping.folder() if request.ranks.is_first else None)
    if computing.engine is not None:
        _check_engine(computing.engine, folder, keeping, extend)
    return Fit(request, computing, keeping, folder, extend, many)


def _check_engine(engine: Engine, folder: Path | None, keeping: Keeping, extend: Posterior | None) -> None:
    require(
        keeping.observer is None and extend is None,
        "observer= and extend= are about a run in this process: leave processes= and engine= out.",
    )
    require(
        folder is not None or engine.kind == "local",
        f"engine={engine.kind!r} needs run_dir, a folder that all machines of the cluster share.",
    )


def work_ahead(fits: Sequence[Fit], shared: Path, reporter: Reporter, title: str) -> None:
    """Have one engine work on the parts of several fits at once; each then has only to be joined by ``run``.

    shared: a folder for what they read.
    """
    with ExitStack() as locks, _told_where(fits[0].folder):
        runs = []
        for each in fits:
            assert each.folder is not None
            run = DividedRun(each.request, each.folder, each.computing, each.keeping, shared)
            locks.enter_context(run.run_folder.lock())
            runs.append(run)
        work_apart(runs, fits[0].computing, reporter, title)
        shutil.rmtree(shared, ignore_errors=True)


@contextmanager
def _told_where(folder: Path | None) -> Iterator[None]:
    """Let an interruption say where the work is, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is None or not (folder / MANIFEST).exists():
            raise
        raise KeyboardInterrupt(
            f"What was trained is kept in {folder}: the same call with resume=True goes on with it."
        ) from None


def _remark_on(request: Request) -> None:
    for remark in remarks_on(request):
        warnings.warn(remark, stacklevel=3)


# --- reading the arguments --------------------------------------------------------------------


def _check_kinds(method: Any, extend: Any) -> None:
    if not isinstance(method, Method):
        given = method.__name__ if isinstance(method, type) else repr(method)
        raise InputError(f"method must be an instance such as pm.methods.DeepEnsemble(), got {given}.")
    require(extend is None or isinstance(extend, Posterior), f"extend must be a posterior, got {extend!r}.")


def _check_epochs(epochs: Any) -> int:
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise InputError(f"epochs must be a whole number of at least 1, got {epochs!r}.")
    return epochs


def _sized(method: Method, epochs: int | None, budget: float | None) -> tuple[Method, int]:
    """The method and the epochs of each chain, from one of the two ways to say how long."""
    if epochs is None and budget is None:
        raise InputError(
            "Say how long to train: epochs=... of each chain, or budget=... member-epochs in all."
        )
    if epochs is not None and budget is not None:
        raise InputError(
            f"epochs={epochs!r} and budget={budget!r} are two ways to say how long to train: leave one out."
        )
    if budget is None:
        return method, _check_epochs(epochs)
    return method.for_budget(require_positive("budget", budget))


class _Double:
    """A factory whose networks are in double precision; it can travel to other processes if they can."""

    def __init__(self, factory: Callable[[], nn.Module]) -> None:
        self.factory = factory

    def __call__(self) -> nn.Module:
        return self.factory().double()


def _in_double(model: Model) -> Model:
    return copy.deepcopy(model).double() if isinstance(model, nn.Module) else _Double(model)


def _seed_list(seed: int | Sequence[int], count: int) -> list[int]:
    seeds: list[Any] = list(seed) if isinstance(seed, list | tuple) else [seed] * count
    for each in seeds:
        require(isinstance(each, int), f"A seed must be a whole number, got {each!r}.")
    if len(seeds) != count:
        raise InputError(f"{len(seeds)} seeds for {count} data sets: give one seed, or one for each.")
    return seeds


def _validation_list(validation: Any, count: int, *, many: bool) -> list[Data] | None:
    if validation is None:
        return None
    if many and not isinstance(validation, list | tuple):
        raise InputError(f"A list of {count} data sets needs a list of {count} validation sets.")
    sources = [as_data(part) for part in (validation if many else [validation])]
    if len(sources) != count:
        raise InputError(f"{len(sources)} validation sets for {count} data sets: give one for each.")
    return sources


def _initial_list(initial: Any, extend: Posterior | None, count: int) -> list[Posterior] | None:
    if initial is None:
        return None
    require(extend is None, "initial= and extend= are two ways to go on from a posterior: leave one out.")
    found = list(initial) if isinstance(initial, list | tuple) else [initial] * count
    for each in found:
        require(isinstance(each, Posterior), f"initial must be a posterior, got {each!r}.")
    if len(found) != count:
        raise InputError(f"{len(found)} posteriors in initial for {count} data sets: give one for each.")
    return [each.one_network() for each in found]


def _first_chain(extend: Posterior | None, *, many: bool) -> int:
    if extend is None:
        return 0
    if many or extend.num_members is None:
        raise InputError(
            "extend=... takes one finite posterior and one data set. Posteriors that draw without end are "
            "joined with merge([first, second])."
        )
    return 1 + max(int(block.labels[:, 1].max()) for block in extend.draw())


def _check_extension(extend: Posterior, network: Network) -> None:
    """Make sure, before any training, that the new members can join the old ones."""
    if not isinstance(extend, Particles):
        raise InputError(f"Only a set of networks can be extended, not {extend.kind!r}.")
    extend.check_joinable(network)
    if extend.network.likelihood.uncalibrated != network.likelihood:
        raise InputError(
            f"The posterior to extend has the likelihood {extend.network.likelihood}, the new members "
            f"{network.likelihood}: they must agree."
        )


def _extended(old: Posterior, new: Posterior) -> Posterior:
    """All members together, with what both cost; the old record is kept inside the new one."""
    spent = old.record.get("member_epochs", 0.0) + new.record["member_epochs"]
    return replace(merge([old, new]), record=new.record | {"member_epochs": spent, "extends": old.record})
