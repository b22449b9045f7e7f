"""polymode: whole calls of ``fit``, with the backend that it chooses by itself in each of them."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

import polymode as pm
from league.jobs import (
    CNN_MOMENTUM,
    CNN_RATE,
    DROPOUT,
    FRICTION,
    HMC_PRIOR_STD,
    HMC_STEP,
    NOISE_STD,
    NUM_CLASSES,
    PRIOR_STD,
    RATE,
    Sizes,
    Timed,
    classification,
    hmc_data,
    hmc_weights,
    images,
    regression,
)
from league.networks import MLP, SmallCNN, tensors

FACTS = ("training_seconds", "choice_seconds", "backend", "prediction_backend", "threads")
Factory = Callable[[], nn.Module]
GAUSSIAN = pm.likelihoods.FixedGaussian(std=NOISE_STD)


def _facts(posterior: pm.Posterior) -> dict:
    return {name: posterior.record.get(name) for name in FACTS}


def _fit(
    method: pm.Method,
    factory: Factory,
    arrays: tuple[np.ndarray, np.ndarray],
    likelihood: str | pm.likelihoods.Likelihood,
    sizes: Sizes,
) -> pm.Posterior:
    data = pm.ArrayData(*tensors(arrays), batch_size=sizes.batch_size)
    return pm.fit(method, factory, data, likelihood=likelihood, epochs=sizes.epochs, progress=False)


def _regression(method: pm.Method, sizes: Sizes, factory: Factory = MLP) -> Timed:
    arrays = regression(sizes.rows)
    return Timed(lambda: _facts(_fit(method, factory, arrays, GAUSSIAN, sizes)))


def ensemble(sizes: Sizes) -> Timed:
    return _regression(pm.methods.DeepEnsemble(sizes.members), sizes)


def cnn_ensemble(sizes: Sizes) -> Timed:
    optimizer = pm.Optimizer("SGD", lr=CNN_RATE, momentum=CNN_MOMENTUM)
    method = pm.methods.DeepEnsemble(sizes.members, of=pm.methods.Single(optimizer=optimizer))
    arrays = images(sizes.rows)
    return Timed(lambda: _facts(_fit(method, SmallCNN, arrays, "categorical", sizes)))


def batch_ensemble(sizes: Sizes) -> Timed:
    return _regression(pm.methods.BatchEnsemble(sizes.members), sizes)


def dropout_training(sizes: Sizes) -> Timed:
    return _regression(pm.methods.MCDropout(), sizes, partial(MLP, dropout=DROPOUT))


def dropout_prediction(sizes: Sizes) -> Timed:
    factory = partial(MLP, dropout=DROPOUT)
    posterior = _fit(pm.methods.MCDropout(), factory, regression(sizes.rows), GAUSSIAN, sizes)
    x, _ = tensors(regression(sizes.points))

    def run() -> None:
        for _ in range(sizes.calls):
            posterior.predict(x, sizes.draws)

    return Timed(run, facts=_facts(posterior))


def swag(sizes: Sizes) -> Timed:
    collected = sizes.epochs // 2
    return _regression(
        pm.methods.SWAG(start=sizes.epochs - collected, rank=collected, num_draws=sizes.draws), sizes
    )


def mean_field(sizes: Sizes) -> Timed:
    return _regression(pm.methods.MeanField(prior_std=PRIOR_STD), sizes)


def prediction(sizes: Sizes) -> Timed:
    factory = partial(MLP, NUM_CLASSES)
    method = pm.methods.DeepEnsemble(sizes.members)
    posterior = _fit(method, factory, classification(sizes.rows), "categorical", sizes)
    x, _ = tensors(classification(sizes.points))

    def run() -> None:
        for _ in range(sizes.calls):
            posterior.predict(x)

    return Timed(run, facts=_facts(posterior))


def sgmcmc(sizes: Sizes) -> Timed:
    """One cycle that samples from its second epoch on and keeps the last network."""
    sampler = pm.methods.CyclicalSGMCMC(
        sizes.kernel,  # pyright: ignore[reportArgumentType]
        num_cycles=1,
        samples_per_cycle=1,
        sampling=1.0,
        lr=RATE,
        friction=FRICTION,
        prior_std=PRIOR_STD,
    )
    return _regression(pm.methods.DeepEnsemble(sizes.members, of=sampler), sizes)


def hmc(sizes: Sizes) -> Timed:
    from polymode.weights.priors import gaussian_penalty

    x, y = tensors(hmc_data())
    method = pm.methods.HMC(
        sizes.members,
        HMC_PRIOR_STD,
        num_samples=sizes.transitions,
        burn_in=1e-9,  # one pass, which finds the first force: the step size is not adapted
        descent=0,
        step_size=HMC_STEP,
        trajectory=HMC_STEP * (sizes.leaps - 0.5),  # rounded up
        jitter=0.0,
    )
    factory = partial(MLP, 2, 8)

    def run() -> dict:
        posterior = pm.fit(
            method,
            factory,
            pm.ArrayData(x, y, batch_size=len(x)),
            likelihood="heteroscedastic_gaussian",
            epochs=1 + sizes.transitions * sizes.leaps,
            progress=False,
        )
        found = posterior.record["findings"]
        asked = (sizes.transitions, sizes.leaps)
        assert all((one["transitions"], one["leapfrog_steps"]) == asked for one in found)
        acceptance = sum(one["acceptance"] for one in found) / len(found)
        return _facts(posterior) | {"acceptance": acceptance}

    weights = {name: torch.from_numpy(array) for name, array in hmc_weights(0).items()}
    module: nn.Module = factory()
    module.load_state_dict(weights)
    with torch.no_grad():
        terms = pm.likelihoods.HeteroscedasticGaussian().log_prob(module(x), y)
    penalty = gaussian_penalty(weights, HMC_PRIOR_STD)
    return Timed(run, facts={"potential": float(penalty - terms.sum())})
