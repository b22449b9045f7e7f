"""What there is to say about one posterior on one test set: scores, predictions, curves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polymode.application.comparison.baselines import Fitted
from polymode.data import Data, Split, arrays_of
from polymode.errors import require
from polymode.judging.evaluation import Evaluation, evaluate, evaluate_in_full, judged_outputs
from polymode.judging.reference import Reference
from polymode.likelihoods import Likelihood
from polymode.metrics import cosine_similarity
from polymode.metrics.calibration import BINS, Bins
from polymode.metrics.diversity import off_diagonal_mean
from polymode.networks.members import Members, concatenate
from polymode.posteriors import Posterior
from polymode.posteriors.base import Averaged
from polymode.trees import Tree

MATRIX_MEMBERS = 40  # members beyond these are not shown in a matrix of pairs
PAIR_MEMBERS = 200  # members beyond these do not count in a mean over pairs
VALIDATION = "validation_"  # how the names of scores on validation data begin
LOG_PROB = "log_prob"  # log probabilities of the test targets, among the predictions


@dataclass(frozen=True)
class Judgement:
    """scores: numbers by name. curves: small lists for plots. predictions: tensors, a row a test point.

    errors: standard errors of scores over the test points.
    """

    scores: dict[str, float]
    curves: dict[str, Any]
    predictions: dict[str, Tensor]
    errors: dict[str, float]


def judge(
    posterior: Posterior,
    split: Split,
    ood: Data | None = None,
    reference: Reference | None = None,
    *,
    num_draws: int = 100,
    bins: Bins = BINS,
    seed: int = 0,
    average: Averaged = "predictions",
) -> Judgement:
    """Judge a posterior on the test data of a split.

    reference: what a trusted posterior predicts there. num_draws: networks drawn of a posterior that has no
    end of them. bins: of confidence, for calibration. average: what the mean over members is taken of.
    """
    count = num_draws if posterior.num_members is None else None

    def draws() -> torch.Generator:
        return torch.Generator().manual_seed(seed)  # every pass is about the same networks

    opinions = _Opinions(posterior, split.test)
    evaluation = evaluate_in_full(
        posterior,
        split.test,
        ood=ood if "ood_auroc" in posterior.network.likelihood.columns else None,
        reference=reference,
        num_draws=count,
        generator=draws(),
        target_scale=split.preprocessing.target_scale,
        bins=bins,
        observe=opinions.observe,
        average=average,
    )
    scale = split.preprocessing.target_scale
    scores = dict(evaluation.scores)
    if split.validation is not None:
        scores |= _validated(
            evaluate(
                posterior,
                split.validation,
                num_draws=count,
                generator=draws(),
                target_scale=scale,
                average=average,
            ),
            posterior.network.likelihood,
        )
    if "ood_entropy_auroc" in scores:
        scores["ood_auroc"] = scores["ood_entropy_auroc"]
    curves = evaluation.predictive.curves(
        evaluation.observations, num_bins=bins.number, foreign=evaluation.foreign
    )
    curves |= opinions.curves()
    if "difference" in curves:
        curves["cosine"] = _cosine(posterior, count, draws())
        scores["disagreement"] = off_diagonal_mean(opinions.difference(PAIR_MEMBERS))
    errors = evaluation.predictive.errors(evaluation.observations, target_scale=scale)
    return Judgement(scores, curves, _predictions(evaluation, scale), errors)


def judge_baseline(fitted: Fitted, split: Split, likelihood: Likelihood, *, bins: Bins = BINS) -> Judgement:
    """Judge a baseline on the test data of a split, as a posterior of one member would be.

    likelihood: what the targets mean; of numbers a baseline gives a Gaussian, on the same scale.
    """
    scale = split.preprocessing.target_scale
    judged_as = likelihood.of_baseline
    require(judged_as is not None, f"No baseline can be judged by the likelihood {likelihood.kind!r}.")
    assert judged_as is not None

    def judged(data: Data) -> Evaluation:
        inputs, targets = arrays_of(data)
        outputs = baseline_outputs(fitted, inputs.flatten(1), judged_as)
        parts = [(slice(0, len(targets)), outputs[None], torch.ones(1))]
        predictive, observations = judged_outputs(judged_as, parts, targets)
        scores = predictive.scores(observations, target_scale=scale, bins=bins)
        return Evaluation(scores, predictive, observations)

    found = judged(split.test)
    scores = dict(found.scores)
    if split.validation is not None:
        scores |= _validated(judged(split.validation).scores, likelihood)
    curves = found.predictive.curves(found.observations, num_bins=bins.number)
    observed = found.observations.observed
    curves["nll_by_members"] = [-found.observations.log_prob[observed].double().mean().item()]
    errors = found.predictive.errors(found.observations, target_scale=scale)
    return Judgement(scores, curves, _predictions(found, scale), errors)


def _validated(scores: Mapping[str, float], likelihood: Likelihood) -> dict[str, float]:
    """The quality of validation data among the scores: what is chosen is chosen by it."""
    return {f"{VALIDATION}{likelihood.quality}": scores[likelihood.quality]}


def baseline_outputs(fitted: Fitted, inputs: Tensor, judged_as: Likelihood) -> Tensor:
    """Outputs [N, ...] of a baseline, as ``judged_as`` reads them."""
    if judged_as.reads == "labels":
        return fitted.probabilities(inputs).log()
    return judged_as.raw_outputs(*fitted.moments(inputs))


class _Opinions:
    """What each member says about each observation, gathered chunk by chunk: log_prob and answers [M, N]."""

    def __init__(self, posterior: Posterior, data: Data) -> None:
        self.likelihood = posterior.network.likelihood
        self.targets = arrays_of(data)[1]
        self.log_weights = torch.zeros(1)
        self._parts: dict[str, list[Tensor]] = {"log_prob": [], "answers": []}

    def observe(self, rows: slice, outputs: Tree, weights: Tensor) -> None:
        """Take in the outputs [M, b, ...] of all members for some points."""
        likelihood = self.likelihood
        chunk = self.targets[rows].to(weights.device)
        observed = likelihood.observed(chunk)
        log_prob = torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, chunk)
        self._parts["log_prob"].append(log_prob[:, observed].double().cpu())
        self._parts["answers"].append(likelihood.answers(outputs)[:, observed].flatten(1).cpu())
        self.log_weights = weights.double().log().cpu()

    @property
    def log_prob(self) -> Tensor:
        return torch.cat(self._parts["log_prob"], 1)

    @property
    def answers(self) -> Tensor:
        return torch.cat(self._parts["answers"], 1)

    def difference(self, num_members: int) -> Tensor:
        """How far the first members are apart, two by two."""
        return self.likelihood.difference(self.answers[:num_members], self.targets)

    def curves(self) -> dict[str, Any]:
        weighted = self.log_prob + self.log_weights[:, None]
        first = torch.logcumsumexp(weighted, 0) - torch.logcumsumexp(self.log_weights, 0)[:, None]
        curves: dict[str, Any] = {"nll_by_members": (-first.mean(1)).tolist()}
        if len(weighted) > 1:
            curves["difference"] = self.difference(MATRIX_MEMBERS).tolist()
        return curves


def _cosine(posterior: Posterior, num_draws: int | None, generator: torch.Generator) -> list | None:
    """Cosines of the members' own weights, where they fit into one block and have any."""
    blocks, count = [], 0
    for block in posterior.draw(num_draws, generator):
        blocks.append(block)
        count += block.num_members
        if count >= MATRIX_MEMBERS:
            break
    alike = all(block.group_size == blocks[0].group_size for block in blocks)
    joined = len(blocks) > 1 and (alike or not blocks[0].shared)
    members = concatenate(blocks) if joined else blocks[0]
    weights = {name for name, _ in posterior.network.module.named_parameters()}
    own = {name: t[:MATRIX_MEMBERS] for name, t in members.stacked.items() if name in weights}
    return cosine_similarity(Members(own)).tolist() if own else None


def _predictions(evaluation: Evaluation, target_scale: float) -> dict[str, Tensor]:
    seen = evaluation.observations
    observed = seen.log_prob[seen.observed.to(seen.log_prob.device)]
    found = {"targets": seen.targets, LOG_PROB: observed} | evaluation.predictive.tensors(target_scale)
    if evaluation.foreign is not None:
        found |= {f"ood_{name}": tensor for name, tensor in evaluation.foreign.tensors(target_scale).items()}
    return found
