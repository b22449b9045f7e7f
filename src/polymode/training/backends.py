"""The choice between ``vmap`` and ``loop``: measured once at the start of a run, then kept."""

import math
import time
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

from polymode.data import Data
from polymode.errors import CannotVectorise, NonFiniteLoss, unknown_name
from polymode.members import BACKENDS, Backend, Members, forward_members
from polymode.posteriors.network import Network
from polymode.training.method import Method, Phase, build_optimizers
from polymode.training.objective import Execution
from polymode.training.setup import SetUp

# On CPU vmap saves the cost of calling small kernels, at most a few milliseconds a member and step. Where
# a member takes longer than this it cannot pay, and trying it needs the activations of all members at once.
WORTH_VECTORISING = 0.025

TRIAL_DRAWS, TRIAL_EXAMPLES = 8, 32  # to compare backends for prediction with

AnyBackend = Backend | Literal["auto"]


@dataclass(frozen=True)
class Choice:
    """The backends of training and of prediction, and the seconds a step took with each."""

    training: Backend
    prediction: Backend
    step_seconds: dict[str, float]


def choose_backend(set_up: SetUp, method: Method, source: Data, wanted: AnyBackend) -> Choice:
    """Take the backend wanted, or the faster of both for one step of the method's first phase."""
    if wanted not in (*BACKENDS, "auto"):
        raise unknown_name("backend", wanted, (*BACKENDS, "auto"))
    execution = set_up.problem.execution
    alone = set_up.state.members.num_members == 1
    seconds: dict[str, float] = {}
    if wanted == "loop" or (wanted == "auto" and (alone or execution.uses_global_random)):
        chosen: Backend = "loop"
        _step_seconds(set_up, "loop", repeats=0)  # a cold first step is no part of the training's time
    elif wanted == "vmap":
        _step_seconds(set_up, "vmap", repeats=0)
        chosen = "vmap"
    else:
        seconds["loop"] = _step_seconds(set_up, "loop")
        each = seconds["loop"] / set_up.state.members.num_members
        if execution.device.type != "cpu" or each < WORTH_VECTORISING:
            try:
                seconds["vmap"] = _step_seconds(set_up, "vmap")
            except CannotVectorise as error:
                warnings.warn(
                    f"Members run one after another, because vmap cannot run this module: {error.reason}",
                    stacklevel=4,
                )
        chosen = min(BACKENDS, key=lambda name: seconds.get(name, float("inf")))
    rounded = {name: float(f"{value:.3g}") for name, value in seconds.items()}
    return Choice(chosen, _for_prediction(set_up, method, source, chosen, wanted), rounded)


def _step_seconds(set_up: SetUp, backend: Backend, repeats: int = 3) -> float:
    """Best time of one step, on a copy of the state; infinite without repeats or when it diverges."""
    phase, problem = set_up.phases[0], set_up.problem
    problem.execution.backend = backend
    state = set_up.state.trial_copy()
    build_optimizers(state, phase, set_up.batches.cohorts, problem.exempt)
    problem.network.train()
    batches = [set_up.arranged(batch) for batch in next(iter(set_up.batches.epoch(0, phase.batches)))]
    timings: list[float] = []
    # The first call is cold: it imports, loads kernels and touches memory, for seconds on a busy machine.
    # It must never decide, so there is always a second; a step that takes long is not repeated further.
    while len(timings) <= repeats and (len(timings) < 2 or sum(timings[1:]) < 0.2):
        began = time.perf_counter()
        if not _quiet_step(phase, state, batches, problem.execution):
            return float("inf")
        timings.append(time.perf_counter() - began)
    return min(timings[1:], default=float("inf"))


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
            block = next(posterior.draw(TRIAL_DRAWS))  # fewer, where a draw is large
            seconds = {b: _pass_seconds(network, block.to(device), source, b) for b in BACKENDS}
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
