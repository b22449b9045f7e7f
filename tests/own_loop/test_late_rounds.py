"""``LateRounds`` in a plain PyTorch loop: Algorithm 1 by hand, exact averages, runs that go on."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.own_loop.late_rounds import LateRounds
from polymode.seeds import global_seed
from polymode.weights.late import LEFT, RIGHT

K = 3
X = torch.randn(28, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0).long()
BATCHES = list(zip(X.split(4), Y.split(4), strict=True))  # seven: two rounds of three and one more
BASE = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
LATE = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.02}
KINDS = ["batch_norm", "rank_one"]


def small_net() -> nn.Sequential:
    with global_seed(1):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def optimisers(late):
    return torch.optim.SGD(late.base_parameters(), **BASE), torch.optim.SGD(late.member_parameters(), **LATE)


def train_epoch(late, base, members, batches=BATCHES, scaler=None):
    for inputs, targets in batches:
        member = late.next_member()
        loss = F.cross_entropy(late.module(inputs), targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        late.inner_step(members[member] if isinstance(members, list) else members, scaler)
        if late.round_is_complete:
            late.outer_step(base, scaler)
    late.end_epoch(scaler)


def trained(epochs=2, scaler=None, module=None, **options):
    late = LateRounds(module or small_net(), K, **options)
    late.split()
    base, members = optimisers(late)
    for _ in range(epochs):
        train_epoch(late, base, members, scaler=scaler)
    return late


def values(late):
    """The tensors of the module and of all members."""
    found = {name: tensor.clone() for name, tensor in late.module.state_dict().items()}
    for k, own in enumerate(late.state_dict()["members"]):
        found |= {f"{k}:{name}": tensor.clone() for name, tensor in own.items()}
    return found


def outputs_of_members(late, inputs=X):
    late.module.eval()
    with torch.no_grad():
        return torch.stack([late.module(inputs) for _ in late.members()])


# --- Algorithm 1 ------------------------------------------------------------------------------


class ByHand:
    """The algorithm box on dictionaries of tensors, with momentum as torch defines it."""

    def __init__(self, module, start, kind):
        self.module, self.kind = module, kind
        self.own = [{n: t.clone() for n, t in member.items()} for member in start]
        late = start[0].keys()
        self.base = {n: p.detach().clone() for n, p in module.named_parameters() if n not in late}
        self.momenta = {}
        self.late = [n for n in late if "running" not in n and "tracked" not in n]

    def weights(self, base, own):
        made = base | own
        if self.kind == "rank_one":
            u, v = made.pop(LEFT + "0.weight"), made.pop(RIGHT + "0.weight")
            made["0.weight"] = made["0.weight"] * torch.outer(u, v)
        return made

    def gradients(self, k, inputs, targets):
        late = {n: self.own[k][n].clone().requires_grad_() for n in self.late}
        base = {n: t.clone().requires_grad_() for n, t in self.base.items()}
        statistics = {n: t for n, t in self.own[k].items() if n not in late}  # move in place
        outputs = functional_call(self.module, self.weights(base, late | statistics), (inputs,))
        F.cross_entropy(outputs, targets).backward()
        return {n: t.grad for n, t in late.items()}, {n: t.grad for n, t in base.items()}

    def step(self, key, tensor, gradient, options):
        gradient = gradient + options["weight_decay"] * tensor
        last = self.momenta.get(key)
        self.momenta[key] = gradient if last is None else options["momentum"] * last + gradient
        tensor -= options["lr"] * self.momenta[key]

    def epoch(self, base_scale):
        for first in range(0, len(BATCHES), K):
            batches, total = BATCHES[first : first + K], {}
            for k, batch in enumerate(batches):
                of_late, of_base = self.gradients(k, *batch)
                for name, gradient in of_late.items():
                    self.step((k, name), self.own[k][name], gradient, LATE)
                total = {n: total.get(n, 0) + g for n, g in of_base.items()}
            if len(batches) == K:
                for name, gradient in total.items():
                    self.step(name, self.base[name], base_scale * gradient, BASE)


@pytest.mark.parametrize("base_scale", [1.0, 1 / K])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_algorithm_1(kind, base_scale):
    late = LateRounds(small_net(), K, weights=kind, noise=0.2, base_scale=base_scale)
    late.split()
    by_hand = ByHand(small_net(), late.state_dict()["members"], kind)
    base, members = optimisers(late)
    for _ in range(3):
        train_epoch(late, base, members)
        by_hand.epoch(base_scale)
    exact = {"rtol": 0, "atol": 1e-12}
    for own, expected in zip(late.state_dict()["members"], by_hand.own, strict=True):
        torch.testing.assert_close(own, expected, **exact)
    for parameter, expected in zip(late.base_parameters(), by_hand.base.values(), strict=True):
        torch.testing.assert_close(parameter.detach(), expected, **exact)
    late.module.eval(), by_hand.module.eval()
    for k, outputs in enumerate(outputs_of_members(late)):
        weights = by_hand.weights(by_hand.base, by_hand.own[k])
        torch.testing.assert_close(outputs, functional_call(by_hand.module, weights, (X,)), **exact)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_method_of_fit(kind):
    # All examples are one example, so that the order of the data does not matter.
    data = X[:1].expand(14, 4).clone(), Y[:1].expand(14).clone()
    method = pm.methods.LatePhase(
        K,
        0,
        kind,
        True,
        optimizer=pm.Optimizer("SGD", **BASE),
        late_optimizer=pm.Optimizer("SGD", lr=0.05, momentum=0.8),
        force=True,
    )
    source, options = pm.ArrayData(*data, batch_size=2), {"backend": "loop", "progress": False}
    expected = pm.fit(method, small_net(), source, epochs=3, likelihood="categorical", **options).collapse()
    late = LateRounds(small_net(), K, weights=kind)
    late.split()
    base = torch.optim.SGD(late.base_parameters(), **BASE)
    members = torch.optim.SGD(late.member_parameters(), lr=0.05, momentum=0.8)
    for _ in range(3):
        train_epoch(late, base, members, [(data[0][:2], data[1][:2])] * 7)
    late.collapse()
    torch.testing.assert_close(late.module.state_dict(), expected.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, **LATE), lambda p: torch.optim.AdamW(p, lr=0.01)],
    ids=["SGD", "AdamW"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_optimiser_of_all_members_is_one_for_each_and_one_of_the_module_is_one_of_the_base(kind, make):
    def run(base_of, members_of):
        late = LateRounds(small_net(), K, weights=kind, noise=0.1)
        base = make(base_of(late))
        late.split()
        members = members_of(late)
        for _ in range(2):
            train_epoch(late, base, members)
        return values(late)

    one = run(LateRounds.base_parameters, lambda late: make(late.member_parameters()))
    many = run(
        lambda late: late.module.parameters(),
        lambda late: [make(late.member_parameters(k)) for k in range(K)],
    )
    torch.testing.assert_close(one, many, rtol=0, atol=1e-12)


def test_noise_is_relative_to_the_size_of_each_tensor():
    module = nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40), nn.Linear(40, 100)).double()
    with torch.no_grad():
        module[1].weight.fill_(7.0)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    late = LateRounds(module, 20, noise=0.3, seed=1)
    late.split()
    members = late.state_dict()["members"]
    for name in ("1.weight", "2.weight", "2.bias"):
        drawn = torch.stack([own[name] - before[name] for own in members])
        size = drawn.square().mean().sqrt() / before[name].square().mean().sqrt()
        # The relative standard error of the root mean square of n normal numbers is sqrt(1/2n); five of them.
        assert abs(size / 0.3 - 1) < 5 * (0.5 / drawn.numel()) ** 0.5
    for name in ("1.bias", "1.running_mean", "1.running_var"):  # zeros, and statistics
        assert all(torch.equal(own[name], before[name]) for own in members)
    again = LateRounds(copy.deepcopy(module), 20, noise=0.0)
    again.split()
    for name, tensor in again.state_dict()["members"][5].items():
        assert torch.equal(tensor, module.state_dict()[name])


def test_a_scaled_loss_changes_nothing():
    def run(scaler):
        late = LateRounds(small_net(), K, noise=0.1)
        late.split()
        base = torch.optim.SGD(late.base_parameters(), **BASE)
        members = [torch.optim.SGD(late.member_parameters(k), **LATE) for k in range(K)]
        for _ in range(3):
            train_epoch(late, base, members, scaler=scaler)
        return values(late)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    torch.testing.assert_close(run(scaler), run(None), rtol=0, atol=0)
    assert scaler.get_scale() > 2.0**10  # it grew between rounds


def test_tied_matrices_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    with global_seed(1):
        module = Tied().double()
    late = trained(module=module, weights="rank_one", noise=0.2)
    for k in late.members():
        own = late.state_dict()["members"][k]
        expected = late.base_parameters()[0] * torch.outer(
            own[LEFT + "first.weight"], own[RIGHT + "first.weight"]
        )
        torch.testing.assert_close(module.first.weight, expected)
        torch.testing.assert_close(module.second.weight, expected)
    outputs = outputs_of_members(late)
    posterior = late.posterior("categorical", backend="loop")
    torch.testing.assert_close(posterior.predict(X).mean, outputs.softmax(-1).mean(0))
    late.collapse()
    assert module.first.weight is module.second.weight
    torch.testing.assert_close(posterior.collapse(force=True).eval()(X), module(X))


def test_factors_of_a_recurrent_layer():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.recurrent(x.unflatten(1, (2, 2)).repeat(1, 1, 2))[0][:, -1])

    with global_seed(1):
        module = Reader().double()
    names = [name for name, _ in module.named_parameters()]
    late = trained(module=module, weights="rank_one", matrices="recurrent.weight_hh*", noise=0.3)
    outputs = outputs_of_members(late)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3
    posterior = late.posterior("categorical", backend="loop")
    torch.testing.assert_close(posterior.predict(X).mean, outputs.softmax(-1).mean(0))
    late.collapse()
    assert [name for name, _ in module.named_parameters()] == names
    torch.testing.assert_close(copy.deepcopy(module)(X), module(X), rtol=0, atol=0)


# --- the module -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_afterwards_the_module_is_plain_and_has_the_same_parameters(kind):
    module = small_net()
    types = [type(part) for part in module.modules()]
    keys, parameters = list(module.state_dict()), list(module.parameters())
    late = trained(module=module, weights=kind, noise=0.1)
    copied, outputs = copy.deepcopy(module).eval(), outputs_of_members(late)
    late.collapse()
    assert [type(part) for part in module.modules()] == types
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    torch.save(module, io.BytesIO())  # as parametrised modules cannot be
    torch.testing.assert_close(copied(X), outputs[0])  # a copy from before keeps its member
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    F.cross_entropy(module(X), Y).backward()
    optimizer.step()


def batch_norm(kind):
    layer = nn.BatchNorm1d(4, affine=kind != "not affine").double()
    if kind == "frozen scale":
        layer.weight.requires_grad_(False).copy_(torch.tensor([2.0, -1.0, 0.5, 3.0]))
    return layer


@pytest.mark.parametrize("kind", ["affine", "not affine", "frozen scale"])
def test_batch_norm_collapses_to_the_mean_of_its_outputs(kind):
    layer = batch_norm(kind)
    late = LateRounds(
        nn.Sequential(layer, nn.Linear(4, 2).double()), 5, weights=() if kind == "not affine" else None
    )
    late.split()
    generator = torch.Generator().manual_seed(2)
    for own in late.state_dict()["members"]:
        for name, tensor in own.items():
            if name.startswith("0.") and tensor.is_floating_point():
                tensor.copy_(torch.rand(4, generator=generator) + 0.5)
    layer.eval()
    outputs = torch.stack([layer(X) for _ in late.members()]).mean(0)
    late.collapse()
    torch.testing.assert_close(layer(X), outputs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("average", ["weights", "factors"])
def test_factors_collapse_to_their_mean(average):
    late = trained(weights="rank_one", head=False, noise=0.3, average=average)
    factors = [(own[LEFT + "0.weight"], own[RIGHT + "0.weight"]) for own in late.state_dict()["members"]]
    [matrix] = [p.detach().clone() for p in late.base_parameters() if p.shape == (6, 4)]
    products = torch.stack([torch.outer(u, v) for u, v in factors]).mean(0)
    of_means = torch.outer(*(torch.stack(each).mean(0) for each in zip(*factors, strict=True)))
    late.collapse()
    expected = matrix * (products if average == "weights" else of_means)
    torch.testing.assert_close(late.module[0].weight.detach(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ensemble_as_a_posterior(kind, tmp_path):
    late = trained(weights=kind, noise=0.3)
    shown = late.module[3].weight.clone()
    for member in late.members():
        if member == 1:
            break
    assert torch.equal(late.module[3].weight, shown)
    posterior = late.posterior("categorical")
    expected = outputs_of_members(late).softmax(-1).mean(0)
    torch.testing.assert_close(posterior.predict(X).mean, expected)
    posterior.save(tmp_path / "saved")
    loaded = pm.load_posterior(tmp_path / "saved", small_net())
    torch.testing.assert_close(loaded.predict(X).mean, expected)
    late.collapse()
    torch.testing.assert_close(posterior.predict(X).mean, expected)
    torch.testing.assert_close(posterior.collapse(force=True).eval()(X), late.module.eval()(X))


@pytest.mark.parametrize("kind", KINDS)
def test_members_follow_the_module_and_inference_leaves_them_trainable(kind):
    late = LateRounds(small_net().float(), K, weights=kind, noise=0.1)
    late.split()
    late.module.to(torch.bfloat16)
    with torch.inference_mode():
        late.module.eval()
        assert all(late.module(X.bfloat16()).dtype == torch.bfloat16 for _ in late.members())
    late.module.train()
    base, members = optimisers(late)
    train_epoch(late, base, members, [(x.bfloat16(), y) for x, y in BATCHES])
    late.collapse()
    assert {p.dtype for p in late.module.parameters()} == {torch.bfloat16}


# --- going on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_the_middle_of_a_round(kind):
    def begun():
        late = LateRounds(small_net(), K, weights=kind, noise=0.1)
        late.split()
        return late, *optimisers(late)

    def batches(late, base, members, some):
        for inputs, targets in some:
            late.next_member()
            F.cross_entropy(late.module(inputs), targets).backward()
            late.inner_step(members)
            if late.round_is_complete:
                late.outer_step(base)

    late, base, members = begun()
    batches(late, base, members, BATCHES[:5])
    file = io.BytesIO()
    torch.save([late.module.state_dict(), *(part.state_dict() for part in (late, base, members))], file)
    batches(late, base, members, BATCHES[5:])
    for fresh in (True, False):  # before split(), or where there are members
        other = LateRounds(small_net(), K, weights=kind) if fresh else begun()[0]
        file.seek(0)
        of_module, *states = torch.load(file)
        other.module.load_state_dict(of_module)
        other.load_state_dict(states[0])
        parts = optimisers(other)
        for part, state in zip(parts, states[1:], strict=True):
            part.load_state_dict(state)
        batches(other, *parts, BATCHES[5:])
        torch.testing.assert_close(values(other), values(late), rtol=0, atol=0)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_members": 0}, "num_members must be a whole number of at least 1"),
        ({"noise": -1.0}, "noise must be"),
        ({"base_scale": float("nan")}, "base_scale must be"),
        ({"average": "outputs"}, "Unknown average"),
        ({"weights": "hypernetwork"}, r"fit\(pm.methods.LatePhase\(weights='hypernetwork'\)\)"),
        ({"weights": (), "head": False}, "No weights are late"),
        ({"weights": "nowhere"}, "nowhere"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(InputError, match=message):
        LateRounds(small_net(), **options)


def test_layers_with_parametrisations_of_their_own():
    module = small_net()
    nn.utils.parametrizations.weight_norm(module[0])
    with pytest.raises(InputError, match="parametrisations of their own"):
        LateRounds(module, weights="rank_one")
    with pytest.raises(InputError, match="parametrisations of their own"):
        LateRounds(LateRounds(small_net(), weights="rank_one").module, weights="rank_one")


def test_calls_in_the_wrong_order():
    late = LateRounds(small_net(), K)
    base = torch.optim.SGD(late.base_parameters())
    unsplit = late.state_dict()
    late.load_state_dict(unsplit)
    before = [
        late.member_parameters,
        late.next_member,
        lambda: late.inner_step(base),
        lambda: late.outer_step(base),
        late.collapse,
        lambda: list(late.members()),
        lambda: late.posterior("categorical"),
    ]
    for call in before:
        with pytest.raises(InputError, match=r"call split\(\) first"):
            call()
    late.split()
    with pytest.raises(InputError, match="called before"):
        late.split()
    with pytest.raises(InputError, match="0 of 3 members were trained"):
        late.outer_step(base)
    with pytest.raises(InputError, match="no weights of member 0"):
        late.inner_step(base)
    members = torch.optim.SGD(late.member_parameters())
    for _ in range(K):
        late.next_member()
        late.inner_step(members)
    with pytest.raises(InputError, match="round is complete"):
        late.next_member()
    with pytest.raises(InputError, match=r"Call next_member\(\)"):
        late.inner_step(members)
    late.outer_step(None)
    for state in (unsplit, trained(weights="rank_one").state_dict()):
        with pytest.raises(InputError, match="Load it into what it was made with"):
            late.load_state_dict(state)
    late.collapse()
    for call in (late.split, late.next_member, late.collapse):
        with pytest.raises(InputError, match="collapsed"):
            call()
