"""Tunnels against a loop by hand, one point at a time; places, ends, statistics, how low they lie."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from cases import BY_NAME
from polymode.errors import InputError
from polymode.methods import DeepEnsemble, Single, Tunnel
from polymode.methods.tunnel import put_back
from polymode.seeds import derive_generator
from tolerances import assert_equal_up_to_rounding

SGD = pm.Optimizer("SGD", lr=0.05, momentum=0.9)
ADAM = pm.Optimizer("Adam", lr=0.02)
MLP, NORM = BY_NAME["mlp"], BY_NAME["batch_norm"]


def fitted(method, epochs=3, case=MLP, data=None, model=None, **options):
    options = {"progress": False, "backend": "loop"} | options
    return pm.fit(
        method,
        model or case.double_factory,
        case.data() if data is None else data,
        likelihood=case.likelihood,
        epochs=epochs,
        **options,
    )


def solutions(count=2, case=MLP, **options):
    return fitted(DeepEnsemble(count, of=Single(optimizer=SGD)), 4, case, **options)


def rows(posterior):
    return [block.member(i) for block in posterior.draw() for i in range(block.num_members)]


def vector(weights, names):
    return torch.cat([weights[name].double().flatten() for name in names])


def trained(case=MLP):
    return [name for name, _ in case.factory().named_parameters()]


def assert_places(points, first, last, names, tolerance):
    """(θ − θ₁)·(θ₂ − θ₁)/‖θ₂ − θ₁‖² = j/(J + 1) for the points between the ends."""
    start, line = vector(first, names), vector(last, names) - vector(first, names)
    for number, weights in enumerate(points, 1):
        place = (vector(weights, names) - start) @ line / (line @ line)
        assert abs(place.item() - number / (len(points) + 1)) < tolerance, number


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("case", [MLP, NORM], ids=["mlp", "batch norm"])
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["SGD", "Adam"])
def test_points_keep_their_places_and_ends_are_untouched(dtype, tolerance, case, optimizer):
    """In single precision a sum over some dozen weights is exact to some 1e-7."""
    options = {"case": case, "model": lambda: case.factory().to(dtype)}
    ends = solutions(**options)
    posterior = fitted(Tunnel(4, optimizer=optimizer), 10, initial=ends, **options)
    first, *points, last = rows(posterior)
    assert len(points) == 4
    assert points[0][trained(case)[0]].dtype == dtype
    for found, expected in zip((first, last), rows(ends), strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert_places(points, first, last, trained(case), tolerance)
    names = trained(case)
    for number, weights in enumerate(points, 1):  # and they have moved away from the line
        on_line = torch.lerp(vector(first, names), vector(last, names), number / 5)
        assert (vector(weights, names) - on_line).norm() > 1e-2
    assert posterior.labels.tolist() == [[0, 0, number] for number in range(6)]
    assert posterior.record["member_epochs"] == pytest.approx(4 * 10)


def by_hand(first, last, place, chain, epochs, make, prior=None, case=MLP):
    """One point with a module, torch.optim and a projection of its own."""
    source, module = case.data(), case.double_factory()
    names = [name for name, _ in module.named_parameters()]
    start, line = vector(first, names), vector(last, names) - vector(first, names)
    nn.utils.vector_to_parameters(start + place * line, module.parameters())
    optimizer, n = make(module.parameters()), source.num_examples
    for epoch in range(epochs):
        order = torch.randperm(n, generator=derive_generator(0, "order", chain, epoch, n))
        for batch in order.split(8):
            optimizer.zero_grad()
            loss = F.cross_entropy(module(source.inputs[batch]), source.targets[batch])
            if prior is not None:
                loss = loss + sum(p.square().sum() for p in module.parameters()) / (2 * prior**2) / n
            loss.backward()
            optimizer.step()
            now = nn.utils.parameters_to_vector(module.parameters()).detach()
            along = (now - start) @ line / (line @ line)
            nn.utils.vector_to_parameters(now + (place - along) * line, module.parameters())
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (SGD, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
        (ADAM, lambda p: torch.optim.Adam(p, lr=0.02)),
    ],
    ids=["SGD", "Adam"],
)
def test_it_is_the_loop_by_hand(backend, optimizer, make):
    """Two chains: one leads from the first network to the second, the other from the third to the fourth."""
    ends = solutions(4)
    method = DeepEnsemble(2, of=Tunnel(3, prior_std=0.8, optimizer=optimizer))
    posterior = fitted(method, initial=ends, backend=backend)
    assert list(posterior.chains()) == [(0, 0), (0, 1)]
    solved = rows(ends)
    for (_, chain), path in posterior.chains().items():
        first, *points, last = rows(path)
        assert all(torch.equal(first[name], tensor) for name, tensor in solved[2 * chain].items())
        assert all(torch.equal(last[name], tensor) for name, tensor in solved[2 * chain + 1].items())
        for number, weights in enumerate(points, 1):
            expected = by_hand(first, last, number / 4, chain, 3, make, prior=0.8)
            for name, tensor in expected.items():
                assert_equal_up_to_rounding(weights[name], tensor, name=name)


def test_points_with_batch_norm_get_statistics_of_their_own():
    """The whole data set in one batch: mean and unbiased variance of what the layer sees."""
    whole = NORM.data(24, batch_size=24)
    ends = solutions(case=NORM)
    first, *points, last = rows(fitted(Tunnel(2, optimizer=SGD), 5, NORM, whole, initial=ends))
    module = NORM.double_factory()
    [(norm, layer)] = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.BatchNorm1d)]
    seen = []
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    for weights in points:
        module.train()
        torch.func.functional_call(module, {n: t.clone() for n, t in weights.items()}, (whole.inputs,))
        torch.testing.assert_close(weights[f"{norm}.running_mean"], seen[-1].mean(0))
        torch.testing.assert_close(weights[f"{norm}.running_var"], seen[-1].var(0))
    for found, expected in zip((first, last), rows(ends), strict=True):  # the ends keep what they came with
        for name in (f"{norm}.running_mean", f"{norm}.running_var"):
            assert torch.equal(found[name], expected[name])
    assert not torch.allclose(points[0][f"{norm}.running_mean"], points[1][f"{norm}.running_mean"])


def test_layers_in_evaluation_mode_keep_their_statistics():
    def fixed():
        module = NORM.double_factory()
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()
        return module

    ends = solutions(case=NORM, model=fixed)
    posterior = fitted(Tunnel(2, optimizer=SGD), case=NORM, model=fixed, initial=ends)
    for weights in rows(posterior):
        for name, tensor in weights.items():
            if "running" in name:
                assert torch.equal(tensor, rows(ends)[0][name])


def test_data_sets_have_their_own_ends():
    sets = [MLP.data(13, seed=1), MLP.data(24, seed=2)]
    ends = fitted(DeepEnsemble(2, of=Single(optimizer=SGD)), data=sets)
    together = fitted(Tunnel(2, optimizer=SGD), data=sets, initial=ends)
    for source, pair, path in zip(sets, ends, together, strict=True):
        alone = rows(fitted(Tunnel(2, optimizer=SGD), data=source, initial=pair))
        for found, expected in zip(rows(path), alone, strict=True):
            assert_equal_up_to_rounding(found, expected)


def moons(n=120):
    """Two half circles that reach into each other, with noise."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.pi * torch.rand(n, generator=generator, dtype=torch.float64)
    label = torch.arange(n) % 2
    sign = 1.0 - 2 * label
    x = torch.stack([torch.cos(angle) * sign + label, torch.sin(angle) * sign + 0.5 * label], 1)
    x = x + 0.1 * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, label, batch_size=30)


def test_the_tunnel_lies_lower_than_the_straight_line():
    data, epochs = moons(), 60
    model = lambda: pm.models.MLP(2, 2, (16,), activation=nn.Tanh).double()  # noqa: E731
    options = {"likelihood": "categorical", "progress": False, "backend": "vmap"}
    single = Single(optimizer=pm.Optimizer("Adam", lr=0.03))
    ends = pm.fit(DeepEnsemble(2, of=single), model, data, epochs=100, **options)
    tunnel = Tunnel(7, optimizer=pm.Optimizer("Adam", lr=0.01))
    path = rows(pm.fit(tunnel, model, data, epochs=epochs, initial=ends, **options))
    module = model()

    def loss(weights):
        return F.cross_entropy(
            torch.func.functional_call(module, weights, (data.inputs,)), data.targets
        ).item()

    first, last = rows(ends)
    line = [{n: torch.lerp(first[n], last[n], j / 8) for n in first} for j in range(9)]
    highest_on_line, highest_in_tunnel = max(map(loss, line)), max(map(loss, path))
    assert max(loss(first), loss(last)) < 0.1  # both are solutions
    assert highest_on_line > 0.5  # with a barrier between them
    assert highest_in_tunnel < 0.15
    names = list(first)
    assert_places(path[1:-1], first, last, names, 1e-12)


def test_rounding_does_not_add_up():
    """The place is that of the position: thousands of projections in single precision leave it there."""
    generator = torch.Generator().manual_seed(0)
    ends = {"a": torch.randn(2, 30, 4, generator=generator), "b": torch.randn(2, 7, generator=generator)}
    points = {
        name: torch.stack([torch.lerp(t[0], t[1], j / 4) for j in (1, 2, 3)]) for name, t in ends.items()
    }
    for _ in range(3000):
        for tensor in points.values():
            tensor.add_(0.01 * torch.randn(tensor.shape, generator=generator))
        put_back(points, ends, ["a", "b"])
    first, last = ({name: t[i] for name, t in ends.items()} for i in (0, 1))
    each = [{name: t[i] for name, t in points.items()} for i in range(3)]
    assert_places(each, first, last, ["a", "b"], 1e-6)


def test_putting_back_moves_along_the_line_alone():
    generator = torch.Generator().manual_seed(1)
    ends = {"a": torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)}
    points = {"a": torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)}
    before = points["a"].clone()
    put_back(points, ends, ["a"])
    line = (ends["a"][1] - ends["a"][0]).flatten()
    moved = (points["a"] - before).flatten(1)
    torch.testing.assert_close(moved, (moved @ line / (line @ line))[:, None] * line)
    again = points["a"].clone()
    put_back(points, ends, ["a"])
    torch.testing.assert_close(points["a"], again)


def test_budgets_and_numbers():
    method = Tunnel(4)
    assert method.for_budget(40) == (method, 10)
    assert method.for_budget(1) == (method, 1)
    assert (method.chain_members, method.num_initial) == (6, 2)
    assert method.num_parameters(MLP.factory()) == 6 * Single().num_parameters(MLP.factory())


def test_ends_that_are_missing_or_the_same_are_refused_before_any_work():
    def watch(epoch):
        pytest.fail("an epoch was trained")

    with pytest.raises(
        InputError, match=r"leads from one solution to another: pass fit\(..., initial=posterior"
    ):
        fitted(Tunnel(2), observer=watch)
    one = fitted(Single(optimizer=SGD))
    with pytest.raises(InputError, match=r"initial has 1 member, and tunnel takes 2 \(2 for each chain\)"):
        fitted(Tunnel(2), initial=one, observer=watch)
    with pytest.raises(InputError, match="are the same one"):
        fitted(Tunnel(2), initial=pm.merge([one, one]), observer=watch)
    with pytest.raises(
        InputError, match=r"initial has 2 members, and deep_ensemble takes 4 \(2 for each chain\)"
    ):
        fitted(DeepEnsemble(2, of=Tunnel(2)), initial=solutions(), observer=watch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_points": 0}, "num_points must be a whole number"),
        ({"optimizer": "Adam"}, "optimizer must be a description"),
        ({"schedule": pm.schedules.Cosine}, "schedule must be an instance"),
        ({"prior_std": 0.0}, "prior_std must be a positive number"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        Tunnel(**options)
