"""``evaluate``: the scores of a posterior on test data, in one dictionary."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from polymode.data import Data, arrays_of, as_data, as_tree, check_finite
from polymode.errors import InputError, require
from polymode.judging.contents import contents_for
from polymode.judging.reference import Reference
from polymode.likelihoods import Likelihood, Predictive
from polymode.likelihoods.predictive import Observations
from polymode.metrics.calibration import BINS, Bins
from polymode.networks.surgery import match_precision
from polymode.posteriors import Posterior
from polymode.posteriors.base import Averaged
from polymode.trees import Tree, leaves, length, map_tree

Observe = Callable[[slice, Tree, Tensor], None]


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
    average: Averaged = "predictions",
) -> dict[str, float]:
    """Score a posterior on ``data``; the keys depend on the likelihood and on what is given.

    ood: data (its targets are ignored) or inputs outside the distribution, for a categorical likelihood.
    reference: a ``Reference`` or probabilities [N, C] of another predictive, such as that of HMC, for the
        same points in the same order.
    target_scale: what targets of a regression were divided by; scores are in the units they had before.
    bins: of confidence, for ece and mce. average: what the mean over members is taken of; "outputs" takes
        that of their logits, or of whatever else they put out.

    Classes: accuracy, nll, brier, ece, mce, aurc, mutual_information, top5, and where asked for
    ood_<score>_<auroc|aupr|fpr95>, agreement, total_variation; where targets are tokens,
    bits_per_character as well, and tokens that are ignored do not count.
    Bernoulli: accuracy, nll (summed over an example's labels). Numbers: rmse, log_density, coverage90,
    coverage95, mean_std, and with a reference wasserstein1, wasserstein2 (in the units the network sees).
    Sample weights do not count here.
    """
    return evaluate_in_full(
        posterior,
        data,
        ood=ood,
        reference=reference,
        num_draws=num_draws,
        generator=generator,
        target_scale=target_scale,
        bins=bins,
        average=average,
    ).scores


@dataclass(frozen=True)
class Evaluation:
    """Scores with the predictives they are about; foreign: of the points outside the distribution."""

    scores: dict[str, float]
    predictive: Predictive
    observations: Observations
    foreign: Predictive | None = None


def evaluate_in_full(
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
    average: Averaged = "predictions",
) -> Evaluation:
    """Score as ``evaluate`` does, and keep what was predicted.

    observe: sees (rows, outputs [M, b, ...] of all members, weights [M]) of every chunk of test points.
    """
    inputs, targets = arrays_of(as_data(data))
    likelihood = posterior.network.likelihood
    if ood is not None and "ood_auroc" not in likelihood.columns:
        raise InputError(f"ood= needs a categorical likelihood, this is {likelihood.kind!r}.")
    if isinstance(reference, Reference):
        reference.check(as_data(data), likelihood)
    elif reference is not None and likelihood.reference_kind != "probabilities":
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

    predictive, observations = _judged_together(
        posterior, inputs, targets, num_draws, same_draws(), observe, average
    )
    scores = predictive.scores(observations, target_scale=target_scale, bins=bins)
    foreign = None
    if ood is not None:
        foreign = posterior.predict(_inputs(ood), num_draws, same_draws(), average=average)
        scores |= predictive.ood_scores(foreign, observations)
    if reference is not None:
        contents = contents_for(likelihood)
        ours = contents.predicted(posterior, inputs, num_draws, same_draws(), predictive=predictive)
        values = reference.values if isinstance(reference, Reference) else reference
        scores |= contents.distances(ours, values)
    return Evaluation(scores, predictive, observations, foreign)


def _judged_together(
    posterior: Posterior,
    inputs: Tree,
    targets: Tensor,
    num_draws: int | None,
    generator: torch.Generator | None,
    observe: Observe | None,
    average: Averaged,
) -> tuple[Predictive, Observations]:
    """The predictive, and what it says of the targets, from one pass of all members over the points."""
    num_points = length(inputs := as_tree(inputs))
    require(num_points > 0, "There are no points to predict.")
    require(len(targets) == num_points, f"{len(targets)} targets for {num_points} inputs.")
    check_finite(match_precision(posterior.network.dtype, inputs))
    parts = posterior.by_points(inputs, num_draws, generator, average=average)
    return judged_outputs(posterior.network.likelihood, parts, targets, observe)


def judged_outputs(
    likelihood: Likelihood,
    parts: Iterable[tuple[slice, Tree, Tensor]],
    targets: Tensor,
    observe: Observe | None = None,
) -> tuple[Predictive, Observations]:
    """What outputs say together, and of the targets.

    parts: (rows, outputs [M, b, ...], weights [M]) of all members for chunks of points, in their order.
    """
    accumulator = likelihood.accumulator(len(targets))
    found: dict[str, list[Tensor]] = {}
    quantiles = []
    for rows, outputs, weights in parts:
        chunk, first = targets[rows].to(weights.device), map_tree(lambda t: t[0], outputs)
        likelihood.check_outputs(first, chunk)
        likelihood.check_targets(chunk, first)
        for name, values in likelihood.found(outputs, weights, chunk).items():
            found.setdefault(name, []).append(values)
        accumulator.update(outputs, weights, rows)
        if likelihood.levels:
            dtype = next(leaves(outputs)).dtype
            quantiles.append(likelihood.quantiles(outputs, weights, likelihood.levels).to(dtype))
        if observe is not None:
            observe(rows, outputs, weights)
    predictive = accumulator.result()
    if quantiles:
        values = torch.cat(quantiles, 1)
        predictive = predictive.with_quantiles(dict(zip(likelihood.levels, values, strict=True)))
    joined = {name: torch.cat(each) for name, each in found.items()}
    return predictive, Observations(targets, likelihood.observed(targets), joined.pop("log_prob"), joined)


def _inputs(source: Any) -> Tree:
    return arrays_of(as_data(source))[0] if isinstance(source, Data | DataLoader) else as_tree(source)
