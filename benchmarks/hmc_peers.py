"""Time Hamiltonian Monte Carlo of polymode beside blackjax and Pyro: gradient evaluations a second.

    python benchmarks/hmc_peers.py                             # peers that this Python can import
    python benchmarks/hmc_peers.py --python PEERS/bin/python   # and those of another environment
    python benchmarks/hmc_peers.py --threads 2 --chains 3,16 --json out.json

All sample one potential, that of an MLP (8-50-2, ReLU, mean and noise of 512 targets) under a Gaussian prior,
with the same step size, leapfrog steps, transitions and number of chains, in single precision; its value at
fixed weights is compared. Each measurement is a fresh process on as many cores as it may have threads, and
the best of several. blackjax runs all chains in one compiled call, whose compilation is reported apart; Pyro
runs one after another (it would have a process for each, where there are cores for them).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

PRIOR_STD = 0.4472  # momenta are in units of it
STEP, LEAPS, TRANSITIONS = 0.005, 50, 20  # STEP in units of PRIOR_STD
REPEATS = 3

Weights = dict[str, np.ndarray]


def make_data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return tuple(random.standard_normal((512, width), dtype=np.float32) for width in (8, 1))


def make_weights(seed: int) -> Weights:
    """As ``nn.Linear`` draws them, under the names they have in polymode's MLP."""
    random, found = np.random.default_rng(seed), {}
    for layer, fan_in, width in ((1, 8, 50), (3, 50, 2)):
        for name, shape in (("weight", (width, fan_in)), ("bias", (width,))):
            drawn = random.uniform(-1, 1, shape) / np.sqrt(fan_in)
            found[f"{layer}.{name}"] = drawn.astype(np.float32)
    return found


# --- peers: seconds of the chains' run, the best of several, and what is worth knowing of it ------------


def best_of(job: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def run_polymode(num_chains: int) -> dict:
    import torch

    import polymode as pm
    from polymode.weights.priors import gaussian_penalty

    x, y = map(torch.from_numpy, make_data())
    method = pm.methods.HMC(
        num_chains,
        PRIOR_STD,
        num_samples=TRANSITIONS,
        burn_in=1e-9,  # one pass, which finds the first force: the step size is not adapted
        descent=0,
        step_size=STEP,
        trajectory=STEP * (LEAPS - 0.5),  # rounded up
        jitter=0.0,
    )

    def factory():
        return pm.models.MLP(8, 2, (50,))

    def run(epochs=1 + TRANSITIONS * LEAPS):
        data = pm.ArrayData(x, y, batch_size=len(x))
        likelihood = "heteroscedastic_gaussian"
        options = {"epochs": epochs, "backend": "vmap", "progress": False}
        return pm.fit(method, factory, data, likelihood=likelihood, **options).record

    run(20)
    records = [run() for _ in range(REPEATS)]
    found = records[0]["findings"]
    assert all((f["transitions"], f["leapfrog_steps"]) == (TRANSITIONS, LEAPS) for f in found)

    module = factory()
    weights = {name: torch.from_numpy(array) for name, array in make_weights(0).items()}
    module.load_state_dict(weights)
    terms = pm.likelihoods.HeteroscedasticGaussian().log_prob(module(x), y)
    return {
        "version": f"polymode {pm.__version__}, torch {torch.__version__}",
        "seconds": min(record["training_seconds"] for record in records),
        "acceptance": sum(f["acceptance"] for f in found) / num_chains,
        "potential": float(gaussian_penalty(weights, PRIOR_STD) - terms.sum()),
    }


def run_blackjax(num_chains: int) -> dict:
    import blackjax
    import jax
    import jax.numpy as jnp

    x, y = map(jnp.asarray, make_data())
    assert x.dtype == jnp.float32

    def potential(weights):
        hidden = jax.nn.relu(x @ weights["1.weight"].T + weights["1.bias"])
        mean, raw = jnp.split(hidden @ weights["3.weight"].T + weights["3.bias"], 2, -1)
        std = jax.nn.softplus(raw) + 1e-6
        prior = sum(jnp.square(tensor).sum() for tensor in weights.values()) / (2 * PRIOR_STD**2)
        return prior - jax.scipy.stats.norm.logpdf(y, mean, std).sum()

    starts = [make_weights(seed) for seed in range(num_chains)]
    stacked = {name: jnp.stack([start[name] for start in starts]) for name in starts[0]}
    num_weights = sum(array.size for array in starts[0].values())
    kernel = blackjax.hmc(
        lambda weights: -potential(weights),
        step_size=STEP,
        inverse_mass_matrix=jnp.full(num_weights, PRIOR_STD**2),
        num_integration_steps=LEAPS,
    )

    def chain(key, weights):
        def transition(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.acceptance_rate)

        return jax.lax.scan(transition, kernel.init(weights), jax.random.split(key, TRANSITIONS))[1]

    keys = jax.random.split(jax.random.key(0), num_chains)
    began = time.perf_counter()
    compiled = jax.jit(jax.vmap(chain)).lower(keys, stacked).compile()
    compilation = time.perf_counter() - began
    _, rates = jax.block_until_ready(compiled(keys, stacked))
    return {
        "version": f"blackjax {blackjax.__version__}, jax {jax.__version__}",
        "seconds": best_of(lambda: jax.block_until_ready(compiled(keys, stacked))),
        "compilation": compilation,
        "acceptance": float(rates.mean()),
        "potential": float(potential({name: jnp.asarray(w) for name, w in make_weights(0).items()})),
    }


def run_pyro(num_chains: int) -> dict:
    import pyro
    import torch
    from pyro.infer import HMC, MCMC
    from torch.nn import functional as F

    x, y = map(torch.from_numpy, make_data())

    def potential(scaled):  # of θ/s: momenta have unit variance then, and the step size means the same
        weights = {name: PRIOR_STD * tensor for name, tensor in scaled.items()}
        hidden = F.relu(F.linear(x, weights["1.weight"], weights["1.bias"]))
        mean, raw = F.linear(hidden, weights["3.weight"], weights["3.bias"]).chunk(2, -1)
        noise = torch.distributions.Normal(mean, F.softplus(raw) + 1e-6, validate_args=False)
        return sum(tensor.square().sum() for tensor in scaled.values()) / 2 - noise.log_prob(y).sum()

    def scaled(seed):
        return {name: torch.from_numpy(array / PRIOR_STD) for name, array in make_weights(seed).items()}

    finished: list[MCMC] = []

    def run(chains=num_chains, transitions=TRANSITIONS):
        finished.clear()
        for seed in range(chains):
            kernel = HMC(
                potential_fn=potential,
                step_size=STEP,
                trajectory_length=STEP * (LEAPS + 0.5),  # rounded down
                adapt_step_size=False,
                adapt_mass_matrix=False,
            )
            options = {"warmup_steps": 0, "initial_params": scaled(seed), "disable_progbar": True}
            finished.append(MCMC(kernel, transitions, **options))
            finished[-1].run()
            assert kernel.num_steps == LEAPS

    run(1, 2)
    seconds = best_of(run)
    rates = [mcmc.diagnostics()["acceptance rate"]["chain 0"] for mcmc in finished]
    return {
        "version": f"pyro {pyro.__version__}, torch {torch.__version__}",
        "seconds": seconds,
        "acceptance": sum(rates) / num_chains,
        "potential": float(potential(scaled(0))),
    }


PEERS = {"polymode": run_polymode, "blackjax": run_blackjax, "pyro": run_pyro}


# --- one process for each measurement -------------------------------------------------------------------


def measure(peer: str, num_chains: int, threads: int, pythons: list[str]) -> dict | None:
    """What a fresh process finds, in the first Python that has the peer; None where none has it."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    arguments = [__file__, "--child", peer, "--chains", str(num_chains), "--threads", str(threads)]
    for python in pythons:
        done = subprocess.run([python, *arguments], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{peer} failed:\n{done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
        if found is not None:
            return found | {"gradients_per_second": num_chains * (1 + TRANSITIONS * LEAPS) / found["seconds"]}
    return None


def child(peer: str, num_chains: int, threads: int) -> None:
    if hasattr(os, "sched_setaffinity"):  # XLA takes as many threads as it may use cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    try:
        __import__(peer)
    except ImportError:
        print("null")
        return
    print(json.dumps(PEERS[peer](num_chains)))


def show(num_chains: int, rows: dict[str, dict]) -> None:
    print(f"\n{num_chains} chains × {TRANSITIONS} transitions × {LEAPS} leapfrog steps")
    head = ("seconds", "gradients / s", "/ polymode", "compilation, s", "acceptance")
    print(" " * 10 + "".join(f"{column:>16}" for column in head))
    ours = rows.get("polymode", {}).get("gradients_per_second")
    for peer, row in rows.items():
        rate = row["gradients_per_second"]
        cells = [f"{row['seconds']:.3f}", f"{rate:,.0f}", f"{rate / ours:.2f}" if ours else "–"]
        cells += [f"{row['compilation']:.2f}" if "compilation" in row else "–", f"{row['acceptance']:.3f}"]
        print(f"{peer:10}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="another interpreter to look for peers")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated: " + ", ".join(PEERS))
    parser.add_argument("--chains", default="3,16", help="comma-separated numbers of chains")
    parser.add_argument("--threads", type=int, default=1, help="threads, and cores, of every process")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--child", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    counts = [int(count) for count in options.chains.split(",")]
    if options.child:
        child(options.child, counts[0], options.threads)
        return 0
    peers = options.peers.split(",")
    if unknown := [peer for peer in peers if peer not in PEERS]:
        parser.error(f"unknown peer {unknown[0]!r}; known: {', '.join(PEERS)}")
    results, versions = {}, {}
    for count in counts:
        found = {p: measure(p, count, options.threads, [sys.executable, *options.python]) for p in peers}
        rows = {peer: row for peer, row in found.items() if row is not None}
        for missing in sorted(found.keys() - rows.keys()) if count == counts[0] else ():
            print(f"{missing}: not installed; see --python")
        if not rows:
            return 1
        potentials = [row["potential"] for row in rows.values()]
        if max(potentials) - min(potentials) > 1e-4 * abs(potentials[0]):
            raise RuntimeError(f"The potentials differ: {dict(zip(rows, potentials, strict=True))}")
        show(count, rows)
        results[count] = rows
        versions |= {peer: row["version"] for peer, row in rows.items()}
    print(f"\n{options.threads} thread(s) each; potential {potentials[0]:.4f} for all; ", end="")
    print("; ".join(versions.values()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"threads": options.threads, "results": results}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
