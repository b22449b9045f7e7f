"""JAX and optax by hand: steps of all members under ``jit(vmap(...))``, or a compiled scan over each epoch.

Compilation is done ahead and counted apart.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from league.jax_parts import Parameters, cnn, compiled_ahead, initial_cnn, initial_mlp, mlp, training
from league.jobs import (
    CNN_MOMENTUM,
    CNN_RATE,
    DROPOUT,
    NOISE_STD,
    NUM_CLASSES,
    PRIOR_STD,
    Sizes,
    Timed,
    classification,
    images,
    regression,
)

Loss = Callable[[Parameters, Any, Any, Any], Any]  # of parameters, inputs, targets and a random key


def _adam() -> Any:
    import optax

    return optax.adam(1e-3)


def _descent(
    sizes: Sizes,
    scan: bool,
    arrays: tuple[np.ndarray, np.ndarray],
    initial: Callable[[Any], Parameters],
    loss: Loss,
    optimizer: Any,
    num_members: int = 1,
    finish: Callable | None = None,
    unrolled: bool = False,
) -> Timed:
    import jax
    import jax.numpy as jnp
    import optax

    x, y = map(jnp.asarray, arrays)

    def begin(key):
        of_weights, of_steps = jax.random.split(key)
        parameters = initial(of_weights)
        return parameters, optimizer.init(parameters), of_steps, jnp.zeros((), jnp.int32)

    def step(state, rows):
        parameters, memory, key, count = state
        gradients = jax.grad(loss)(parameters, x[rows], y[rows], jax.random.fold_in(key, count))
        updates, memory = optimizer.update(gradients, memory, parameters)
        return optax.apply_updates(parameters, updates), memory, key, count + 1

    return training(sizes, scan, begin, step, num_members, finish, unrolled)


def _squares(outputs: Any, targets: Any) -> Any:
    return ((outputs - targets) ** 2).mean()


def ensemble(sizes: Sizes, scan: bool) -> Timed:
    def loss(parameters, x, y, key):
        return _squares(mlp(parameters, x), y)

    arrays = regression(sizes.rows)
    return _descent(sizes, scan, arrays, initial_mlp, loss, _adam(), sizes.members)


def cnn_ensemble(sizes: Sizes, scan: bool) -> Timed:
    """In steps members are unrolled: under ``vmap`` convolutions become grouped ones, which are slower."""
    import optax

    def loss(parameters, x, y, key):
        return optax.softmax_cross_entropy_with_integer_labels(cnn(parameters, x, scan), y).mean()

    x, y = images(sizes.rows)
    arrays = np.ascontiguousarray(x.transpose(0, 2, 3, 1)), y
    optimizer = optax.sgd(CNN_RATE, momentum=CNN_MOMENTUM)
    return _descent(sizes, scan, arrays, initial_cnn, loss, optimizer, sizes.members, unrolled=not scan)


def batch_ensemble(sizes: Sizes, scan: bool) -> Timed:
    """The factors u_k and v_k of all members stand on a first axis."""
    import jax

    def initial(key):
        of_network, *keys = jax.random.split(key, 5)
        network = initial_mlp(of_network)
        shapes = {
            f"{layer}.{factor}": (sizes.members, 1, network[f"{layer}.weight"].shape[axis])
            for layer in ("first", "last")
            for axis, factor in enumerate(("v", "u"))
        }
        factors = {
            name: 1 + 0.5 * jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return network | factors

    def loss(parameters, x, y, key):
        def layer(name, inputs):
            outputs = (inputs * parameters[f"{name}.v"]) @ parameters[f"{name}.weight"]
            return outputs * parameters[f"{name}.u"] + parameters[f"{name}.bias"]

        return _squares(layer("last", jax.nn.relu(layer("first", x))), y)

    return _descent(sizes, scan, regression(sizes.rows), initial, loss, _adam())


def _dropped_out(parameters: Parameters, x: Any, key: Any) -> Any:
    import jax

    hidden = jax.nn.relu(x @ parameters["first.weight"] + parameters["first.bias"])
    kept = jax.random.bernoulli(key, 1 - DROPOUT, hidden.shape) / (1 - DROPOUT)
    return (hidden * kept) @ parameters["last.weight"] + parameters["last.bias"]


def dropout_training(sizes: Sizes, scan: bool) -> Timed:
    def loss(parameters, x, y, key):
        return _squares(_dropped_out(parameters, x, key), y)

    return _descent(sizes, scan, regression(sizes.rows), initial_mlp, loss, _adam())


def _predicting(sizes: Sizes, function: Callable, *arguments: Any) -> Timed:
    import jax

    compiled, seconds = compiled_ahead(function, *arguments)

    def run() -> None:
        for _ in range(sizes.calls):
            jax.block_until_ready(compiled(*arguments))

    return Timed(run, compilation=seconds)


def dropout_prediction(sizes: Sizes, scan: bool) -> Timed:
    import jax

    parameters = initial_mlp(jax.random.key(0))
    x, _ = regression(sizes.points)

    def predict(key, x):
        keys = jax.random.split(key, sizes.draws)
        outputs = jax.vmap(partial(_dropped_out, parameters, x))(keys)
        return outputs.mean(0), outputs.var(0)

    return _predicting(sizes, predict, jax.random.key(1), jax.numpy.asarray(x))


def swag(sizes: Sizes, scan: bool) -> Timed:
    """Draws are vectors of all weights; Maddox et al. (2019), Algorithm 1."""
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    collected = sizes.epochs // 2

    def loss(parameters, x, y, key):
        return _squares(mlp(parameters, x), y)

    @jax.jit
    def draw(key, weights):
        mean, std = weights.mean(0), weights.std(0)
        deviations = (weights - mean) / (collected - 1) ** 0.5
        of_own, of_common = jax.random.split(key)
        own = jax.random.normal(of_own, (sizes.draws, weights.shape[1]))
        common = jax.random.normal(of_common, (sizes.draws, collected))
        return mean + 0.5**0.5 * (own * std + common @ deviations)

    def finish(epoch, state):
        seen = []
        for _ in range(collected):
            state = epoch(state)
            seen.append(ravel_pytree(state[0])[0])
        return draw(jax.random.key(2), jnp.stack(seen))

    return _descent(sizes, scan, regression(sizes.rows), initial_mlp, loss, _adam(), finish=finish)


def mean_field(sizes: Sizes, scan: bool) -> Timed:
    import jax
    import jax.numpy as jnp

    def initial(key):
        means = initial_mlp(key)
        return {"mean": means, "rho": jax.tree.map(lambda mean: jnp.full_like(mean, -6.0), means)}

    def loss(parameters, x, y, key):
        means, stds = parameters["mean"], jax.tree.map(jax.nn.softplus, parameters["rho"])
        keys = dict(zip(means, jax.random.split(key, len(means)), strict=True))
        drawn = {
            name: mean + stds[name] * jax.random.normal(keys[name], mean.shape)
            for name, mean in means.items()
        }
        kl = sum(
            ((std**2 + means[name] ** 2) / (2 * PRIOR_STD**2) - jnp.log(std / PRIOR_STD)).sum()
            for name, std in stds.items()
        )
        return _squares(mlp(drawn, x), y) / (2 * NOISE_STD**2) + kl / sizes.rows

    return _descent(sizes, scan, regression(sizes.rows), initial, loss, _adam())


def prediction(sizes: Sizes, scan: bool) -> Timed:
    import jax

    keys = jax.random.split(jax.random.key(0), sizes.members)
    members = jax.vmap(partial(initial_mlp, num_outputs=NUM_CLASSES))(keys)
    x, _ = classification(sizes.points)

    def predict(members, x):
        return jax.nn.softmax(jax.vmap(mlp, (0, None))(members, x)).mean(0)

    return _predicting(sizes, predict, members, jax.numpy.asarray(x))
