"""What there is to say about one posterior on one test set: scores, predictions, curves."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polymode.data import Data, Split
from polymode.judging.evaluation import Evaluation, arrays_of, evaluated
from polymode.judging.reference import Reference
from polymode.likelihoods import Bernoulli, Categorical, Gaussian
from polymode.likelihoods.predictive import CategoricalPredictive, GaussianPredictive, labelled
from polymode.metrics import calibration_bins, cosine_similarity
from polymode.metrics.calibration import BINS, Bins
from polymode.metrics.diversity import label_disagreement, off_diagonal_mean
from polymode.networks.members import Members, concatenate
from polymode.posteriors import Posterior
from polymode.trees import Tree

NUM_BINS = 20  # of histograms
MATRIX_MEMBERS = 40  # members beyond these are not shown in a matrix of pairs
PAIR_MEMBERS = 200  # members beyond these do not count in a mean over pairs
LEVELS = tuple(round(0.05 * k, 2) for k in range(1, 20))  # nominal coverage of central intervals


@dataclass(frozen=True)
class Judgement:
    """scores: numbers by name. curves: small lists for plots. predictions: tensors, a row a test point."""

    scores: dict[str, float]
    curves: dict[str, Any]
    predictions: dict[str, Tensor]


def judge(
    posterior: Posterior,
    split: Split,
    ood: Data | None = None,
    reference: Reference | None = None,
    *,
    num_draws: int = 100,
    bins: Bins = BINS,
    seed: int = 0,
) -> Judgement:
    """Judge a posterior on the test data of a split.

    reference: what a trusted posterior predicts there. num_draws: networks drawn of a posterior that has no
    end of them. bins: of confidence, for calibration.
    """
    count = num_draws if posterior.num_members is None else None

    def draws() -> torch.Generator:
        return torch.Generator().manual_seed(seed)  # every pass is about the same networks

    opinions = _Opinions(posterior, split.test)
    evaluation = evaluated(
        posterior,
        split.test,
        ood=ood if isinstance(posterior.network.likelihood, Categorical) else None,
        reference=reference,
        num_draws=count,
        generator=draws(),
        target_scale=split.preprocessing.target_scale,
        bins=bins,
        observe=opinions.observe,
    )
    scores = dict(evaluation.scores)
    if "ood_entropy_auroc" in scores:
        scores["ood_auroc"] = scores["ood_entropy_auroc"]
    curves = _curves(evaluation, bins.number) | opinions.curves()
    if "difference" in curves:
        curves["cosine"] = _cosine(posterior, count, draws())
        scores["disagreement"] = off_diagonal_mean(opinions.difference(PAIR_MEMBERS))
    return Judgement(scores, curves, _predictions(evaluation, split.preprocessing.target_scale))


class _Opinions:
    """What each member says about each observation, gathered chunk by chunk.

    log_prob [M, N]; answers [M, N], labels or means; probability_integral [N], F(y) of the mixture, for
    regressions; spread: what a difference of answers is measured in, 0 for labels.
    """

    def __init__(self, posterior: Posterior, data: Data) -> None:
        self.likelihood = posterior.network.likelihood
        self.targets = arrays_of(data)[1]
        self.is_regression = isinstance(self.likelihood, Gaussian)
        self.spread = self.targets.double().std().item() if self.is_regression else 0.0
        self.log_weights = torch.zeros(1)
        self._parts: dict[str, list[Tensor]] = {"log_prob": [], "answers": [], "probability_integral": []}

    def observe(self, rows: slice, outputs: Tree, weights: Tensor) -> None:
        """Take in the outputs [M, b, ...] of all members for some points."""
        likelihood, parts = self.likelihood, self._parts
        chunk = self.targets[rows].to(weights.device)
        observed = likelihood.observed(chunk)
        log_prob = torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, chunk)
        parts["log_prob"].append(log_prob[:, observed].double().cpu())
        if isinstance(likelihood, Categorical):
            parts["answers"].append(likelihood.read(outputs).argmax(-1)[:, observed].cpu())
        elif isinstance(likelihood, Bernoulli):
            parts["answers"].append((likelihood.read(outputs) > 0).flatten(1).long().cpu())
        elif isinstance(likelihood, Gaussian):
            means, stds = likelihood.moments(outputs)
            parts["answers"].append(means.flatten(1).cpu())
            z = (chunk.reshape(means.shape[1:]) - means) / stds
            share = weights.double() / weights.double().sum()
            integral = torch.tensordot(share, torch.special.ndtr(z.double()), 1).flatten()
            parts["probability_integral"].append(integral.cpu())
        self.log_weights = weights.double().log().cpu()

    @property
    def log_prob(self) -> Tensor:
        return torch.cat(self._parts["log_prob"], 1)

    @property
    def answers(self) -> Tensor:
        return torch.cat(self._parts["answers"], 1)

    def difference(self, num_members: int) -> Tensor:
        """Share of different labels, or root mean square difference of means over the targets' spread."""
        some = self.answers[:num_members]
        if not self.spread:
            return label_disagreement(some)
        rows = [(some - row).double().square().mean(-1).sqrt() for row in some]
        return torch.stack(rows) / self.spread

    def curves(self) -> dict[str, Any]:
        weighted = self.log_prob + self.log_weights[:, None]
        first = torch.logcumsumexp(weighted, 0) - torch.logcumsumexp(self.log_weights, 0)[:, None]
        curves: dict[str, Any] = {"nll_by_members": (-first.mean(1)).tolist()}
        if len(weighted) > 1:
            curves["difference"] = self.difference(MATRIX_MEMBERS).tolist()
        if self.is_regression:
            centred = (torch.cat(self._parts["probability_integral"]) - 0.5).abs()
            curves["coverage"] = {
                "nominal": list(LEVELS),
                "observed": [(centred <= level / 2).double().mean().item() for level in LEVELS],
            }
        return curves


def _curves(evaluation: Evaluation, num_bins: int) -> dict[str, Any]:
    predictive = evaluation.predictive
    if isinstance(predictive, GaussianPredictive):
        return {"std": _histogram([predictive.std.flatten()], predictive.std.max().item())}
    if not isinstance(predictive, CategoricalPredictive):
        return {}
    probabilities, labels = labelled_points(evaluation)
    bins = calibration_bins(probabilities, labels, num_bins)
    foreign = evaluation.foreign
    num_classes = probabilities.shape[-1]
    ends = {"confidence": 1.0, "entropy": torch.tensor(float(num_classes)).log().item()}
    histograms = {
        name: _histogram([getattr(p, name).flatten() for p in (predictive, foreign) if p is not None], end)
        for name, end in ends.items()
    }
    reliability = {
        "edges": bins.edges.tolist(),
        "counts": bins.counts.tolist(),
        "correct": (bins.accuracy.nan_to_num() * bins.counts).tolist(),
        "confidence": (bins.confidence.nan_to_num() * bins.counts).tolist(),
    }
    return {"reliability": reliability} | histograms


def labelled_points(evaluation: Evaluation) -> tuple[Tensor, Tensor]:
    """Mean probabilities [N, C] and labels [N] of all observations of a classification."""
    targets = evaluation.targets
    kept = (targets >= 0) & (targets < evaluation.predictive.mean.shape[-1])
    return labelled(evaluation.predictive.mean[kept.to(evaluation.predictive.mean.device)], targets[kept])


def _histogram(values: list[Tensor], end: float) -> dict[str, Any]:
    """Counts in equal bins from 0 to ``end``: of ordinary points and, where given, of foreign ones."""
    counts = [torch.histc(v.float().cpu(), NUM_BINS, 0.0, max(end, 1e-12)).tolist() for v in values]
    return {"end": end} | dict(zip(("ordinary", "foreign"), counts, strict=False))


def _cosine(posterior: Posterior, num_members: int | None, generator: torch.Generator) -> list | None:
    """Cosines of the members' own weights, where they fit into one block and have any."""
    blocks, count = [], 0
    for block in posterior.draw(num_members, generator):
        blocks.append(block)
        count += block.num_members
        if count >= MATRIX_MEMBERS:
            break
    members = blocks[0] if len(blocks) == 1 else concatenate(blocks)
    weights = {name for name, _ in posterior.network.module.named_parameters()}
    own = {name: t[:MATRIX_MEMBERS] for name, t in members.stacked.items() if name in weights}
    return cosine_similarity(Members(own)).tolist() if own else None


def _predictions(evaluation: Evaluation, target_scale: float) -> dict[str, Tensor]:
    predictive = evaluation.predictive
    found = {"targets": evaluation.targets, "mean": predictive.mean}
    if isinstance(predictive, GaussianPredictive):
        # Standardised, as the network saw them; target_scale and the manifest's shift undo it.
        found |= {"std": predictive.std, "target_scale": torch.tensor(target_scale)}
    else:
        found |= {"entropy": predictive.entropy, "mutual_information": predictive.mutual_information}
    if evaluation.foreign is not None:
        found |= {
            "ood_mean": evaluation.foreign.mean,
            "ood_entropy": evaluation.foreign.entropy,
            "ood_mutual_information": evaluation.foreign.mutual_information,
        }
    return found
