"""How time and memory of polymode grow with members, width, rows of data and draws.

    python benchmarks/growth.py --json growth.json --figure growth.png   # about ten minutes on one idle core
    python benchmarks/growth.py --axes members,draws --threads 2
    python benchmarks/growth.py --quick                                  # does it run? Few, small sizes

Each size is timed with every backend in turn, in one process that a first short job of each backend has
warmed up. Training counts the seconds of its record alone, so neither setting up nor compiling; prediction
counts calls after a first one. The best of the repeats counts. Peak memory is that of a fresh process which
trains an epoch or predicts twice, above what importing polymode and building data and members takes. It
includes what a backend imports when it is first used, and is measured at some of the sizes, as each process
takes seconds to start. One member predicts without vmap or a graph, whatever the backend.

A law fixed + slope·x, for width fixed + a·w + b·w², is fitted to both: least squares of relative errors,
coefficients of at least zero. Where the growing part equals the fixed one the law crosses over: below, size
is nearly free, above, one pays for it. The misfit is the largest relative distance between law and
measurement.
"""

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import run
import torch
from scipy.optimize import nnls

import polymode as pm
from polymode.application.plots.style import AXIS, COLOURS
from polymode.networks.members import Backend
from polymode.posteriors.network import Network

FIT: tuple[Backend, ...] = ("vmap", "compiled", "loop")
PREDICT: tuple[Backend, ...] = ("vmap", "compiled")
COLOUR = dict(zip(FIT, COLOURS, strict=False))

BATCH_SIZE, NUM_INPUTS, NUM_CLASSES = 100, 20, 10
LEAST_STEPS = 20  # of a training that is timed
LONG_SECONDS = 2.0  # what takes longer is timed once: what its first round loads is nothing beside it
MEGABYTE = 1.0  # smaller peaks are rounding of the kernel's counters, and weigh as much as this one

# Trains or predicts so many times, and returns the seconds it counted: NaN where a backend could not be used,
# as a fallback that runs instead must not be taken for it.
Rounds = Callable[[int], float]


@dataclass(frozen=True)
class Job:
    """Something to be timed; a round has several units (steps), or is one itself (an epoch, a call)."""

    rounds: Rounds
    units: int = 1
    least: int = 1  # rounds


Jobs = dict[Backend, Job]


@dataclass(frozen=True)
class Sweep:
    """One size that grows while the others stay.

    timed: what the seconds are of. size, each: names of the size, in a table and after "a"; without ``each``
    time divided by the size means nothing. weighed: sizes at which memory is measured. degree: of the law.
    most: the largest size of a backend that would take minutes beyond it.
    """

    axis: str
    title: str
    timed: str
    size: str
    each: str | None
    build: Callable[[int], Jobs]
    backends: tuple[Backend, ...]
    sizes: tuple[int, ...]
    weighed: tuple[int, ...]
    quick: tuple[int, ...]
    degree: int = 1
    most: Mapping[Backend, int] = field(default_factory=dict)

    def backends_at(self, size: int) -> list[Backend]:
        return [backend for backend in self.backends if size <= self.most.get(backend, size)]


# --- jobs ----------------------------------------------------------------------------------------------


def trainings(
    num_members: int, hidden: tuple[int, ...], num_rows: int, *, by_step: bool = True
) -> dict[Backend, Job]:
    """Training an ensemble of MLPs, epoch by epoch; seconds are those of a step, or of an epoch."""
    torch.manual_seed(0)
    data = pm.ArrayData(torch.randn(num_rows, NUM_INPUTS), torch.randn(num_rows, 1), batch_size=BATCH_SIZE)

    def train(backend: Backend, epochs: int) -> float:
        posterior = pm.fit(
            pm.methods.DeepEnsemble(num_members),
            lambda: pm.models.MLP(NUM_INPUTS, 1, hidden),
            data,
            likelihood=pm.likelihoods.FixedGaussian(std=1.0),
            epochs=epochs,
            backend=backend,
            threads=torch.get_num_threads(),
            progress=False,
        )
        record = posterior.record
        return record["training_seconds"] if record["backend"] == backend else math.nan

    steps = -(-num_rows // BATCH_SIZE)
    least = -(-LEAST_STEPS // steps)
    return {backend: Job(partial(train, backend), steps if by_step else 1, least) for backend in FIT}


def predictions(num_members: int, num_points: int) -> dict[Backend, Job]:
    """Predicting with MLPs, call by call, after a first call that compiles."""
    torch.manual_seed(0)
    modules = [pm.models.MLP(NUM_INPUTS, NUM_CLASSES, (50,)) for _ in range(num_members)]
    members = pm.stack([{name: t.detach() for name, t in m.state_dict().items()} for m in modules])
    network = Network(modules[0].eval(), pm.likelihoods.Categorical(), "vmap")
    posterior = pm.Particles(network, blocks=[members])
    x = torch.randn(num_points, NUM_INPUTS)

    def predict(posterior: pm.Particles, calls: int) -> float:
        with warnings.catch_warnings(record=True) as remarks:
            warnings.simplefilter("always")
            posterior.predict(x)
        if remarks:  # the only ones that MLPs give rise to: nothing could be compiled
            print(remarks[0].message, file=sys.stderr)
            return math.nan
        began = time.perf_counter()
        for _ in range(calls):
            posterior.predict(x)
        return time.perf_counter() - began

    return {backend: Job(partial(predict, posterior.with_backend(backend))) for backend in PREDICT}


SWEEPS = {
    "members": Sweep(
        axis="members",
        title="Training K MLPs 20-50-1, batch 100, 10,000 rows",
        timed="a step",
        size="members",
        each="member",
        build=lambda count: trainings(count, (50,), 10_000),
        backends=FIT,
        sizes=(1, 2, 5, 10, 20, 50, 100, 200),
        weighed=(1, 50, 200),
        quick=(1, 5, 20),
        most={"loop": 100},
    ),
    "width": Sweep(
        axis="width",
        title="Training 10 MLPs 20-w-w-1, batch 100, 2,000 rows",
        timed="a step",
        size="units a layer",
        each=None,
        build=lambda width: trainings(10, (width, width), 2_000),
        backends=FIT,
        sizes=(16, 32, 64, 128, 256, 512, 1024),
        weighed=(16, 128, 512, 1024),
        quick=(16, 64, 128),
        degree=2,
    ),
    "rows": Sweep(
        axis="rows",
        title="Training 10 MLPs 20-50-1, batch 100",
        timed="an epoch",
        size="rows",
        each="row",
        build=lambda rows: trainings(10, (50,), rows, by_step=False),
        backends=FIT,
        sizes=(1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000),
        weighed=(1_000, 100_000, 1_000_000),
        quick=(1_000, 3_000, 10_000),
        most={"loop": 100_000},
    ),
    "draws": Sweep(
        axis="draws",
        title="Predicting 100 points with S MLPs 20-50-10",
        timed="a call",
        size="members",
        each="member",
        build=lambda count: predictions(count, 100),
        backends=PREDICT,
        sizes=(1, 10, 100, 1_000),
        weighed=(1, 100, 1_000),
        quick=(1, 10, 100),
    ),
    "points": Sweep(
        axis="draws",
        title="Predicting N points with 100 MLPs 20-50-10",
        timed="a call",
        size="points",
        each="point",
        build=lambda points: predictions(100, points),
        backends=PREDICT,
        sizes=(1, 10, 100, 1_000, 10_000, 100_000),
        weighed=(1, 1_000, 100_000),
        quick=(1, 100, 1_000),
    ),
}
AXES = list(dict.fromkeys(sweep.axis for sweep in SWEEPS.values()))


def contenders(name: str, size: int) -> run.Contenders:
    """One round of each backend, as ``run.peak_memory`` builds it in a fresh process."""
    return {backend: partial(job.rounds, 1) for backend, job in SWEEPS[name].build(size).items()}


# A fresh process imports this file, too, and finds them there.
run.CASES |= {
    f"{name} {size}": run.Case(f"{sweep.title}: {size:,}", partial(contenders, name, size), goals={})
    for name, sweep in SWEEPS.items()
    for size in (*sweep.weighed, *sweep.quick)
}


# --- laws ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """fixed + linear·x + quadratic·x²; misfit: the largest relative one, None where it cannot but fit."""

    fixed: float
    linear: float
    quadratic: float
    crossing: float | None  # where both parts are equal; None where one of them is zero
    misfit: float | None

    def at(self, x: Any) -> Any:
        return self.fixed + self.linear * x + self.quadratic * x**2


def fitted(sizes: Sequence[int], values: Sequence[float], degree: int) -> Law | None:
    """The law that is nearest in relative terms; None where there are fewer sizes than coefficients."""
    if len(sizes) <= degree:
        return None
    x, y, largest = np.array(sizes, dtype=float), np.array(values), max(sizes)
    powers = np.arange(degree + 1)
    design = (x[:, None] / largest) ** powers / y[:, None]
    scaled, _ = nnls(design, np.ones(len(x)))
    is_forced = len(sizes) <= np.count_nonzero(scaled)
    misfit = None if is_forced else float(np.abs(design @ scaled - 1).max())
    fixed, linear, quadratic = (float(c) for c in (*scaled / float(largest) ** powers, 0.0)[:3])
    crossing = None
    if fixed > 0 and linear + quadratic > 0:
        crossing = 2 * fixed / (linear + math.sqrt(linear**2 + 4 * quadratic * fixed))
    return Law(fixed, linear, quadratic, crossing, misfit)


# --- measuring -----------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Of one backend at one size; replicates are seconds of a step, an epoch or a call."""

    backend: Backend
    size: int
    rounds: int
    replicates: list[float]
    peak_memory_mb: float | None = None

    @property
    def seconds(self) -> float:
        return min(self.replicates)


def timed(jobs: Jobs, size: int, least_seconds: float, repeats: int) -> list[Measured]:
    """All backends at one size: rounds enough for a clock, then repeats in turn."""
    found = []
    for backend, job in jobs.items():
        seconds = job.rounds(job.least)
        if math.isnan(seconds):
            print(f"{backend} is left out at {size:,}: it could not be used", file=sys.stderr)
            continue
        rounds, replicates = job.least, []
        if seconds > LONG_SECONDS:
            replicates = [seconds / (rounds * job.units)]
        elif seconds < least_seconds:
            rounds = math.ceil(1.2 * rounds * least_seconds / max(seconds, 0.001))
        found.append(Measured(backend, size, rounds, replicates))
    in_turn = [measured for measured in found if not measured.replicates]
    for _ in range(repeats):
        for measured in in_turn:
            job = jobs[measured.backend]
            seconds = job.rounds(measured.rounds)
            measured.replicates.append(seconds / (measured.rounds * job.units))
    return found


def warm_up(sweeps: Iterable[Sweep]) -> None:
    """One small job of each backend of each sweep: imports, kernels, the compiler."""
    for sweep in sweeps:
        for job in sweep.build(sweep.quick[1]).values():
            job.rounds(job.least)


def swept(name: str, sweep: Sweep, *, quick: bool) -> list[Measured]:
    """A whole sweep; times come first, so that fresh processes find compiled graphs on disk."""
    found: list[Measured] = []
    for size in sweep.quick if quick else sweep.sizes:
        print(f"{name}: {size:,}, time", file=sys.stderr)
        built = sweep.build(size)
        jobs: Jobs = {backend: built[backend] for backend in sweep.backends_at(size)}
        found += timed(jobs, size, 0.1 if quick else 0.3, 1 if quick else 3)
    weighed = sweep.quick[-1:] if quick else sweep.weighed
    for measured in found:
        if measured.size in weighed:
            print(f"{name}: {measured.size:,}, memory, {measured.backend}", file=sys.stderr)
            measured.peak_memory_mb = run.peak_memory(f"{name} {measured.size}", measured.backend)
    return found


@dataclass(frozen=True)
class Line:
    """One backend over all sizes of a sweep, with its laws."""

    backend: Backend
    measured: list[Measured]
    time: Law | None  # seconds
    memory: Law | None  # megabytes


def lines(sweep: Sweep, found: Sequence[Measured]) -> list[Line]:
    drawn = []
    for backend in sweep.backends:
        own = [measured for measured in found if measured.backend == backend]
        weights = {m.size: max(m.peak_memory_mb, MEGABYTE) for m in own if m.peak_memory_mb is not None}
        time_law = fitted([m.size for m in own], [m.seconds for m in own], sweep.degree)
        drawn.append(
            Line(backend, own, time_law, fitted(list(weights), list(weights.values()), sweep.degree))
        )
    return drawn


# --- showing -------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def number(value: float | None, scale: float = 1.0) -> str:
    """Three digits, or whole numbers with all of theirs; a dash where there is none."""
    if value is None:
        return "–"
    value *= scale
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


def measurements(sweep: Sweep, drawn: Sequence[Line]) -> str:
    """A size a row: milliseconds, microseconds for each of what grows, megabytes."""
    head = [sweep.size, *(f"{line.backend}, ms {sweep.timed}" for line in drawn)]
    if sweep.each is not None:
        head += [f"{line.backend}, µs a {sweep.each}" for line in drawn]
    rows = [[*head, *(f"{line.backend}, MB" for line in drawn)]]
    for size in sorted({m.size for line in drawn for m in line.measured}):
        cells = [next((m for m in line.measured if m.size == size), None) for line in drawn]
        row = [f"{size:,}", *(number(m and m.seconds, 1e3) for m in cells)]
        if sweep.each is not None:
            row += [number(m and m.seconds, 1e6 / size) for m in cells]
        memory = [m and m.peak_memory_mb for m in cells]
        rows.append([*row, *("" if value is None else number(value) for value in memory)])
    return markdown(rows)


def laws(sweep: Sweep, drawn: Sequence[Line]) -> str:
    """A law a row."""
    each = sweep.each or "unit"
    slopes = [f"a {each}"] if sweep.degree == 1 else [f"a {each} (a)", f"a squared {each} (b)"]
    rows = [["law of", "fixed", *slopes, f"crosses at, {sweep.size}", "largest misfit"]]
    for line in drawn:
        for what, law, units in (
            (sweep.timed, line.time, {"ms": 1e3, "µs": 1e6, "ns": 1e9}),
            ("memory", line.memory, {"MB": 1, "KB": 2**10, "B": 2**20}),
        ):
            if law is None:
                continue
            coefficients = (law.fixed, law.linear, law.quadratic)[: sweep.degree + 1]
            parts = zip(coefficients, units.items(), strict=False)
            shown = [f"{number(coefficient, scale)} {unit}" for coefficient, (unit, scale) in parts]
            misfit = "–" if law.misfit is None else f"{100 * law.misfit:.0f} %"
            rows.append([f"{line.backend}, {what}", *shown, number(law.crossing), misfit])
    return markdown(rows)


def figure(found: Mapping[str, Sequence[Line]]) -> Any:
    """A panel an axis: measured times as points on a line, fitted laws dashed, both axes logarithmic."""
    from plotly.subplots import make_subplots

    panels = [axis for axis in AXES if any(SWEEPS[name].axis == axis for name in found)]
    columns = min(2, len(panels))
    sweeps_of = {axis: [name for name in found if SWEEPS[name].axis == axis] for axis in panels}
    titles = ["<br>".join(SWEEPS[name].title for name in names) for names in sweeps_of.values()]
    drawn = make_subplots(
        -(-len(panels) // columns),
        columns,
        subplot_titles=titles,
        horizontal_spacing=0.11,
        vertical_spacing=0.2,
    )
    for index, names in enumerate(sweeps_of.values()):
        place: dict[str, Any] = {"row": index // columns + 1, "col": index % columns + 1}
        for name, symbol in zip(names, ("circle", "diamond-open"), strict=False):
            for line in found[name]:
                draw_line(drawn, line, symbol, place)
        sizes = sorted({m.size for name in names for line in found[name] for m in line.measured})
        label = " or ".join(SWEEPS[name].size for name in names)
        ticks = {"tickvals": sizes, "tickformat": ","}
        drawn.update_xaxes(AXIS | ticks | {"type": "log", "title": {"text": label}}, **place)
        label = f"time of {SWEEPS[names[0]].timed}"
        ticks = {"dtick": 1, "tickformat": "~s", "ticksuffix": "s"}
        drawn.update_yaxes(AXIS | ticks | {"type": "log", "title": {"text": label}}, **place)
    add_legend(drawn, [line.backend for name in found for line in found[name]], with_points="points" in found)
    return drawn.update_layout(
        height=60 + 440 * -(-len(panels) // columns),
        width=620 * columns,
        margin={"l": 70, "r": 30, "t": 110, "b": 60},
        plot_bgcolor="white",
        paper_bgcolor="white",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
        legend={"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top"},
    )


def draw_line(drawn: Any, line: Line, symbol: str, place: Mapping[str, int]) -> None:
    """What was measured of one backend, and its law."""
    look, sizes = {"color": COLOUR[line.backend]}, [m.size for m in line.measured]
    drawn.add_scatter(
        x=sizes,
        y=[m.seconds for m in line.measured],
        mode="lines+markers",
        line=look | {"width": 1.5},
        marker=look | {"symbol": symbol, "size": 8},
        showlegend=False,
        **place,
    )
    if line.time is not None:
        x = np.geomspace(min(sizes), max(sizes), 100)
        dashes = look | {"dash": "dash", "width": 1.5}
        drawn.add_scatter(x=x, y=line.time.at(x), mode="lines", line=dashes, showlegend=False, **place)


def add_legend(drawn: Any, backends: Iterable[Backend], *, with_points: bool) -> None:
    """What colours, dashes and symbols mean, once for all panels."""
    entries: dict[str, dict[str, Any]] = {
        backend: {"mode": "lines", "line": {"color": COLOUR[backend], "width": 3}}
        for backend in dict.fromkeys(backends)
    }
    entries["measured"] = {"mode": "lines+markers", "line": {"color": "#555", "width": 1.5}}
    if with_points:
        entries["measured, by points"] = {
            "mode": "lines+markers",
            "line": {"color": "#555", "width": 1.5},
            "marker": {"symbol": "diamond-open", "size": 8},
        }
    entries["fitted law"] = {"mode": "lines", "line": {"color": "#555", "dash": "dash", "width": 1.5}}
    for name, look in entries.items():
        drawn.add_scatter(x=[None], y=[None], name=name, **look)


def write_figure(drawn: Any, path: Path) -> None:
    import kaleido

    shape = {"width": drawn.layout.width, "height": drawn.layout.height, "scale": 2}
    job = {"fig": drawn, "path": str(path), "opts": {"format": "png", **shape}}
    kaleido.write_fig_from_object_sync([job], kopts={"mathjax": False})  # nothing is fetched from elsewhere


# --- the command ---------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--axes", default=",".join(AXES), help="comma-separated: " + ", ".join(AXES))
    parser.add_argument("--threads", type=int, default=1, help="that every process computes with")
    parser.add_argument("--quick", action="store_true", help="few, small sizes, to see that everything runs")
    parser.add_argument("--json", type=Path, help="also write all replicates and laws to this file")
    parser.add_argument("--figure", type=Path, help="also draw times and laws as this PNG")
    options = parser.parse_args()
    axes = options.axes.split(",")
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        parser.error(f"unknown axis {unknown[0]!r}; known: {', '.join(AXES)}")
    torch.set_num_threads(options.threads)
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
    chosen = {name: sweep for name, sweep in SWEEPS.items() if sweep.axis in axes}
    began = time.perf_counter()
    warm_up(chosen.values())
    found: dict[str, list[Line]] = {}
    for name, sweep in chosen.items():
        found[name] = lines(sweep, swept(name, sweep, quick=options.quick))
        print(f"\n### {sweep.title}\n")
        print(measurements(sweep, found[name]), laws(sweep, found[name]), sep="\n\n", flush=True)
        if options.json:
            write_json(options.json, found, options, time.perf_counter() - began)
    if options.figure:
        write_figure(figure(found), options.figure)
    return 0


def write_json(
    path: Path, found: Mapping[str, Sequence[Line]], options: argparse.Namespace, seconds: float
) -> None:
    content = {
        "polymode": pm.__version__,
        "torch": torch.__version__,
        "threads": options.threads,
        "quick": options.quick,
        "seconds": round(seconds, 1),
        "sweeps": [
            {"name": name, "title": SWEEPS[name].title, "timed": SWEEPS[name].timed}
            | {"lines": [asdict(line) for line in drawn]}
            for name, drawn in found.items()
        ],
    }
    path.write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    sys.exit(main())
