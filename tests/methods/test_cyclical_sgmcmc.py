"""Algorithm 1 of Zhang et al. (2020) by hand: descent, then noise, then samples, cycle after cycle.

What it samples from is tested in ``tests/statistical/test_posterior_samples.py``, the kernels alone in
``tests/samplers/test_stochastic_gradients.py``.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.methods import CyclicalSGMCMC, DeepEnsemble, Trajectory
from polymode.networks.surgery import build
from polymode.seeds import derive_generator, draw_seed
from tolerances import assert_equal_up_to_rounding

PRIOR, LR = 0.7, 0.3


def network():
    return pm.models.MLP(4, 3, (5,), batch_norm=True).double()


def data(n=30, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, torch.randint(3, (n,), generator=generator), batch_size=8)


def fitted(method, epochs, source=None, **options):
    options = {"likelihood": "categorical", "progress": False, "backend": "loop"} | options
    return pm.fit(method, network, data() if source is None else source, epochs=epochs, **options)


def rows(posterior):
    return [block.member(i) for block in posterior.draw() for i in range(block.num_members)]


def by_hand(chain, source, *, kernel, temperature, cycles, noisy, samples, friction=0.9):
    """The paper's loop with autograd and nothing else; returns samples, and weights after every epoch."""
    generator = derive_generator(0, "chain", chain)
    module = build(network, draw_seed(generator))
    draw_seed(generator)  # the seed of the member's noise
    parameters = dict(sorted(module.named_parameters()))
    n, done, path, kept = source.num_examples, 0, [], []
    momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}
    steps = math.ceil(n / 8)
    for epochs, with_noise in zip(cycles, noisy, strict=True):
        for epoch in range(epochs):
            order = torch.randperm(n, generator=derive_generator(0, "order", chain, done, n))
            done += 1
            for step, batch in enumerate(order.split(8)):
                h = LR * 0.5 * (1 + math.cos(math.pi * (steps * epoch + step) / (steps * epochs)))
                module.zero_grad()
                loss = F.cross_entropy(module(source.inputs[batch]), source.targets[batch])
                penalty = sum(p.square().sum() for p in parameters.values()) / (2 * PRIOR**2)
                (loss + penalty / n).backward()
                size = sum(p.numel() for p in parameters.values())
                drawn = torch.zeros(size, dtype=torch.float64)
                if epoch >= epochs - with_noise:
                    drawn = torch.randn(size, generator=generator, dtype=torch.float64)
                for (name, p), noise in zip(
                    parameters.items(), drawn.split([p.numel() for p in parameters.values()]), strict=True
                ):
                    noise = noise.reshape(p.shape)
                    with torch.no_grad():
                        if kernel == "sgld":
                            p.add_(-h * p.grad + math.sqrt(2 * h * temperature / n) * noise)
                            continue
                        m = momentum[name]
                        m.mul_(1 - friction).add_(-h * p.grad)
                        m.add_(math.sqrt(2 * h * friction * temperature / n) * noise)
                        p.add_(m)
            path.append({name: t.detach().clone() for name, t in module.state_dict().items()})
            if epoch >= epochs - samples:
                kept.append(path[-1])
    return kept, path


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("kernel", ["sgld", "sghmc"])
@pytest.mark.parametrize(
    ("epochs", "cycles", "sampling", "noisy", "samples"),
    [
        (10, [5, 5], 0.4, [2, 2], 2),  # a sample after each epoch of noise
        (11, [6, 5], 0.6, [4, 3], 1),  # epochs of noise before the first sample
        (8, [4, 4], 0.1, [2, 2], 2),  # at least as many epochs of noise as samples
        (6, [3, 3], 1.0, [2, 2], 1),  # and one without
    ],
)
def test_it_is_algorithm_1(kernel, epochs, cycles, sampling, noisy, samples, backend):
    method = CyclicalSGMCMC(
        kernel, len(cycles), samples, sampling, lr=LR, temperature=0.3, friction=0.8, prior_std=PRIOR
    )
    posterior = fitted(DeepEnsemble(2, of=method), epochs, backend=backend)
    options = {"kernel": kernel, "temperature": 0.3, "friction": 0.8}
    options |= {"cycles": cycles, "noisy": noisy, "samples": samples}
    expected = [*by_hand(0, data(), **options)[0], *by_hand(1, data(), **options)[0]]
    found = rows(posterior)
    assert len(found) == len(expected) == 2 * method.chain_members
    for weights, other in zip(found, expected, strict=True):
        for name, tensor in weights.items():  # with running statistics
            assert_equal_up_to_rounding(tensor, other[name], name=name)
    numbers = list(range(method.chain_members))
    assert posterior.labels.tolist() == [[0, chain, number] for chain in range(2) for number in numbers]
    assert posterior.record["member_epochs"] == pytest.approx(2 * epochs)


@pytest.mark.parametrize("kernel", ["sgld", "sghmc"])
def test_there_is_no_noise_in_exploration(kernel):
    """Hot and cold chains are one chain, bit for bit, until sampling begins, and that of plain descent."""
    hot = CyclicalSGMCMC(kernel, 1, 2, 0.5, lr=LR, temperature=1.0, prior_std=PRIOR)
    paths = [rows(fitted(Trajectory(replace(hot, temperature=t)), 8)) for t in (1.0, 1e-3)]
    for epoch in range(8):
        same = all(torch.equal(paths[0][epoch][name], tensor) for name, tensor in paths[1][epoch].items())
        assert same == (epoch < 4), epoch
    _, path = by_hand(0, data(), kernel=kernel, temperature=0.0, cycles=[8], noisy=[0], samples=1)
    for epoch in range(4):
        for name, tensor in paths[0][epoch].items():
            assert_equal_up_to_rounding(tensor, path[epoch][name])
    # Without noise the rest of the cycle would be descent, too: at T → 0 it is.
    frozen = rows(fitted(Trajectory(replace(hot, temperature=1e-30)), 8))
    for weights, other in zip(frozen, path, strict=True):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-12)


def test_without_momentum_to_keep_descent_is_torch_sgd():
    """Exploration of sgld against torch.optim, through the library's own loop."""
    sgld = CyclicalSGMCMC("sgld", 1, 1, 0.2, lr=LR, prior_std=None)
    whole = pm.schedules.Part(pm.schedules.Cosine(), 0, 6)
    plain = pm.methods.Single(optimizer=pm.Optimizer("SGD", lr=LR), schedule=whole)
    [expected] = rows(fitted(plain, 5))
    assert_equal_up_to_rounding(rows(fitted(Trajectory(sgld), 6))[4], expected)


def test_data_sets_have_their_own_numbers_of_observations():
    """N divides the temperature: chains on unequal data sets have the noise that they have alone."""
    sets = [data(13, seed=3), data(30, seed=4)]
    method = CyclicalSGMCMC("sghmc", 1, 1, 0.5, lr=LR, prior_std=PRIOR)
    options = {"kernel": "sghmc", "temperature": 1.0, "cycles": [4], "noisy": [2], "samples": 1}
    for source, posterior in zip(sets, fitted(method, 4, sets, backend="vmap"), strict=True):
        [found], ([expected], _) = rows(posterior), by_hand(0, source, **options)
        for name, tensor in found.items():
            assert_equal_up_to_rounding(tensor, expected[name])


def test_a_run_that_was_cut_in_the_noise_goes_on_with_the_same_bits(tmp_path):
    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.epochs_done == 7:
            raise Stop

    method = DeepEnsemble(2, of=CyclicalSGMCMC("sghmc", 2, 1, 0.6, lr=LR))
    expected = fitted(method, 10)
    options = {"run_dir": tmp_path / "run", "checkpoint_seconds": 0.0}
    with pytest.raises(Stop):
        fitted(method, 10, observer=stop, **options)
    for found, other in zip(rows(fitted(method, 10, resume=True, **options)), rows(expected), strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in other.items())


def test_the_record_tells_the_temperature():
    method = CyclicalSGMCMC(num_cycles=1, samples_per_cycle=1, temperature=0.125)
    assert fitted(method, 2).record["findings"] == [{"temperature": 0.125}]
    both = fitted(DeepEnsemble(2, of=method), 2)
    assert both.record["findings"] == [{"temperature": 0.125}] * 2


def test_budgets_and_numbers():
    method = CyclicalSGMCMC(num_cycles=4, samples_per_cycle=3)
    assert method.for_budget(200) == (method, 200)
    assert method.for_budget(5) == (method, 16)
    assert method.chain_members == 12
    assert method.num_parameters(network()) == 12 * pm.methods.Single().num_parameters(network())


def test_the_published_setting_has_noise_in_five_epochs_and_samples_in_three():
    """Cycles of 50 epochs: noise from the 46th, samples after 48, 49 and 50."""
    phases = []
    fitted(CyclicalSGMCMC(num_cycles=2), 100, data(8), observer=lambda e: phases.append(e.phase))
    assert phases == 2 * (["explore"] * 45 + ["warm up"] * 2 + ["sample"] * 3)


def test_too_few_epochs_are_refused_with_numbers():
    message = "7 epochs are too few for 2 cycles, each with an epoch of descent and 3 that end in a sample"
    with pytest.raises(InputError, match=message):
        fitted(CyclicalSGMCMC(num_cycles=2, samples_per_cycle=3), 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "hmc"}, "Unknown kernel 'hmc'"),
        ({"num_cycles": 0}, "num_cycles must be a whole number"),
        ({"samples_per_cycle": 0}, "samples_per_cycle must be a whole number"),
        ({"sampling": 0}, "sampling must be above 0 and at most 1, got 0"),
        ({"friction": 1.5}, "friction must be above 0 and at most 1, got 1.5"),
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"temperature": 0.0}, "temperature must be a positive number"),
        ({"prior_std": -1.0}, "prior_std must be a positive number"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        CyclicalSGMCMC(**options)
