"""How a run computes: ``vmap`` or ``loop``, one thread or several; measured once at its start, then kept."""

import math
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch

from polymode.data import Data
from polymode.errors import CannotVectorise, NonFiniteLoss, unknown_name
from polymode.networks.members import BACKENDS, Backend, Members, forward_members
from polymode.posteriors.network import Network
from polymode.seeds import free_in_children
from polymode.training.contract.method import Method, Phase, build_optimizers
from polymode.training.contract.objective import Execution
from polymode.training.loop.arithmetic import available_threads, with_threads
from polymode.training.loop.setup import SetUp

# On CPU vmap saves the cost of calling small kernels, at most a few milliseconds a member and step. Where
# a member takes longer than this it cannot pay, and trying it needs the activations of all members at once.
WORTH_VECTORISING = 0.025

# Several threads must be faster than one by this factor. As soon as anybody else computes on the same cores
# they wait for each other in every operation, and a step takes a multiple of its time; one thread does not.
WORTH_THREADS = 1.15

REPEATS, REPEAT_SECONDS = 5, 0.2  # of a step that is timed, at most
TRIAL_DRAWS, TRIAL_EXAMPLES = 8, 32  # to compare backends for prediction with

AnyBackend = Backend | Literal["auto"]

# One thread measures at a time: others would disturb it, and Python's filters of warnings are global.
_measuring = free_in_children(threading.Lock())


@dataclass(frozen=True)
class Choice:
    """The backends of training and of prediction, the threads, and the seconds a step took each way."""

    training: Backend
    prediction: Backend
    threads: int
    step_seconds: dict[str, float]


def choose_execution(
    set_up: SetUp, method: Method, source: Data, wanted: AnyBackend, threads: int | None
) -> Choice:
    """Take the backend and the threads that are wanted, or what is fastest for a step of the first phase.

    threads: None chooses between one and as many as PyTorch has now.
    """
    if wanted not in (*BACKENDS, "auto"):
        raise unknown_name("backend", wanted, (*BACKENDS, "auto"))
    with _measuring:
        counts = _counts(set_up.problem.execution, threads)
        seconds = _seconds(set_up, wanted, counts)
        few, many = _fastest(seconds, counts[0]), _fastest(seconds, counts[-1])
        backend, number = many if seconds[many] * WORTH_THREADS <= seconds[few] < math.inf else few
        with with_threads(number):
            prediction = _for_prediction(set_up, method, source, backend, wanted)
    told = {
        f"{name}, {count} threads" if count > 1 else name: float(f"{value:.3g}")
        for (name, count), value in seconds.items()
        if math.isfinite(value)
    }
    return Choice(backend, prediction, number, told)


def _fastest(seconds: Mapping[tuple[Backend, int], float], threads: int) -> tuple[Backend, int]:
    """The fastest way with so many threads; the first where none could be timed."""
    return min((way for way in seconds if way[1] == threads), key=lambda way: seconds[way])


def _counts(execution: Execution, threads: int | None) -> list[int]:
    """Numbers of threads to choose from, the fewest first."""
    if threads is not None:
        return [threads]
    available = available_threads()
    return sorted({1, available}) if execution.device.type == "cpu" else [available]


def _seconds(set_up: SetUp, wanted: AnyBackend, counts: Sequence[int]) -> dict[tuple[Backend, int], float]:
    """Time of a step with every backend that may be taken and every number of threads."""
    execution, num_members = set_up.problem.execution, set_up.state.members.num_members
    if wanted != "auto" or num_members == 1 or execution.uses_global_random:
        only: Backend = "loop" if wanted == "auto" else wanted
        # A cold first step is no part of the training's time, even where there is nothing to choose.
        return _step_seconds(set_up, only, counts, repeats=REPEATS if len(counts) > 1 else 0)
    seconds = _step_seconds(set_up, "loop", counts)
    if execution.device.type != "cpu" or min(seconds.values()) / num_members < WORTH_VECTORISING:
        try:
            seconds |= _step_seconds(set_up, "vmap", counts)
        except CannotVectorise as error:
            warnings.warn(
                f"Members run one after another, because vmap cannot run this module: {error.reason}",
                stacklevel=6,
            )
    return seconds


def _step_seconds(
    set_up: SetUp, backend: Backend, counts: Sequence[int], repeats: int = REPEATS
) -> dict[tuple[Backend, int], float]:
    """Time of one step, on a copy of the state; infinite without repeats or when it diverges.

    The numbers of threads take turns, so that what a neighbour does falls on all of them. Of the fewest the
    best time counts, of more the median: a step that was lucky once must not decide for many threads.
    """
    phase, problem = set_up.phases[0], set_up.problem
    problem.execution.backend = backend
    state = set_up.state.trial_copy()
    build_optimizers(state, phase, set_up.batches.cohorts, problem.exempt)
    problem.network.train()
    batches = [set_up.arranged(batch) for batch in next(iter(set_up.batches.epoch(0, phase.batches)))]
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


def _for_prediction(
    set_up: SetUp, method: Method, source: Data, chosen: Backend, wanted: AnyBackend
) -> Backend:
    """The same as in training, unless evaluation mode takes a path that cannot be vectorised.

    Draws that share most of their weights are another matter than the one network that was trained: which
    backend is faster for them is measured.
    """
    network, device = set_up.problem.network, set_up.problem.execution.device
    network.module.eval()
    if wanted == "auto":
        posterior = method.posterior(set_up.problem, set_up.state.chain(0))
        if posterior.num_members is None:
            block = next(posterior.draw(TRIAL_DRAWS)).to(device)  # fewer, where a draw is large
            seconds = {b: _pass_seconds(network, block, source, b) for b in BACKENDS}
            if math.isinf(_pass_seconds(network, block, source, "vmap", 1)):  # the last batch may have one
                return "loop"
            return min(BACKENDS, key=lambda name: seconds[name])
    if chosen == "loop":
        return "loop"
    weights = set_up.problem.start(0, torch.Generator())
    two = Members({name: torch.stack([tensor] * 2) for name, tensor in weights.items()})
    return "loop" if math.isinf(_pass_seconds(network, two, source, "vmap", 2)) else "vmap"


def _pass_seconds(
    network: Network, members: Members, source: Data, backend: Backend, num_examples: int = TRIAL_EXAMPLES
) -> float:
    """The better time of two passes in evaluation mode; infinite where the backend cannot run the module."""
    device = network.device
    examples = next(iter(source.in_order(num_examples))).map(lambda t: t.to(device))
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
