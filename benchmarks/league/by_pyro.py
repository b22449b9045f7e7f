"""Pyro: HMC one chain after another, variational inference, predictions of samples side by side."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from league.jobs import (
    HMC_PRIOR_STD,
    HMC_STEP,
    NOISE_STD,
    NUM_CLASSES,
    NUM_HIDDEN,
    NUM_INPUTS,
    PRIOR_STD,
    Sizes,
    Timed,
    classification,
    hmc_data,
    hmc_weights,
    regression,
)
from league.networks import shuffled, tensors


def _mlp(x: Tensor, num_outputs: int) -> Tensor:
    """A network with weights drawn from the prior; several draws stand on a first axis."""
    import pyro
    from pyro.distributions import Normal

    def drawn(name: str, *shape: int) -> Tensor:
        prior = Normal(torch.zeros(shape), PRIOR_STD).to_event(len(shape))
        return pyro.sample(name, prior)

    hidden = x @ drawn("first.weight", NUM_INPUTS, NUM_HIDDEN) + drawn("first.bias", 1, NUM_HIDDEN)
    return hidden.relu() @ drawn("last.weight", NUM_HIDDEN, num_outputs) + drawn("last.bias", 1, num_outputs)


def mean_field(sizes: Sizes) -> Timed:
    import pyro
    from pyro.distributions import Normal
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoDiagonalNormal

    pyro.enable_validation(False)
    x, y = tensors(regression(sizes.rows))

    def model(inputs: Tensor, targets: Tensor) -> None:
        means = _mlp(inputs, 1)
        with pyro.poutine.scale(scale=sizes.rows / len(inputs)):
            pyro.sample("targets", Normal(means, NOISE_STD).to_event(2), obs=targets)

    def train(epochs: int) -> None:
        pyro.clear_param_store()
        guide = AutoDiagonalNormal(model, init_scale=0.0025)
        inference = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), Trace_ELBO())
        for _ in range(epochs):
            for batch in shuffled(x, y, sizes.batch_size):
                inference.step(*batch)

    return Timed(lambda: train(sizes.epochs), lambda: train(1))


def prediction(sizes: Sizes) -> Timed:
    import pyro
    from pyro.infer import Predictive

    pyro.enable_validation(False)
    x, _ = tensors(classification(sizes.points))
    shapes = {
        "first.weight": (NUM_INPUTS, NUM_HIDDEN),
        "first.bias": (1, NUM_HIDDEN),
        "last.weight": (NUM_HIDDEN, NUM_CLASSES),
        "last.bias": (1, NUM_CLASSES),
    }
    samples = {name: torch.randn(sizes.members, *shape) for name, shape in shapes.items()}

    def model(inputs: Tensor) -> None:
        pyro.deterministic("probabilities", _mlp(inputs, NUM_CLASSES).softmax(-1), event_dim=2)

    predict = Predictive(model, samples, return_sites=("probabilities",), parallel=True)
    assert predict(x)["probabilities"].shape == (sizes.members, len(x), NUM_CLASSES)

    def run() -> None:
        for _ in range(sizes.calls):
            predict(x)["probabilities"].mean(0)

    return Timed(run)


def hmc(sizes: Sizes) -> Timed:
    from pyro.infer import HMC, MCMC

    x, y = tensors(hmc_data())

    def potential(scaled: dict[str, Tensor]) -> Any:
        """Of θ/s: momenta have unit variance then, and the step size means the same."""
        weights = {name: HMC_PRIOR_STD * tensor for name, tensor in scaled.items()}
        hidden = F.relu(F.linear(x, weights["0.weight"], weights["0.bias"]))
        mean, raw = F.linear(hidden, weights["2.weight"], weights["2.bias"]).chunk(2, -1)
        noise = torch.distributions.Normal(mean, F.softplus(raw) + 1e-6, validate_args=False)
        return sum(tensor.square().sum() for tensor in scaled.values()) / 2 - noise.log_prob(y).sum()

    def scaled(seed: int) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array / HMC_PRIOR_STD) for name, array in hmc_weights(seed).items()}

    def sample(chains: int, transitions: int) -> dict:
        rates = {}
        for seed in range(chains):

            def note_rate(kernel: Any, *_: Any, seed: int = seed) -> None:
                rates[seed] = kernel.diagnostics()["acceptance rate"]

            kernel = HMC(
                potential_fn=potential,
                step_size=HMC_STEP,
                trajectory_length=HMC_STEP * (sizes.leaps + 0.5),  # rounded down
                adapt_step_size=False,
                adapt_mass_matrix=False,
            )
            options = {"warmup_steps": 0, "initial_params": scaled(seed), "disable_progbar": True}
            MCMC(kernel, transitions, hook_fn=note_rate, **options).run()
            assert kernel.num_steps == sizes.leaps
        return {"acceptance": sum(rates.values()) / chains}

    return Timed(
        lambda: sample(sizes.members, sizes.transitions),
        lambda: sample(1, 2),
        facts={"potential": float(potential(scaled(0)))},
    )
