"""Late-phase weights: Algorithm 1 by hand, ordinary training as a special case, exact averages."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from cases import BY_NAME
from polymode.errors import InputError, NonFiniteLoss, NotCollapsible
from polymode.networks.members import Members
from polymode.posteriors import LateMembers
from polymode.seeds import derive_generator, global_seed
from polymode.weights.late import Bank, LateWeights, average_normalisation, late_weights
from tolerances import PASS, assert_equal_up_to_rounding

SGD = pm.Optimizer("SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-3)


def small_net() -> nn.Module:
    with global_seed(3):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(number=24, batch_size=5) -> pm.ArrayData:
    return BY_NAME["mlp"].data(number, batch_size=batch_size)


def fitted(method, module=None, epochs=4, **options):
    options = {"likelihood": "categorical", "progress": False, "backend": "loop", "data": data()} | options
    return pm.fit(method, module or small_net(), options.pop("data"), epochs=epochs, **options)


def weights_of(posterior):
    [members] = posterior.draw()
    return members.member(0)


# --- training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["batch_norm", "3", ("batch_norm", "3"), "norm"])
@pytest.mark.parametrize("optimizer", [SGD, pm.Optimizer("Adam", lr=0.01)], ids=["SGD", "Adam"])
def test_one_member_with_carried_moments_is_ordinary_training(weights, optimizer):
    schedule = pm.schedules.Cosine()
    late = pm.methods.LatePhase(
        1, 2, weights, head=False, carry_moments=True, optimizer=optimizer, schedule=schedule
    )
    got = weights_of(fitted(late))
    expected = weights_of(fitted(pm.methods.Single(optimizer=optimizer, schedule=schedule)))
    assert_equal_up_to_rounding(got, expected)


def test_without_carried_moments_it_is_not():
    late = pm.methods.LatePhase(1, 2, "batch_norm", optimizer=SGD)
    got, expected = weights_of(fitted(late)), weights_of(fitted(pm.methods.Single(optimizer=SGD)))
    assert not torch.allclose(got["1.weight"], expected["1.weight"])


def minibatches(epoch, number=24, size=5):
    order = torch.randperm(number, generator=derive_generator(0, "order", 0, epoch, number))
    return order.split(size)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 0.0])
def test_equals_algorithm_1_by_hand_with_batch_norm_and_head(scale):
    """Five minibatches: a round of three and one of two, whose base gradient is dropped."""
    late_sgd = pm.Optimizer("SGD", lr=0.02, momentum=0.8, weight_decay=1e-2)
    method = pm.methods.LatePhase(
        3, 1, head=True, base_scale=scale, optimizer=SGD, late_optimizer=late_sgd, keep_members=True
    )
    examples = data()
    got = fitted(method, epochs=3)

    net = small_net()

    def sgd(parameters, late=False):
        if late:
            return torch.optim.SGD(parameters, lr=0.02, momentum=0.8, weight_decay=1e-2)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-3)

    def backward(module, rows):
        F.cross_entropy(module(examples.inputs[rows]), examples.targets[rows]).backward()

    whole = sgd(net.parameters())
    net.train()
    for rows in minibatches(0):
        whole.zero_grad()
        backward(net, rows)
        whole.step()
    members = [copy.deepcopy(net) for _ in range(3)]
    for member in members[1:]:
        member[0] = members[0][0]  # the base is one
    base = sgd(members[0][0].parameters())
    for parameter, old in zip(members[0][0].parameters(), net[0].parameters(), strict=True):
        base.state[parameter] = copy.deepcopy(whole.state[old])
    late = [sgd([*m[1].parameters(), *m[3].parameters()], late=True) for m in members]
    for epoch in (1, 2):
        for start in (0, 3):
            base.zero_grad()
            part = minibatches(epoch)[start : start + 3]
            for k, rows in enumerate(part):
                late[k].zero_grad()
                backward(members[k], rows)
                late[k].step()
            if len(part) == 3 and scale:
                for parameter in members[0][0].parameters():
                    parameter.grad *= scale
                base.step()
    [drawn] = got.draw()
    for k, member in enumerate(members):
        for name, tensor in member.state_dict().items():
            torch.testing.assert_close(drawn.member(k)[name], tensor, rtol=1e-12, atol=1e-14)


class Shifted(nn.Module):
    """Two weights that are added have one gradient, and autograd gives one tensor for both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x * (self.first + self.second))


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), Shifted], ids=["MLP", "sum"]
)
def test_members_that_own_nothing_accumulate_gradients(make):
    """The control of von Oswald et al. (2021): a step of the base for three minibatches, nothing else."""
    net = make().double()
    plain = pm.Optimizer("SGD", lr=0.1)
    method = pm.methods.LatePhase(3, 0, weights=(), head=False, base_scale=1 / 3, optimizer=plain)
    got = weights_of(fitted(method, net, epochs=1))
    by_hand, examples = copy.deepcopy(net), data()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for rows in minibatches(0)[:3]:
        (F.cross_entropy(by_hand(examples.inputs[rows]), examples.targets[rows]) / 3).backward()
    optimizer.step()
    for name, tensor in by_hand.state_dict().items():
        torch.testing.assert_close(got[name], tensor)


def test_noise_is_relative_to_every_tensor_and_statistics_are_copied():
    late = late_weights(small_net(), frozenset(dict(small_net().named_parameters())), None, head=True)
    method = pm.methods.LatePhase(4000, 0, head=True, noise=0.5)
    stacked = {n: torch.stack([t.clone()] * 4000) for n, t in small_net().state_dict().items()}
    stacked["3.weight"] *= 7
    state = pm.State(
        Members(stacked),
        common={"begun": torch.zeros(1, dtype=torch.bool)},
        generators=[torch.Generator().manual_seed(0)],
    )
    before = {name: tensor[0].clone() for name, tensor in stacked.items()}
    method._split(state, late)
    for name in ("1.weight", "3.weight", "3.bias"):
        spread = (stacked[name] - before[name]) / before[name].square().mean().sqrt()
        count = spread.numel()
        assert abs(spread.std().item() - 0.5) < 5 * 0.5 / (2 * count) ** 0.5
        assert abs(spread.mean().item()) < 5 * 0.5 / count**0.5
    assert torch.equal(stacked["1.bias"], torch.zeros(4000, 6))  # of nothing, nothing
    assert torch.equal(stacked["1.running_var"][5], before["1.running_var"])


@pytest.mark.parametrize("weights", ["batch_norm", "rank_one"])
def test_backends_agree_on_several_chains_and_data_sets(weights):
    """Running statistics of the k-th members of all chains lie apart in memory."""
    method = pm.methods.DeepEnsemble(2, of=pm.methods.LatePhase(3, 1, weights, noise=0.1, optimizer=SGD))
    both = {}
    for backend in ("loop", "vmap"):
        found = fitted(method, small_net, data=[data(24), data(17)], backend=backend, epochs=3)
        both[backend] = [block.member(i) for p in found for block in p.draw() for i in range(2)]
    for loop, vmap in zip(both["loop"], both["vmap"], strict=True):
        for name, tensor in loop.items():
            torch.testing.assert_close(vmap[name], tensor, rtol=1e-8, atol=1e-10)


def test_schedule_runs_over_the_whole_training():
    rates = []
    schedule = pm.schedules.Linear(0, 4, 0.0)
    fitted(
        pm.methods.LatePhase(5, 2, optimizer=SGD, schedule=schedule, keep_members=True),
        observer=lambda epoch: rates.append(epoch.rate),
    )
    # At the last step of an epoch of five minibatches, and of rounds of five in the late phase.
    assert rates == pytest.approx([1 - 4 / 20, 1 - 9 / 20, 1 - 2 / 4, 1 - 3 / 4])


# --- averages -------------------------------------------------------------------------------------


def random_members(module: nn.Module, count: int, seed: int = 0) -> Members:
    generator = torch.Generator().manual_seed(seed)
    stacked = {}
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            stacked[name] = torch.arange(count)
            continue
        drawn = torch.randn(count, *tensor.shape, generator=generator, dtype=tensor.dtype)
        stacked[name] = drawn.exp() if name.endswith("running_var") else drawn
    return Members(stacked)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(6), (7, 6)),
        (nn.BatchNorm2d(6), (3, 6, 4, 4)),
        (nn.BatchNorm3d(6, eps=0.1), (2, 6, 2, 2, 2)),
        (nn.BatchNorm1d(6, affine=False), (7, 6)),
        (nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (3, 6, 8)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_an_averaged_batch_norm_is_the_mean_of_the_outputs(layer, shape):
    layer = layer.double().eval()
    members = random_members(layer, 5)
    if "weight" not in members.stacked:  # solved statistics must be positive to exist
        members.stacked["running_var"].clamp_(max=2.0)
    inputs = torch.randn(*shape, dtype=torch.float64)
    outputs = []
    for k in range(5):
        layer.load_state_dict(members.member(k))
        outputs.append(layer(inputs))
    found = LateWeights().average(layer, members, "weights")
    layer.load_state_dict(found)
    torch.testing.assert_close(layer(inputs), torch.stack(outputs).mean(0), rtol=1e-12, atol=1e-12)
    if "weight" in found:
        torch.testing.assert_close(found["running_var"], members.stacked["running_var"].mean(0))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_scale_or_shift_is_part_of_the_map(frozen):
    layer = nn.BatchNorm1d(6).double().eval()
    members = random_members(layer, 4)
    constant = members.stacked.pop(frozen)[0]
    inputs = torch.randn(7, 6, dtype=torch.float64)
    outputs = []
    for k in range(4):
        layer.load_state_dict(members.member(k) | {frozen: constant})
        outputs.append(layer(inputs))
    layer.load_state_dict({frozen: constant} | LateWeights().average(layer, members, "weights"))
    torch.testing.assert_close(layer(inputs), torch.stack(outputs).mean(0), rtol=1e-12, atol=1e-12)


def test_an_average_of_single_precision_is_as_exact_as_single_precision():
    layer = nn.BatchNorm2d(6).eval()
    members = random_members(layer, 10)
    inputs = torch.randn(4, 6, 5, 5)
    outputs = []
    for k in range(10):
        layer.load_state_dict(members.member(k))
        outputs.append(layer(inputs))
    layer.load_state_dict(average_normalisation(layer, members) | {"num_batches_tracked": torch.tensor(0)})
    torch.testing.assert_close(layer(inputs), torch.stack(outputs).mean(0), rtol=1e-5, atol=1e-5)


def test_rank_one_folds_the_mean_of_the_products():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(8, 2)).double()
    late = LateWeights(factored=("0.weight", "2.weight"))
    start = {n: t.clone() for n, t in module.state_dict().items()}
    begun = late.begin(start, torch.Generator().manual_seed(0), spread=0.3)
    generator = torch.Generator().manual_seed(1)
    stacked = {
        n: torch.randn(4, *t.shape, generator=generator, dtype=torch.float64)
        for n, t in begun.items()
        if n in late.names
    }
    members = Members(stacked, {n: t[None] for n, t in begun.items() if n not in late.names})
    exact, factors = late.average(module, members, "weights"), late.average(module, members, "factors")
    u, v = stacked["left/0.weight"], stacked["right/0.weight"]
    products = torch.einsum("ko,ki->oi", u, v)[:, :, None, None] / 4
    torch.testing.assert_close(exact["0.weight"], start["0.weight"] * products)
    averaged = u.mean(0)[:, None] * v.mean(0)
    torch.testing.assert_close(factors["0.weight"], start["0.weight"] * averaged[:, :, None, None])
    realised = late.realised(members)
    torch.testing.assert_close(realised.stacked["2.weight"].mean(0), exact["2.weight"])
    assert torch.equal(realised.shared["0.bias"][0], start["0.bias"])


@pytest.mark.parametrize("weights", ["batch_norm", "rank_one", "hypernetwork", ("Conv2d", "norm")])
def test_the_collapsed_network_is_the_plain_module(weights):
    def net():
        return nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3), nn.Dropout(0.1), nn.Flatten(), nn.Linear(36, 3)),
        )

    images = pm.ArrayData(torch.randn(24, 2, 5, 5), torch.randint(3, (24,)), batch_size=5)
    posterior = fitted(
        pm.methods.LatePhase(2, 1, weights, noise=0.1, optimizer=SGD), net, epochs=3, data=images
    )
    assert posterior.kind == "particles"
    assert posterior.num_members == 1
    module = posterior.collapse()
    assert [type(part) for part in module.modules()] == [type(part) for part in net().modules()]
    assert module.state_dict().keys() == net().state_dict().keys()
    inputs = torch.randn(6, 2, 5, 5)
    expected = posterior.predict(inputs).mean
    torch.testing.assert_close(module.eval()(inputs).softmax(-1), expected.float(), rtol=1e-4, atol=1e-5)
    assert set(posterior.record["findings"][0]) == {"barrier"}


def test_kept_members_collapse_to_the_same_network(tmp_path):
    options = {"noise": 0.3, "optimizer": SGD}
    kept = fitted(pm.methods.LatePhase(3, 1, "rank_one", keep_members=True, **options))
    assert isinstance(kept, LateMembers)
    assert kept.num_members == 3
    collapsed = fitted(pm.methods.LatePhase(3, 1, "rank_one", **options))
    assert_equal_up_to_rounding(
        weights_of(kept.averaged(force=True))["0.weight"], weights_of(collapsed)["0.weight"]
    )
    with pytest.raises(NotCollapsible, match="was not measured"):
        kept.collapse()
    loaded = pm.load_posterior(kept.save(tmp_path / "kept"), small_net)
    state = kept.collapse(force=True).state_dict()
    assert_equal_up_to_rounding(loaded.collapse(force=True).state_dict(), state, PASS)
    # Counted once what is shared: of 57 numbers, the head's 21 and 4 + 6 factors three times.
    assert kept.num_parameters == 24 + 6 + 12 + 3 * (21 + 4 + 6)
    assert pm.methods.LatePhase(3, 1, "rank_one", keep_members=True).num_parameters(small_net()) == 135


@pytest.mark.parametrize("weights", ["batch_norm", "rank_one", "hypernetwork", "Conv2d"])
def test_saved_members_collapse_to_the_same_network(weights, tmp_path):
    def net():
        layers = (nn.Dropout(0.1), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3))

    images = pm.ArrayData(torch.randn(24, 2, 5, 5), torch.randint(3, (24,)), batch_size=5)
    method = pm.methods.LatePhase(2, 1, weights, head=False, noise=0.1, optimizer=SGD)
    kept = fitted(replace(method, keep_members=True), net, epochs=2, data=images)
    loaded = pm.load_posterior(kept.save(tmp_path / "kept"), net)
    expected = fitted(method, net, epochs=2, data=images).collapse().state_dict()
    for posterior in (kept, loaded):
        for name, tensor in posterior.collapse(force=True).state_dict().items():
            torch.testing.assert_close(tensor, expected[name])
            assert tensor.dtype == expected[name].dtype


def test_realised_members_come_in_bounded_blocks(monkeypatch):
    kept = fitted(pm.methods.LatePhase(4, 0, "rank_one", head=False, keep_members=True, optimizer=SGD))
    first = next(iter(kept.draw())).member(0)
    one = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    monkeypatch.setattr("polymode.posteriors.late_members.BLOCK_BYTES", 2 * one)
    blocks = list(kept.draw())
    assert [block.labels[:, 2].tolist() for block in blocks] == [[0, 1], [2, 3]]


def test_an_average_whose_loss_is_no_number_is_refused_and_its_members_weigh_as_one():
    seen = {}

    class Noted(pm.methods.LatePhase):
        def posterior(self, problem, state):
            seen.update(problem=problem, state=state)
            return super().posterior(problem, state)

    fitted(Noted(2, 1, optimizer=SGD))
    seen["state"].common["seen"][0, 0] = torch.inf
    with pytest.warns(UserWarning, match="different basins"):
        kept = pm.methods.LatePhase(2, 1, optimizer=SGD).posterior(seen["problem"], seen["state"])
    together = kept.merged([fitted(pm.methods.Single(optimizer=SGD))])
    weights = torch.cat([block.log_weights for block in together.draw()]).exp()
    assert (weights / weights.sum()).tolist() == pytest.approx([0.25, 0.25, 0.5])


def test_before_the_late_phase_there_is_one_network():
    """All members are judged as the one that is trained, and an error leaves that one behind."""
    scores = []
    fitted(pm.methods.LatePhase(3, 2, optimizer=SGD), validation=data(), observer=scores.append)
    early = [epoch.validation["nll"].tolist() for epoch in scores if epoch.phase == "early"]
    assert len(early) == 2
    for first, *others in early:
        assert others == pytest.approx([first, first])
    with pytest.raises(NonFiniteLoss) as error:
        fitted(
            pm.methods.LatePhase(3, 2, optimizer=pm.Optimizer("SGD", lr=1e200)), pm.models.MLP(4, 3).double()
        )
    assert error.value.posterior.num_members == 1


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_mixed_precision_ends_as_it_began(backend):
    """What looks at the members runs as prediction does, which has no mixed precision."""
    examples = data()
    single = pm.ArrayData(examples.inputs.float(), examples.targets, batch_size=5)
    posterior = fitted(
        pm.methods.LatePhase(2, 1, optimizer=SGD),
        lambda: small_net().float(), data=single, precision="bfloat16", backend=backend,
    )  # fmt: skip
    assert abs(posterior.record["findings"][0]["barrier"]) < 0.1


def test_there_are_no_more_members_than_minibatches_unless_they_are_asked_for():
    kept = fitted(pm.methods.LatePhase(optimizer=SGD, keep_members=True))
    assert kept.num_members == 5
    plenty = fitted(pm.methods.LatePhase(optimizer=SGD, keep_members=True), data=data(24, 2))
    assert plenty.num_members == 10


def test_matrices_of_a_network_beside_a_learned_noise_level():
    numbers = pm.ArrayData(torch.randn(24, 4).double(), torch.randn(24, 1).double(), batch_size=5)
    kept = fitted(
        pm.methods.LatePhase(2, 0, "rank_one", matrices="1.weight", optimizer=SGD, keep_members=True),
        pm.models.MLP(4, 1, (6,)).double(), data=numbers, likelihood="gaussian",
    )  # fmt: skip
    assert kept.late.factored == ("network.1.weight",)


def test_members_of_different_basins_are_kept_and_not_averaged():
    """Hidden units that changed places: as good as before, each; their average is not."""
    inputs = torch.randn(600, 2, dtype=torch.float64)
    targets = ((inputs[:, 0] * inputs[:, 1]) > 0).long()
    split = pm.ArrayData(inputs, targets, batch_size=50)
    method = pm.methods.LatePhase(
        2, 0, "all", noise=30.0, optimizer=pm.Optimizer("Adam", lr=0.02), factor_spread=0.0
    )

    def net():
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()

    with pytest.warns(UserWarning, match="different basins.*The posterior holds the members"):
        posterior = fitted(method, net, data=split, epochs=20)
    assert isinstance(posterior, LateMembers)
    with pytest.raises(NotCollapsible, match="different basins"):
        posterior.collapse()
    alone = -posterior.log_prob(inputs, targets).mean()
    forced = -posterior.averaged(force=True).log_prob(inputs, targets).mean()
    assert forced > alone + 0.1
    one = fitted(replace(method, force=True), net, data=split, epochs=20)
    assert one.num_members == 1


# --- which weights --------------------------------------------------------------------------------


def names_of(module):
    return frozenset(name for name, p in module.named_parameters() if p.requires_grad)


def test_what_is_late_by_default():
    module = small_net()
    assert late_weights(module, names_of(module), None, head=True).own == (
        *("1.weight", "1.bias", "3.weight", "3.bias"),
    )
    plain = pm.models.MLP(4, 3, (6, 6))
    matrices = [n for n, p in plain.named_parameters() if p.ndim == 2]
    assert late_weights(plain, names_of(plain), None, head=True).factored == tuple(matrices[:-1])
    assert late_weights(plain, names_of(plain), None, head=False).factored == tuple(matrices)
    lone = nn.Linear(4, 3)
    assert late_weights(lone, names_of(lone), None, head=True).own == ("weight", "bias")


def test_only_what_multiplies_gets_factors_unasked():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, 4))
            self.norm = nn.LayerNorm((3, 4))
            self.attention = nn.MultiheadAttention(4, 2)
            self.embedding = nn.Embedding(5, 4)

    module = Patches()
    found = late_weights(module, names_of(module), "rank_one", head=False).factored
    assert found == ("attention.in_proj_weight", "attention.out_proj.weight")
    asked = late_weights(module, names_of(module), "rank_one", head=False, matrices="token")
    assert asked.factored == ("token",)


def test_recurrent_matrices_get_factors():
    lstm = pm.models.CharacterLSTM(20, 8, 12)
    found = late_weights(lstm, names_of(lstm), "rank_one", head=False, matrices="*weight_hidden")
    assert found.factored == ("lstm.weight_hidden",)
    assert "embedding.weight" not in late_weights(lstm, names_of(lstm), "rank_one", head=False).factored
    torch_lstm = nn.LSTM(3, 5)
    both = late_weights(torch_lstm, names_of(torch_lstm), "rank_one", head=False, matrices="weight_hh_*")
    assert both.factored == ("weight_hh_l0",)


def test_hypernetwork_of_table_7_has_654_numbers_a_member():
    with torch.device("meta"):
        net = pm.models.wrn28_10(10)
    convs = {n: tuple(m.weight.shape) for n, m in net.named_modules() if isinstance(m, nn.Conv2d)}

    def of(shape):
        return tuple(name for name, found in convs.items() if found == shape)

    banks = [
        Bank(of((16, 3, 3, 3)), 3, 10),
        Bank(of((160, 16, 3, 3)), 16, 7),
        Bank(of((160, 160, 3, 3)), 80, 14),
        Bank(of((320, 160, 3, 3)) + of((320, 320, 3, 3)), 160, 14),
        Bank(of((640, 320, 3, 3)) + of((640, 640, 3, 3)), 320, 14),
        *(Bank(of((a, b, 1, 1)), b, 7) for a, b in ((160, 16), (320, 160), (640, 320))),
    ]
    late = late_weights(net, names_of(net), "hypernetwork", head=False, banks=banks)
    numbers = 0
    for bank in late.banks:
        for name in bank.layers:
            numbers += bank.templates * (net.get_parameter(name).shape[1] // bank.inputs)
    assert numbers == 654
    assert {name for bank in late.banks for name in bank.layers} == {f"{name}.weight" for name in convs}


def test_templates_times_embedding_are_kernels_side_by_side():
    net = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(8, 6, 3)).double()
    late = LateWeights(banks=(Bank(("0.weight", "1.weight"), 4, 5),))
    begun = late.begin(dict(net.state_dict()), torch.Generator().manual_seed(0), 0.0)
    made = late.realise(begun)
    templates, embedding = begun["templates/0.weight"], begun["embedding/1.weight"]
    assert made["1.weight"].shape == net[1].weight.shape
    for part in range(2):
        expected = sum(embedding[t, part] * templates[..., t] for t in range(5))
        torch.testing.assert_close(made["1.weight"][:, 4 * part : 4 * part + 4], expected)
    assert begun["embedding/1.weight"].norm(dim=0).mean().item() == pytest.approx(1)


@pytest.mark.parametrize("weights", ["rank_one", "hypernetwork"])
def test_multipliers_carry_no_decay(weights):
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3)).double()
    images = pm.ArrayData(torch.zeros(12, 2, 5, 5, dtype=torch.float64), torch.zeros(12).long(), batch_size=4)
    # On inputs of zeros no kernel has a gradient: decay alone would move its factors.
    decay = pm.Optimizer("SGD", lr=0.1, weight_decay=1.0)
    method = pm.methods.LatePhase(
        3, 0, weights, head=False, matrices="0.weight" if weights == "rank_one" else None, optimizer=decay,
        keep_members=True, factor_spread=0.1,
    )  # fmt: skip
    posterior = fitted(method, net, data=images, epochs=2)
    [block] = posterior.blocks
    for name, tensor in block.stacked.items():
        if name.startswith("left/"):
            assert (tensor - 1).abs().max() <= 0.1
            assert (tensor - 1).abs().max() > 0.01
        if name.startswith("embedding/"):
            assert tensor.norm(dim=1).mean().item() == pytest.approx(1)


# --- composition and bad input -----------------------------------------------------------------


def test_an_ensemble_of_late_phase_networks():
    late = pm.methods.LatePhase(2, 1, noise=0.1, optimizer=SGD)
    ensemble = fitted(pm.methods.DeepEnsemble(3, of=late), small_net)
    assert ensemble.num_members == 3
    assert len(ensemble.record["findings"]) == 3
    alone = fitted(late, small_net)
    [drawn] = ensemble.draw()
    for name, tensor in weights_of(alone).items():
        torch.testing.assert_close(drawn.member(0)[name], tensor)


def test_pretrained_module_is_where_a_fine_tune_begins():
    net = small_net()
    frozen = pm.Optimizer("SGD", lr=1e-12)
    got = weights_of(fitted(pm.methods.LatePhase(2, 0, optimizer=frozen), net))
    torch.testing.assert_close(got["0.weight"], net.state_dict()["0.weight"])
    torch.testing.assert_close(got["3.weight"], net.state_dict()["3.weight"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pm.methods.LatePhase(0), "num_members must be a whole number of at least 1, got 0"),
        (lambda: pm.methods.LatePhase(start=-1), "start must be a number of epochs"),
        (lambda: pm.methods.LatePhase(start=1.5), "start=1.5: give whole epochs"),
        (lambda: pm.methods.LatePhase(noise=-0.1), "noise must be a number of at least 0"),
        (lambda: pm.methods.LatePhase(average="mean"), "Unknown average 'mean'"),
        (lambda: pm.methods.LatePhase(optimizer=pm.Optimizer("LBFGS")), "LBFGS evaluates the loss"),
        (
            lambda: pm.methods.LatePhase(carry_moments=True, late_optimizer=pm.Optimizer("SGD")),
            "carry_moments=True needs one optimiser",
        ),
        (lambda: pm.methods.LatePhase(start=0, carry_moments=True), "needs a phase before the late one"),
        (lambda: pm.methods.BatchEnsemble(0), "num_members must be"),
        (lambda: pm.methods.BatchEnsemble(spread=-1), "spread must be"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_members": 6}, "num_members=6 is more than the 5 minibatches of an epoch"),
        ({"start": 4}, "start=4 is not before the end of 4 epochs"),
        ({"weights": "hypernetwork"}, "no two-dimensional convolutions. It has 1 BatchNorm1d, 2 Linear"),
        ({"weights": ("rank_one",), "matrices": "nowhere*"}, "'nowhere.' fits no matrix.*there are 0.weight"),
        ({"weights": "batch_norm", "matrices": "0.weight"}, "are those of weights='rank_one'"),
        ({"weights": ("rank_one", "hypernetwork")}, "at once"),
        ({"weights": (), "head": False, "keep_members": True}, "all members would be the same"),
        ({"weights": "bach_norm"}, "Unknown layer, type or pattern"),
    ],
)
def test_bad_input_is_found_before_training(options, message):
    with pytest.raises(InputError, match=message):
        fitted(pm.methods.LatePhase(**({"num_members": 2} | options)))


def test_a_network_without_batch_norm_is_told_what_it_has():
    with pytest.raises(InputError, match=r"no BatchNorm layers.*It has 3 Linear.*'rank_one': factors"):
        fitted(pm.methods.LatePhase(2, weights="batch_norm"), pm.models.MLP(4, 3, (6, 6)).double())


# --- networks of others: the names and types of torchvision's, built here -------------------------------


class DenseLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 8, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1, bias=False)

    def forward(self, x):
        return torch.cat([x, self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())], 1)


class DenseNet(nn.Module):
    """The layout of torchvision's DenseNet, with one block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential()
        block.add_module("denselayer1", DenseLayer(6))
        block.add_module("denselayer2", DenseLayer(10))
        self.features = nn.Sequential()
        for name, layer in (
            *(("conv0", nn.Conv2d(3, 6, 3, padding=1, bias=False)), ("norm0", nn.BatchNorm2d(6))),
            *(("denseblock1", block), ("norm5", nn.BatchNorm2d(14))),
        ):
            self.features.add_module(name, layer)
        self.classifier = nn.Linear(14, 3)

    def forward(self, x):
        return self.classifier(self.features(x).relu().mean((2, 3)))


class Bottleneck(nn.Module):
    """A block of torchvision's ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.downsample = nn.Sequential(nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16))

    def forward(self, x):
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return (self.bn3(self.conv3(out)) + self.downsample(x)).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Bottleneck())
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.layer1(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("net", "head", "norms"),
    [(DenseNet, "classifier", 6), (ResNet, "fc", 4)],
    ids=["DenseNet-161", "ResNet-50 and 152"],
)
def test_pretrained_networks_of_others_are_fine_tuned_as_they_are(net, head, norms):
    module = net()
    late = late_weights(module, names_of(module), "batch_norm", head=True)
    assert late.own[-2:] == (f"{head}.weight", f"{head}.bias")
    assert len(late.own) == 2 * norms + 2
    assert late_weights(module, names_of(module), "batch_norm", head=False).own == late.own[:-2]
    images = pm.ArrayData(torch.randn(12, 3, 6, 6), torch.randint(3, (12,)), batch_size=4)
    tuned = fitted(
        pm.methods.LatePhase(3, 0, "batch_norm", head=False, base_scale=1 / 3, optimizer=SGD),
        module, data=images, epochs=2,
    ).collapse()  # fmt: skip
    assert type(tuned) is net
    assert tuned.state_dict().keys() == module.state_dict().keys()
    norm = next(name for name in late.own if "weight" in name)
    assert not torch.equal(tuned.state_dict()[norm], module.state_dict()[norm])
