"""``evaluate``: the scores of a posterior on test data, in one dictionary."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from polymode import metrics
from polymode.data import ArrayData, Data, as_data, as_tree
from polymode.errors import InputError
from polymode.likelihoods import Categorical, Gaussian
from polymode.metrics.ood import SCORES, uncertainty
from polymode.metrics.scores import check_probabilities
from polymode.posteriors import Posterior
from polymode.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    Predictive,
    labelled,
)
from polymode.trees import Tree, map_tree

LEVELS = (0.025, 0.05, 0.95, 0.975)


def evaluate(
    posterior: Posterior,
    data: Any,
    *,
    ood: Any = None,
    reference: Tensor | None = None,
    num_members: int | None = None,
    generator: torch.Generator | None = None,
    target_scale: float = 1.0,
) -> dict[str, float]:
    """Score a posterior on ``data``; the keys depend on the likelihood and on what is given.

    ood: data (its targets are ignored) or inputs outside the distribution. reference: probabilities [N, C]
        of another predictive, such as that of HMC, for the same points. Both need a categorical likelihood.
    target_scale: what targets of a regression were divided by; scores are in the units they had before.

    Classes: accuracy, nll, brier, ece, mce, aurc, mutual_information, top5, and where asked for
    ood_<score>_<auroc|aupr|fpr95>, agreement, total_variation; tokens that are ignored do not count.
    Bernoulli: accuracy, nll (summed over an example's labels). Gaussians: rmse, log_density, coverage90,
    coverage95, mean_std. Sample weights do not count here.
    """
    return evaluated(
        posterior,
        data,
        ood=ood,
        reference=reference,
        num_members=num_members,
        generator=generator,
        target_scale=target_scale,
    ).scores


@dataclass(frozen=True)
class Evaluation:
    """Scores with the predictives they are about; foreign: of the points outside the distribution."""

    scores: dict[str, float]
    predictive: Predictive
    targets: Tensor
    foreign: CategoricalPredictive | None = None


def evaluated(
    posterior: Posterior,
    data: Any,
    *,
    ood: Any = None,
    reference: Tensor | None = None,
    num_members: int | None = None,
    generator: torch.Generator | None = None,
    target_scale: float = 1.0,
) -> Evaluation:
    """Score as ``evaluate`` does, and keep what was predicted."""
    inputs, targets = arrays_of(as_data(data))
    likelihood = posterior.network.likelihood
    if not isinstance(likelihood, Categorical) and (ood is not None or reference is not None):
        raise InputError(f"ood= and reference= need a categorical likelihood, this is {likelihood.kind!r}.")
    start = None if generator is None else generator.get_state()

    def same_draws() -> torch.Generator | None:
        """All scores are about the same members: each pass replays the draws."""
        if generator is not None and start is not None:
            generator.set_state(start)
        return generator

    log_prob = posterior.log_prob(inputs, targets, num_members, same_draws())
    levels = LEVELS if isinstance(likelihood, Gaussian) else ()
    predictive = posterior.predict(inputs, num_members, same_draws(), quantiles=levels)
    if isinstance(predictive, GaussianPredictive):
        scores = _regression(predictive, targets, log_prob, target_scale)
        return Evaluation(scores, predictive, targets)
    if isinstance(predictive, BernoulliPredictive):
        wrong = predictive.labels.cpu().reshape(targets.shape) != (targets.cpu() > 0.5)
        scores = {"accuracy": 1 - wrong.double().mean().item(), "nll": -log_prob.double().mean().item()}
        return Evaluation(scores, predictive, targets)
    assert isinstance(likelihood, Categorical)
    observed = likelihood.observed(targets).to(log_prob.device)
    scores = _classification(predictive, targets, likelihood.ignore_index)
    scores["nll"] = -log_prob.double()[observed].mean().item()  # in logarithms: no underflow
    foreign = None
    if ood is not None:
        foreign = posterior.predict(_inputs(ood), num_members, same_draws())
        assert isinstance(foreign, CategoricalPredictive)
        for score in SCORES:
            found = metrics.ood_scores(uncertainty(predictive, score), uncertainty(foreign, score))
            scores |= {f"ood_{score}_{key}": value for key, value in vars(found).items()}
    if reference is not None:
        reference = torch.as_tensor(reference).to(predictive.mean.device)
        check_probabilities(reference.flatten(0, -2))
        scores["agreement"] = metrics.agreement(predictive.mean, reference)
        scores["total_variation"] = metrics.total_variation(predictive.mean, reference)
    return Evaluation(scores, predictive, targets, foreign)


def arrays_of(data: Data) -> tuple[Tree, Tensor]:
    """All inputs and targets of a data set, in their own order."""
    if isinstance(data, ArrayData):
        return data.inputs, data.targets
    parts = list(data.in_order())
    inputs = map_tree(lambda *t: torch.cat(t), *(part.inputs for part in parts))
    return inputs, torch.cat([part.targets for part in parts])


def _inputs(source: Any) -> Tree:
    return arrays_of(as_data(source))[0] if isinstance(source, Data | DataLoader) else as_tree(source)


def _classification(
    predictive: CategoricalPredictive, labels: Tensor, ignore_index: int | None
) -> dict[str, float]:
    probabilities, labels = labelled(predictive.mean, labels, ignore_index)
    wrong = (probabilities.argmax(-1) != labels).double()
    scores = {
        "accuracy": metrics.accuracy(probabilities, labels),
        "brier": metrics.brier(probabilities, labels),
        "ece": metrics.ece(probabilities, labels),
        "mce": metrics.mce(probabilities, labels),
        "aurc": metrics.aurc(probabilities.amax(-1), wrong),
        "mutual_information": predictive.mutual_information.double().mean().item(),
    }
    if probabilities.shape[-1] > 5:
        scores["top5"] = metrics.accuracy(probabilities, labels, top=5)
    return scores


def _regression(
    predictive: GaussianPredictive, targets: Tensor, log_prob: Tensor, scale: float
) -> dict[str, float]:
    assert predictive.quantiles is not None
    q = {level: value.cpu() for level, value in predictive.quantiles.items()}
    targets = targets.cpu()
    return {
        "rmse": scale * metrics.rmse(predictive.mean.cpu(), targets),
        # The density of scale · y is the density of y divided by the scale, once for each output.
        "log_density": log_prob.double().mean().item() - math.log(scale) * targets[0].numel(),
        "coverage90": metrics.interval_coverage(q[0.05], q[0.95], targets),
        "coverage95": metrics.interval_coverage(q[0.025], q[0.975], targets),
        "mean_std": scale * predictive.std.double().mean().item(),
    }
