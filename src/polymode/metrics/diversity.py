"""How far members are from each other, in what they predict and in their weights."""

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.metrics.probabilities import entropy
from polymode.networks.members import Members


def _check_members(probabilities: Tensor) -> None:
    if probabilities.ndim != 3 or len(probabilities) < 2:
        raise InputError(
            f"Expected probabilities [M, N, C] of at least two members, got {list(probabilities.shape)}."
        )


def off_diagonal_mean(matrix: Tensor) -> float:
    """Mean over all pairs of different members of a matrix [M, M]."""
    count = len(matrix)
    return ((matrix.sum() - matrix.diagonal().sum()) / (count * (count - 1))).item()


def disagreement_matrix(probabilities: Tensor) -> Tensor:
    """Share of points on which members i and j predict different labels, [M, M]."""
    _check_members(probabilities)
    return label_disagreement(probabilities.argmax(-1))


def label_disagreement(labels: Tensor) -> Tensor:
    """Share of points with different labels, [M, M], from the members' labels [M, N]."""
    counts = torch.stack([(row != labels).sum(-1, dtype=torch.int32) for row in labels])
    return counts.double() / labels.shape[-1]


def disagreement(probabilities: Tensor) -> float:
    """Mean of the disagreement over all pairs of members [M, N, C]."""
    return off_diagonal_mean(disagreement_matrix(probabilities))


def kl_matrix(probabilities: Tensor) -> Tensor:
    """KL(p_i ‖ p_j) = Σ_c p_ic (log p_ic − log p_jc), in nats, the mean over points, [M, M]."""
    _check_members(probabilities)
    p = probabilities.double()
    logs = p.clamp(min=torch.finfo(torch.float64).tiny).log()
    own = (p * logs).sum(-1).mean(-1)
    cross = torch.einsum("inc,jnc->ij", p, logs) / p.shape[1]
    return own[:, None] - cross


def pairwise_kl(probabilities: Tensor) -> float:
    """Mean of the KL divergence over all ordered pairs of members."""
    return off_diagonal_mean(kl_matrix(probabilities))


def js_matrix(probabilities: Tensor) -> Tensor:
    """The Jensen–Shannon divergence of members i and j alone, in nats, the mean over points, [M, M]."""
    _check_members(probabilities)
    # Classes first: over a short last axis sums take many times as long.
    p = probabilities.double().movedim(-1, 0).contiguous()
    own = torch.special.entr(p).sum(0).mean(-1)
    number = len(probabilities)
    found = torch.zeros(number, number, dtype=torch.float64, device=p.device)
    for i in range(1, number):
        between = torch.special.entr((p[:, :i] + p[:, i : i + 1]) / 2).sum(0).mean(-1)
        found[i, :i] = between - (own[:i] + own[i]) / 2
    return (found + found.T).clamp(min=0)


def jensen_shannon(probabilities: Tensor) -> float:
    """Entropy of the mean minus mean of the entropies, averaged over points: (1/M) Σ_m KL(p_m ‖ p̄)."""
    _check_members(probabilities)
    p = probabilities.double()
    return (entropy(p.mean(0)) - entropy(p).mean(0)).mean().item()


def cosine_similarity(members: Members) -> Tensor:
    """θ_i·θ_j / (‖θ_i‖ ‖θ_j‖) over all floating-point weights the members own, [M, M]."""
    flat = [t.double().reshape(len(t), -1) for t in members.stacked.values() if t.is_floating_point()]
    if not flat:
        raise InputError("These members own no floating-point weights.")
    products = torch.stack([part @ part.T for part in flat]).sum(0)
    lengths = products.diagonal().sqrt()
    return products / (lengths[:, None] * lengths)
