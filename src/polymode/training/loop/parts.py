"""A run in parts, some chains on some data sets each: how it is divided, and joined again."""

import itertools
import math
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from polymode.data import ArrayData, Data, fingerprint
from polymode.errors import CheckpointError
from polymode.posteriors import Posterior, load_posterior, merge
from polymode.posteriors.base import MANIFEST
from polymode.storage import read_document, read_tensors, write_tensors
from polymode.training.keeping.events import epochs_of, read_events
from polymode.training.keeping.folder import PARTS_FOLDER, RunFolder
from polymode.training.loop.material import Material, Request, gather
from polymode.training.loop.settings import Computing, Keeping
from polymode.trees import Tree, filled, leaves

SHARED = "shared"  # folder of what all parts of a run read: data, networks to begin at, orders


@dataclass(frozen=True)
class Share:
    """Some chains on some data sets, which are numbered as in the whole."""

    data_sets: range
    chains: range

    def of(self, things: Sequence[Any]) -> list[Any]:
        """Those of some things, one a data set, that belong to the share."""
        return list(things[self.data_sets.start : self.data_sets.stop])


def shares_of(num_data_sets: int, chains: range, workers: int) -> list[Share]:
    """Shares for so many workers, as even as can be: of the data sets first, then of the chains.

    >>> shares_of(1, range(4), 2)
    [Share(data_sets=range(0, 1), chains=range(0, 2)), Share(data_sets=range(0, 1), chains=range(2, 4))]
    """
    by_data = min(workers, num_data_sets)
    by_chains = min(max(1, workers // by_data), len(chains))
    return [
        Share(data_sets, some)
        for data_sets in _even(range(num_data_sets), by_data)
        for some in _even(chains, by_chains)
    ]


def _even(numbers: range, count: int) -> list[range]:
    """Neighbouring numbers in so many stretches."""
    borders = [numbers.start + len(numbers) * index // count for index in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(borders)]


@dataclass(frozen=True)
class ArrayFile:
    """An ``ArrayData`` in a file that every worker sees: data travel by its name."""

    path: Path
    checksum: str
    form: Tree  # of the inputs, with tensors of no rows
    batch_size: int
    drop_last: bool
    augment: tuple[Any, ...]

    def read(self) -> ArrayData:
        tensors = read_tensors(self.path, self.checksum)
        inputs = (tensors[f"inputs/{index}"] for index in range(len(list(leaves(self.form)))))
        return ArrayData(
            filled(self.form, inputs),
            tensors["targets"],
            weights=tensors.get("weights"),
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            augment=self.augment,
        )


@dataclass(frozen=True)
class PosteriorFolder:
    """A posterior in a folder that every worker sees."""

    path: Path

    def read(self, request: Request) -> Posterior:
        return load_posterior(self.path, request.model).to(request.device)


def put_down(data: Data, folder: Path, written: dict[Path, str]) -> Data | ArrayFile:
    """Write arrays where every worker sees them, once for all that need them; loaders travel as they are.

    written: files of this session, with their checksums; those of an earlier one may have been damaged since.
    """
    if not isinstance(data, ArrayData):
        return data
    tensors = {f"inputs/{index}": leaf for index, leaf in enumerate(leaves(data.inputs))}
    tensors["targets"] = data.targets
    if data.weights is not None:
        tensors["weights"] = data.weights
    path = folder / f"data-{fingerprint(data)[:32]}.safetensors"
    if path not in written:
        written[path] = write_tensors(path, tensors)
    form = filled(data.inputs, (torch.empty(0) for _ in leaves(data.inputs)))
    return ArrayFile(path, written[path], form, data.batch_size, data.drop_last, data.augment)


@dataclass(frozen=True)
class Part:
    """What one worker does: a request of its own, whose data and networks to begin at stand in files."""

    request: Request
    sources: Sequence[Data | ArrayFile]
    validation: Sequence[Data | ArrayFile] | None
    initial: Sequence[PosteriorFolder] | None
    folder: Path
    computing: Computing
    checkpoint_seconds: float | None
    cores: int

    def whole_request(self) -> Request:
        """The request with everything in it, as a run needs it."""
        initial = self.initial
        return replace(
            self.request,
            sources=_each_once(self.sources),
            validation=None if self.validation is None else _each_once(self.validation),
            initial=None if initial is None else [each.read(self.request) for each in initial],
        )

    def __str__(self) -> str:
        chains, data_sets = self.request.chains, self.request.data_sets
        sets = f" on data sets {data_sets.start} to {data_sets.stop - 1}" if data_sets.stop > 1 else ""
        return f"{self.request.method.name}, chains {chains.start} to {chains.stop - 1}{sets}"


def is_finished(folder: Path) -> bool:
    """Whether the part in a folder has come to its end."""
    path = folder / MANIFEST
    advice = "Remove it: the same call goes on from the checkpoints beside it."
    return path.exists() and read_document(path, "run", advice).get("status") == "finished"


def _each_once(data: Sequence[Data | ArrayFile]) -> list[Data]:
    """What stands in one file is one data set, however often it is named."""
    known: dict[Any, Data] = {}
    found = []
    for each in data:
        key = each.path if isinstance(each, ArrayFile) else id(each)
        if key not in known:
            known[key] = each.read() if isinstance(each, ArrayFile) else each
        found.append(known[key])
    return found


class DividedRun:
    """A run whose shares are worked on apart, each with checkpoints of its own, and joined when all are done.

    shared: a folder for what several such runs read.
    """

    def __init__(
        self,
        request: Request,
        folder: Path,
        computing: Computing,
        keeping: Keeping,
        shared: Path | None = None,
    ) -> None:
        self.request, self.folder, self.keeping = request, folder, keeping
        # Finds bad input before any work begins; one chain may differ from the others, which are alike.
        self.material: Material = gather(replace(request, chains=request.chains[:2]), None)
        signature = request.signature(self.material.problem.network, self.material.owned)
        self.run_folder = RunFolder(folder, signature, keeping.options or {})
        self.shared = shared or folder / PARTS_FOLDER / SHARED
        self.computing = replace(computing, processes=1, engine=None)
        self.shares: list[Share] = []

    @property
    def title(self) -> str:
        return self.keeping.title or self.request.method.name

    @property
    def num_epochs(self) -> float:
        """Gradient passes of each chain."""
        phases = self.material.phases(self.material.problem.execution)
        return sum(phase.epochs * phase.cost for phase in phases)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left but to join the parts, or not even that."""
        if self.run_folder.is_finished:
            return True
        self.shares = [Share(range(*sets), range(*chains)) for sets, chains in self.run_folder.shares()]
        return bool(self.shares) and all(map(is_finished, self.folders))

    def begin(self, workers: int) -> None:
        """Divide the run, as it was divided before if it goes on, and write down how."""
        self.run_folder.check_undivided()
        event = "resume" if self.shares else "begin"
        self.shares = self.shares or shares_of(len(self.request.sources), self.request.chains, workers)
        self.run_folder.began(self.division, event)

    @property
    def division(self) -> dict[str, Any]:
        """From and to of the data sets and of the chains of each part."""
        ranges = [(share.data_sets, share.chains) for share in self.shares]
        return {"shares": [[[each.start, each.stop] for each in both] for both in ranges]}

    @property
    def folders(self) -> list[Path]:
        """Of the parts, in the order of the shares."""
        return [self.folder / PARTS_FOLDER / f"{number:03d}" for number in range(len(self.shares))]

    def parts(self, cores: int, written: dict[Path, str]) -> list[Part]:
        """The work, with data and networks put down where all see them; written: what stands there."""
        request = self.request
        files = {
            id(data): put_down(data, self.shared, written)
            for data in (*request.sources, *(request.validation or ()))
        }
        begin_at = None
        if request.initial is not None:
            known = {id(each): each for each in request.initial}
            places = {key: self._put_posterior(each, n) for n, (key, each) in enumerate(known.items())}
            begin_at = [places[id(each)] for each in request.initial]
        return [
            Part(
                replace(
                    request,
                    sources=(),
                    validation=None,
                    initial=None,
                    seeds=share.of(request.seeds),
                    chains=share.chains,
                    data_sets=share.data_sets,
                ),
                [files[id(data)] for data in share.of(request.sources)],
                None if request.validation is None else [files[id(d)] for d in share.of(request.validation)],
                None if begin_at is None else share.of(begin_at),
                folder,
                self.computing,
                self.keeping.checkpoint_seconds,
                cores,
            )
            for share, folder in zip(self.shares, self.folders, strict=True)
        ]

    def _put_posterior(self, posterior: Posterior, place: int) -> PosteriorFolder:
        path = self.shared / f"initial-{place}"
        shutil.rmtree(path, ignore_errors=True)  # of a run that was cut: perhaps not whole
        posterior.save(path)
        return PosteriorFolder(path)

    def joined(self) -> list[Posterior]:
        """One posterior a data set, of all parts, kept in the folder of the whole; theirs are removed."""
        self._join_events()
        manifests = [read_document(folder / MANIFEST, "run") for folder in self.folders]
        spent = [manifest["spent"][0] for manifest in manifests]
        posteriors = [self._joined(index, spent) for index in range(len(self.request.sources))]
        parts = [manifest["record"] for manifest in manifests]  # the backend that each has chosen, say
        self.run_folder.finish(posteriors, self.division | {"parts": parts})
        return self.stored()

    def stored(self) -> list[Posterior]:
        paths = self.run_folder.posteriors()
        return [load_posterior(path, self.request.model).to(self.request.device) for path in paths]

    def _joined(self, index: int, spent: Sequence[Mapping[str, Any]]) -> Posterior:
        """All chains on a data set, with what they cost; spent: what each part did."""
        found, sizes = [], []
        for share, folder in zip(self.shares, self.folders, strict=True):
            if index in share.data_sets:
                path = folder / f"posterior-{index - share.data_sets.start}"
                found.append(load_posterior(path, self.request.model).to(self.request.device))
                sizes.append(len(share.chains))
        records = [posterior.record for posterior in found]
        record = records[0] | {
            "member_epochs": sum(r["member_epochs"] for r in records),
            "training_seconds": max(part["training_seconds"] for part in spent),
            "total_seconds": max(r["total_seconds"] for r in records),
            "peak_memory_mb": sum(part["peak_memory_mb"] for part in spent),
            "findings": [finding for r in records for finding in r["findings"]],
            "history": _mean_history([r["history"] for r in records], sizes),
            "parts": len(self.shares),
        }
        return replace(merge(found), record=record)

    def _join_events(self) -> None:
        """The epochs of all parts in the log of the run: losses side by side, costs added up.

        Where some parts ended before others, theirs stay as they were at their ends.
        """
        logs = [_log_of(folder) for folder in self.folders]
        if not all(labels and epochs for labels, epochs in logs):
            warnings.warn(
                f"The log of a part of the run in {self.folder} is damaged or missing: the log of the run "
                "has no epochs. Its posteriors have everything.",
                stacklevel=2,
            )
            return
        self.run_folder.events.write("members", labels=[row for labels, _ in logs for row in labels])
        epochs: list[dict[str, Any]] = [{} for _ in logs]
        for done in sorted({number for _, of_part in logs for number in of_part}):
            epochs = [of_part.get(done, before) for (_, of_part), before in zip(logs, epochs, strict=True)]
            if not all(epochs):  # the first lines of a part are damaged
                continue
            longest = max(epochs, key=lambda epoch: float(epoch["epochs_done"]))
            joined = {name: value for name, value in longest.items() if name not in ("event", "time")}
            # An epoch tells what a data set has cost so far, the mean over those of its part.
            costs = [e["member_epochs"] * len(s.data_sets) for e, s in zip(epochs, self.shares, strict=True)]
            joined["member_epochs"] = sum(costs) / len(self.request.sources)
            joined["stopped"] = all(epoch["stopped"] for epoch in epochs)
            joined["losses"] = [loss for epoch in epochs for loss in epoch["losses"]]
            for kind in ("validation", "measures"):
                names = [name for name in longest[kind] if all(name in epoch[kind] for epoch in epochs)]
                joined[kind] = {n: [value for epoch in epochs for value in epoch[kind][n]] for n in names}
            self.run_folder.events.write("epoch", **joined)


def _log_of(folder: Path) -> tuple[list[list[int]], dict[float, dict[str, Any]]]:
    """The labels of a part's members, and its epochs by the number of those done; what is whole of them."""
    try:
        labels = next((e["labels"] for e in read_events(folder) if e["event"] == "members"), [])
        return labels, {epoch["epochs_done"]: epoch for epoch in epochs_of(folder)}
    except CheckpointError:  # it is missing
        return [], {}


def _mean_history(histories: Sequence[list[dict[str, Any]]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of means over the members of all parts, of so many chains each; as many as the longest has."""
    longest = max(histories, key=len)
    rows = []
    for number, row in enumerate(longest):
        others = [history[min(number, len(history) - 1)] for history in histories]
        means = {
            name: sum(size * other.get(name, math.nan) for size, other in zip(sizes, others, strict=True))
            / sum(sizes)
            for name, value in row.items()
            if isinstance(value, float)
        }
        rows.append(row | means)
    return rows
