"""How far a network can be from another one at a given accuracy (Fort et al. 2019, Appendix D).

d is the share of points on which the two disagree; a the accuracy of the network, a* that of the other one, C
the number of classes. Equations 3 and 4 of the paper have their right-hand sides exchanged; here they are
put right: with p₊ = p₋ they are those of its D.2.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polymode.errors import InputError, require_whole


def _check(base_accuracy: float, num_classes: int) -> None:
    require_whole("num_classes", num_classes, least=2)
    if not 0 <= base_accuracy <= 1:
        raise InputError(f"An accuracy lies between 0 and 1, got {base_accuracy!r}.")


def independent_disagreement(accuracy: Tensor, base_accuracy: float, num_classes: int) -> Tensor:
    """Upper limit (D.1): mistakes of the two have nothing to do with each other.

    d = (1 − a*) a + (1 − a) a* + (1 − a*)(1 − a)(C − 2)/(C − 1).
    """
    _check(base_accuracy, num_classes)
    a, base = accuracy.double(), base_accuracy
    both_wrong = (1 - base) * (1 - a)
    return (1 - base) * a + (1 - a) * base + both_wrong * (num_classes - 2) / (num_classes - 1)


def perturbed_disagreement(accuracy: Tensor, base_accuracy: float, num_classes: int) -> Tensor:
    """Lower limit (D.2): labels of the other network, flipped at random. d = (C − 1)(a* − a)/(C a* − 1)."""
    _check(base_accuracy, num_classes)
    if num_classes * base_accuracy <= 1:
        raise InputError(
            f"The lower limit is about networks that are better than chance, 1/{num_classes}; the accuracy "
            f"is {base_accuracy}."
        )
    flipped = (base_accuracy - accuracy.double()) / (num_classes * base_accuracy - 1)
    return (num_classes - 1) * flipped


def family(flip: Tensor, exponent: float, base_accuracy: float, num_classes: int) -> tuple[Tensor, Tensor]:
    """Accuracy and disagreement where right labels flip with p₊ = p and wrong ones with p₋ = p^e (D.3).

    a = a*(1 − p₊) + (1 − a*) p₋/(C − 1), d = a* p₊ + (1 − a*) p₋.
    """
    _check(base_accuracy, num_classes)
    right, base = flip.double(), base_accuracy
    wrong = right**exponent
    accuracy = base * (1 - right) + (1 - base) * wrong / (num_classes - 1)
    return accuracy, base * right + (1 - base) * wrong


def fit_exponent(
    accuracies: Sequence[float], disagreements: Sequence[float], base_accuracy: float, num_classes: int
) -> float:
    """The exponent e whose curve is nearest to some networks, in the plane of accuracy and disagreement.

    Least squares of the disagreement: every network is compared with the point of the curve that has its
    accuracy, or with the curve's end where it has none.
    """
    _check(base_accuracy, num_classes)
    a = torch.as_tensor(accuracies, dtype=torch.float64)
    d = torch.as_tensor(disagreements, dtype=torch.float64)
    if not len(a) or a.shape != d.shape:
        raise InputError(f"As many accuracies as disagreements are needed, got {len(a)} and {len(d)}.")
    flips = torch.linspace(0, 1, 4001, dtype=torch.float64)

    def loss(exponent: float) -> float:
        on_curve, far = family(flips, exponent, base_accuracy, num_classes)
        top = int(on_curve.argmax())
        beyond = top + int(on_curve[top:].argmin()) + 1  # with a large e accuracy may rise again at the end
        on_curve, far = on_curve[top:beyond].flip(0), far[top:beyond].flip(0)
        place = torch.searchsorted(on_curve.contiguous(), a).clamp(1, len(on_curve) - 1)
        low, high = on_curve[place - 1], on_curve[place]
        share = ((a - low) / (high - low).clamp(min=1e-300)).clamp(0, 1)
        predicted = torch.lerp(far[place - 1], far[place], share)
        return float((predicted - d).square().mean())

    grid = torch.logspace(-2, 1, 301, dtype=torch.float64).tolist()
    best = min(grid, key=loss)
    step = grid[1] / grid[0]
    fine = torch.logspace(math.log10(best / step), math.log10(best * step), 201, dtype=torch.float64).tolist()
    return min(fine, key=loss)
