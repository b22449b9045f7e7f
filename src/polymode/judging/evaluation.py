"""``evaluate``: the scores of a posterior on test data, in one dictionary."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from polymode import metrics
from polymode.data import ArrayData, Data, as_data, as_tree, check_finite
from polymode.errors import InputError, require
from polymode.judging.reference import Reference
from polymode.likelihoods import Categorical, Gaussian, quantiles_of
from polymode.likelihoods.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    Predictive,
    labelled,
)
from polymode.metrics.calibration import BINS, Bins
from polymode.metrics.ood import OOD_SCORES, uncertainty
from polymode.metrics.scores import check_probabilities
from polymode.networks.surgery import match_precision
from polymode.posteriors import Posterior
from polymode.trees import Tree, leaves, length, map_tree

NUM_SAMPLES = 1000  # of a predictive distribution; the number that the HMC references in use have
REFERENCE_SEED = 1  # of the noise in a reference's samples: not that of the methods, which is 0
Observe = Callable[[slice, Tree, Tensor], None]
LEVELS = (0.025, 0.05, 0.95, 0.975)


def evaluate(
    posterior: Posterior,
    data: Any,
    *,
    ood: Any = None,
    reference: Reference | Tensor | None = None,
    num_draws: int | None = None,
    generator: torch.Generator | None = None,
    target_scale: float = 1.0,
    bins: Bins = BINS,
) -> dict[str, float]:
    """Score a posterior on ``data``; the keys depend on the likelihood and on what is given.

    ood: data (its targets are ignored) or inputs outside the distribution, for a categorical likelihood.
    reference: a ``Reference`` or probabilities [N, C] of another predictive, such as that of HMC, for the
        same points in the same order.
    target_scale: what targets of a regression were divided by; scores are in the units they had before.
    bins: of confidence, for ece and mce.

    Classes: accuracy, nll, brier, ece, mce, aurc, mutual_information, top5, and where asked for
    ood_<score>_<auroc|aupr|fpr95>, agreement, total_variation; where targets are tokens,
    bits_per_character as well, and tokens that are ignored do not count.
    Bernoulli: accuracy, nll (summed over an example's labels). Gaussians: rmse, log_density, coverage90,
    coverage95, mean_std, and with a reference wasserstein1, wasserstein2 (in the units the network sees).
    Sample weights do not count here.
    """
    return evaluated(
        posterior,
        data,
        ood=ood,
        reference=reference,
        num_draws=num_draws,
        generator=generator,
        target_scale=target_scale,
        bins=bins,
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
    reference: Reference | Tensor | None = None,
    num_draws: int | None = None,
    generator: torch.Generator | None = None,
    target_scale: float = 1.0,
    bins: Bins = BINS,
    observe: Observe | None = None,
) -> Evaluation:
    """Score as ``evaluate`` does, and keep what was predicted.

    observe: sees (rows, outputs [M, b, ...] of all members, weights [M]) of every chunk of test points.
    """
    inputs, targets = arrays_of(as_data(data))
    likelihood = posterior.network.likelihood
    if not isinstance(likelihood, Categorical) and ood is not None:
        raise InputError(f"ood= needs a categorical likelihood, this is {likelihood.kind!r}.")
    if isinstance(reference, Reference):
        reference.check(as_data(data), likelihood)
    elif reference is not None and not isinstance(likelihood, Categorical):
        raise InputError(
            f"reference= as a matrix needs a categorical likelihood, this is {likelihood.kind!r}: pass a "
            "Reference."
        )
    start = None if generator is None else generator.get_state()

    def same_draws() -> torch.Generator | None:
        """All scores are about the same members: each pass replays the draws."""
        if generator is not None and start is not None:
            generator.set_state(start)
        return generator

    log_prob, predictive = _judged_together(posterior, inputs, targets, num_draws, same_draws(), observe)
    if isinstance(predictive, GaussianPredictive):
        scores = _regression(predictive, targets, log_prob, target_scale)
        if isinstance(reference, Reference):
            samples = predictive_samples(posterior, inputs, num_draws, same_draws()).cpu()
            scores["wasserstein1"] = metrics.wasserstein1(samples, reference.values)
            scores["wasserstein2"] = metrics.wasserstein2(samples, reference.values)
        return Evaluation(scores, predictive, targets)
    if isinstance(predictive, BernoulliPredictive):
        wrong = predictive.labels.cpu().reshape(targets.shape) != (targets.cpu() > 0.5)
        scores = {"accuracy": 1 - wrong.double().mean().item(), "nll": -log_prob.double().mean().item()}
        return Evaluation(scores, predictive, targets)
    assert isinstance(likelihood, Categorical)
    observed = likelihood.observed(targets).to(log_prob.device)
    scores = _classification(predictive, targets, likelihood.ignore_index, bins)
    scores["nll"] = -log_prob.double()[observed].mean().item()  # in logarithms: no underflow
    if targets.ndim > 1:
        scores["bits_per_character"] = scores["nll"] / math.log(2)
    foreign = None
    if ood is not None:
        foreign = posterior.predict(_inputs(ood), num_draws, same_draws())
        assert isinstance(foreign, CategoricalPredictive)
        for score in OOD_SCORES:
            ordinary = uncertainty(predictive, score)
            ordinary = ordinary[observed.to(ordinary.device)]
            found = metrics.ood_scores(ordinary, uncertainty(foreign, score).flatten())
            scores |= {f"ood_{score}_{key}": value for key, value in vars(found).items()}
    if reference is not None:
        values = reference.values if isinstance(reference, Reference) else reference
        reference = torch.as_tensor(values).to(predictive.mean.device)
        check_probabilities(reference.flatten(0, -2))
        scores["agreement"] = metrics.agreement(predictive.mean, reference)
        scores["total_variation"] = metrics.total_variation(predictive.mean, reference)
    return Evaluation(scores, predictive, targets, foreign)


def _judged_together(
    posterior: Posterior,
    inputs: Tree,
    targets: Tensor,
    num_draws: int | None,
    generator: torch.Generator | None,
    observe: Observe | None,
) -> tuple[Tensor, Predictive]:
    """Log densities of the targets and the predictive, from one pass of all members over the points."""
    likelihood = posterior.network.likelihood
    num_points = length(inputs := as_tree(inputs))
    require(num_points > 0, "There are no points to predict.")
    require(len(targets) == num_points, f"{len(targets)} targets for {num_points} inputs.")
    check_finite(match_precision(posterior.network.dtype, inputs))
    accumulator = likelihood.accumulator(num_points)
    log_probs, quantiles = [], []
    for rows, outputs, weights in posterior.by_points(inputs, num_draws, generator):
        chunk, first = targets[rows].to(weights.device), map_tree(lambda t: t[0], outputs)
        likelihood.check_outputs(first, chunk)
        likelihood.check_targets(chunk, first)
        each = torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, chunk).double()
        shares = (weights.double() / weights.double().sum()).log().reshape(-1, *[1] * (each.ndim - 1))
        log_probs.append(torch.logsumexp(each + shares, 0))
        accumulator.update(outputs, weights, rows)
        if isinstance(likelihood, Gaussian):
            dtype = next(leaves(outputs)).dtype
            quantiles.append(quantiles_of(likelihood, outputs, weights, LEVELS).to(dtype))
        if observe is not None:
            observe(rows, outputs, weights)
    predictive = accumulator.result()
    if isinstance(predictive, GaussianPredictive):
        values = torch.cat(quantiles, 1)
        predictive = replace(predictive, quantiles=dict(zip(LEVELS, values, strict=True)))
    return torch.cat(log_probs), predictive


def predictive_samples(
    posterior: Posterior,
    inputs: Tree,
    num_draws: int | None = None,
    generator: torch.Generator | None = None,
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> Tensor:
    """Samples [S, N] of the predictive distribution of a regression with one output.

    Members take part in proportion to their weights, spread evenly over all of them where there are more
    than samples, each with noise of its own.
    """
    likelihood = posterior.network.likelihood
    if not isinstance(likelihood, Gaussian):
        raise InputError(f"Samples of numbers need a Gaussian likelihood, this is {likelihood.kind!r}.")
    noise = torch.Generator().manual_seed(seed)
    chunks = []
    for _, outputs, weights in posterior.by_points(inputs, num_draws, generator):
        chunks.append(mixture_samples(likelihood, outputs, weights, num_samples, noise)[0])
    return torch.cat(chunks, 1)


def mixture_samples(
    likelihood: Gaussian, outputs: Tree, weights: Tensor, num_samples: int, noise: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Samples [S, b] from outputs [M, b, 1] of all members, and the member [S] that each comes from."""
    mean, std = likelihood.moments(outputs)
    if mean[0, 0].numel() != 1:
        raise InputError(f"A reference is about one output, the network has {mean[0, 0].numel()}.")
    share = (weights.double() / weights.double().sum()).cumsum(0).cpu()
    places = (torch.arange(num_samples, dtype=torch.float64) + 0.5) / num_samples
    chosen = torch.searchsorted(share, places).clamp(max=len(share) - 1).to(mean.device)
    mean = mean.flatten(1)[chosen].double()
    std = std.flatten(1)[chosen].double() if isinstance(std, Tensor) else std
    drawn = torch.randn(mean.shape, generator=noise, dtype=torch.float64).to(mean.device)
    return mean + std * drawn, chosen


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
    predictive: CategoricalPredictive, labels: Tensor, ignore_index: int | None, bins: Bins
) -> dict[str, float]:
    probabilities, labels = labelled(predictive.mean, labels, ignore_index)
    wrong = (probabilities.argmax(-1) != labels).double()
    scores = {
        "accuracy": metrics.accuracy(probabilities, labels),
        "brier": metrics.brier(probabilities, labels),
        "ece": metrics.ece(probabilities, labels, bins.number, min_count=bins.min_count),
        "mce": metrics.mce(probabilities, labels, bins.number, min_count=bins.min_count),
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
