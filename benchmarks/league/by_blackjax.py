"""blackjax: all chains of a sampler under ``vmap``, in calls that are compiled ahead and counted apart."""

from collections.abc import Callable
from typing import Any

from league.jax_parts import compiled_ahead, initial_mlp, mlp, training
from league.jobs import (
    FRICTION,
    HMC_PRIOR_STD,
    HMC_STEP,
    NOISE_STD,
    PRIOR_STD,
    RATE,
    Sizes,
    Timed,
    hmc_data,
    hmc_weights,
    regression,
)


def _prior(weights: dict[str, Any]) -> Any:
    return -sum((weight**2).sum() for weight in weights.values()) / (2 * PRIOR_STD**2)


def _likelihood(weights: dict[str, Any], example: tuple[Any, Any]) -> Any:
    x, y = example
    return -((mlp(weights, x) - y) ** 2).sum() / (2 * NOISE_STD**2)


def _sampling(sizes: Sizes, initial: Callable[[Any], Any], move: Callable[[Any, Any, Any], Any]) -> Timed:
    """``move(key, state, batch)`` for every batch; an epoch is one compiled call."""
    import jax
    import jax.numpy as jnp

    x, y = map(jnp.asarray, regression(sizes.rows))

    def begin(key):
        of_weights, of_steps = jax.random.split(key)
        return initial(initial_mlp(of_weights)), of_steps, jnp.zeros((), jnp.int32)

    def step(state, rows):
        inner, key, count = state
        return move(jax.random.fold_in(key, count), inner, (x[rows], y[rows])), key, count + 1

    return training(sizes, True, begin, step, sizes.members)


def mean_field(sizes: Sizes) -> Timed:
    import blackjax
    import optax
    from blackjax.sgmcmc.gradients import logdensity_estimator

    adam, density = optax.adam(1e-3), logdensity_estimator(_prior, _likelihood, sizes.rows)

    def move(key, state, batch):
        def of_batch(weights):
            return density(weights, batch)

        return blackjax.vi.meanfield_vi.step(key, state, of_batch, adam, num_samples=1)[0]

    return _sampling(sizes, lambda weights: blackjax.vi.meanfield_vi.init(weights, adam), move)


def sgmcmc(sizes: Sizes) -> Timed:
    """Its diffusions, which keep momenta from step to step; its SGHMC draws them anew for every batch.

    They take gradients of the whole log density: a rate of the mean loss is divided by the number of rows.
    """
    import jax
    import jax.numpy as jnp
    from blackjax.sgmcmc import diffusions
    from blackjax.sgmcmc.gradients import grad_estimator

    gradient = grad_estimator(_prior, _likelihood, sizes.rows)
    langevin = diffusions.overdamped_langevin()
    step_size = (RATE / sizes.rows) ** 0.5
    hamiltonian = diffusions.sghmc(alpha=FRICTION / step_size)

    def move(key, state, batch):
        position, momentum = state
        force = gradient(position, batch)
        if sizes.kernel == "sgld":
            return langevin(key, position, force, RATE / sizes.rows), momentum
        return hamiltonian(key, position, momentum, force, step_size)

    return _sampling(sizes, lambda weights: (weights, jax.tree.map(jnp.zeros_like, weights)), move)


def hmc(sizes: Sizes) -> Timed:
    import blackjax
    import jax
    import jax.numpy as jnp

    x, y = map(jnp.asarray, hmc_data())

    def potential(weights):
        hidden = jax.nn.relu(x @ weights["0.weight"].T + weights["0.bias"])
        mean, raw = jnp.split(hidden @ weights["2.weight"].T + weights["2.bias"], 2, -1)
        std = jax.nn.softplus(raw) + 1e-6
        prior = sum(jnp.square(tensor).sum() for tensor in weights.values()) / (2 * HMC_PRIOR_STD**2)
        return prior - jax.scipy.stats.norm.logpdf(y, mean, std).sum()

    starts = [hmc_weights(seed) for seed in range(sizes.members)]
    stacked = {name: jnp.stack([start[name] for start in starts]) for name in starts[0]}
    kernel = blackjax.hmc(
        lambda weights: -potential(weights),
        step_size=HMC_STEP,
        inverse_mass_matrix=jnp.full(sum(array.size for array in starts[0].values()), HMC_PRIOR_STD**2),
        num_integration_steps=sizes.leaps,
    )

    def chain(key, weights):
        def transition(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.acceptance_rate)

        keys = jax.random.split(key, sizes.transitions)
        return jax.lax.scan(transition, kernel.init(weights), keys)[1]

    keys = jax.random.split(jax.random.key(0), sizes.members)
    compiled, seconds = compiled_ahead(jax.vmap(chain), keys, stacked)

    def run() -> dict:
        _, rates = jax.block_until_ready(compiled(keys, stacked))
        return {"acceptance": float(rates.mean())}

    start = {name: jnp.asarray(array) for name, array in hmc_weights(0).items()}
    return Timed(run, compilation=seconds, facts={"potential": float(potential(start))})
