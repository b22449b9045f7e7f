"""``evaluate``: the scores of a posterior on test data, in one dictionary."""

from typing import Any

import torch
from torch import Tensor

from polymode import metrics
from polymode.data import ArrayData, Data, as_data
from polymode.errors import InputError
from polymode.metrics.ood import SCORES, uncertainty
from polymode.posteriors import Posterior
from polymode.predictive import BernoulliPredictive, CategoricalPredictive, GaussianPredictive
from polymode.trees import Tree, map_tree


def evaluate(
    posterior: Posterior,
    data: Any,
    *,
    ood: Any = None,
    reference: Tensor | None = None,
    num_members: int | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Score a posterior on ``data``; the keys depend on the likelihood and on what is given.

    ood: data (its targets are ignored) or inputs that lie outside the distribution.
    reference: probabilities [N, C] of another predictive, such as that of HMC, for the same points.
    """
    inputs, targets = _arrays(as_data(data))
    predictive = posterior.predict(inputs, num_members, generator)
    log_prob = posterior.log_prob(inputs, targets, num_members, generator)
    if isinstance(predictive, GaussianPredictive):
        return _regression(posterior, predictive, inputs, targets, log_prob, num_members, generator)
    if isinstance(predictive, BernoulliPredictive):
        wrong = predictive.labels.reshape(targets.shape) != (targets > 0.5)
        return {"accuracy": 1 - wrong.double().mean().item(), "nll": -log_prob.double().mean().item()}
    scores = _classification(predictive, targets.to(predictive.mean.device))
    if ood is not None:
        foreign = posterior.predict(_inputs(ood), num_members, generator)
        assert isinstance(foreign, CategoricalPredictive)
        for score in SCORES:
            found = metrics.ood_scores(uncertainty(predictive, score), uncertainty(foreign, score))
            scores |= {f"ood_{score}_{key}": value for key, value in vars(found).items()}
    if reference is not None:
        reference = torch.as_tensor(reference).to(predictive.mean.device)
        scores["agreement"] = metrics.agreement(predictive.mean, reference)
        scores["total_variation"] = metrics.total_variation(predictive.mean, reference)
    return scores


def _arrays(data: Data) -> tuple[Tree, Tensor]:
    if isinstance(data, ArrayData):
        return data.inputs, data.targets
    parts = list(data.in_order())
    inputs = map_tree(lambda *t: torch.cat(t), *(part.inputs for part in parts))
    return inputs, torch.cat([part.targets for part in parts])


def _inputs(source: Any) -> Tree:
    return source if isinstance(source, Tensor | dict | tuple) else _arrays(as_data(source))[0]


def _classification(predictive: CategoricalPredictive, labels: Tensor) -> dict[str, float]:
    probabilities = predictive.mean.flatten(0, -2)
    labels = labels.flatten()
    wrong = (probabilities.argmax(-1) != labels).double()
    scores = {
        "accuracy": metrics.accuracy(probabilities, labels),
        "nll": metrics.nll(probabilities, labels),
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
    posterior: Posterior,
    predictive: GaussianPredictive,
    inputs: Tree,
    targets: Tensor,
    log_prob: Tensor,
    num_members: int | None,
    generator: torch.Generator | None,
) -> dict[str, float]:
    levels = (0.025, 0.05, 0.95, 0.975)
    found = posterior.predict(inputs, num_members, generator, quantiles=levels)
    assert isinstance(found, GaussianPredictive)
    if found.quantiles is None:
        raise InputError("Quantiles were asked for and not computed.")
    q = {level: value.cpu() for level, value in found.quantiles.items()}
    targets = targets.cpu()
    return {
        "rmse": metrics.rmse(predictive.mean.cpu(), targets),
        "log_density": log_prob.double().mean().item(),
        "coverage90": metrics.interval_coverage(q[0.05], q[0.95], targets),
        "coverage95": metrics.interval_coverage(q[0.025], q[0.975], targets),
        "mean_std": predictive.std.double().mean().item(),
    }
