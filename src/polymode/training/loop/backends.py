"""How a run computes: its backend, one thread or several; measured once at its start, then kept."""

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from polymode.data import Data
from polymode.errors import CannotVectorise, NonFiniteLoss
from polymode.networks.members import Backend, Members, forward_members
from polymode.networks.recording import alone
from polymode.posteriors import Posterior
from polymode.posteriors.network import Network
from polymode.training.contract.execution import Execution
from polymode.training.contract.phase import Phase, build_optimizers
from polymode.training.contract.ranks import ALONE, Ranks
from polymode.training.loop.arithmetic import available_threads, with_threads
from polymode.training.loop.compilation import Note
from polymode.training.loop.material import Material
from polymode.training.loop.settings import AnyBackend, Computing
from polymode.trees import map_tree

# On CPU vmap saves the cost of calling small kernels, at most a few milliseconds a member and step. Where
# a member takes longer than this it cannot pay, and trying it needs the activations of all members at once.
WORTH_VECTORISING = 0.025

# Compiling saves the cost of calling kernels, too, and takes seconds to minutes. Where a member's step takes
# longer than this there is little to save, and what vmap slows down by this factor no compiler makes good.
WORTH_COMPILING, WORTH_RECORDING = 0.003, 1.3

BESIDE = 1.2  # a step in a run takes longer than the best of some on one batch

# Several threads must be faster than one by this factor. As soon as anybody else computes on the same cores
# they wait for each other in every operation, and a step takes a multiple of its time; one thread does not.
WORTH_THREADS = 1.15

REPEATS, REPEAT_SECONDS = 5, 0.2  # of a step that is timed, at most
TRIAL_DRAWS, TRIAL_EXAMPLES = 8, 32  # to compare backends for prediction with

UNCOMPILED: tuple[Backend, ...] = ("vmap", "loop")
Way = tuple[Backend, int]  # with so many threads


def choose_execution(
    material: Material, computing: Computing, ranks: Ranks = ALONE
) -> tuple[Execution, dict[str, float]]:
    """How to execute a run: as is wanted, or what is fastest for a step of the first phase.

    threads: None chooses between one and as many as PyTorch has now. ranks: who will share the steps; what
    they tell each other is not compiled. Returns the seconds of a step each way, too.
    """
    with alone:
        counts = _counts(material.problem.execution, computing)
        seconds = _seconds(material, computing.backend, counts)
        few, many = _fastest(seconds, counts[0]), _fastest(seconds, counts[-1])
        backend, number = many if seconds[many] * WORTH_THREADS <= seconds[few] < math.inf else few
        with with_threads(number):
            if ranks.size == 1:
                backend = _or_compiled(material, computing.backend, backend, seconds, number)
            prediction = _for_prediction(material, backend, computing.backend)
    told = {
        f"{name}, {count} threads" if count > 1 else name: float(f"{value:.3g}")
        for (name, count), value in seconds.items()
        if math.isfinite(value)
    }
    chosen = replace(
        material.problem.execution, backend=backend, prediction_backend=prediction, threads=number
    )
    return chosen, told


def _fastest(seconds: Mapping[Way, float], threads: int) -> Way:
    """The fastest way with so many threads; the first where none could be timed."""
    return min((way for way in seconds if way[1] == threads), key=lambda way: seconds[way])


def _counts(execution: Execution, computing: Computing) -> list[int]:
    """Numbers of threads to choose from, the fewest first."""
    if computing.threads is not None:
        return [computing.threads]
    available = available_threads()
    if execution.device.type != "cpu":
        return [available]
    # A graph is compiled for a number of threads: who wants nothing else is spared a second one.
    return [1] if computing.backend == "compiled" else sorted({1, available})


def _seconds(material: Material, wanted: AnyBackend, counts: Sequence[int]) -> dict[Way, float]:
    """Time of a step under vmap or in a loop, as it may be taken, with every number of threads."""
    network, execution = material.problem.network, material.problem.execution
    num_members = material.state.members.num_members
    if wanted in UNCOMPILED or num_members == 1 or network.draws_globally:
        only: Backend = "vmap" if wanted == "vmap" else "loop"
        # A cold first step is no part of the training's time, even where there is nothing to choose.
        undecided = len(counts) > 1 or (wanted not in UNCOMPILED and not network.draws_globally)
        return _step_seconds(material, only, counts, repeats=REPEATS if undecided else 0)
    seconds = _step_seconds(material, "loop", counts)
    if execution.device.type != "cpu" or min(seconds.values()) / num_members < WORTH_VECTORISING:
        try:
            seconds |= _step_seconds(material, "vmap", counts)
        except CannotVectorise as error:
            warnings.warn(
                f"Members run one after another, because vmap cannot run this module: {error.reason}",
                stacklevel=6,
            )
    return seconds


def _or_compiled(
    material: Material, wanted: AnyBackend, best: Backend, seconds: dict[Way, float], threads: int
) -> Backend:
    """The best backend so far, or a compiled graph where that is wanted or pays; its time is added."""
    step, recordings = seconds[best, threads], material.problem.recordings
    if wanted in UNCOMPILED:
        return best
    draws = material.problem.network.draws_globally
    if draws or math.isinf(step):
        if wanted == "compiled":
            why = "the network draws random numbers by itself" if draws else "the first step diverges"
            warnings.warn(f"The backend is {best}, as nothing can be compiled: {why}.", stacklevel=6)
        return best
    note = Note.of(material, threads)
    small = step < WORTH_COMPILING * material.state.members.num_members
    vectorises = seconds.get(("vmap", threads), step) <= WORTH_RECORDING * step
    if wanted == "auto" and not (
        small and vectorises and note.is_worth_it(_seconds_of_training(material, step), _num_graphs(material))
    ):
        return best
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what fails is told below, with what is done instead
        try:
            seconds |= _step_seconds(material, "compiled", [threads])
        except CannotVectorise as error:
            recordings.failure = error.reason
    if recordings.failure is not None:
        seconds.pop(("compiled", threads), None)
        warnings.warn(
            f"The backend is {best}, as nothing can be compiled: {recordings.failure}", stacklevel=6
        )
        return best
    compiled = seconds["compiled", threads]
    note.write(time.perf_counter() - began, compiled / step)
    return "compiled" if wanted == "compiled" or compiled < step else best


def _seconds_of_training(material: Material, step: float) -> float:
    """What a run takes whose steps take so long; those of later phases by what they cost."""
    first, *_ = phases = material.phases(material.problem.execution)
    steps = material.batches.steps_per_epoch(material.batches.cohorts[0], first.batches)
    return BESIDE * step * steps / first.cost * sum(phase.epochs * phase.cost for phase in phases)


def _num_graphs(material: Material) -> int:
    """Graphs that a run needs, as far as can be told before: one for each kind of batches and of steps."""
    phases = material.phases(material.problem.execution)
    kinds = {(phase.batches, getattr(phase.step, "__code__", phase.step)): phase for phase in phases}
    return sum(material.batches.num_kinds(phase.batches) for phase in kinds.values())


def _step_seconds(
    material: Material, backend: Backend, counts: Sequence[int], repeats: int = REPEATS
) -> dict[Way, float]:
    """Time of one step, on a copy of the state; infinite without repeats or when it diverges.

    The numbers of threads take turns, so that what a neighbour does falls on all of them. Of the fewest the
    best time counts, of more the median: a step that was lucky once must not decide for many threads.
    """
    problem = material.problem
    [phase, *_] = material.phases(replace(problem.execution, backend=backend))
    state = material.state.trial_copy()
    build_optimizers(state, phase, material.batches.cohorts, problem.exempt)
    problem.network.train()
    batches = next(iter(material.batches.epoch(0, phase.batches)))
    rounds: list[list[float]] = []
    # The first round is cold: it imports, loads kernels and touches memory, for seconds on a busy machine.
    # It must never decide, so there is always a second; a step that takes long is not repeated further.
    while len(rounds) <= repeats and (len(rounds) < 2 or sum(map(sum, rounds[1:])) < REPEAT_SECONDS):
        rounds.append([])
        for count in counts:
            with with_threads(count):
                began = time.perf_counter()
                if not _quiet_step(phase, state, batches, problem.execution):
                    return {(backend, n): math.inf for n in counts}
                rounds[-1].append(time.perf_counter() - began)
    if repeats == 0:
        return {(backend, count): math.inf for count in counts}
    timings = list(zip(*rounds[1:], strict=True))  # of each number of threads
    return {
        (backend, count): (min if place == 0 else median)(timings[place])
        for place, count in enumerate(counts)
    }


def _quiet_step(phase: Phase, state, batches, execution: Execution) -> bool:
    """Take a step; False if it diverges, which training itself will meet and locate."""
    with warnings.catch_warnings():
        # vmap remarks on operations that it runs slowly: this very measurement decides.
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            phase.step(state, batches, phase.objective)
        except NonFiniteLoss:
            return False
    if execution.device.type == "cuda":
        torch.cuda.synchronize(execution.device)
    return True


def _for_prediction(material: Material, chosen: Backend, wanted: AnyBackend) -> Backend:
    """The same as in training, unless evaluation mode takes a path that cannot be vectorised.

    Draws or members that share weights are another matter than the one network that was trained: vmap runs
    once what they share, up to the first layer that is their own. Which backend is faster is measured.
    """
    network, device = material.problem.network, material.problem.execution.device
    method, source = material.request.method, material.request.sources[0]
    network.module.eval()
    if wanted == "auto":
        posterior = method.posterior(material.problem, material.state.chain(0))
        block = _sharing(posterior)
        if block is not None:
            block = block.to(device)
            seconds = {b: _pass_seconds(network, block, source, b) for b in UNCOMPILED}
            if math.isinf(_pass_seconds(network, block, source, "vmap", 1)):  # the last batch may have one
                return "loop"
            return min(UNCOMPILED, key=lambda name: seconds[name])
    if chosen == "loop":
        return "loop"
    weights = material.problem.start(0, torch.Generator())
    two = Members({name: torch.stack([tensor] * 2) for name, tensor in weights.items()})
    return "loop" if math.isinf(_pass_seconds(network, two, source, "vmap", 2)) else "vmap"


def _sharing(posterior: Posterior) -> Members | None:
    """Some draws of a posterior without end, or some members that share weights; None where nobody does."""
    if posterior.num_members is None:
        return next(posterior.draw(TRIAL_DRAWS))  # fewer, where a draw is large
    if posterior.num_members < 2:
        return None
    block = next(posterior.draw())
    return block if block.shared else None


def _pass_seconds(
    network: Network, members: Members, source: Data, backend: Backend, num_examples: int = TRIAL_EXAMPLES
) -> float:
    """The better time of two passes in evaluation mode; infinite where the backend cannot run the module."""
    device = network.device
    examples = map_tree(lambda t: t.to(device), next(iter(source.in_order(num_examples))))
    timings = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        for _ in range(2):
            began = time.perf_counter()
            try:
                forward_members(network.module, members, network.arrange(examples.inputs), backend=backend)
            except CannotVectorise:
                return math.inf
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            timings.append(time.perf_counter() - began)
    return min(timings)
