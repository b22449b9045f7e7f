"""Recording what a function of tensors does, to replay it without Python's share, or to compile it."""

import logging
import os
import random
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.errors import CannotCompile
from polymode.seeds import free_in_children
from polymode.trees import Tree, filled, leaves, map_tree

Program = Callable[..., Sequence[Tensor]]

COMPILER = "inductor"  # one of torch.compile's backends
MOST_PROGRAMS = 64  # that a process keeps compiled
TRIALS = 3  # of a function whose results are compared, while others may draw random numbers

_programs: dict[Any, Program] = {}

_PLACE = torch.empty(0)  # of a tensor in the form of a result

# One thread records, compiles or measures at a time: what PyTorch knows of a recording that is under way is
# global, as are Python's filters of warnings.
alone = free_in_children(threading.RLock())


@dataclass(frozen=True)
class Recording:
    """What a function did with tensors of certain forms, to be done with others of the same forms.

    program: takes the tensors of all arguments in a row, then ``constants``, the tensors that the function
    had from elsewhere. form: of the result. graph: of the operations; None once it is compiled.
    """

    program: Program
    form: Tree
    constants: Sequence[Tensor]
    graph: Any = field(repr=False)

    def bind(self, *first: Tree) -> Callable[..., Any]:
        """A function of the other arguments; of the first ones it sees the values that they have by then."""
        program, form, constants, bound = self.program, self.form, self.constants, list(leaves(first))

        def replay(*others: Tree) -> Any:
            with torch.no_grad():
                return filled(form, program(*bound, *leaves(others), *constants))

        return replay


def record(function: Callable[..., Any], arguments: tuple[Tree, ...]) -> Recording | None:
    """Record ``function(*arguments)`` for tensors of these forms; None where that is not possible.

    The function may change its arguments in place, and so will the recording; here both see copies. The
    recording must give what the function gives, up to rounding, or it is not used. Bits would be too
    much to ask: where a device rounds otherwise from call to call, whether a run replays would be left to
    chance, and a resumed run could decide otherwise than the one it continues.
    """
    form_of_result: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        result = function(*filled(arguments, tensors))
        form_of_result[:] = [result]
        return list(leaves(result))

    with alone:
        try:
            from torch.fx.experimental.proxy_tensor import make_fx

            # Tensors without values: what looks at one cannot be recorded, instead of being recorded wrongly.
            trace = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
            with _without_logs():
                graph = trace(*_copies(arguments))
            constants = _lift_constants(graph)
            with torch.no_grad():
                replayed = _results_and_changes(graph.forward, _copies(arguments), kept := _copies(constants))
                disturbed = _results_and_changes(graph.forward, _disturbed(arguments), constants)
        except Exception:  # whatever a module does that cannot be recorded: it is run as it is
            return None
        if not _agree(kept, constants, [0.0] * len(kept)):  # it changes what it was not given
            return None
        for _ in range(TRIALS):
            before = _random_states()
            directly = _results_and_changes(flat, _copies(arguments))
            if before == _random_states():
                break
        else:
            return None  # what it does is drawn anew each time; another thread would not draw at each of them
    if not _agree(replayed, directly, _moved(disturbed, replayed)):
        return None
    form = map_tree(lambda _: _PLACE, form_of_result[0])
    return Recording(graph.forward, form, constants, graph)


def compiled(function: Callable[..., Any], arguments: tuple[Tree, ...]) -> Recording:
    """Record a function and compile it as one graph that gives the same up to rounding, or ``CannotCompile``.

    PyTorch keeps compiled graphs on disk, and finds those that any process has left there.
    """
    recording = record(function, arguments)
    if recording is None:
        raise CannotCompile("PyTorch cannot record what the network does.")
    with alone, torch.no_grad():
        try:
            program = _compiled_once(recording, arguments)
            found = _results_and_changes(program, _copies(arguments), recording.constants)
        except CannotCompile:
            raise
        except Exception as error:
            raise CannotCompile((str(error) or type(error).__name__).splitlines()[0]) from error
        expected, disturbed = (
            _results_and_changes(recording.program, tensors, recording.constants)
            for tensors in (_copies(arguments), _disturbed(arguments))
        )
    if not _agree(found, expected, _moved(disturbed, expected)):
        raise CannotCompile("the compiled graph gives other numbers than the network itself.")
    return replace(recording, program=program, graph=None)


def form_of(tree: Tree) -> Any:
    """What a recording takes for granted of its tensors: their forms, their names and the order of these."""
    if isinstance(tree, Tensor):
        return (tree.shape, tree.stride(), tree.dtype, tree.device)
    if isinstance(tree, dict):
        return (*tree, *map(form_of, tree.values()))
    return None if tree is None else tuple(map(form_of, tree))


# --- compiling ------------------------------------------------------------------------------------


def _compiled_once(recording: Recording, arguments: tuple[Tree, ...]) -> Program:
    """The compiled graph; two of equal text, for tensors of equal forms, are the same one."""
    tensors = [*_copies(arguments), *recording.constants]
    key = (recording.graph.code, form_of(tensors), torch.get_num_threads(), COMPILER)
    if key not in _programs:
        if len(_programs) >= MOST_PROGRAMS:
            del _programs[next(iter(_programs))]
        _programs[key] = _compile(recording.graph, tensors)
    return _programs[key]


def _compile(graph: Any, tensors: list[Tensor]) -> Program:
    """Have a backend of torch.compile compile a graph, which needs no look at Python code any more.

    Called as it is, without what torch.compile puts around it to look at code and to check tensors at
    every call, a small network's step takes a fifth less time.
    """
    from torch._dynamo import lookup_backend
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _check_folder()
    options: dict[str, Any] = {
        "compile_threads": 1,  # a graph has one or two kernels: to start other processes takes longer
        "triton.cudagraphs": any(tensor.is_cuda for tensor in tensors),  # not tried on such a device yet
    }
    has_matrix_units = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)()
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and not has_matrix_units:
        # Compilers have known these instructions for years; to try them out takes seconds in every process.
        options["cpp.vec_isa_ok"] = True
    # What PyTorch keeps on disk is looked for where there is such a context, which torch.compile would make.
    context = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
    with warnings.catch_warnings(), config.patch(options), tracing(context):
        warnings.simplefilter("ignore")  # PyTorch's remarks on itself: the numbers decide
        return lookup_backend(COMPILER)(graph, tensors)


def _check_folder() -> None:
    """Refuse to run code from a folder that others write to; that of PyTorch has a name anybody can guess."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    found = folder.stat()
    if hasattr(os, "getuid") and (found.st_uid not in (os.getuid(), 0) or found.st_mode & stat.S_IWOTH):
        raise CannotCompile(
            f"others may write to {folder}, where PyTorch keeps compiled code. Let TORCHINDUCTOR_CACHE_DIR "
            "name a folder of your own."
        )


# --- what a recording is made of and compared by --------------------------------------------------


def _random_states() -> tuple[Any, ...]:
    """Of the generators that PyTorch knows nothing of."""
    return random.getstate(), *map(str, np.random.get_state(legacy=True))


@contextmanager
def _without_logs() -> Iterator[None]:
    """Keep PyTorch from writing down what cannot be recorded: it is run otherwise."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _lift_constants(graph: Any) -> list[Tensor]:
    """Make arguments of the tensors that a graph holds, after all others; gives these tensors.

    What was recorded is then the same graph for every phase of a method, whose penalties differ in them.
    """
    places: dict[str, Any] = {}
    constants: list[Tensor] = []
    nodes = list(graph.graph.nodes)
    last = [node for node in nodes if node.op == "placeholder"][-1]
    for node in nodes:
        if node.op != "get_attr":
            continue
        if node.target not in places:
            with graph.graph.inserting_after(last):
                last = places[node.target] = graph.graph.placeholder(f"constant_{len(constants)}")
            constants.append(getattr(graph, node.target))
        node.replace_all_uses_with(places[node.target])
        graph.graph.erase_node(node)
    graph.recompile()
    return constants


def _results_and_changes(
    program: Program, arguments: list[Tensor], constants: Sequence[Tensor] = ()
) -> list[Tensor]:
    """What a program gives, and what it makes of its arguments."""
    return [*program(*arguments, *constants), *arguments]


def _copies(tree: Tree) -> list[Tensor]:
    """Copies that lie in memory as the originals do."""
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
        if all(step or size == 1 for step, size in zip(t.stride(), t.shape, strict=True))
        else t  # one number in several places can only be read
        for t in leaves(tree)
    ]


def _disturbed(tree: Tree) -> list[Tensor]:
    """Copies of which every second number is rounded otherwise."""
    copies = _copies(tree)
    for tensor in copies:
        if tensor.is_floating_point() and 0 not in tensor.stride():
            factors = torch.ones_like(tensor).flatten()
            factors[::2] += 2 * torch.finfo(tensor.dtype).eps
            tensor.mul_(factors.view_as(tensor))
    return copies


def _moved(disturbed: Sequence[Tensor], undisturbed: Sequence[Tensor]) -> list[float]:
    """The largest change of a number of each tensor."""
    pairs = zip(disturbed, undisturbed, strict=True)
    return [_largest(one - other) if one.is_floating_point() else 0.0 for one, other in pairs]


def _largest(tensor: Tensor) -> float:
    """The largest absolute value that is finite."""
    return tensor.abs().nan_to_num(0.0, 0.0).max().item() if tensor.numel() else 0.0


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor], moved: Sequence[float]) -> bool:
    """Whether differences are a matter of rounding.

    They may be 2¹⁰ units in the last place of the largest value of a tensor, or 2¹⁰ times what it is moved by
    arguments that are rounded otherwise: a difference of two large numbers has no more digits than that.
    """
    unit = max([torch.finfo(t.dtype).eps for t in expected if t.is_floating_point()], default=0.0)
    for one, other, change in zip(found, expected, moved, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        tolerance = 2**10 * max(unit * _largest(other), change) if other.is_floating_point() else 0.0
        if not torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True):
            return False
    return True
