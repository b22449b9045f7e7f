"""fit against a hand-written loop, and every option against what it promises."""

import copy
import math
import random
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import polymode as pm
from cases import BY_NAME, redrawn
from polymode.errors import InputError, NonFiniteLoss, NotCollapsible
from polymode.methods import DeepEnsemble, Single
from polymode.networks.adaptations import Adaptation, register_adaptation
from polymode.networks.members import call_module, unstack
from polymode.networks.surgery import tensors_of
from polymode.seeds import derive_generator
from polymode.training.contract import State
from polymode.training.loop.validation import keep_better, take_best
from polymode.trees import leaves
from tolerances import assert_equal_up_to_rounding


def quiet(method, model, data, likelihood="categorical", epochs=3, **options):
    options = {"progress": False, "backend": "loop"} | options
    return pm.fit(method, model, data, likelihood=likelihood, epochs=epochs, **options)


def mlp() -> nn.Module:
    return pm.models.MLP(4, 3, (6,)).double()


def toy(n: int = 24, batch_size: int = 8, seed: int = 0, **options) -> pm.ArrayData:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, dtype=torch.float64, generator=g)
    return pm.ArrayData(x, torch.randint(3, (n,), generator=g), batch_size=batch_size, **options)


def weights_of(posterior) -> dict[str, torch.Tensor]:
    blocks = list(posterior.draw())
    return {n: torch.cat([b.stacked[n] for b in blocks]) for n in blocks[0].stacked}


def assert_same_bits(a, b) -> None:
    """Of runs in which the same kernels see the same shapes."""
    first, second = weights_of(a), weights_of(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def assert_same_weights(a, b, *, rows_b=slice(None)) -> None:
    expected = {name: tensor[rows_b] for name, tensor in weights_of(b).items()}
    assert_equal_up_to_rounding(weights_of(a), expected)


def plain_loop(module, data, epochs, make_optimizer, chain=0, seed=0, after_step=None):
    """The loop everybody writes, on the order that fit derives."""
    module = copy.deepcopy(module).train()
    optimizer = make_optimizer(module)
    for epoch in range(epochs):
        key = (seed, "order", chain, epoch, data.num_examples)
        order = torch.randperm(data.num_examples, generator=derive_generator(*key))
        for rows in order.split(data.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(module(data.inputs[rows]), data.targets[rows]).backward()
            if after_step:
                after_step(module)
            optimizer.step()
    return module


# --- equality ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_norm", [False, True])
def test_single_is_the_ordinary_loop(batch_norm):
    module, data = pm.models.MLP(4, 3, (6,), batch_norm=batch_norm).double(), toy()
    posterior = quiet(Single(), module, data)
    expected = plain_loop(module, data, 3, lambda m: torch.optim.Adam(m.parameters(), fused=True))
    found = {name: tensor[0] for name, tensor in weights_of(posterior).items()}
    assert_equal_up_to_rounding(found, expected.state_dict())
    collapsed = posterior.collapse()
    assert type(collapsed) is type(module)
    x = data.inputs
    assert_equal_up_to_rounding(collapsed(x), expected.eval()(x))
    torch.testing.assert_close(posterior.predict(x).mean, expected(x).softmax(-1))


def test_one_member_ensemble_is_the_single_network():
    for model in (mlp(), mlp):
        assert_same_weights(quiet(Single(), model, toy()), quiet(DeepEnsemble(1), model, toy()))


def test_members_do_not_feel_each_other():
    """Members 0 and 1 of a pair, and of five, are the same; the others are added to them."""
    two = quiet(DeepEnsemble(2), mlp, toy())
    five = quiet(DeepEnsemble(5), mlp, toy())
    assert_same_weights(two, five, rows_b=slice(0, 2))
    extended = quiet(DeepEnsemble(3), mlp, toy(), extend=two)
    assert_same_weights(extended, five)
    assert extended.num_members == 5
    assert extended.record["member_epochs"] == five.record["member_epochs"] == 15
    assert extended.record["extends"]["method"]["num_members"] == 2


@pytest.mark.parametrize("name", ["mlp", "batch_norm", "dropout", "learned_noise"])
def test_backends_train_to_the_same_weights(name):
    case = BY_NAME[name]
    loop, vmap = (
        quiet(DeepEnsemble(3), case.double_factory, case.data(), case.likelihood, backend=backend)
        for backend in ("loop", "vmap")
    )
    assert_same_weights(loop, vmap)
    assert vmap.record["backend"] == vmap.record["prediction_backend"] == "vmap"


@pytest.mark.parametrize("optimizer", ["Adam", "LBFGS"])
def test_noise_of_a_member_is_its_own(optimizer):
    """Idle chains and other members' evaluations do not advance it."""
    case = BY_NAME["dropout"]
    method = Single(optimizer=pm.Optimizer(optimizer, lr=0.01))
    sets = [case.data(13, seed=1), case.data(24, seed=2)]
    for data, together in zip(sets, quiet(method, case.double_factory, sets), strict=True):
        assert_same_weights(quiet(method, case.double_factory, data), together)
    pair = quiet(DeepEnsemble(2, of=method), case.double_factory, sets[0])
    alone = quiet(method, case.double_factory, sets[0])
    assert_same_weights(alone, pair, rows_b=slice(0, 1))


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_data_sets_side_by_side_equal_one_after_another(backend):
    """Unequal sizes, in any order, with their own numbers of steps and schedules."""
    sets = [toy(13, seed=1), toy(24, seed=2), toy(8, seed=3), toy(13, seed=4)]
    method = DeepEnsemble(2, of=Single(prior_std=1.0, schedule=pm.schedules.Cosine()))
    together = quiet(method, mlp, sets, backend=backend)
    for data, posterior in zip(sets, together, strict=True):
        alone = quiet(method, mlp, data, backend=backend)
        assert_same_weights(alone, posterior)
        assert posterior.record["num_examples"] == data.num_examples
        assert posterior.record["member_epochs"] == pytest.approx(6)
        torch.testing.assert_close(alone.predict(data.inputs).mean, posterior.predict(data.inputs).mean)
    seeded = quiet(method, mlp, sets, seed=[0, 1, 2, 3])
    assert_same_weights(together[0], seeded[0])
    assert not torch.allclose(weights_of(together[1])["1.weight"], weights_of(seeded[1])["1.weight"])


# --- orders ------------------------------------------------------------------------------------


def test_members_see_their_own_order_and_all_examples():
    seen: list[torch.Tensor] = []

    class Recorder(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(1, 3)

        def forward(self, x):
            seen.append(x.detach().flatten())
            return self.body(x)

    data = pm.ArrayData(torch.arange(12.0)[:, None], torch.zeros(12, dtype=torch.int64), batch_size=5)
    quiet(DeepEnsemble(2), Recorder, data, epochs=1)
    steps = seen[-6:]  # the probe came first
    first, second = (torch.cat(steps[i::2]) for i in (0, 1))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(12))
    assert first.tolist() != second.tolist()
    quiet(DeepEnsemble(2), Recorder, data, epochs=1, shared_order=True)
    first, second = (torch.cat(seen[-6:][i::2]) for i in (0, 1))
    assert first.tolist() == second.tolist()


def test_shared_order_agrees_between_backends():
    a, b = (
        quiet(DeepEnsemble(3), mlp, toy(), shared_order=True, backend=backend) for backend in ("loop", "vmap")
    )
    assert_same_weights(a, b)


def test_data_loader_gives_the_same_as_arrays():
    data = toy()
    dataset = TensorDataset(data.inputs, data.targets)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    assert_same_weights(quiet(DeepEnsemble(2), mlp, data), quiet(DeepEnsemble(2), mlp, loader))


def test_augmentation_of_a_data_set_is_seeded():
    """What ``__getitem__`` draws depends on the seed of the fit, not on the global random state."""
    data = toy()

    class Jitter(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, row):
            noise = torch.randn(4, dtype=torch.float64) * random.random()
            return data.inputs[row] + noise, data.targets[row]

    loader = DataLoader(Jitter(), batch_size=8, shuffle=True)
    first = quiet(DeepEnsemble(2), mlp, loader)
    torch.rand(7), random.random()
    assert_same_bits(first, quiet(DeepEnsemble(2), mlp, loader))
    workers = DataLoader(Jitter(), batch_size=8, shuffle=True, num_workers=1)
    assert_same_bits(first, quiet(DeepEnsemble(2), mlp, workers))


def test_a_sampler_of_the_users_is_not_ignored():
    data = toy()
    dataset = TensorDataset(data.inputs, data.targets)
    sampler = torch.utils.data.SubsetRandomSampler(range(10))
    with pytest.raises(InputError, match=r"SubsetRandomSampler.*Subset"):
        quiet(Single(), mlp, DataLoader(dataset, batch_size=8, sampler=sampler))


def test_bad_rows_of_a_loader_are_found_when_they_come():
    data = toy()
    labels = data.targets.clone()
    labels[20] = 3
    loader = DataLoader(TensorDataset(data.inputs, labels), batch_size=8)
    for backend in ("loop", "vmap", "auto"):
        with pytest.raises(InputError, match="Label 3 is out of range"):
            quiet(DeepEnsemble(2), mlp, loader, backend=backend)
    inputs = data.inputs.clone()
    inputs[20] = float("nan")
    with pytest.raises(InputError, match="NaN or infinite inputs"):
        quiet(Single(), mlp, DataLoader(TensorDataset(inputs, data.targets), batch_size=8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_labels_of_any_integer_type(dtype, backend):
    data = toy()
    other = pm.ArrayData(data.inputs, data.targets.to(dtype), batch_size=8)
    a, b = (quiet(DeepEnsemble(2), mlp, d, backend=backend) for d in (data, other))
    assert_same_bits(a, b)
    assert pm.evaluate(a, data) == pm.evaluate(b, other)


def test_iterable_data_needs_a_length():
    data = toy()

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(list(zip(data.inputs, data.targets, strict=True)))

    loader = DataLoader(Stream(), batch_size=8)
    with pytest.raises(InputError, match="num_examples"):
        quiet(DeepEnsemble(2), mlp, loader)
    posterior = quiet(DeepEnsemble(2), mlp, pm.LoaderData(loader, num_examples=24))
    assert posterior.record["member_epochs"] == 6
    with pytest.raises(InputError, match="The data ended before row 24"):
        quiet(DeepEnsemble(2), mlp, pm.LoaderData(loader, num_examples=30))


# --- optimisers, schedules, groups ---------------------------------------------------------------

OPTIMIZERS = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax"]
OPTIMIZERS += ["ASGD", "Rprop", "Adafactor", "Muon"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_steps_members_as_if_alone(name):
    def factory():
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)).double()

    method = Single(optimizer=pm.Optimizer(name, lr=0.01))
    together = quiet(DeepEnsemble(3, of=method), factory, toy(), backend="vmap")
    for member in range(3):
        alone = weights_of(quiet(DeepEnsemble(member + 1, of=method), factory, toy()))
        for key, tensor in weights_of(together).items():
            torch.testing.assert_close(tensor[member], alone[key][member], rtol=1e-6, atol=1e-8)


def test_lbfgs_reaches_the_minimum_of_a_convex_problem():
    data = toy(40, batch_size=40)
    method = Single(prior_std=1.0, optimizer=pm.Optimizer("LBFGS", lr=1.0, tolerance_change=0.0))
    posterior = quiet(DeepEnsemble(2, of=method), lambda: nn.Linear(4, 3).double(), data, epochs=5)
    weights = {n: t.requires_grad_() for n, t in weights_of(posterior).items()}
    for member in range(2):
        logits = data.inputs @ weights["weight"][member].T + weights["bias"][member]
        penalty = sum(t[member].square().sum() for t in weights.values()) / 2 / 40
        loss = F.cross_entropy(logits, data.targets) + penalty
        gradient = torch.autograd.grad(loss, weights["weight"])[0]
        assert gradient.abs().max() < 1e-6


@redrawn
def test_clipping_is_per_member():
    """A norm over all members would clip differently from each alone."""
    module, data = mlp(), toy()
    method = Single(optimizer=pm.Optimizer("SGD", lr=0.5, clip_norm=0.1))
    posterior = quiet(DeepEnsemble(3, of=method), module, data)
    expected = plain_loop(
        module,
        data,
        3,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
        after_step=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    )
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(weights_of(posterior)[name][0], tensor)


def test_no_decay_on_normalisation_and_bias():
    module = pm.models.MLP(4, 3, (6,), batch_norm=True).double()
    data = toy()
    method = Single(optimizer=pm.Optimizer("SGD", lr=0.1, weight_decay=0.5, decay_all=False))

    def groups(m):
        decayed = [m[1].weight, m[4].weight]
        free = [p for p in m.parameters() if not any(p is q for q in decayed)]
        return torch.optim.SGD(
            [{"params": decayed, "weight_decay": 0.5}, {"params": free}], lr=0.1, fused=True
        )

    expected = plain_loop(module, data, 3, groups)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(weights_of(quiet(method, module, data))[name][0], tensor)


@pytest.mark.filterwarnings("ignore:The targets have a mean of 1e")
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (pm.schedules.Constant(), [1, 1, 1, 1]),
        (pm.schedules.Cosine(0.1), [0.1 + 0.45 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]),
        (pm.schedules.Drops((1.0, 1.5), 0.1), [1, 1, 0.1, 0.01]),
        (pm.schedules.Linear(0.5, 1.5, 0.2), [1, 1, 0.6, 0.2]),
        (pm.schedules.Warmup(1.0), [0.5, 1, 1, 1]),
        (pm.schedules.Triangle(0.2, 0.8), [0.2, 0.5, 0.8, 0.5]),
        (pm.schedules.Triangle(0.2, 0.8, cycles=2), [0.2, 0.8, 0.2, 0.8]),
        (pm.schedules.Triangle(0.5, 0.5), [0.5, 0.5, 0.5, 0.5]),
        (lambda progress: 0.5**progress.step, [1, 0.5, 0.25, 0.125]),
    ],
)
def test_schedules_multiply_the_rate(schedule, expected):
    """Plain SGD on a linear loss moves by the rate: two epochs of two steps."""
    rates = []

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            rates.append(self.w.item())
            return self.w.expand(len(x), 1) * 1.0

    # With targets at distance 1e6 the gradient of the squared loss is constant to a millionth.
    data = pm.ArrayData(torch.zeros(4, 1), torch.full((4, 1), 1e6, dtype=torch.float64), batch_size=2)
    method = Single(optimizer=pm.Optimizer("SGD", lr=1e-6), schedule=schedule)
    posterior = quiet(method, Sum(), data, pm.likelihoods.FixedGaussian(), epochs=2)
    moved = torch.tensor([*rates[-4:], weights_of(posterior)["w"].item()]).diff()
    torch.testing.assert_close(moved, torch.tensor(expected).float(), rtol=1e-4, atol=1e-5)


# --- keeping the best ----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["best", pm.KeepBest("error", from_epoch=3, to_epoch=5)])
def test_best_weights_are_kept_per_member(keep):
    validation = toy(30, seed=9)
    records: list[pm.Epoch] = []
    snapshots = []
    method = DeepEnsemble(3, of=Single(optimizer=pm.Optimizer("SGD", lr=1.0), keep=keep))

    # A stricter observer would see weights; here the same run is cut at every epoch instead.
    posterior = quiet(method, mlp, toy(), epochs=6, validation=validation, observer=records.append)
    for epochs in range(1, 7):
        last = DeepEnsemble(3, of=Single(optimizer=pm.Optimizer("SGD", lr=1.0)))
        snapshots.append(weights_of(quiet(last, mlp, toy(), epochs=epochs)))
    criterion = "nll" if keep == "best" else "error"
    scores = torch.stack([record.validation[criterion] for record in records])
    first = 0 if keep == "best" else 2
    last = None if keep == "best" else 5
    best = scores[first:last].argmin(0) + first
    for member in range(3):
        for name, tensor in weights_of(posterior).items():
            assert torch.equal(tensor[member], snapshots[best[member]][name][member])


def test_validation_scores_are_those_of_each_member():
    validation = toy(30, seed=9)
    records: list[pm.Epoch] = []
    method = DeepEnsemble(2, of=Single(prior_std=2.0))
    posterior = quiet(method, mlp, toy(), validation=validation, observer=records.append)
    for member, block in enumerate(pm.unstack(next(iter(posterior.draw())))):
        module = mlp()
        module.load_state_dict(block)
        logits = module(validation.inputs)
        nll = F.cross_entropy(logits, validation.targets)
        penalty = sum(t.square().sum() for t in block.values()) / (2 * 4) / 24
        last = records[-1].validation
        assert last["nll"][member].item() == pytest.approx(nll.item(), rel=1e-5)
        assert last["objective"][member].item() == pytest.approx((nll + penalty).item(), rel=1e-5)
        wrong = (logits.argmax(-1) != validation.targets).double().mean().item()
        assert last["error"][member].item() == pytest.approx(wrong)


def test_validation_of_both_backends_agrees():
    """Also where evaluation mode takes another kernel than training, as a transformer layer does."""
    case = BY_NAME["transformer"]
    sgd = Single(optimizer=pm.Optimizer("SGD", lr=0.05))
    scores = {}
    for backend in ("loop", "vmap"):
        records: list[pm.Epoch] = []
        quiet(
            DeepEnsemble(2, of=sgd),
            case.double_factory,
            case.data(),
            backend=backend,
            validation=case.data(seed=3),
            observer=records.append,
        )
        scores[backend] = records[-1].validation["nll"]
    torch.testing.assert_close(scores["loop"], scores["vmap"])


def test_a_score_that_is_nan_is_never_the_best():
    state = State(pm.Members({"w": torch.zeros(3, 1)}))
    for weight, scores in (
        (1.0, [2.0, math.nan, 2.0]),
        (2.0, [math.nan, 3.0, 1.0]),
        (3.0, [4.0, 4.0, math.nan]),
    ):
        state.members.stacked["w"].fill_(weight)
        keep_better(state, torch.tensor(scores))
    take_best(state)
    assert state.members.stacked["w"].flatten().tolist() == [1.0, 2.0, 2.0]


def test_own_tensors_follow_the_member_and_common_ones_the_mean_of_its_chain():
    members = pm.Members({"w": torch.zeros(4, 1)}, num_groups=2)
    state = State(members, own={"mask": torch.zeros(4, 2)}, common={"sum": torch.zeros(2, 3)})
    for epoch, scores in (
        (1.0, [1.0, 5.0, 3.0, 3.0]),
        (2.0, [2.0, 2.0, 4.0, 1.0]),
        (3.0, [3.0, 4.0, 2.5, 3.0]),
    ):
        for tensor in (state.members.stacked["w"], state.own["mask"], state.common["sum"]):
            tensor.fill_(epoch)
        keep_better(state, torch.tensor(scores))
    take_best(state)
    assert state.members.stacked["w"][:, 0].tolist() == [1.0, 2.0, 3.0, 2.0]
    assert state.own["mask"][:, 0].tolist() == [1.0, 2.0, 3.0, 2.0]
    assert state.common["sum"][:, 0].tolist() == [2.0, 2.0]  # means 3, 2, 3.5 and 3, 2.5, 2.75


# --- starts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["convolution", "two_inputs", "keyword_inputs", "tied_tokens"])
def test_a_method_is_given_an_example_that_its_network_can_run_on(name):
    """The first one of the data, alone, in the precision of the weights, whatever the method is asked."""
    case, given = BY_NAME[name], []

    class Noting(Single):
        def phases(self, problem, epochs):
            given.append(problem)
            return super().phases(problem, epochs)

        def init(self, problem, generator):
            given.append(problem)
            return super().init(problem, generator)

    data = case.data()
    quiet(Noting(), case.factory, data, case.likelihood, epochs=1)
    assert len(given) >= 3
    for problem in given:
        rows = list(leaves(problem.example))
        assert all(torch.equal(a, b[:1].to(a)) for a, b in zip(rows, leaves(data.inputs), strict=True))
        assert {row.dtype for row in rows} <= {torch.float32, torch.int64}  # the data are in double precision
        outputs = call_module(problem.network.module, {}, problem.example)
        assert all(torch.isfinite(each).all() for each in leaves(outputs))


@redrawn
def test_the_users_module_is_untouched():
    module = pm.models.MLP(4, 3, (6,), batch_norm=True, dropout=0.1).double()
    before = copy.deepcopy(module.state_dict())
    training, children = module.training, [type(m) for m in module.modules()]
    quiet(DeepEnsemble(2), module, toy())
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert (training, children) == (module.training, [type(m) for m in module.modules()])
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


@redrawn
def test_frozen_parameters_stay():
    module = mlp()
    module[1].requires_grad_(False)
    posterior = quiet(DeepEnsemble(2), module, toy())
    assert set(weights_of(posterior)) == {"3.weight", "3.bias"}
    outputs = next(posterior.outputs(toy().inputs))[1]
    body = torch.relu(toy().inputs @ module[1].weight.T + module[1].bias)
    head = weights_of(posterior)
    expected = torch.einsum("bh,mch->mbc", body, head["3.weight"]) + head["3.bias"][:, None]
    torch.testing.assert_close(outputs, expected)


@redrawn
def test_frozen_batch_norm_keeps_its_statistics():
    """Layers in evaluation mode inside a training module stay so; frozen layers are not drawn anew."""
    module = pm.models.MLP(4, 3, (6,), batch_norm=True).double().train()
    module[2].requires_grad_(False).eval()
    module[2].running_mean.fill_(5.0)
    data = toy()
    posterior = quiet(DeepEnsemble(2), module, data)
    assert "2.running_mean" not in weights_of(posterior)
    single = quiet(Single(), module, data).collapse()
    assert torch.equal(single[2].running_mean, module[2].running_mean)
    assert single[1].weight.requires_grad
    assert not single[2].weight.requires_grad


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic_gaussian"])
def test_a_module_in_evaluation_mode_is_trained_all_the_same(likelihood):
    """Only layers put into evaluation mode one by one stay there, dropout layers too."""
    data = pm.ArrayData(toy().inputs, toy().inputs[:, :1], batch_size=8)
    module = pm.models.MLP(4, 2 if likelihood[0] == "h" else 1, (6,), batch_norm=True, dropout=0.5).double()
    trained = quiet(Single(), module.train(), data, likelihood)
    in_eval = quiet(Single(), copy.deepcopy(module).eval(), data, likelihood)
    assert_same_weights(trained, in_eval)
    module.train()[4].eval()
    without = copy.deepcopy(module)
    without[4].p = 0.0
    assert_same_weights(quiet(Single(), module, data, likelihood), quiet(Single(), without, data, likelihood))


def test_collapse_gives_back_ordinary_layers_and_every_buffer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)
            self.register_buffer("shift", torch.randn(3), persistent=False)

        def forward(self, x):
            return self.drop(self.body(x)) + self.shift

    posterior = quiet(Single(), lambda: Net().double(), toy())
    module = posterior.collapse()
    assert type(module.drop) is nn.Dropout
    x = toy().inputs
    torch.testing.assert_close(module(x).softmax(-1), posterior.predict(x).mean)


def test_a_factorys_frozen_random_layer_is_each_members_own():
    case = BY_NAME["random_features"]
    posterior = quiet(DeepEnsemble(2), case.double_factory, case.data())
    weights = weights_of(posterior)
    assert not torch.equal(weights["features.weight"][0], weights["features.weight"][1])
    assert "scale" not in weights


def test_modules_that_cannot_be_drawn_anew_ask_for_a_factory():
    pretrained = mlp()
    with torch.no_grad():
        pretrained[1].weight.mul_(3)
    with pytest.raises(InputError, match=r"'1.weight' changes its scale .* function instead of the module"):
        quiet(DeepEnsemble(2), pretrained, toy())
    quiet(Single(), pretrained, toy())  # one chain starts from the weights given

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))

        def forward(self, x):
            return x @ self.w

    with pytest.raises(InputError, match=r"'w' cannot be re-initialised.* function instead of the module"):
        quiet(DeepEnsemble(2), Bare(), toy())
    quiet(DeepEnsemble(2), Bare, toy())


def test_a_module_is_not_drawn_anew_without_a_word():
    """Its weights may have been trained, which nobody can tell by looking at them."""
    module, data = mlp(), toy()
    with pytest.warns(UserWarning, match="chain 0 starts from its weights, chains 1 to 2 start from") as said:
        three = quiet(DeepEnsemble(3), module, data, epochs=1)
    assert len(said) == 1
    with pytest.warns(UserWarning, match="one module: chain 3 starts from weights that its layers draw anew"):
        quiet(Single(), module, data, epochs=1, extend=three)
    # What the warning advises: all from these weights, up to the order of the data, or all drawn.
    slow = Single(optimizer=pm.Optimizer("SGD", lr=1e-9))
    copies = quiet(DeepEnsemble(3, of=slow), lambda: copy.deepcopy(module), data, epochs=1)
    for member in weights_of(copies)["1.weight"]:
        torch.testing.assert_close(member, module[1].weight.detach(), rtol=0, atol=1e-7)
    quiet(Single(), module, data, epochs=1)  # one chain: the module's own weights, and no word


@redrawn
@pytest.mark.parametrize("name", ["batch_norm", "convolution", "lstm", "transformer"])
def test_modules_are_drawn_anew_with_their_layers_rules(name):
    """Member 0 is the module; the others are drawn as its layers draw: each its own, of the same spread."""
    case = BY_NAME[name]
    module = case.double_factory()
    still = Single(optimizer=pm.Optimizer("SGD", lr=1e-12))
    posterior = quiet(DeepEnsemble(3, of=still), module, case.data(), case.likelihood, epochs=1)
    own = tensors_of(module)
    for key, tensor in weights_of(posterior).items():
        if key.endswith("weight") and tensor.ndim > 2:
            torch.testing.assert_close(tensor[0], own[key])
            assert not torch.allclose(tensor[1], tensor[2], atol=1e-3)
            # Two samples of n: the ratio of their spreads is 1 within 1/√n at a kurtosis of up to 3.
            error = 5 / own[key].numel() ** 0.5
            for member in tensor[1:]:
                assert float(member.std() / own[key].std()) == pytest.approx(1, abs=error), key


def test_mixed_precision_runs_and_keeps_weights_in_full():
    x = torch.randn(64, 4)
    data = pm.ArrayData(x, (x.sum(-1) > 0).long(), batch_size=16)
    posterior = quiet(
        DeepEnsemble(2), lambda: pm.models.MLP(4, 2, (8,)), data, precision="bfloat16", epochs=30
    )
    assert weights_of(posterior)["1.weight"].dtype == torch.float32
    full = quiet(DeepEnsemble(2), lambda: pm.models.MLP(4, 2, (8,)), data, epochs=30)
    difference = (posterior.predict(x).mean - full.predict(x).mean).abs().max().item()
    assert 0 < difference < 0.05  # bfloat16 has 8 bits: about 0.4 % a multiplication


def test_extension_of_another_network_is_refused_before_training():
    two = quiet(DeepEnsemble(2), mlp, toy())
    seen = []
    with pytest.raises(pm.errors.CheckpointError, match="belongs to another network"):
        quiet(
            DeepEnsemble(1),
            lambda: pm.models.MLP(4, 3, (7,)).double(),
            toy(),
            extend=two,
            observer=seen.append,
        )
    likelihood = pm.likelihoods.Categorical(ignore_index=2)
    with pytest.raises(InputError, match="they must agree"):
        quiet(DeepEnsemble(1), mlp, toy(), likelihood, extend=two, observer=seen.append)
    assert seen == []


def test_deep_ensemble_does_not_collapse():
    with pytest.raises(NotCollapsible, match="2 different networks"):
        quiet(DeepEnsemble(2), mlp, toy()).collapse()


# --- bad input ------------------------------------------------------------------------------------


def nan_inputs():
    x = torch.randn(6, 4)
    x[3, 1] = float("nan")
    return pm.ArrayData(x, torch.zeros(6, dtype=torch.int64))


def with_targets(targets):
    return lambda: pm.ArrayData(torch.randn(6, 4), targets)


BAD_DATA = {
    "empty": (lambda: pm.ArrayData(torch.zeros(0, 4), torch.zeros(0)), "0 examples"),
    "nan": (nan_inputs, "first in row 3"),
    "lengths": (lambda: pm.ArrayData(torch.zeros(3, 4), torch.zeros(2)), "differ in length"),
    "label too large": (with_targets(torch.tensor([0, 1, 2, 3, 0, 0])), "Label 3 is out of range"),
    "label negative": (with_targets(torch.tensor([0, -1, 2, 0, 0, 0])), "got -1"),
    "float labels": (with_targets(torch.zeros(6)), "Class labels must be integers, got torch.float32"),
    "label shape": (
        with_targets(torch.zeros(6, 2, dtype=torch.int64)),
        r"gives \[6, 3\] for labels \[6, 2\]",
    ),
    "wrong width": (
        lambda: pm.ArrayData(torch.randn(6, 5), torch.zeros(6, dtype=torch.int64)),
        r"cannot run on a batch of the data, inputs \[6, 5\]",
    ),
    "not data": (lambda: [[1, 2], [3, 4]], "Data must be ArrayData"),
    "no batch": (lambda: pm.ArrayData(torch.zeros(3, 4), torch.zeros(3), batch_size=0), "batch_size"),
    "weights": (
        lambda: pm.ArrayData(torch.zeros(2, 4), torch.zeros(2), weights=torch.tensor([1.0, -1.0])),
        "not negative",
    ),
    "nothing left": (
        lambda: pm.ArrayData(torch.zeros(3, 4), torch.zeros(3), batch_size=4, drop_last=True),
        "leaves nothing of 3",
    ),
}


class Odd(torch.nn.Linear):
    """A network whose code does something with its outputs."""

    def __init__(self, change):
        super().__init__(4, 3)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.Tensor.long, "outputs are torch.int64: they must be real floating-point numbers"),
        (lambda x: x + 1j, "outputs are torch.complex64: they must be real floating-point numbers"),
        (lambda x: {}["boom"], r"cannot run on a batch of the data, inputs \[6, 4\].*: KeyError: 'boom'"),
    ],
)
def test_networks_that_cannot_be_trained_are_refused(change, message):
    data = pm.ArrayData(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
    with pytest.raises(InputError, match=message):
        quiet(Single(), Odd(change), data)


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_refused_before_training(name):
    make, message = BAD_DATA[name]
    with pytest.raises(InputError, match=message):
        quiet(Single(), pm.models.MLP(4, 3, (6,)), make())


BAD_OPTIONS = {
    "members": (lambda: DeepEnsemble(0), "num_members must be a whole number of at least 1, got 0"),
    "optimiser": (lambda: pm.Optimizer("Adan"), "Did you mean 'Adam'"),
    "option": (lambda: pm.Optimizer("SGD", momentun=0.9), "Did you mean 'momentum'"),
    "rate": (lambda: pm.Optimizer("SGD", lr=0.0), "lr=...\\) must be a positive number"),
    "likelihood": (lambda: quiet(Single(), mlp(), toy(), "categorial"), "Did you mean 'categorical'"),
    "backend": (lambda: quiet(Single(), mlp(), toy(), backend="vmp"), "Did you mean 'vmap'"),
    "epochs": (lambda: quiet(Single(), mlp(), toy(), epochs=0), "at least 1, got 0"),
    "keep": (lambda: quiet(Single(keep="first"), mlp(), toy()), "keep='first'"),
    "no validation": (lambda: quiet(Single(keep="best"), mlp(), toy()), "pass validation"),
    "window": (
        lambda: quiet(Single(keep=pm.KeepBest(from_epoch=9)), mlp(), toy(), validation=toy()),
        "lies after the last of 3 epochs",
    ),
    "empty window": (lambda: pm.KeepBest(from_epoch=4, to_epoch=3), "got 4 and 3"),
    "seeds": (lambda: quiet(Single(), mlp, [toy(), toy()], seed=[1]), "1 seeds for 2 data sets"),
    "loaders": (
        lambda: quiet(Single(), mlp, [DataLoader(TensorDataset(torch.zeros(3, 4), torch.zeros(3)))] * 2),
        "must all be ArrayData",
    ),
    "model": (lambda: quiet(Single(), "resnet", toy()), "must be an nn.Module or a function"),
    "nothing trainable": (
        lambda: quiet(Single(), mlp().requires_grad_(False), toy()),
        "no trainable parameters",
    ),
    "dictionary": (
        lambda: quiet(Single(), BY_NAME["named_outputs"].double_factory(), toy()),
        "name the entry",
    ),
    "output name": (
        lambda: quiet(
            Single(),
            BY_NAME["named_outputs"].double_factory(),
            toy(),
            pm.likelihoods.Categorical(output="logit"),
        ),
        "Did you mean 'logits'",
    ),
    "precision": (lambda: quiet(Single(), mlp(), toy(), precision="float16"), "Unknown precision"),
    "prior": (lambda: quiet(Single(prior_std=-1.0), mlp(), toy()), "prior_std must be a positive number"),
    "batch norm": (
        lambda: quiet(Single(), BY_NAME["batch_norm"].double_factory(), toy(17)),
        "last batch of an epoch has one example .17 examples in batches of 8.",
    ),
    "optimizer name": (lambda: Single(optimizer="AdamW"), "optimizer must be a description"),
    "schedule": (lambda: Single(schedule=pm.schedules.Cosine), "schedule must be an instance"),
    "schedule value": (lambda: quiet(Single(schedule=lambda p: None), mlp(), toy()), "gave None at step 0"),
    "drops": (lambda: pm.schedules.Drops(3), "tuple of epochs"),
    "triangle": (lambda: pm.schedules.Triangle(0.5, 0.1), "0 <= low <= high, got low=0.5 and high=0.1"),
    "cycles": (lambda: pm.schedules.Triangle(0.1, cycles=0), "whole number of cycles, got 0"),
    "constant": (lambda: pm.schedules.Constant("fast"), "factor of Constant must be a number.*'fast'"),
    "cosine": (lambda: pm.schedules.Cosine(float("nan")), "final of Cosine must be a number.*nan"),
    "drop": (lambda: pm.schedules.Drops((1, "2")), "epochs of Drops must be a number.*'2'"),
    "rises": (lambda: pm.schedules.Drops((1, 2, 3), 1e5), "rise beyond 1e.06"),
    "linear": (lambda: pm.schedules.Linear(0, 1, -1), "final of Linear must be a number from 0"),
    "warmup": (lambda: pm.schedules.Warmup("2"), "epochs of Warmup must be a number"),
    "warmup then": (lambda: pm.schedules.Warmup(2, 3), "Warmup takes a schedule, such as Cosine.., got 3"),
    "scaled": (lambda: pm.schedules.Scaled("x", 1), "Scaled takes a schedule"),
    "pieces": (lambda: pm.schedules.Pieces(((0, 1, 2),)), "Pieces takes points .fraction, factor."),
    "piece": (lambda: pm.schedules.Pieces(((0, float("inf")),)), "factor of Pieces must be a number"),
    "method class": (lambda: quiet(DeepEnsemble, mlp, toy()), "got DeepEnsemble"),
    "method name": (lambda: quiet("deep_ensemble", mlp, toy()), "must be an instance"),
    "member class": (lambda: DeepEnsemble(2, of=Single), "such as Single"),
    "likelihood class": (
        lambda: quiet(Single(), mlp(), toy(), pm.likelihoods.Categorical),
        "instance such as Categorical",
    ),
    "seed": (lambda: quiet(Single(), mlp(), toy(), seed=1.5), "whole number, got 1.5"),
    "one validation": (
        lambda: quiet(Single(), mlp, [toy(), toy()], validation=toy()),
        "list of 2 validation sets",
    ),
    "validation data": (
        lambda: quiet(
            Single(), mlp(), toy(), validation=pm.ArrayData(torch.zeros(3, 5), torch.zeros(3).long())
        ),
        "In the validation data",
    ),
    "batch size": (lambda: pm.ArrayData(torch.zeros(3, 4), torch.zeros(3), batch_size=2.0), "got 2.0"),
    "factory": (lambda: quiet(Single(), nn.Linear, toy()), "without arguments"),
    "observer": (lambda: quiet(Single(), mlp(), toy(), observer="x"), "observer must be a function"),
    "run_dir": (lambda: quiet(Single(), mlp(), toy(), run_dir=3), "run_dir must be a path"),
    "device": (lambda: quiet(Single(), mlp(), toy(), device="gpu"), "device='gpu' cannot be used"),
    "case": (lambda: pm.Optimizer("adamw"), "Did you mean 'AdamW'"),
    "text labels": (lambda: pm.ArrayData(torch.zeros(2, 4), ["cat", "dog"]), "Targets must be numbers"),
    "one-hot": (
        lambda: quiet(Single(), mlp(), pm.ArrayData(toy().inputs, torch.eye(3).long().repeat(8, 1))),
        "argmax",
    ),
    "tuple": (lambda: quiet(Single(), mlp(), (toy().inputs, toy().targets)), r"ArrayData\(x, y\)"),
    "resume": (lambda: quiet(Single(), mlp(), toy(), resume=True), "needs run_dir"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_refused_before_training(name):
    make, message = BAD_OPTIONS[name]
    with pytest.raises(InputError, match=message):
        make()


def test_a_softmax_at_the_end_is_pointed_out():
    model = nn.Sequential(mlp(), nn.Softmax(-1))
    with pytest.warns(UserWarning, match="Remove the softmax"):
        quiet(Single(), model, toy(), epochs=1)


def test_vmap_demanded_where_it_cannot_be():
    case = BY_NAME["data_dependent"]
    with pytest.raises(pm.errors.CannotVectorise, match="backend='loop'"):
        quiet(DeepEnsemble(2), case.double_factory, case.data(), backend="vmap")
    with pytest.warns(UserWarning, match="one after another"):
        posterior = quiet(DeepEnsemble(2), case.double_factory, case.data(), backend="auto")
    assert posterior.record["backend"] == "loop"


def test_a_diverging_member_is_named_and_nothing_is_lost():
    data = pm.ArrayData(
        torch.randn(24, 4, dtype=torch.float64) * 100,
        torch.randn(24, 1, dtype=torch.float64),
        batch_size=8,
    )
    method = DeepEnsemble(2, of=Single(optimizer=pm.Optimizer("SGD", lr=1e6)))
    with pytest.raises(
        NonFiniteLoss, match=r"phase 'train', epoch \d+, step \d+: the loss of member 0"
    ) as info:
        quiet(
            method,
            lambda: pm.models.MLP(4, 1, (6,)).double(),
            data,
            pm.likelihoods.FixedGaussian(),
            epochs=50,
        )
    assert info.value.posterior.num_members == 2
    assert all(t.isfinite().all() for t in weights_of(info.value.posterior).values())


def exploding(num_examples=40):
    """Data and options of a regression whose first steps overflow."""
    x = torch.randn(num_examples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e3
    return pm.ArrayData(x, x[:, :1] * 1e3, batch_size=8), pm.likelihoods.FixedGaussian()


WILD = pm.Optimizer("SGD", lr=1e3)


@pytest.mark.parametrize(
    "method",
    [
        pm.methods.SequentialAnchored(
            2, first_epochs=50, optimizer=WILD, walk=pm.samplers.GuidedWalk(step=3.0)
        ),
        pm.methods.HMC(2, burn_in=0.5, num_samples=2, optimizer=WILD),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.filterwarnings("ignore:The targets have a mean of")
def test_divergence_before_the_first_finished_member_is_said_as_such(method, count):
    data, likelihood = exploding()
    with pytest.raises(NonFiniteLoss, match=r"epoch \d+, step \d+.*no member was finished") as info:
        quiet(method, lambda: pm.models.MLP(4, 1, (6,)).double(), [data] * count, likelihood, epochs=60)
    assert info.value.posterior is None


@pytest.mark.filterwarnings("ignore:The targets have a mean of")
def test_divergence_leaves_the_members_that_were_finished():
    method = pm.methods.SequentialAnchored(
        2,
        first_epochs=1,
        short_epochs=50,
        optimizer=pm.Optimizer("SGD", lr=1e-30),
        short_optimizer=WILD,
        walk=pm.samplers.GuidedWalk(step=3.0),
    )
    data, likelihood = exploding()
    with pytest.raises(NonFiniteLoss, match=r"phase 'short'.*are in this error's `posterior`") as info:
        quiet(method, lambda: pm.models.MLP(4, 1, (6,)).double(), data, likelihood, epochs=101)
    assert info.value.posterior.num_members == 2  # one of each chain
    assert all(t.isfinite().all() for t in weights_of(info.value.posterior).values())


@register_adaptation
@dataclass(frozen=True)
class Shift(Adaptation):
    """Shifts the outputs by what is drawn at random: trained, and kept as it is."""

    kind: ClassVar[str] = "tests/shift"
    width: int = 3

    def apply(self, module):
        module.shift = nn.Parameter(torch.randn(self.width, dtype=torch.float64))
        module.register_buffer("kept", torch.randn(self.width, dtype=torch.float64))
        module.register_forward_hook(_shift)
        return module


def _shift(module, inputs, outputs):
    return outputs + module.shift + module.kept


@register_adaptation
@dataclass(frozen=True)
class Halve(Adaptation):
    """Halves the outputs by a hook, which leaves no trace among the tensors."""

    kind: ClassVar[str] = "tests/halve"

    def apply(self, module):
        module.register_forward_hook(_halve)
        return module


def _halve(module, inputs, outputs):
    return outputs / 2


@dataclass(frozen=True)
class Adapted(Single):
    """Trains a network that was adapted before."""

    name: ClassVar[str] = "adapted"
    by: tuple[Adaptation, ...] = ()

    def adaptations(self, module):
        return self.by


@pytest.mark.parametrize("model", [mlp, mlp()], ids=["factory", "instance"])
@pytest.mark.filterwarnings("ignore:deep_ensemble trains several chains of one module")
def test_what_an_adaptation_draws_follows_the_seed(model):
    method = DeepEnsemble(2, of=Adapted(optimizer=pm.Optimizer("SGD", lr=0.1), by=(Shift(),)))
    before = torch.get_rng_state()
    first = quiet(method, model, toy())
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)  # another global random state
    assert_same_bits(first, quiet(method, model, toy()))
    for name in ("shift", "kept"):  # of each chain its own, trained or not
        shifts = weights_of(first)[name]
        assert not torch.equal(shifts[0], shifts[1]), name


@pytest.mark.parametrize("by", [(Shift(),), (Halve(),), (Shift(), Halve()), (Halve(), Shift())])
def test_loading_adapts_the_network_again(by, tmp_path):
    """The posterior of a network with the same weights, changed by hand, is what loading gives."""
    posterior = quiet(DeepEnsemble(2, of=Adapted(by=by)), mlp, toy(), epochs=2)
    posterior.save(tmp_path / "saved")
    loaded = pm.load_posterior(tmp_path / "saved", mlp)
    assert loaded.network.adaptations == by
    assert_same_bits(posterior, loaded)
    x = toy().inputs
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    logits = next(loaded.outputs(x))[1]
    for member, weights in enumerate(unstack(next(posterior.draw()))):
        plain = mlp()
        plain.load_state_dict({n: t for n, t in weights.items() if n not in ("shift", "kept")})
        outputs = plain(x)
        for adaptation in by:
            halved = isinstance(adaptation, Halve)
            outputs = outputs / 2 if halved else outputs + weights["shift"] + weights["kept"]
        torch.testing.assert_close(logits[member], outputs)


@redrawn
def test_chains_of_an_adapted_network_run_in_several_processes():
    method = DeepEnsemble(2, of=Adapted(by=(Shift(), Halve())))
    module = mlp()
    alone, parts = (quiet(method, module, toy(), epochs=1, **o) for o in ({}, {"processes": 2}))
    assert_same_weights(parts, alone)
    assert parts.network.adaptations == (Shift(), Halve())
    x = toy().inputs
    torch.testing.assert_close(parts.predict(x).mean, alone.predict(x).mean)


def test_posteriors_of_differently_adapted_networks_are_not_joined():
    plain, halved = (quiet(Adapted(by=by), mlp, toy(), epochs=1) for by in ((), (Halve(),)))
    with pytest.raises(InputError, match=r"cannot be joined: .* changed by \[\], .* by \[Halve\(\)\]"):
        pm.merge([plain, halved])


def test_a_factory_that_returns_one_module_is_refused():
    module = mlp()
    before = copy.deepcopy(module)
    with pytest.raises(InputError, match="returns the same module each time: build it inside the function"):
        quiet(DeepEnsemble(2), lambda: module, toy(), epochs=1)
    assert str(module) == str(before)


def test_inputs_that_the_networks_type_cannot_hold_are_refused():
    posterior = quiet(Single(), lambda: mlp().float(), toy(), epochs=1)
    inputs = torch.full((3, 4), 1e39, dtype=torch.float64)
    with pytest.raises(InputError, match="3 of 3 examples hold NaN or infinite inputs"):
        posterior.predict(inputs)
