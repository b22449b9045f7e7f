"""Compare samplers of polymode and blackjax: effective samples a second, in function space, of one posterior.

    python benchmarks/sampler_peers.py                             # peers that this Python can import
    python benchmarks/sampler_peers.py --python PEERS/bin/python   # and those of another environment
    python benchmarks/sampler_peers.py --peers polymode-hmc,blackjax-mclmc --passes 20000 --json out.json

The posterior is that of an MLP (8-16-16-2, tanh, mean and noise of 256 targets) under a Gaussian prior, in
single precision; the value of its potential at fixed weights is compared. (With ReLU these functions have
modes that chains do not change between, and effective sizes say nothing.) Every chain descends with Adam,
finds its step size and whatever else its library adapts, and then samples with the same number of gradients
(NUTS: about as many). Function values are the predicted means and the logarithms of the predicted standard
deviations at 100 test points. ArviZ gives the effective sample size of all chains together, whose median over
the values is shown, and R-hat, whose 95 % quantile is.

Only the seconds of sampling count; those of descent, warm-up and compilation are shown apart. Other programs
disturb the clock, the processor's seconds less so; effective samples for each gradient do not depend on the
machine. Each measurement is a fresh process on as many cores as it may have threads. blackjax runs all chains
in one compiled call, in which those of NUTS wait for the longest tree: only gradients of each chain's own
tree are counted. Of its HMC and of NUTS every state is a sample, of the others every so many passes.

Microcanonical dynamics has no acceptance test: what it samples is the nearer to the posterior the smaller the
energy variance, the number behind its name. The last columns compare function values with those of the first
peer, polymode's hmc unless others are asked for. distance: the largest one between their posterior means, in
posterior standard deviations; in errors: the root mean square of such distances over their Monte Carlo
errors, 1 where both sample the same law; spread: the median ratio of the posterior standard deviations.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

LAYERS = ((1, 8, 16), (3, 16, 16), (5, 16, 2))  # place in polymode's MLP, inputs, outputs
PRIOR_STD = 0.3
NUM_OBSERVATIONS, NUM_POINTS = 256, 100
DESCENT, RATE = 1000, 3e-3  # steps of Adam and its learning rate
KEPT = 2000  # samples of each chain, where not every state is one
LEAPS = 112  # of blackjax's HMC: a length of about π/2 in its units, as polymode's in those of the prior
WINDOWS = 500  # transitions of its window adaptation

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Setting:
    """passes: gradients that each chain samples with. energy_variance: of microcanonical dynamics."""

    num_chains: int
    passes: int
    threads: int
    seed: int
    energy_variance: float

    @property
    def warm_up(self) -> int:
        """Gradients of each chain, except where windows of transitions are given."""
        return self.passes // 3


@dataclass(frozen=True)
class Run:
    """What a peer has done. seconds: of each stage, and of the processor while it samples ("processor").

    gradients: of all chains while they sample. values: [chains, samples, values]. potential: at fixed
    weights. found: what is worth knowing, in words.
    """

    version: str
    seconds: dict[str, float]
    gradients: int
    values: np.ndarray
    potential: float
    found: str


def make_data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs and targets to learn from, and inputs of test points."""
    random = np.random.default_rng(0)
    x, points = (random.standard_normal((number, 8)) for number in (NUM_OBSERVATIONS, NUM_POINTS))
    bent, straight, noisy = random.standard_normal((3, 8)) / math.sqrt(8)
    std = 0.2 + 0.2 / (1 + np.exp(-2 * x @ noisy))
    y = np.sin(2 * x @ bent) + 0.5 * x @ straight + std * random.standard_normal(NUM_OBSERVATIONS)
    return x.astype(np.float32), y[:, None].astype(np.float32), points.astype(np.float32)


def make_weights(seed: int) -> Weights:
    """As ``nn.Linear`` draws them, under the names they have in polymode's MLP."""
    random, found = np.random.default_rng(seed), {}
    for layer, fan_in, width in LAYERS:
        for name, shape in (("weight", (width, fan_in)), ("bias", (width,))):
            drawn = random.uniform(-1, 1, shape) / np.sqrt(fan_in)
            found[f"{layer}.{name}"] = drawn.astype(np.float32)
    return found


def in_words(values: Any) -> str:
    """A number of every chain: once where all have the same, else as a range."""
    low, high = float(np.min(values)), float(np.max(values))
    return f"{low:.3g}" if math.isclose(low, high, rel_tol=1e-3) else f"{low:.3g}–{high:.3g}"


# --- polymode -------------------------------------------------------------------------------------------


def run_polymode(method: Any, epochs: int, setting: Setting) -> tuple[Run, list[dict]]:
    """Fit a method whose first phase descends and whose last one samples; also its findings."""
    import torch
    from torch.nn import functional as F

    import polymode as pm
    from polymode.weights.priors import gaussian_penalty

    x, y, points = map(torch.from_numpy, make_data())

    def factory():
        return pm.models.MLP(8, 2, (16, 16), activation=torch.nn.Tanh)

    began = time.perf_counter()
    ends = {}  # of phases: gradients so far, clock and processor's time

    def observe(epoch):
        ends[epoch.phase] = (epoch.member_epochs, time.perf_counter(), time.process_time())

    posterior = pm.fit(
        method,
        factory,
        pm.ArrayData(x, y, batch_size=len(x)),
        likelihood="heteroscedastic_gaussian",
        epochs=epochs,
        seed=setting.seed,
        backend="compiled",
        threads=setting.threads,
        progress=False,
        observer=observe,
    )
    descended, (before, warm, idle), (after, sampled, busy) = (list(ends.values())[i] for i in (0, -2, -1))

    likelihood = posterior.network.likelihood
    outputs = torch.cat([outputs for _, outputs, _ in posterior.by_points(points)], 1)
    values = torch.cat([outputs[..., 0], (F.softplus(outputs[..., 1]) + likelihood.min_std).log()], 1)
    chains = torch.cat([block.labels[:, 1] for block in posterior.draw()])

    module = factory()
    weights = {name: torch.from_numpy(array) for name, array in make_weights(0).items()}
    module.load_state_dict(weights)
    terms = likelihood.log_prob(module(x), y)
    run = Run(
        version=f"polymode {pm.__version__}, torch {torch.__version__}",
        seconds={
            "descent": descended[1] - began,
            "warm-up": warm - descended[1],
            "sampling": sampled - warm,
            "processor": busy - idle,
        },
        gradients=round(after - before),
        values=torch.stack([values[chains == chain] for chain in chains.unique()]).double().numpy(),
        potential=float(gaussian_penalty(weights, PRIOR_STD) - terms.sum()),
        found="",
    )
    return run, posterior.record["findings"]


def run_hmc(setting: Setting) -> Run:
    import polymode as pm

    burn_in = DESCENT + setting.warm_up
    epochs = burn_in + setting.passes
    method = pm.methods.HMC(
        setting.num_chains,
        PRIOR_STD,
        num_samples=KEPT,
        burn_in=burn_in / epochs,
        descent=DESCENT,
        optimizer=pm.Optimizer("Adam", lr=RATE),
    )
    run, found = run_polymode(method, epochs, setting)
    rates, leaps = ([chain[name] for chain in found] for name in ("acceptance", "leapfrog_steps"))
    return replace(run, found=f"acceptance {in_words(rates)}, {in_words(leaps)} leapfrog steps")


def run_microcanonical(setting: Setting) -> Run | None:
    import polymode as pm

    if not hasattr(pm.methods, "Microcanonical"):  # an older version
        return None
    moving = 2 * (setting.warm_up // 2) + setting.passes  # two gradients a step
    method = pm.methods.Microcanonical(
        setting.num_chains,
        PRIOR_STD,
        num_samples=KEPT,
        warm_up=1 - setting.passes / moving,
        descent=DESCENT,
        optimizer=pm.Optimizer("Adam", lr=RATE),
        energy_variance=setting.energy_variance,
        first_energy_variance=max(0.5, setting.energy_variance),
    )
    run, found = run_polymode(method, DESCENT + 1 + moving, setting)
    steps, lengths, errors = (
        [chain[name] for chain in found] for name in ("step_size", "length", "energy_variance")
    )
    undone = sum(chain["divergences"] for chain in found)
    words = f"step {in_words(steps)}, length {in_words(lengths)}, energy variance {in_words(errors)}"
    return replace(run, found=words + (f", {undone} divergences" if undone else ""))


# --- blackjax -------------------------------------------------------------------------------------------


class Chains:
    """Chains of blackjax at the weights that they have descended to, and the seconds of every stage."""

    def __init__(self, setting: Setting) -> None:
        import jax
        import jax.numpy as jnp

        self.num_chains, self.keys = setting.num_chains, jax.random.key(setting.seed)
        self.seconds = {"compilation": 0.0}
        starts = [make_weights(setting.num_chains * setting.seed + chain) for chain in range(self.num_chains)]
        stacked = {name: jnp.stack([start[name] for start in starts]) for name in starts[0]}
        self.starts = self.run("descent", lambda _, weights: self.descend(weights), stacked)

    @staticmethod
    def predict(weights, x):
        """Means and standard deviations, [B, 1] each."""
        import jax
        import jax.numpy as jnp

        for layer, _, _ in LAYERS:
            x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
            x = x if layer == LAYERS[-1][0] else jnp.tanh(x)
        mean, raw = jnp.split(x, 2, -1)
        return mean, jax.nn.softplus(raw) + 1e-6

    def log_density(self, weights):
        import jax
        import jax.numpy as jnp

        x, y, _ = make_data()
        terms = jax.scipy.stats.norm.logpdf(y, *self.predict(weights, x))
        prior = sum(jnp.square(tensor).sum() for tensor in weights.values()) / (2 * PRIOR_STD**2)
        return terms.sum() - prior

    def descend(self, weights):
        import jax
        import optax

        adam = optax.adam(RATE)

        def step(carry, _):
            weights, state = carry
            gradients = jax.grad(lambda weights: -self.log_density(weights))(weights)
            updates, state = adam.update(gradients, state)
            return (optax.apply_updates(weights, updates), state), None

        return jax.lax.scan(step, (weights, adam.init(weights)), length=DESCENT)[0][0]

    def run(self, stage: str, job: Callable, *arguments: Any) -> Any:
        """What ``job(key, ...)`` returns for every chain, stacked."""
        import jax

        self.keys, key = jax.random.split(self.keys)
        arguments = (jax.random.split(key, self.num_chains), *arguments)
        began = time.perf_counter()
        compiled = jax.jit(jax.vmap(job)).lower(*arguments).compile()
        ready, idle = time.perf_counter(), time.process_time()
        found = jax.block_until_ready(compiled(*arguments))
        self.seconds["compilation"] += ready - began
        self.seconds[stage] = time.perf_counter() - ready
        self.seconds["processor"] = time.process_time() - idle  # of the last stage, which samples
        return found

    def finish(self, positions: Any, gradients: int, found: str) -> Run:
        """positions: weights [chains, samples, ...]."""
        import blackjax
        import jax
        import jax.numpy as jnp

        points = make_data()[2]

        def values(weights):
            mean, std = self.predict(weights, points)
            return jnp.concatenate([mean[:, 0], jnp.log(std[:, 0])])

        return Run(
            version=f"blackjax {blackjax.__version__}, jax {jax.__version__}",
            seconds=self.seconds,
            gradients=gradients,
            values=np.asarray(jax.jit(jax.vmap(jax.vmap(values)))(positions), dtype=np.float64),
            potential=-float(self.log_density(make_weights(0))),
            found=found,
        )


def run_windows(algorithm: str, setting: Setting) -> Run:
    """HMC or NUTS of blackjax, with the step size and the diagonal masses that window adaptation finds."""
    import blackjax
    import jax
    from blackjax.adaptation.base import get_filter_adapt_info_fn

    chains, kernel = Chains(setting), getattr(blackjax, algorithm)
    options = {"num_integration_steps": LEAPS} if algorithm == "hmc" else {}
    adaptation = blackjax.window_adaptation(
        kernel,
        chains.log_density,
        adaptation_info_fn=get_filter_adapt_info_fn(info_keys={"num_integration_steps"}),
        **options,
    )
    adapted, told = chains.run("warm-up", lambda key, at: adaptation.run(key, at, WINDOWS), chains.starts)
    leaps = np.asarray(told.info.num_integration_steps)[:, WINDOWS // 2 :].mean()
    transitions = round(setting.passes / (LEAPS if algorithm == "hmc" else leaps))
    found = {name: adapted.parameters[name] for name in ("step_size", "inverse_mass_matrix")}

    def sample(key, state, found):
        sampler = kernel(chains.log_density, **found, **options)

        def transition(state, key):
            state, info = sampler.step(key, state)
            return state, (state.position, info.acceptance_rate, info.num_integration_steps)

        return jax.lax.scan(transition, state, jax.random.split(key, transitions))[1]

    positions, rates, leaps = chains.run("sampling", sample, adapted.state, found)
    trajectories = np.asarray(leaps).mean(1) * np.asarray(found["step_size"])
    words = f"acceptance {in_words(rates.mean(1))}, {in_words(leaps.mean(1))} leapfrog steps, "
    words += f"{transitions} transitions, length {in_words(trajectories)}"
    return chains.finish(positions, int(leaps.sum()), words)


def run_mclmc(setting: Setting) -> Run:
    import blackjax
    import jax

    chains, steps = Chains(setting), setting.passes // 2  # two gradients a step
    kernel = blackjax.mcmc.mclmc.build_kernel(integrator=blackjax.mcmc.integrators.isokinetic_mclachlan)

    def tune(key, position):
        first, second = jax.random.split(key)
        state, found, _ = blackjax.mclmc_find_L_and_step_size(
            mclmc_kernel=kernel,
            num_steps=steps,  # it takes a third as many
            state=blackjax.mcmc.mclmc.init(position, chains.log_density, first),
            rng_key=second,
            logdensity_fn=chains.log_density,
            desired_energy_var=setting.energy_variance,
        )
        return state, found

    def sample(key, state, found):
        def step(state, key):
            return kernel(key, state, chains.log_density, found.inverse_mass_matrix, found.L, found.step_size)

        def to_next(state, key):
            state, told = jax.lax.scan(step, state, jax.random.split(key, steps // KEPT))
            return state, (state.position, told.energy_change)

        return jax.lax.scan(to_next, state, jax.random.split(key, KEPT))[1]

    state, found = chains.run("warm-up", tune, chains.starts)
    positions, changes = chains.run("sampling", sample, state, found)
    num_weights = sum(array.size for array in make_weights(0).values())
    errors = np.square(np.asarray(changes)).mean((1, 2)) / num_weights
    words = (
        f"step {in_words(found.step_size)}, length {in_words(found.L)}, energy variance {in_words(errors)}"
    )
    return chains.finish(positions, 2 * changes.size, words)


PEERS: dict[str, Callable[[Setting], Run | None]] = {
    "polymode-hmc": run_hmc,
    "polymode-microcanonical": run_microcanonical,
    "blackjax-hmc": partial(run_windows, "hmc"),
    "blackjax-nuts": partial(run_windows, "nuts"),
    "blackjax-mclmc": run_mclmc,
}
MICROCANONICAL = ("polymode-microcanonical", "blackjax-mclmc")


# --- one process for each measurement -------------------------------------------------------------------


def measure(peer: str, setting: Setting, pythons: list[str]) -> dict | None:
    """What a fresh process finds, in the first Python that has the peer; None where none has it."""
    threads = str(setting.threads)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.npz")
        arguments = [__file__, "--child", json.dumps({"peer": peer, "file": str(file)} | asdict(setting))]
        for python in pythons:
            done = subprocess.run([python, *arguments], env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{peer} failed:\n{done.stderr}")
            found = json.loads(done.stdout.splitlines()[-1])
            if found is not None:
                with np.load(file) as arrays:
                    return found | {"values": arrays["values"]}
    return None


def child(peer: str, file: str, **options: Any) -> None:
    setting = Setting(**options)
    if hasattr(os, "sched_setaffinity"):  # XLA takes as many threads as it may use cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-setting.threads :])
    try:
        __import__(peer.split("-")[0])
    except ImportError:
        print("null")
        return
    if (run := PEERS[peer](setting)) is None:
        print("null")
        return
    np.savez(file, values=run.values)
    print(json.dumps({name: value for name, value in vars(run).items() if name != "values"}))


# --- what the samples are worth -------------------------------------------------------------------------


def judge(rows: dict[str, dict]) -> None:
    """Replace the values of each row by what they tell, on their own and beside those of the first row."""
    from polymode.judging.diagnostics import import_arviz

    arviz = import_arviz()
    first = None
    for row in rows.values():
        values = row.pop("values")
        dataset = arviz.convert_to_dataset({"value": values})
        effective, rhat = (np.asarray(f(dataset)["value"]) for f in (arviz.ess, arviz.rhat))
        means, stds = values.mean((0, 1)), values.std((0, 1))
        errors = stds / np.sqrt(np.asarray(arviz.ess(dataset, method="mean")["value"]))
        first = first or (means, stds, errors)
        apart = np.abs(means - first[0])
        ess = float(np.median(effective))
        row |= {
            "samples": values.shape[0] * values.shape[1],
            "effective": ess,
            "least_effective": float(effective.min()),
            "rhat": float(np.quantile(rhat, 0.95)),
            "effective_per_second": ess / row["seconds"]["sampling"],
            "effective_per_processor_second": ess / row["seconds"]["processor"],
            "effective_per_gradient": ess / row["gradients"],
            "distance": float((apart / first[1]).max()),
            "distance_in_errors": float(np.sqrt(np.mean(apart**2 / (errors**2 + first[2] ** 2)))),
            "spread": float(np.median(stds / first[1])),
        }


def show(rows: dict[str, dict]) -> None:
    stages = ("descent", "warm-up", "compilation", "sampling", "processor")
    table = [[*(f"{stage}, s" for stage in stages), "samples", "ESS", "R-hat", "ESS / s", "/ processor's s"]]
    table[0] += ["/ 1000 gradients", "distance", "in errors", "spread"]
    for number, row in enumerate(rows.values()):
        seconds = row["seconds"]
        cells = [f"{seconds[stage]:.1f}" if stage in seconds else "–" for stage in stages]
        cells += [f"{row['samples']}", f"{row['effective']:.0f}", f"{row['rhat']:.3f}"]
        cells += [f"{row[f'effective_per_{unit}second']:.1f}" for unit in ("", "processor_")]
        cells += [f"{1000 * row['effective_per_gradient']:.2f}"]
        beside = [row[name] for name in ("distance", "distance_in_errors", "spread")]
        table.append(cells + [f"{value:.3f}" if number else "–" for value in beside])
    widths = [2 + max(map(len, column)) for column in zip(*table, strict=True)]
    for label, cells in zip(["", *rows], table, strict=True):
        line = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        print(f"{label:{max(map(len, rows))}}{line}")
    print()
    for label, row in rows.items():
        print(f"{label}: {row['found']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="another interpreter to look for peers")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated: " + ", ".join(PEERS))
    parser.add_argument("--chains", type=int, default=8, help="number of chains")
    parser.add_argument("--passes", type=int, default=40_000, help="gradients that each chain samples with")
    parser.add_argument(
        "--energy-variances", default="0.0005,0.1", help="comma-separated, of microcanonical dynamics"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads, and cores, of every process")
    parser.add_argument("--seed", type=int, default=0, help="of starts and chains; the data are fixed")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(**options.child)
        return 0
    peers = options.peers.split(",")
    if unknown := [peer for peer in peers if peer not in PEERS]:
        parser.error(f"unknown peer {unknown[0]!r}; known: {', '.join(PEERS)}")
    if options.passes < 2 * KEPT or options.passes % (2 * KEPT):
        parser.error(f"--passes must be a multiple of {2 * KEPT}, got {options.passes}")
    variances = [float(variance) for variance in options.energy_variances.split(",")]
    rows = {}
    for peer in peers:
        for variance in variances if peer in MICROCANONICAL else variances[:1]:
            setting = Setting(options.chains, options.passes, options.threads, options.seed, variance)
            row = measure(peer, setting, [sys.executable, *options.python])
            if row is None:
                print(f"{peer}: not installed; see --python")
                break
            rows[f"{peer} {variance:g}" if peer in MICROCANONICAL else peer] = row
    if not rows:
        return 1
    potentials = {label: row["potential"] for label, row in rows.items()}
    if np.ptp(list(potentials.values())) > 1e-4 * abs(next(iter(potentials.values()))):
        raise RuntimeError(f"The potentials differ: {potentials}")
    judge(rows)
    print(f"\n{options.chains} chains × {options.passes} gradients, after {DESCENT} steps of Adam\n")
    show(rows)
    versions = dict.fromkeys(row["version"] for row in rows.values())
    print(
        f"\n{options.threads} thread(s) each; potential {next(iter(potentials.values())):.4f} for all; ",
        end="",
    )
    print("; ".join(versions))
    if options.json:
        asked = {name: vars(options)[name] for name in ("chains", "passes", "threads", "seed")}
        with open(options.json, "w") as file:
            json.dump(asked | {"results": rows}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
