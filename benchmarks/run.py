"""Time polymode beside plain PyTorch, in one run, as ratios.

    python benchmarks/run.py                        # all cases, about twelve minutes on two cores
    python benchmarks/run.py --cases mlp10,'hmc*'   # some of them
    python benchmarks/run.py --json out.json        # also as JSON

Every case runs its contenders in turn, several times over, and reports each one's best time; times on
shared hardware vary, ratios of neighbours less so. Peak memory is that of a fresh process which runs one
contender once, above what importing and building the data takes.
"""

import argparse
import copy
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polymode as pm
from polymode.networks.members import Backend
from polymode.posteriors.network import Network

# Jobs by name; one that returns a number has counted its seconds itself.
Contenders = dict[str, Callable[[], float | None]]


@dataclass(frozen=True)
class Case:
    """A job done by several contenders; goals are least ratios (contender's time / polymode's)."""

    title: str
    build: Callable[[], Contenders]
    goals: dict[str, float]
    repeats: int = 3
    flops: Callable[[], float] | None = None  # of the whole job, for the arithmetic limit
    work: tuple[float, str] | None = None  # how much of what the job does, to show it by the second
    fresh: bool = False  # contenders run in processes of their own: no warming up, no memory of this one


# --- the ordinary loops ------------------------------------------------------------------------


def train_alone(module, batches, loss, epochs, optimizer=None) -> None:
    """The loop everybody writes."""
    optimizer = optimizer or torch.optim.Adam(module.parameters())
    module.train()
    for _ in range(epochs):
        for x, y in batches():
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()


def in_memory_batches(x, y, batch_size):
    def batches():
        order = torch.randperm(len(x))
        for start in range(0, len(x), batch_size):
            rows = order[start : start + batch_size]
            yield x[rows], y[rows]

    return batches


class Fit:
    """polymode's contender: the first call measures backends and threads, later ones run with the choice.

    The measurement is made once a run, whatever its length; its cost is reported beside the times.
    """

    def __init__(self, method, model, data, likelihood, epochs, backend="auto") -> None:
        self.arguments = (method, model, data)
        self.options = {"likelihood": likelihood, "epochs": epochs, "progress": False}
        self.backend, self.choice_seconds, self.threads = backend, 0.0, None

    def __call__(self, seed: int = 0) -> None:
        computing = {"backend": self.backend, "threads": self.threads}
        posterior = pm.fit(*self.arguments, **self.options, **computing, seed=seed)
        record = (posterior[0] if isinstance(posterior, list) else posterior).record
        if self.backend == "auto":
            self.backend, self.choice_seconds = record["backend"], record["choice_seconds"]
        self.threads = record["threads"]


# --- MLPs --------------------------------------------------------------------------------------


def mlp_case(num_members: int, epochs: int, *, with_loader: bool) -> Callable[[], Contenders]:
    def build() -> Contenders:
        [(x, y)] = table_data()

        def factory():
            return pm.models.MLP(20, 1, (50,))

        likelihood = pm.likelihoods.FixedGaussian(std=1.0)

        data = pm.ArrayData(x, y, batch_size=100)
        ours = Fit(pm.methods.DeepEnsemble(num_members), factory, data, likelihood, epochs)

        def loop(batches):
            def run():
                for _ in range(num_members):
                    train_alone(factory(), batches, F.mse_loss, epochs)

            return run

        contenders = {"polymode": ours, "loop, in-memory batches": loop(in_memory_batches(x, y, 100))}
        if with_loader:
            loader = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
            contenders["loop, DataLoader"] = loop(lambda: loader)
        return contenders

    return build


def drawn_mlps_case(of: pm.Method) -> Callable[[], Contenders]:
    """K=10 MLPs of a method that draws their weights, beside the same networks without."""

    def build() -> Contenders:
        torch.manual_seed(0)
        data = pm.ArrayData(torch.randn(10_000, 20), torch.randn(10_000, 1), batch_size=100)

        def ours(method: pm.Method):
            return Fit(
                pm.methods.DeepEnsemble(10, of=method),
                lambda: pm.models.MLP(20, 1, (50,)),
                data,
                pm.likelihoods.FixedGaussian(std=1.0),
                2,
            )

        return {"polymode": ours(of), "Single in fit": ours(pm.methods.Single())}

    return build


def splits_case() -> Contenders:
    """20 splits × 10 members of a UCI-size MLP (455 rows, 13 features, 50 units)."""
    sets, epochs = splits_data(), 20

    def factory():
        return pm.models.MLP(13, 1, (50,))

    data = [pm.ArrayData(x, y, batch_size=100) for x, y in sets]
    likelihood = pm.likelihoods.FixedGaussian(std=1.0)
    ours = Fit(pm.methods.DeepEnsemble(10), factory, data, likelihood, epochs)

    def loop():
        for x, y in sets:
            for _ in range(10):
                train_alone(factory(), in_memory_batches(x, y, 100), F.mse_loss, epochs)

    return {"polymode": ours, "loop, in-memory batches": loop}


def whole_case(
    data: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]],
    num_members: int,
    epochs: int,
    *,
    loader: bool,
) -> Callable[[], Contenders]:
    """Whole trainings of MLPs with 50 units: ours in fresh processes, with all that a run costs at its start.

    Loops take so long, and equally long for every epoch, that a twentieth of the epochs is timed.
    """

    def build() -> Contenders:
        part = epochs // 20

        def loop(make_batches):
            def run() -> float:
                began = time.perf_counter()
                for x, y in data():
                    batches = make_batches(x, y)
                    for _ in range(num_members):
                        train_alone(pm.models.MLP(x.shape[1], 1, (50,)), batches, F.mse_loss, part)
                return (time.perf_counter() - began) * epochs / part

            return run

        def ours(**options):
            return lambda: _in_fresh_process(_whole_training, data, num_members, epochs, **options)

        contenders = {
            "polymode": ours(),
            "polymode, compiled anew": ours(cold=True),
            "polymode, second call": ours(calls=2),
            "loop, in-memory batches": loop(lambda x, y: in_memory_batches(x, y, 100)),
        }
        if loader:

            def loaded(x, y):
                batches = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
                return lambda: batches

            contenders["loop, DataLoader"] = loop(loaded)
        ours()()  # leaves the graph on disk
        return contenders

    return build


def _whole_training(data, num_members: int, epochs: int, *, cold: bool = False, calls: int = 1) -> float:
    """Seconds of the last of some calls of ``fit``. cold: PyTorch knows the compiler, but no graph."""
    if cold:
        folder = tempfile.mkdtemp()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        _compile_something()
    sets = [pm.ArrayData(x, y, batch_size=100) for x, y in data()]
    columns = sets[0].inputs.shape[1]
    seconds = 0.0
    for _ in range(calls):
        began = time.perf_counter()
        pm.fit(
            pm.methods.DeepEnsemble(num_members),
            lambda: pm.models.MLP(columns, 1, (50,)),
            sets,
            likelihood=pm.likelihoods.FixedGaussian(std=1.0),
            epochs=epochs,
            progress=False,
        )
        seconds = time.perf_counter() - began
    if cold:
        shutil.rmtree(folder)
    return seconds


def _compile_something() -> None:
    """Let PyTorch precompile its headers, as it does once on a machine: in a process of its own."""
    code = "import torch; torch.compile(lambda x: x.sin() + 1)(torch.ones(100))"
    subprocess.run([sys.executable, "-c", code], check=True)


def _in_fresh_process(job: Callable[..., float], *arguments, **options) -> float:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(job, *arguments, **options).result()


def table_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(10_000, 20), torch.randn(10_000, 1))]


def splits_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(455, 13), torch.randn(455, 1)) for _ in range(20)]


def prediction_case(num_points: int) -> Callable[[], Contenders]:
    """S = 100 MLPs, the mean of their probabilities (polymode also gives the entropies)."""

    def build() -> Contenders:
        torch.manual_seed(0)
        modules = [pm.models.MLP(20, 10, (50,)).eval() for _ in range(100)]
        members = pm.stack([{n: t.detach() for n, t in m.state_dict().items()} for m in modules])
        network = Network(copy.deepcopy(modules[0]), pm.likelihoods.Categorical(), "vmap")
        vmap = pm.Particles(network, blocks=[members])
        x = torch.randn(num_points, 20)
        first, first_bias, second, second_bias = members.stacked.values()

        def ours(posterior):
            def run():
                for _ in range(50):
                    posterior.predict(x)

            return run

        def loop():
            for _ in range(50):
                with torch.no_grad():
                    torch.stack([module(x).softmax(-1) for module in modules]).mean(0)

        def by_hand():
            for _ in range(50):
                hidden = torch.baddbmm(first_bias[:, None], x.expand(100, -1, -1), first.mT).relu_()
                torch.baddbmm(second_bias[:, None], hidden, second.mT).softmax(-1).mean(0)

        return {
            "polymode": ours(vmap.with_backend("compiled")),
            "polymode, vmap": ours(vmap),
            "loop": loop,
            "batched products by hand": by_hand,
        }

    return build


# --- chains and samplers of a UCI-size MLP -----------------------------------------------------

PRIOR_STD = 0.4472  # a variance of 0.2, as in Delaunoy and Louppe (2021)


def sequential_anchored(chains: int, first_epochs: int) -> pm.methods.SequentialAnchored:
    """Short trainings of two epochs."""
    walk = pm.samplers.GuidedWalk(step=4.0)  # all cost alike; short steps warn of a short walk
    return pm.methods.SequentialAnchored(chains, PRIOR_STD, walk, first_epochs, short_epochs=2)


def uci_data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(512, 8), torch.randn(512, 1)


def uci_mlp() -> nn.Module:
    return pm.models.MLP(8, 2, (50,))


def heteroscedastic_losses(outputs, targets):
    mean, raw = outputs.chunk(2, -1)
    std = F.softplus(raw) + 1e-6
    return ((targets - mean) / std).square() / 2 + std.log() + math.log(2 * math.pi) / 2


def anchored_chain(module, batches, num_rows, lengths) -> None:
    """Trainings in turn, each with a fresh optimiser and a new anchor."""
    parameters = list(module.parameters())
    for epochs in lengths:
        anchor = [PRIOR_STD * torch.randn_like(p) for p in parameters]

        def loss(outputs, targets, anchor=anchor):
            distance = sum((p - a).square().sum() for p, a in zip(parameters, anchor, strict=True))
            return heteroscedastic_losses(outputs, targets).mean() + distance / (2 * PRIOR_STD**2 * num_rows)

        train_alone(module, batches, loss, epochs)


FIRST, NUM_SHORT = 4, 10  # epochs of the first training, number of short ones


def stacked_chains_case(num_chains: int) -> Callable[[], Contenders]:
    """C chains in one fit, beside C fits, beside C hand-written chains."""

    def build() -> Contenders:
        x, y = uci_data()
        data, epochs = pm.ArrayData(x, y, batch_size=58), FIRST + 2 * NUM_SHORT

        def fitted(chains, backend):
            method = sequential_anchored(chains, FIRST)
            return Fit(method, uci_mlp, data, "heteroscedastic_gaussian", epochs, backend)

        alone = fitted(1, "auto")

        def one_after_another():
            for seed in range(num_chains):
                alone(seed)

        def loop():
            for _ in range(num_chains):
                batches = in_memory_batches(x, y, 58)
                anchored_chain(uci_mlp(), batches, len(x), [FIRST, *[2] * NUM_SHORT])

        return {
            "polymode": fitted(num_chains, "vmap"),
            "fits, one after another": one_after_another,
            "loop": loop,
        }

    return build


STEP, LEAPS, TRANSITIONS = 0.005, 50, 20  # of a trajectory in units of the prior's width, and their number


def leapfrog_chain(module, x, y) -> None:
    """Hamiltonian Monte Carlo of one chain; momenta in units of the prior's width, as polymode has them."""
    weights = list(module.parameters())

    def look():
        """−s ∇U, and the data's part of U."""
        energy = heteroscedastic_losses(module(x), y).sum()
        forces = list(torch.autograd.grad(energy, weights))
        with torch.no_grad():
            for force, weight in zip(forces, weights, strict=True):
                force.mul_(-PRIOR_STD).sub_(weight, alpha=1 / PRIOR_STD)
        return forces, energy.detach()

    def total(energy, momenta):
        squares = sum(w.double().square().sum() for w in weights) / PRIOR_STD**2
        return energy.double() + (squares + sum(p.double().square().sum() for p in momenta)) / 2

    forces, energy = look()
    for _ in range(TRANSITIONS):
        with torch.no_grad():
            kept = [w.clone() for w in weights], forces, energy
            momenta = [torch.randn_like(w) for w in weights]
            before = total(energy, momenta)
            for momentum, force in zip(momenta, forces, strict=True):
                momentum.add_(force, alpha=STEP / 2)
        for leap in range(1, LEAPS + 1):
            with torch.no_grad():
                for weight, momentum in zip(weights, momenta, strict=True):
                    weight.add_(momentum, alpha=STEP * PRIOR_STD)
            forces, energy = look()
            for momentum, force in zip(momenta, forces, strict=True):
                momentum.add_(force, alpha=STEP if leap < LEAPS else STEP / 2)
        with torch.no_grad():
            if torch.rand((), dtype=torch.float64).log() > before - total(energy, momenta):
                saved, forces, energy = kept
                for weight, old in zip(weights, saved, strict=True):
                    weight.copy_(old)


def hmc_case(num_chains: int) -> Callable[[], Contenders]:
    """Chains with one step size and one length of trajectories; only the time of training counts."""

    def build() -> Contenders:
        x, y = uci_data()
        method = pm.methods.HMC(
            num_chains,
            PRIOR_STD,
            num_samples=4,
            burn_in=1e-9,  # one pass, which finds the first force: the step size is not adapted
            descent=0,
            step_size=STEP,
            trajectory=STEP * (LEAPS - 0.5),  # rounded up
            jitter=0.0,
        )
        data = pm.ArrayData(x, y, batch_size=len(x))

        def ours(backend: Backend) -> float:
            posterior = pm.fit(
                method,
                uci_mlp,
                data,
                likelihood="heteroscedastic_gaussian",
                epochs=1 + TRANSITIONS * LEAPS,
                backend=backend,
                progress=False,
            )
            found = posterior.record["findings"][0]
            assert (found["transitions"], found["leapfrog_steps"]) == (TRANSITIONS, LEAPS)
            return posterior.record["training_seconds"]

        def loop():
            for _ in range(num_chains):
                leapfrog_chain(uci_mlp(), x, y)

        return {
            "polymode": lambda: ours("compiled"),
            "polymode, vmap": lambda: ours("vmap"),
            "loop": loop,
        }

    return build


# --- convolutional networks --------------------------------------------------------------------


def convolution_case(
    factory: Callable[[], nn.Module], num_members: int, num_images: int, epochs: int = 1
) -> Callable[[], Contenders]:
    def build() -> Contenders:
        torch.manual_seed(0)
        x, y = torch.randn(num_images, 3, 32, 32), torch.randint(10, (num_images,))
        method = pm.methods.DeepEnsemble(
            num_members, of=pm.methods.Single(optimizer=pm.Optimizer("SGD", lr=0.01, momentum=0.9))
        )

        ours = Fit(method, factory, pm.ArrayData(x, y, batch_size=128), "categorical", epochs)

        def loop(channels_last: bool):
            def run():
                images = x.contiguous(memory_format=torch.channels_last) if channels_last else x
                for _ in range(num_members):
                    module = factory()
                    if channels_last:
                        module = module.to(memory_format=torch.channels_last)
                    sgd = torch.optim.SGD(
                        module.parameters(), lr=0.01, momentum=0.9, fused=channels_last or None
                    )
                    batches = in_memory_batches(images, y, 128)
                    train_alone(module, batches, F.cross_entropy, epochs, sgd)

            return run

        return {"polymode": ours, "loop, NCHW": loop(False), "loop, by hand": loop(True)}

    return build


def chain_case() -> Contenders:
    """A chain of trainings of two epochs each, beside the same epochs of one network without any prior."""
    torch.manual_seed(0)
    x, y = torch.randn(1024, 3, 32, 32), torch.randint(10, (1024,))
    data, epochs = pm.ArrayData(x, y, batch_size=128), 4

    def ours(method):
        return Fit(method, pm.models.resnet20, data, "categorical", epochs)

    def loop():
        module = pm.models.resnet20().to(memory_format=torch.channels_last)
        adam = torch.optim.Adam(module.parameters(), fused=True)
        batches = in_memory_batches(x.contiguous(memory_format=torch.channels_last), y, 128)
        train_alone(module, batches, F.cross_entropy, epochs, adam)

    return {
        "polymode": ours(sequential_anchored(1, first_epochs=2)),
        "loop, by hand": loop,
        "Single in fit": ours(pm.methods.Single()),
    }


ADAM = pm.Optimizer("Adam", lr=1e-3)
SGD = pm.Optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


def extended_case(method: pm.Method, optimizer: pm.Optimizer = ADAM) -> Callable[[], Contenders]:
    """Training a network that a method extends, beside the same network without."""

    def build() -> Contenders:
        torch.manual_seed(0)
        x, y = torch.randn(2048, 3, 32, 32), torch.randint(10, (2048,))
        data = pm.ArrayData(x, y, batch_size=128)

        def loop():
            module = pm.models.resnet20().to(memory_format=torch.channels_last)
            options = {"lr": optimizer.lr, **optimizer.options, "fused": True}
            its_own = optimizer.factory(module.parameters(), **options)
            batches = in_memory_batches(x.contiguous(memory_format=torch.channels_last), y, 128)
            train_alone(module, batches, F.cross_entropy, 1, its_own)

        def ours(method):
            def run() -> float:
                posterior = pm.fit(
                    method,
                    pm.models.resnet20,
                    data,
                    likelihood="categorical",
                    epochs=1,
                    backend="loop",
                    progress=False,
                )
                return posterior.record["training_seconds"]  # an epoch, without setting up

            return run

        return {
            "polymode": ours(method),
            "loop, by hand": loop,
            "Single in fit": ours(pm.methods.Single(optimizer=optimizer)),
        }

    return build


def draws_case(where: str | tuple[str, ...], num_draws: int = 100) -> Callable[[], Contenders]:
    """Draws of a patched ResNet-20, averaged, beside as many passes of the plain one."""

    def build() -> Contenders:
        torch.manual_seed(0)
        x, y = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
        method = pm.methods.ECMP(where=where)
        posterior = pm.fit(
            method, pm.models.resnet20, pm.ArrayData(x, y), likelihood="categorical", epochs=1, progress=False
        )
        plain = pm.models.resnet20().to(memory_format=torch.channels_last).eval()
        images = x.contiguous(memory_format=torch.channels_last)

        def passes():
            with torch.no_grad():
                torch.stack([plain(images).softmax(-1) for _ in range(num_draws)]).mean(0)

        def ours():
            posterior.predict(x, num_draws)

        return {"polymode": ours, f"{num_draws} passes, channels last": passes}

    return build


def convolution_flops(factory: Callable[[], nn.Module], num_examples: int) -> Callable[[], float]:
    """Floating-point operations of training: forward, and twice as many backward."""

    def count() -> float:
        from torch.utils.flop_counter import FlopCounterMode

        module, x = factory(), torch.randn(1, 3, 32, 32)
        with FlopCounterMode(display=False) as counter:
            module(x)
        return 3.0 * counter.get_total_flops() * num_examples

    return count


def peak_flops(threads: int) -> float:
    """What this machine reaches in a large matrix product with so many threads: the practical limit."""
    a, before = torch.randn(2048, 2048), torch.get_num_threads()
    torch.set_num_threads(threads)
    a @ a
    seconds = min(_timed(lambda: a @ a) for _ in range(10))
    torch.set_num_threads(before)
    return 2 * 2048**3 / seconds


def small_cnn() -> nn.Module:
    return pm.models.SmallCNN(dropout=0.0)


CASES = {
    "mlp10": Case(
        "K=10 MLPs (20-50-1, batch 100, 10,000 rows, 5 epochs)",
        mlp_case(10, 5, with_loader=True),
        {"loop, DataLoader": 8.0, "loop, in-memory batches": 2.5},
    ),
    "mlp50": Case(
        "K=50 MLPs (the same)",
        mlp_case(50, 2, with_loader=False),
        {"loop, in-memory batches": 5.0},
        repeats=2,
    ),
    "splits": Case(
        "20 splits × 10 members of a UCI-size MLP, 20 epochs",
        splits_case,
        {"loop, in-memory batches": 10.0},
        repeats=2,
    ),
    "mlp10_whole": Case(
        "K=10 MLPs (20-50-1, batch 100, 10,000 rows), 100 epochs, whole calls in fresh processes",
        whole_case(table_data, 10, 100, loader=True),
        {"loop, DataLoader": 20.0},
        repeats=2,
        fresh=True,
    ),
    "mlp50_whole": Case(
        "K=50 of them, 100 epochs",
        whole_case(table_data, 50, 100, loader=False),
        {"loop, in-memory batches": 15.0},
        repeats=1,
        fresh=True,
    ),
    "splits_whole": Case(
        "20 splits × 10 members of a UCI-size MLP, 1,000 epochs",
        whole_case(splits_data, 10, 1000, loader=False),
        {"loop, in-memory batches": 25.0},
        repeats=1,
        fresh=True,
    ),
    "predict1": Case("prediction with S=100 MLPs, 1 point", prediction_case(1), {}, 5),
    "predict10": Case("the same, 10 points", prediction_case(10), {"loop": 10.0}, 5),
    "predict100": Case("the same, 100 points", prediction_case(100), {"loop": 10.0}, 5),
    "predict1000": Case("the same, 1,000 points", prediction_case(1000), {}, 5),
    "smallcnn5": Case(
        "K=5 SmallCNNs, 4,096 images, batch 128",
        convolution_case(small_cnn, 5, 4096),
        {"loop, NCHW": 1.3, "loop, by hand": 0.95},
        flops=convolution_flops(small_cnn, 5 * 4096),
    ),
    "resnet20x3": Case(
        "K=3 ResNet-20s, 1,280 images, batch 128",
        convolution_case(pm.models.resnet20, 3, 1280),
        {"loop, NCHW": 1.3, "loop, by hand": 0.95},
        flops=convolution_flops(pm.models.resnet20, 3 * 1280),
        repeats=2,
    ),
    "resnet20": Case(
        "one ResNet-20, 2,560 images, batch 128 (overhead of fit: 1 − last ratio)",
        convolution_case(pm.models.resnet20, 1, 2560),
        {"loop, NCHW": 1.3, "loop, by hand": 0.97},
        flops=convolution_flops(pm.models.resnet20, 2560),
    ),
    "chain": Case(
        "a sequential chain of ResNet-20s, two trainings of 2 epochs, 1,024 images, batch 128",
        chain_case,
        {"loop, by hand": 0.952, "Single in fit": 0.952},  # at most 1.05 times their seconds an epoch
        flops=convolution_flops(pm.models.resnet20, 4 * 1024),
        repeats=2,
        work=(4, "epochs"),
    ),
}
CASES |= {
    name: Case(
        f"ResNet-20 with {name.upper()} on BatchNorm and output, 2,048 images, batch 128",
        extended_case(method),
        {"loop, by hand": 0.952, "Single in fit": 0.952},  # at most 1.05 times their seconds
        flops=convolution_flops(pm.models.resnet20, 2048),
    )
    for name, method in (("emp", pm.methods.EMP()), ("ecmp", pm.methods.ECMP()))
}
CASES |= {
    name: Case(
        f"ResNet-20 with {name}, 2,048 images, batch 128",
        extended_case(method),
        {"Single in fit": 0.833},  # at most 1.2 times its seconds
        repeats=5,
        flops=convolution_flops(pm.models.resnet20, 2048),
    )
    for name, method in (
        ("mean_field", pm.methods.MeanField(optimizer=ADAM)),
        ("spike_slab", pm.methods.SpikeSlab(optimizer=ADAM)),
    )
}
CASES |= {
    f"{method.name}10": Case(
        f"K=10 MLPs with {method.name}, 2 epochs, vmap",
        drawn_mlps_case(method),
        {"Single in fit": 0.5},  # at most twice its seconds
        repeats=5,
    )
    for method in (pm.methods.MeanField(optimizer=ADAM), pm.methods.SpikeSlab(optimizer=ADAM))
}
CASES["late_phase"] = Case(
    "ResNet-20 in its late phase (K=8, BatchNorm and head), 2,048 images, batch 128",
    extended_case(pm.methods.LatePhase(8, start=0, optimizer=SGD, force=True), SGD),
    {"loop, by hand": 0.971, "Single in fit": 0.971},  # at most 1.03 times their seconds
    repeats=5,
    flops=convolution_flops(pm.models.resnet20, 2048),
)
CASES |= {
    "draws": Case(
        "100 draws of that ResNet-20, 128 images",
        draws_case(("norm", "output")),
        {"100 passes, channels last": 0.909},  # at most 1.1 times their seconds
        repeats=2,
    ),
    "draws_output": Case(
        "the same with the output layer patched only",
        draws_case("output"),
        {"100 passes, channels last": 10.0},
        repeats=2,
    ),
}
CASES |= {
    f"chains{count}": Case(
        f"{count} sequential chains of an MLP (8-50-2, batch 58, 512 rows), {1 + NUM_SHORT} trainings each",
        stacked_chains_case(count),
        {"fits, one after another": 2.0},
        repeats=2,
        work=(count * (FIRST + 2 * NUM_SHORT), "epochs"),
    )
    for count in (2, 5, 10, 20)
}
CASES |= {
    f"hmc{count}": Case(
        f"HMC of the same MLP, full batch: {count} × {TRANSITIONS} trajectories of {LEAPS} leaps",
        hmc_case(count),
        {"loop": 2.0} if count > 1 else {},
        work=(count * (1 + TRANSITIONS * LEAPS), "gradients"),
    )
    for count in (1, 3, 8, 16)
}


# --- measuring ---------------------------------------------------------------------------------


def _timed(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    counted = job()
    return counted if isinstance(counted, float) else time.perf_counter() - began


def _peak_memory(case: str, contender: str, queue: multiprocessing.Queue) -> None:
    job = CASES[case].build()[contender]
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = _resident("VmRSS")
    job()
    queue.put(_resident("VmHWM") - before)


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak_memory(case: str, contender: str) -> float:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_peak_memory, args=(case, contender, queue))
    process.start()
    megabytes = queue.get()
    process.join()
    return megabytes


def measure(name: str, case: Case) -> dict:
    contenders = case.build()
    for job in () if case.fresh else contenders.values():
        job()  # warm up: first calls load kernels and fill caches
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(case.repeats):
        for contender, job in contenders.items():
            best[contender] = min(best[contender], _timed(job))
    memory = {contender: math.nan if case.fresh else peak_memory(name, contender) for contender in contenders}
    rows = [
        {
            "contender": contender,
            "seconds": seconds,
            "ratio": seconds / best["polymode"],
            "goal": case.goals.get(contender),
            "peak_memory_mb": memory[contender],
        }
        for contender, seconds in best.items()
    ]
    if case.work is not None:
        amount, unit = case.work
        for row in rows:
            row |= {f"{unit}_per_second": amount / row["seconds"]}
    result = {"case": name, "title": case.title, "rows": rows}
    if isinstance(contenders["polymode"], Fit):
        ours = contenders["polymode"]
        result |= {"backend": ours.backend, "choice_seconds": ours.choice_seconds, "threads": ours.threads}
    if case.flops is not None:
        result["limit_seconds"] = case.flops() / peak_flops(result.get("threads", torch.get_num_threads()))
    return result


def show(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=result["title"], title_justify="left")
    rates = [key for key in result["rows"][0] if key.endswith("_per_second")]
    columns = ["contender", "seconds", "time / polymode", "goal", "peak memory, MB"]
    for column in columns + [rate.replace("_per_second", " / s") for rate in rates]:
        table.add_column(column, justify="left" if column == "contender" else "right")
    for row in result["rows"]:
        goal = row["goal"]
        verdict = "" if goal is None else f"≥ {goal:g} {'met' if row['ratio'] >= goal else 'MISSED'}"
        table.add_row(
            row["contender"],
            f"{row['seconds']:.3f}",
            f"{row['ratio']:.2f}",
            verdict,
            "" if math.isnan(row["peak_memory_mb"]) else f"{row['peak_memory_mb']:.0f}",
            *[f"{row[rate]:,.4g}" for rate in rates],
        )
    if "limit_seconds" in result:
        limit, ours = result["limit_seconds"], result["rows"][0]["seconds"]
        table.add_row("arithmetic limit", f"{limit:.3f}", f"{limit / ours:.2f}", "", "")
    if "backend" in result:
        table.caption = f"backend {result['backend']}, threads {result['threads']}"
        if result["choice_seconds"]:
            table.caption += f", chosen in {result['choice_seconds']:.2f} s (once a run)"
    Console(width=100).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--cases", default=",".join(CASES), help="comma-separated, * for any: " + ", ".join(CASES)
    )
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    patterns = options.cases.split(",")
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in CASES)]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    names = [name for name in CASES if any(fnmatchcase(name, pattern) for pattern in patterns)]
    results = []
    for name in names:
        results.append(measure(name, CASES[name]))
        show(results[-1])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"torch": torch.__version__, "threads": torch.get_num_threads(), "results": results},
                file,
                indent=2,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
