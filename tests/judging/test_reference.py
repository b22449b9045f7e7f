"""References: files, checks before any training, distances to them, and verdicts about chains."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

import polymode as pm
from polymode.application.comparison import noise_floor_text
from polymode.errors import InputError
from polymode.judging.contents import predictive_samples
from polymode.judging.diagnostics import MOST_ENERGY_VARIANCE, check_reference, mixing, noise_floor
from polymode.judging.reference import Reference, row_hashes
from polymode.likelihoods import Bernoulli, Categorical, FixedGaussian
from polymode.methods import HMC, Anchored, Microcanonical


def classes(n=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return pm.ArrayData(x, (x @ torch.randn(3, 3, generator=generator)).argmax(1))


def numbers(n=30):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return pm.ArrayData(x, x[:, 0] + 0.3 * torch.randn(n, generator=generator))


def right(data, confidence=0.8):
    rest = (1 - confidence) / 2
    return torch.full((data.num_examples, 3), rest).scatter_(1, data.targets[:, None], confidence)


def test_a_file_holds_everything(tmp_path):
    data = classes()
    made = Reference(
        "probabilities", right(data), row_hashes(data), {"data": "toy", "verdict": {"is_fit": True}}
    )
    read = Reference.load(made.save(tmp_path / "r.npz"))
    assert torch.equal(read.values, made.values)
    assert torch.equal(read.rows, made.rows)
    assert read.about == made.about
    assert read.digest == made.digest
    read.check(data, Categorical(), 3)


def test_rows_are_told_apart_by_all_of_their_inputs():
    first = row_hashes(pm.ArrayData((torch.eye(3), torch.zeros(3, 2)), torch.zeros(3)))
    second = row_hashes(
        pm.ArrayData((torch.eye(3), torch.tensor([[0.0, 0], [0, 1], [0, 0]])), torch.zeros(3))
    )
    assert len(set(first.tolist())) == 3
    assert (first == second).tolist() == [True, False, True]


def test_a_foreign_npz_is_read_by_the_name_of_its_matrix(tmp_path):
    data = classes()
    np.savez(tmp_path / "other.npz", test=right(data).numpy(), labels=data.targets.numpy())
    Reference.load(f"{tmp_path}/other.npz:test").check(data, Categorical(), 3)
    with pytest.raises(InputError, match=r"holds test, labels. Name the matrix .*other\.npz:test"):
        Reference.load(tmp_path / "other.npz")
    with pytest.raises(InputError, match=r"Unknown array .* 'tset'\. Did you mean 'test'"):
        Reference.load(f"{tmp_path}/other.npz:tset")


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_files_that_cannot_be_read(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(InputError, match="not a readable"):
        Reference.load(tmp_path / "bad.npz")
    with pytest.raises(InputError, match="There is no reference"):
        Reference.load(tmp_path / "none.npz")


def test_references_of_other_shapes_orders_and_classes_are_refused():
    data = classes()
    known = Reference("probabilities", right(data), row_hashes(data))
    backwards = data.subset(torch.arange(39, -1, -1))
    with pytest.raises(InputError, match="same test points in another order"):
        known.check(backwards, Categorical(), 3)
    with pytest.raises(InputError, match="other test points: 40 of 40 differ"):
        known.check(pm.ArrayData(data.inputs + 1, data.targets), Categorical(), 3)
    with pytest.raises(InputError, match="about 40 points, the test data have 39"):
        known.check(data.subset(range(39)), Categorical(), 3)
    with pytest.raises(InputError, match="3 classes, the task has 4"):
        known.check(data, Categorical(), 4)
    with pytest.raises(InputError, match="needs samples"):
        known.check(numbers(40), FixedGaussian(), 1)
    with pytest.raises(InputError, match="not of the likelihood 'bernoulli'"):
        known.check(data, Bernoulli(), 3)


def test_a_foreign_reference_in_another_order_is_noticed_by_its_accuracy():
    data = classes()
    shifted = right(pm.ArrayData(data.inputs, (data.targets + 1) % 3))
    with pytest.raises(InputError, match=r"right on 0\.0% .* seems to be in another order"):
        Reference("probabilities", shifted).check(data, Categorical(), 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(4, 3), "sum to 1 in each row"),
        (torch.full((4, 3), torch.nan), "finite numbers only"),
        (torch.ones(4) / 3, r"a matrix of real numbers, got \[4\]"),
        (torch.ones(4, 1, dtype=torch.long), "a matrix of real numbers, got .* of torch.int64"),
        (torch.ones(0, 3), r"a matrix of real numbers, got \[0, 3\]"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(InputError, match=message):
        Reference("probabilities", values)


def fitted(method, data, likelihood, outputs, epochs):
    return pm.fit(
        method,
        lambda: pm.models.MLP(3, outputs, (4,)),
        data,
        likelihood=likelihood,
        epochs=epochs,
        progress=False,
    )


def test_distances_of_classes():
    data = classes()
    posterior = fitted(Anchored(3), data, "categorical", 3, 2)
    reference = Reference("probabilities", right(data), row_hashes(data))
    scores = pm.evaluate(posterior, data, reference=reference)
    mean = posterior.predict(data.inputs).mean
    assert scores["agreement"] == pytest.approx((mean.argmax(1) == data.targets).double().mean().item())
    expected = 0.5 * (mean - right(data)).abs().sum(1).mean().item()
    assert scores["total_variation"] == pytest.approx(expected, rel=1e-5)
    own = Reference("probabilities", mean, row_hashes(data))
    scores = pm.evaluate(posterior, data, reference=own)
    assert scores["agreement"] == 1
    assert scores["total_variation"] == pytest.approx(0, abs=1e-7)


def test_distances_of_numbers():
    data = numbers()
    likelihood = FixedGaussian(std=0.3)
    posterior = fitted(Anchored(7), data, likelihood, 1, 20)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(500, 30, generator=generator) + 0.5
    scores = pm.evaluate(posterior, data, reference=Reference("samples", values, row_hashes(data)))
    samples = predictive_samples(posterior, data.inputs)
    assert samples.shape == (1000, 30)
    by_scipy = [wasserstein_distance(samples[:, i], values[:, i]) for i in range(30)]
    assert scores["wasserstein1"] == pytest.approx(np.mean(by_scipy), rel=1e-6)
    assert scores["wasserstein2"] >= scores["wasserstein1"]


def test_samples_have_the_moments_of_the_predictive_and_noise_of_their_own():
    data = numbers()
    posterior = fitted(Anchored(7), data, FixedGaussian(std=0.3), 1, 20)
    predictive = posterior.predict(data.inputs)
    samples = predictive_samples(posterior, data.inputs, num_samples=20_000)
    error = predictive.std / 20_000**0.5
    assert ((samples.mean(0) - predictive.mean.squeeze()).abs() < 4.5 * error.squeeze()).all()
    torch.testing.assert_close(samples.std(0), predictive.std.squeeze().double(), rtol=0.03, atol=0)
    few = predictive_samples(posterior, data.inputs, num_samples=7)  # one of each member
    noise = few - torch.stack([o.squeeze() for _, out, _ in posterior.outputs(data.inputs) for o in out])
    assert len(noise.unique()) == noise.numel()  # not one draw for all members


def test_chains_that_have_mixed_are_told_from_those_that_have_not():
    data = numbers(12)
    likelihood = FixedGaussian(std=0.5)
    linear = lambda: torch.nn.Linear(3, 1)  # noqa: E731
    good = pm.fit(
        HMC(4, 0.7, num_samples=60, descent=10),
        linear,
        data,
        likelihood=likelihood,
        epochs=2500,
        progress=False,
    )
    judged = check_reference(good, data)
    assert judged.is_fit, judged.reasons
    assert judged.mixing.rhat < 1.05
    assert judged.mixing.effective > 100
    bad = pm.fit(
        HMC(4, 0.7, num_samples=60, descent=0, burn_in=0.001, step_size=1e-4, trajectory=1e-3),
        linear,
        data,
        likelihood=likelihood,
        epochs=2402,
        progress=False,
    )
    judged = check_reference(bad, data)
    assert not judged.is_fit
    assert any("R-hat" in reason for reason in judged.reasons)
    with pytest.warns(UserWarning, match="300 of 300 trajectories diverge"):
        diverging = pm.fit(
            HMC(4, 0.7, num_samples=60, descent=0, burn_in=0.001, step_size=100.0),
            linear,
            data,
            likelihood=likelihood,
            epochs=301,
            progress=False,
        )
    words = " ".join(check_reference(diverging, data).reasons)
    assert "accepts 0% of its proposals" in words
    assert "100.0% of the trajectories diverge" in words


def of_linear(method, data, epochs):
    return pm.fit(
        method,
        lambda: torch.nn.Linear(3, 1),
        data,
        likelihood=FixedGaussian(std=0.5),
        epochs=epochs,
        progress=False,
        backend="vmap",
    )


def test_microcanonical_chains_are_judged_by_the_errors_of_their_steps():
    data = numbers(12)
    good = of_linear(Microcanonical(4, 0.7, num_samples=60, descent=10, energy_variance=5e-4), data, 2000)
    judged = check_reference(good, data)
    assert judged.is_fit, judged.reasons
    assert judged.acceptance is None
    largest = max(chain["energy_variance"] for chain in good.record["findings"])
    assert judged.energy_variance == largest <= MOST_ENERGY_VARIANCE
    assert judged.divergences == 0
    assert judged.config()["is_fit"] is True

    rough = of_linear(Microcanonical(4, 0.7, num_samples=60, descent=10, energy_variance=0.3), data, 1000)
    judged = check_reference(rough, data)
    [reason] = judged.reasons
    assert f"has the variance {judged.energy_variance:.2g} for each weight" in reason
    assert f"{MOST_ENERGY_VARIANCE:g} is allowed: lower energy_variance" in reason

    # One chain of four is enough to spoil a sample, by its errors or by what it could not follow.
    for change, expected in (
        ({"energy_variance": 2 * MOST_ENERGY_VARIANCE}, "the energy's error in a step of a chain"),
        ({"energy_variance": float("nan")}, "the energy's error in a step of a chain"),
        ({"divergences": good.record["findings"][0]["steps"] // 20}, "1.2% of the steps diverge"),
        ({"energy_variance": None}, "the energy's error in a step of a chain"),  # no step was taken
    ):
        first, *others = good.record["findings"]
        record = {**good.record, "findings": [first | change, *others]}
        [reason] = check_reference(replace(good, record=record), data).reasons
        assert reason.startswith(expected)
        assert "lower energy_variance" in reason


def test_chains_that_are_stuck_at_different_values_do_not_pass():
    """R-hat is infinite there: such values must count, not be left out.

    Where kernels round equal members differently, ranks make of it the largest R-hat they know, about 2.4.
    """
    data = numbers(12)
    posterior = fitted(HMC(2, num_samples=8), data, FixedGaussian(std=0.5), 1, 60)
    [members] = posterior.draw()
    stuck = {
        name: t.unflatten(0, (2, 8))[:, :1].expand(2, 8, *t.shape[1:]).flatten(0, 1).clone()
        for name, t in members.stacked.items()
    }
    found = mixing(pm.Particles(posterior.network, blocks=[pm.Members(stuck, labels=members.labels)]), data)
    assert found.rhat > 2
    assert found.worst_rhat > 2
    assert found.effective < 50


# --- noise floors --------------------------------------------------------------------------------------


def drawn(total_chains, num_samples, likelihood, outputs, weights):
    """Samples of linear networks, a weight for each of many points, in chains. weights: [S, outputs, N]."""
    labels = torch.zeros(total_chains * num_samples, 3, dtype=torch.long)
    labels[:, 1] = torch.arange(total_chains).repeat_interleave(num_samples)
    num_points = weights.shape[-1]
    linear = lambda: torch.nn.Linear(num_points, outputs, bias=False)  # noqa: E731
    data = pm.ArrayData(torch.eye(num_points), torch.zeros(num_points, dtype=torch.long))
    if isinstance(likelihood, FixedGaussian):
        data = pm.ArrayData(torch.eye(num_points), torch.zeros(num_points, 1))
    [one] = pm.fit(
        pm.methods.Single(), linear, [data], likelihood=likelihood, epochs=1, seed=[0], progress=False
    )
    return pm.Particles(one.network, blocks=[pm.Members({"weight": weights}, labels=labels)]), data


@pytest.mark.parametrize(("total_chains", "num_samples"), [(4, 250), (5, 200), (1, 1000)])
def test_the_noise_floor_of_independent_gaussian_samples(total_chains, num_samples):
    """E W₁ of two empirical laws of N(0, 1): √(2/π) √(1/n + 1/m) ∫ √(Φ(1 − Φ)), as F_n − G_m is Gaussian."""
    weights = torch.randn(1000, 1, 60, generator=torch.Generator().manual_seed(0))
    posterior, data = drawn(total_chains, num_samples, FixedGaussian(std=1e-6), 1, weights)
    found = noise_floor(posterior, data)
    x = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    spread = torch.trapezoid((torch.special.ndtr(x) * torch.special.ndtr(-x)).sqrt(), x).item()
    first = num_samples * (total_chains // 2) if total_chains > 1 else 500
    expected = (2 / np.pi * (1 / first + 1 / (1000 - first))) ** 0.5 * spread
    # A point's W₁ deviates by about 0.45 of itself; 60 points, and what the ways share: 4 · 0.45/√60 = 0.23.
    assert found["wasserstein1"] == pytest.approx(expected, rel=0.23)
    assert found["wasserstein2"] >= found["wasserstein1"]


@pytest.mark.parametrize("total_chains", [2, 3, 4])
def test_all_samples_are_half_as_far_from_the_truth_as_halves_are_from_each_other(total_chains):
    num_points, total = 600, 600
    weights = torch.randn(total, 2, num_points, generator=torch.Generator().manual_seed(1))
    posterior, data = drawn(total_chains, total // total_chains, Categorical(), 2, weights)
    found = noise_floor(posterior, data)
    x, step = torch.linspace(-12, 12, 20_001, dtype=torch.float64), 24 / 20_000
    law = (-x.square() / 4).exp() / (4 * np.pi) ** 0.5 * step  # a difference of logits is N(0, 2)
    variance = (law * (x.sigmoid() - 0.5).square()).sum().item()
    first = total // total_chains * (total_chains // 2)
    expected = (2 / np.pi * variance * (1 / first + 1 / (total - first))) ** 0.5
    # |N(0, 1)| deviates by 0.76 of its mean: 4 · 0.76/√600 = 0.12.
    assert found["total_variation"] == pytest.approx(expected, rel=0.13)
    whole = posterior.predict(data.inputs).mean
    error = 0.5 * (whole - 0.5).abs().sum(1).mean().item()  # the truth is ½ for both classes
    uneven = (1 / first + 1 / (total - first)) / (4 / total)  # one chain more or less
    assert error == pytest.approx(found["total_variation"] / 2 / uneven**0.5, rel=0.18)
    assert 0.3 < found["agreement"] < 0.7  # labels of coin flips


def test_chains_that_are_identical_have_no_noise():
    one = torch.randn(20, 3, 30, generator=torch.Generator().manual_seed(0))
    posterior, data = drawn(3, 20, Categorical(), 3, one.repeat(3, 1, 1))
    assert noise_floor(posterior, data) == {"agreement": 1.0, "total_variation": pytest.approx(0, abs=1e-12)}
    posterior, data = drawn(5, 20, FixedGaussian(std=1e-9), 1, one[:, :1].repeat(5, 1, 1))
    # 1,000 samples of 100 members are ten of each: nothing but the noise of 1e-9 tells the halves apart.
    assert max(noise_floor(posterior, data).values()) < 1e-8


def test_chains_in_different_places_show_in_the_noise_floor():
    """Halves are made of whole chains: what chains do not agree about is not averaged away."""
    places = torch.tensor([-3.0, 3.0]).repeat_interleave(50)[:, None, None]
    near = 0.01 * torch.randn(100, 1, 8, generator=torch.Generator().manual_seed(0))
    posterior, data = drawn(2, 50, FixedGaussian(std=1e-6), 1, places + near)
    assert noise_floor(posterior, data)["wasserstein1"] == pytest.approx(6, abs=0.02)


def test_the_noise_floor_is_kept_and_told(tmp_path):
    data = classes()
    floor = {"agreement": 0.98, "total_variation": 0.021}
    about = {"noise_floor": floor, "effective_samples": 109.4}
    read = Reference.load(Reference("probabilities", right(data), about=about).save(tmp_path / "r.npz"))
    assert read.noise_floor == floor
    assert noise_floor_text(read) == (
        "noise floor of the reference: agreement 0.9800, TV 0.0210 between halves of its own chains; methods "
        "whose distances differ by less cannot be told apart (its samples are worth 109 independent ones)"
    )
    old = Reference("probabilities", right(data))
    assert noise_floor_text(old) == "the reference's own noise floor is not known"
    with pytest.raises(InputError, match="says of its noise_floor is damaged"):
        Reference("probabilities", right(data), about={"noise_floor": ["a"]})
    for wrong in ("a", float("nan"), -0.1):
        with pytest.raises(InputError, match="holds a number for each distance, got"):
            Reference("probabilities", right(data), about={"noise_floor": {"total_variation": wrong}})


def test_r_hat_needs_chains_and_a_reference_needs_hmc():
    data = numbers(12)
    one = fitted(HMC(1, num_samples=5), data, FixedGaussian(std=0.5), 1, 20)
    with pytest.raises(InputError, match="R-hat compares chains: there is one"):
        mixing(one, data)
    other = fitted(Anchored(3), data, FixedGaussian(std=0.5), 1, 2)
    with pytest.raises(InputError, match="a finished run of hmc or microcanonical"):
        check_reference(other, data)


def test_weights_that_change_places_do_not_count_against_chains():
    """Two chains in equivalent places, hidden units exchanged, compute the same function: R-hat says so."""
    data = numbers(20)
    posterior = fitted(HMC(2, num_samples=30), data, FixedGaussian(std=0.5), 1, 800)
    [members] = posterior.draw()
    first, second = slice(0, 30), slice(30, 60)
    exchanged = {name: tensor.clone() for name, tensor in members.stacked.items()}
    order = torch.tensor([3, 1, 0, 2])
    names = sorted(exchanged)
    for tensor in exchanged.values():  # the second chain becomes the first one ...
        tensor[second] = tensor[first]
    plain = {name: tensor.clone() for name, tensor in exchanged.items()}
    hidden, head = ([n.rpartition(".")[0] for n in names if n.endswith("bias")][i] for i in (0, -1))
    # ... with its hidden units in another order.
    exchanged[f"{hidden}.weight"][second] = exchanged[f"{hidden}.weight"][second][:, order]
    exchanged[f"{hidden}.bias"][second] = exchanged[f"{hidden}.bias"][second][:, order]
    exchanged[f"{head}.weight"][second] = exchanged[f"{head}.weight"][second][:, :, order]
    found = [
        mixing(pm.Particles(posterior.network, blocks=[pm.Members(weights, labels=members.labels)]), data)
        for weights in (plain, exchanged)
    ]
    assert found[0].rhat == pytest.approx(found[1].rhat, rel=1e-3)
    assert found[0].worst_rhat == pytest.approx(found[1].worst_rhat, rel=1e-3)
    moved = (exchanged[f"{hidden}.bias"][first] - exchanged[f"{hidden}.bias"][second]).abs().max()
    assert moved > 0.1  # while the weights themselves are far apart


@pytest.mark.parametrize(
    "about",
    [{"verdict": None}, {"verdict": []}, {"chains": {}}, {"method": "hmc"}, {"effective_samples": "9"}],
)
def test_what_a_stranger_says_of_a_reference_is_checked(about):
    with pytest.raises(InputError, match=f"says of its {next(iter(about))} is damaged"):
        Reference("probabilities", torch.tensor([[0.5, 0.5]]), about=about)


def test_a_floor_that_is_not_known_and_whole_numbers_will_do():
    known = Reference(
        "probabilities", torch.tensor([[0.5, 0.5]]), about={"noise_floor": None, "effective_samples": 9}
    )
    assert known.noise_floor is None
