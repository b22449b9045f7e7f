"""Recording what a function of tensors does, operation by operation, to replay it without Python's share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polymode.trees import Tree, filled, leaves, map_tree

# From tensors to a function that replays what is done with them, with the values that they have by then.
Recording = Callable[[Tree], Callable[[], Any]]


def record(function: Callable[..., Any], arguments: tuple[Tree, ...]) -> Recording | None:
    """Record ``function(*arguments)`` for tensors of these shapes; None where that is not possible.

    The recording must give what the function gives, up to rounding, or it is not used. Bits would be too
    much to ask: where a device rounds otherwise from call to call, whether a run replays would be left to
    chance, and a resumed run could decide otherwise than the one it continues.
    """
    places: list[Tensor] = list(leaves(arguments))
    form_of_result: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        result = function(*filled(arguments, tensors))
        form_of_result[:] = [result]
        return list(leaves(result))

    try:
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(flat)(*places)
        with torch.no_grad():
            replayed = graph(*places)
    except Exception:  # whatever a module does that cannot be recorded: it is run as it is
        return None
    directly = flat(*places)
    if not all(map(_equal_up_to_rounding, replayed, directly)):
        return None

    form = map_tree(torch.Tensor.detach, form_of_result[0])

    def bind(arguments: Tree) -> Callable[[], Any]:
        tensors = list(leaves(arguments))

        def replay() -> Any:
            with torch.no_grad():
                return filled(form, graph(*tensors))

        return replay

    return bind


def _equal_up_to_rounding(replayed: Tensor, direct: Tensor) -> bool:
    """Whether differences are a matter of the order of additions: 2¹⁰ ulps of the largest value."""
    if not direct.is_floating_point() or not direct.numel():
        return torch.equal(replayed, direct)
    scale = direct.abs().nan_to_num(0.0, 0.0).max().item()
    tolerance = 2**10 * torch.finfo(direct.dtype).eps * scale
    return replayed.shape == direct.shape and torch.allclose(
        replayed, direct, rtol=0.0, atol=tolerance, equal_nan=True
    )
