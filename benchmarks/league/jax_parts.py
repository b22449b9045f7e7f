"""The networks of ``networks`` in JAX, and epochs that are compiled ahead: by hand and of blackjax."""

import time
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from league.jobs import NUM_CLASSES, NUM_HIDDEN, NUM_INPUTS, Sizes, Timed

Parameters = dict[str, Any]
State = Any


def _uniform(key: Any, fan_in: int, shape: tuple[int, ...]) -> Any:
    import jax

    return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0) / fan_in**0.5


def initial_mlp(key: Any, num_outputs: int = 1) -> Parameters:
    import jax

    keys = jax.random.split(key, 4)
    return {
        "first.weight": _uniform(keys[0], NUM_INPUTS, (NUM_INPUTS, NUM_HIDDEN)),
        "first.bias": _uniform(keys[1], NUM_INPUTS, (NUM_HIDDEN,)),
        "last.weight": _uniform(keys[2], NUM_HIDDEN, (NUM_HIDDEN, num_outputs)),
        "last.bias": _uniform(keys[3], NUM_HIDDEN, (num_outputs,)),
    }


def mlp(parameters: Parameters, x: Any) -> Any:
    import jax

    hidden = jax.nn.relu(x @ parameters["first.weight"] + parameters["first.bias"])
    return hidden @ parameters["last.weight"] + parameters["last.bias"]


CHANNELS = (3, 16, 32, 32)


def initial_cnn(key: Any) -> Parameters:
    import jax

    parameters = {}
    for layer, (width, out) in enumerate(pairwise(CHANNELS)):
        key, of_weight, of_bias = jax.random.split(key, 3)
        parameters[f"{layer}.weight"] = _uniform(of_weight, 9 * width, (3, 3, width, out))
        parameters[f"{layer}.bias"] = _uniform(of_bias, 9 * width, (out,))
    of_weight, of_bias = jax.random.split(key)
    parameters["last.weight"] = _uniform(of_weight, 512, (512, NUM_CLASSES))
    parameters["last.bias"] = _uniform(of_bias, 512, (NUM_CLASSES,))
    return parameters


def cnn(parameters: Parameters, images: Any, as_products: bool) -> Any:
    """Images have their channels last, which XLA prefers on a CPU, and are pooled in pairs of pixels.

    as_products: convolutions as products with the nine shifted images, because XLA's own run dozens of times
        slower inside a compiled loop.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    for layer in range(len(CHANNELS) - 1):
        weight, (number, height, width, _) = parameters[f"{layer}.weight"], images.shape
        if as_products:
            padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
            shifts = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
            images = jnp.concatenate(shifts, -1) @ weight.reshape(-1, weight.shape[-1])
        else:
            order = ("NHWC", "HWIO", "NHWC")
            images = lax.conv_general_dilated(images, weight, (1, 1), "SAME", dimension_numbers=order)
        images = images + parameters[f"{layer}.bias"]
        images = images.reshape(number, height // 2, 2, width // 2, 2, -1).max((2, 4))
        if layer < len(CHANNELS) - 2:
            images = jax.nn.relu(images)
    return images.reshape(len(images), -1) @ parameters["last.weight"] + parameters["last.bias"]


# --- compiled loops ------------------------------------------------------------------------------------


def compiled_ahead(function: Callable, *arguments: Any, **options: Any) -> tuple[Callable, float]:
    """The function for such arguments, and the seconds that compiling it took."""
    import jax

    began = time.perf_counter()
    compiled = jax.jit(function, **options).lower(*arguments).compile()
    return compiled, time.perf_counter() - began


def training(
    sizes: Sizes,
    scan: bool,
    begin: Callable[[Any], State],
    step: Callable[[State, Any], State],
    num_members: int = 1,
    finish: Callable[[Callable[[State], State], State], Any] | None = None,
    unrolled: bool = False,
) -> Timed:
    """Epochs of ``step(state, rows)`` from ``begin(key)``, which are those of one member.

    scan: an epoch is one compiled call that shuffles on the device, for every member its own way; otherwise a
        step is, and NumPy shuffles.
    finish: takes over for the second half of the epochs, with a function that runs one and the state.
    unrolled: members stand one after another in the compiled step, not under ``vmap``.
    """
    import jax
    import jax.numpy as jnp

    num_steps, rest = divmod(sizes.rows, sizes.batch_size)
    assert rest == 0, "Batches of another shape would be compiled apart."

    def one_by_one(state, rows):
        members = [jax.tree.map(itemgetter(member), (state, rows)) for member in range(num_members)]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *(step(*member) for member in members))

    together = one_by_one if unrolled else jax.vmap(step)

    def scanned(state, key):
        keys = jax.random.split(key, num_members)
        orders = jax.vmap(lambda key: jax.random.permutation(key, sizes.rows))(keys)
        batches = orders.reshape(num_members, num_steps, -1).swapaxes(0, 1)
        return jax.lax.scan(lambda state, rows: (together(state, rows), None), state, batches)[0]

    random = np.random.default_rng(0)
    keys = jax.random.split(jax.random.key(0), num_members)
    initialise, seconds = compiled_ahead(jax.vmap(begin), keys)
    first = jax.random.key(1) if scan else np.zeros((num_members, sizes.batch_size), np.int32)
    compiled, more = compiled_ahead(scanned if scan else together, initialise(keys), first, donate_argnums=0)

    def epoch(state: State) -> State:
        if scan:
            return compiled(state, jax.random.key(int(random.integers(2**31))))
        orders = np.stack([random.permutation(sizes.rows) for _ in range(num_members)]).astype(np.int32)
        for rows in np.split(orders, num_steps, 1):
            state = compiled(state, rows)
        return state

    def run() -> None:
        state = initialise(keys)
        for _ in range(sizes.epochs if finish is None else sizes.epochs - sizes.epochs // 2):
            state = epoch(state)
        jax.block_until_ready(state if finish is None else finish(epoch, state))

    def warm_up() -> None:
        jax.block_until_ready(epoch(initialise(keys)))

    return Timed(run, None if finish else warm_up, seconds + more)
