"""The spread of every weight in its chain, measured as it moves."""

import torch
from torch import Tensor

from polymode.networks.members import Tensors


class Spread:
    """Weighted means and variances of vectors [G, D], a row a chain (West 1979).

    Its state is a dictionary of tensors: "mean" and "squares" [G, D], "weight" [G]; every chain counts for
    itself.
    """

    @staticmethod
    def begin(like: Tensor) -> Tensors:
        """The state before anything was seen, for vectors like these."""
        weight = torch.zeros(len(like), dtype=torch.float64, device=like.device)
        return {"mean": torch.zeros_like(like), "squares": torch.zeros_like(like), "weight": weight}

    @staticmethod
    def forget(state: Tensors) -> None:
        """Measure from here on."""
        for tensor in state.values():
            tensor.zero_()

    @staticmethod
    def update(state: Tensors, values: Tensor, weight: Tensor) -> None:
        """Take in values [G, D] with weights [G]; 0 leaves a chain as it is, whatever its value."""
        values = torch.where(weight[:, None] > 0, values, state["mean"])
        total = state["weight"].add_(weight).clamp(min=torch.finfo(torch.float64).tiny)
        off = values - state["mean"]
        state["mean"].addcmul_((weight / total)[:, None].to(off.dtype), off)
        state["squares"].addcmul_(weight[:, None].to(off.dtype) * off, values - state["mean"])

    @staticmethod
    def std(state: Tensors) -> Tensor:
        """The standard deviation of every weight, [G, D]; 0 where nothing was seen."""
        total = state["weight"].clamp(min=torch.finfo(torch.float64).tiny)
        return (state["squares"] / total[:, None].to(state["squares"].dtype)).clamp(min=0).sqrt()

    @staticmethod
    def rescale(scale: Tensor, state: Tensors, where: Tensor) -> Tensor:
        """Make a scale [G, D] that of the spread, in place; returns the factor on steps in its units, [G].

        where: the chains [G] to do it for.

        A weight that has hardly moved yet may be wider than it seems: its scale is at least a tenth of its
        chain's median. A chain that has not moved at all keeps the scale it has.
        """
        std, before = Spread.std(state), torch.linalg.vector_norm(scale.double(), dim=1)
        median = std.median(1, keepdim=True).values
        known = (median > 0) & where[:, None]
        scale.copy_(torch.where(known, torch.maximum(std, 0.1 * median), scale))
        return before / torch.linalg.vector_norm(scale.double(), dim=1)
