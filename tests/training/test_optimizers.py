"""The rates that rows have, those of their cohorts, and steps with the bits of torch's own optimisers."""

import copy

import pytest
import torch

import polymode as pm
from polymode.training.contract.optimizers import MemberOptimizer
from tolerances import PASS, assert_equal_up_to_rounding

COHORTS = [slice(0, 4), slice(4, 6)]  # rows: two groups of two members, then one such group
FACTORS = [0.5, 0.25]


def over(kind, group_size, **options):
    tensors = {"weight": torch.ones(6, 3, dtype=torch.float64), "bias": torch.ones(6, 2, dtype=torch.float64)}
    spec = pm.Optimizer(kind, lr=0.1, **options)
    return MemberOptimizer(spec, tensors, frozenset({"bias"}), COHORTS, group_size), tensors


@pytest.mark.parametrize("kind", ["SGD", "Adafactor"])  # one instance for many rows, one for each
@pytest.mark.parametrize("group_size", [None, 2], ids=["together", "separate members"])
def test_every_row_has_the_rate_of_its_cohort(kind, group_size):
    optimizer, _ = over(kind, group_size)
    assert optimizer.rates.tolist() == [0.1] * 6
    optimizer.set_rates(FACTORS)
    assert optimizer.rates.tolist() == [0.05] * 4 + [0.025] * 2
    assert optimizer.rates.dtype == torch.float64


@pytest.mark.parametrize("group_size", [None, 2], ids=["together", "separate members"])
def test_they_are_what_a_step_multiplies_the_gradient_by(group_size):
    """Plain SGD on a gradient of one moves every row by its rate; decay has a group of its own."""
    optimizer, tensors = over("SGD", group_size, weight_decay=0.5, decay_all=False)
    optimizer.set_rates(FACTORS)
    before = tensors["bias"].clone()
    ones = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    for member in [None] if group_size is None else range(group_size):
        optimizer.step(ones, member=member)
    torch.testing.assert_close(before - tensors["bias"], optimizer.rates[:, None].expand(6, 2))
    # The decayed weights move by half as much again: 1 + 0.5 · 1.
    torch.testing.assert_close(1 - tensors["weight"], 1.5 * optimizer.rates[:, None].expand(6, 3))


def test_rows_that_do_not_step_have_rates_too():
    optimizer, tensors = over("SGD", 2)
    optimizer.set_rates(FACTORS)
    optimizer.step({name: torch.ones_like(t) for name, t in tensors.items()}, cohorts=[1], member=1)
    moved = (1 - tensors["weight"]).amax(1)
    torch.testing.assert_close(moved, torch.tensor([0, 0, 0, 0, 0, 0.025], dtype=torch.float64))
    assert optimizer.rates.tolist() == [0.05] * 4 + [0.025] * 2


def test_there_are_none_where_there_is_nothing_to_train():
    assert MemberOptimizer(pm.Optimizer("SGD"), {}, frozenset(), []).rates.shape == (0,)


# --- steps that call fused kernels themselves ------------------------------------------------------

OPTIONS = {
    "Adam": ("Adam", {}),
    "Adam with amsgrad": ("Adam", {"amsgrad": True}),
    "Adam with decay": ("Adam", {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}),
    "Adam upwards": ("Adam", {"maximize": True, "weight_decay": 0.1}),
    "AdamW": ("AdamW", {}),
    "AdamW with amsgrad": ("AdamW", {"amsgrad": True, "weight_decay": 0.2, "maximize": True}),
    "SGD": ("SGD", {}),
    "SGD with decay": ("SGD", {"weight_decay": 0.1}),
    "SGD with momentum": ("SGD", {"momentum": 0.9}),
    "SGD with dampening": ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "SGD with nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD upwards": ("SGD", {"momentum": 0.5, "maximize": True}),
}
SHAPES = {"weight": (4, 5, 3), "bias": (4, 7), "scale": (4,)}
RATES = (1.0, 0.5, 0.5, 0.1, 2.0, 0.3)  # factors of the learning rate, step by step

kinds = pytest.mark.parametrize("name", OPTIONS)


def drawn(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def plain_steps(name, tensors, groups, steps, lr=0.1):
    """What torch.optim's own fused optimiser makes of copies; groups: names with options of their own."""
    kind, options = OPTIONS[name]
    copies = {n: torch.empty_like(t).copy_(t).requires_grad_() for n, t in tensors.items()}
    factors = [own.get("factor", 1.0) for _, own in groups]
    described = [
        {"params": [copies[n] for n in names], **{o: v for o, v in own.items() if o != "factor"}}
        for names, own in groups
    ]
    optimizer = getattr(torch.optim, kind)(described, lr=lr, fused=True, **options)
    for number in steps:
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = lr * RATES[number] * factor
        gradients = drawn(100 + number)
        for n, parameter in copies.items():
            parameter.grad = torch.empty_like(parameter).copy_(gradients[n])
        optimizer.step()
    return {n: t.detach() for n, t in copies.items()}


def member_steps(optimizer, steps, dtype=torch.float32):
    for number in steps:
        optimizer.set_rates([RATES[number]])
        optimizer.step(drawn(100 + number, dtype))


def of(name, tensors, lr=0.1, exempt=frozenset(), rates=None, **options):
    kind, own = OPTIONS[name]
    spec = pm.Optimizer(kind, lr=lr, **own, **options)
    return MemberOptimizer(spec, tensors, exempt, [slice(0, 4)], rates=rates)


def assert_same_bits(found, expected):
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@kinds
def test_steps_have_the_bits_of_torchs_own(name):
    """At rates that change from step to step; every option changes what comes out."""
    tensors = drawn(0)
    expected = plain_steps(name, tensors, [(list(SHAPES), {})], range(6))
    member_steps(of(name, tensors), range(6))
    assert_same_bits(tensors, expected)
    kind, options = OPTIONS[name]
    if options:
        bare = plain_steps(kind, drawn(0), [(list(SHAPES), {})], range(6))
        assert not torch.equal(bare["weight"], expected["weight"])


@pytest.mark.parametrize(
    "name", [n for n, (kind, own) in OPTIONS.items() if kind != "SGD" or "momentum" in own]
)
def test_after_the_first_step_torch_is_not_asked(name, monkeypatch):
    tensors = drawn(0)
    optimizer = of(name, tensors)
    member_steps(optimizer, [0])
    expected = plain_steps(name, drawn(0), [(list(SHAPES), {})], range(6))

    def refuse(*args, **options):
        raise AssertionError("a step through torch.optim")

    for instance in optimizer.instances:
        monkeypatch.setattr(instance, "step", refuse)
    member_steps(optimizer, range(1, 6))
    assert_same_bits(tensors, expected)


@pytest.mark.parametrize("name", ["Adam with decay", "AdamW", "SGD with nesterov", "SGD with decay"])
def test_groups_of_weights_keep_their_own_options(name):
    """Biases without decay, and a scale that learns thrice as fast."""
    tensors, free = drawn(0), {"weight_decay": 0.0}
    groups = [(["weight"], {}), (["bias"], free), (["scale"], free | {"factor": 3.0})]
    expected = plain_steps(name, tensors, groups, range(6))
    optimizer = of(name, tensors, exempt=frozenset({"bias"}), rates={"scale": 3.0}, decay_all=False)
    assert len(optimizer.instances[0].param_groups) == 3
    member_steps(optimizer, range(6))
    assert_same_bits(tensors, expected)


@kinds
def test_steps_go_on_from_states_that_were_loaded(name):
    """Into an optimiser that has not stepped, and into one that has stepped elsewhere."""
    tensors = drawn(0)
    expected = plain_steps(name, tensors, [(list(SHAPES), {})], range(6))
    first = of(name, tensors)
    member_steps(first, range(3))
    states = copy.deepcopy(first.state_dict())
    fresh = {n: t.clone() for n, t in tensors.items()}
    second = of(name, fresh)
    second.load_state_dict(copy.deepcopy(states))
    other = drawn(7)
    third = of(name, other)
    member_steps(third, (5, 4))
    third.load_state_dict(states)
    for n, t in other.items():
        t.copy_(fresh[n])
    for optimizer, moved in ((first, tensors), (second, fresh), (third, other)):
        member_steps(optimizer, range(3, 6))
        assert_same_bits(moved, expected)


@pytest.mark.parametrize("name", ["Adam", "SGD with momentum"])
def test_a_state_from_before_the_first_step_begins_anew(name):
    tensors = drawn(0)
    optimizer = of(name, tensors)
    start = copy.deepcopy(optimizer.state_dict())
    member_steps(optimizer, range(4))
    optimizer.load_state_dict(start)
    for n, t in drawn(0).items():
        tensors[n].copy_(t)
    member_steps(optimizer, range(3))
    assert_same_bits(tensors, plain_steps(name, drawn(0), [(list(SHAPES), {})], range(3)))


@pytest.mark.parametrize("name", ["Adam", "AdamW with amsgrad", "SGD with dampening"])
def test_weights_of_several_types_take_the_steps_of_each(name):
    """One kernel is for tensors of one type: the step is left to torch.optim."""

    def mixed(tensors):
        return {n: t.double() if n == "bias" else t for n, t in tensors.items()}

    tensors = mixed(drawn(0))
    expected = plain_steps(name, tensors, [(list(SHAPES), {})], range(6))
    optimizer = of(name, tensors)
    for number in range(6):
        optimizer.set_rates([RATES[number]])
        optimizer.step(mixed(drawn(100 + number)))
    assert tensors["bias"].dtype == torch.float64
    assert_same_bits(tensors, expected)


@pytest.mark.parametrize("layout", ["transposed", "axes in reverse"])
@pytest.mark.parametrize("name", ["Adam with amsgrad", "AdamW", "SGD with dampening"])
def test_weights_may_lie_in_memory_in_any_order_of_axes(name, layout):
    """Gradients come in plain order; kernels walk the memory of both."""
    order = (0, 2, 1) if layout == "transposed" else (2, 1, 0)
    tensors, plain = drawn(0), drawn(0)
    back = [order.index(axis) for axis in range(3)]
    tensors["weight"] = tensors["weight"].permute(order).contiguous().permute(back)
    assert not tensors["weight"].is_contiguous()
    expected = plain_steps(name, plain, [(list(SHAPES), {})], range(6))
    optimizer = of(name, tensors)
    member_steps(optimizer, range(3))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    member_steps(optimizer, range(3, 6))
    for n, tensor in expected.items():
        # Fused kernels take whole vectors of neighbours, which are others in another order.
        assert_equal_up_to_rounding(tensors[n], tensor, PASS)


@pytest.mark.parametrize("name", ["Adam", "SGD with nesterov"])
def test_cohorts_and_members_that_do_not_step_stay_as_they_are(name):
    kind, options = OPTIONS[name]
    tensors = drawn(0)
    before = {n: t.clone() for n, t in tensors.items()}
    spec = pm.Optimizer(kind, lr=0.1, **options)
    optimizer = MemberOptimizer(spec, tensors, frozenset(), [slice(0, 3), slice(3, 4)])
    for number in range(4):
        optimizer.set_rates([RATES[number]] * 2)
        optimizer.step(drawn(100 + number), cohorts=[0])
    for n, t in tensors.items():
        assert torch.equal(t[3], before[n][3])
    assert not optimizer.instances[1].state
    whole = plain_steps(name, before, [(list(SHAPES), {})], range(4))
    assert_equal_up_to_rounding(
        {n: t[:3] for n, t in tensors.items()}, {n: t[:3] for n, t in whole.items()}, PASS
    )
