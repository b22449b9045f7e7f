"""EMP, ECMP and DropConnect against Algorithm 1 written by hand, and the options of the methods."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.methods import ECMP, EMP, DropConnect
from polymode.methods.model_patching import LOGITS
from polymode.networks.adaptations import Sampling
from polymode.posteriors.component_mixture import COMPONENTS, PROBABILITIES, SHARED, STATISTICS
from polymode.weights.mixtures import Mixture

SGD = pm.Optimizer("SGD", lr=0.1)
TILT = torch.tensor([1.5, 0.0, -1.0], dtype=torch.float64)


def factory() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def data(number: int = 32, batch_size: int = 8) -> pm.ArrayData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 4, generator=generator, dtype=torch.float64)
    labels = (x @ torch.randn(4, 3, generator=generator).double()).argmax(-1)
    return pm.ArrayData(x, labels, batch_size=batch_size)


def fit(method, model=factory, **options):
    options = {"epochs": 3, "likelihood": "categorical", "progress": False} | options
    return pm.fit(method, model, options.pop("data", None) or data(), **options)


@pytest.mark.parametrize(
    "method",
    [
        EMP(num_components=3, prior_std=0.7, optimizer=SGD),
        ECMP(num_components=3, prior_std=0.7, optimizer=SGD),
        ECMP(num_components=2, probabilities=(0.8, 0.2), prior_std=0.7, optimizer=SGD),
        EMP(num_components=3, l2=0.01, optimizer=SGD),
        EMP(num_components=3, l2=0.01, optimizer=pm.Optimizer("Adam", lr=0.01)),
        DropConnect(rate=0.3, prior_std=0.7, optimizer=SGD),
    ],
    ids=["emp", "ecmp", "probabilities", "l2", "l2 with Adam", "dropconnect"],
)
def test_training_is_algorithm_1(method, monkeypatch):
    """The same seeds of assignments and the same batches in a loop of plain PyTorch."""
    seeds, batches, first = [], [], {}
    realise = Mixture.realise

    def noted(self, components, seed):
        if not first:
            first.update({name: tensor.detach().clone() for name, tensor in components.items()})
        seeds.append(seed.clone())
        return realise(self, components, seed)

    monkeypatch.setattr(Mixture, "realise", noted)
    forward = nn.Linear.forward

    def watched(self, x):
        if self.in_features == 4 and self.training:
            batches.append(x.detach().clone())
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    # One step in three epochs of one batch: what is tried out beforehand is dropped by position.
    source = data(8)
    posterior = fit(method, data=source, epochs=12, backend="loop")
    monkeypatch.undo()
    seeds, batches = seeds[-12:], batches[-12:]
    mixture = posterior.mixture
    family = mixture.family
    module = factory()
    trained = {
        n: first[n].clone().requires_grad_() for n, p in module.named_parameters()
    }  # components where there are some
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    kind = torch.optim.Adam if method.optimizer.kind == "Adam" else torch.optim.SGD
    optimizer = kind(trained.values(), lr=method.optimizer.lr)
    lookup = {tuple(row.tolist()): label for row, label in zip(source.inputs, source.targets, strict=True)}
    for seed, x in zip(seeds, batches, strict=True):
        weights = dict(trained)
        for name, index in mixture.indices(seed.reshape(1)).items():
            index = index[0].expand(mixture.shapes[name])
            weights[name] = sum(
                (index == k).double() * trained[name][k] for k in range(family.num_components)
            )
            weights[name] = weights[name] / (1 - family.drop)
        outputs = torch.func.functional_call(module.train(), weights | buffers, (x,))
        targets = torch.stack([lookup[tuple(row.tolist())] for row in x])
        loss = F.cross_entropy(outputs, targets)
        for name, tensor in trained.items():
            if method.prior_std is not None:
                share = torch.ones(1).double()
                if name in mixture.shapes:
                    share = torch.tensor(family.mixing, dtype=torch.float64) / (1 - family.drop)
                    tensor = tensor.flatten(1)
                squares = tensor.square() if name not in mixture.shapes else share @ tensor.square()
                loss = loss + squares.sum() / (2 * 0.7**2) / len(source.targets)
            if method.l2 is not None:
                loss = loss + method.l2 * tensor.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    [chain] = posterior.chains
    for name, tensor in trained.items():
        key = (COMPONENTS if name in mixture.names else SHARED) + name
        torch.testing.assert_close(chain[key], tensor.detach(), rtol=1e-9, atol=1e-11)
    for name, buffer in buffers.items():
        torch.testing.assert_close(chain[SHARED + name], buffer)


def test_only_the_drawn_component_of_a_layer_is_trained():
    """One step: of each layer one component of all its tensors has moved, and no other has."""
    method = EMP(num_components=4, optimizer=SGD, spread=0.0)
    [chain] = fit(method, data=data(8), epochs=1).chains
    [begun] = fit(replace(method, optimizer=pm.Optimizer("SGD", lr=1e-30)), data=data(8), epochs=1).chains
    for layer in ("1", "3"):  # BatchNorm and the output
        moved = [
            [k for k in range(4) if not torch.allclose(chain[key][k], begun[key][k], rtol=0, atol=1e-15)]
            for key in (f"{COMPONENTS}{layer}.weight", f"{COMPONENTS}{layer}.bias")
        ]
        assert len(moved[0]) == 1
        assert moved[0] == moved[1]


def test_every_component_has_its_own_running_statistics_when_asked(monkeypatch):
    """Momentum 0.1: statistics of a component that was drawn n times have forgotten 0.9ⁿ of their start."""
    seeds = []
    realise = Mixture.realise
    monkeypatch.setattr(
        Mixture, "realise", lambda self, c, seed: (seeds.append(seed.clone()), realise(self, c, seed))[1]
    )
    source = data(8)
    frozen = pm.Optimizer("SGD", lr=1e-30)
    posterior = fit(EMP(num_components=3, statistics="component", optimizer=frozen), data=source, epochs=30)
    monkeypatch.undo()
    [chain] = posterior.chains
    assert SHARED + "1.running_mean" not in chain
    drawn = posterior.mixture.indices(torch.stack(seeds[-30:]))["1.weight"].flatten()
    counts = torch.bincount(drawn.long(), minlength=3)
    assert int(counts.min()) > 0
    assert torch.equal(chain[STATISTICS + "1.num_batches_tracked"], counts)
    weights = chain[SHARED + "0.weight"], chain[SHARED + "0.bias"]
    inside = F.linear(source.inputs, *weights)
    for k in range(3):
        share = 1 - 0.9 ** int(counts[k])
        torch.testing.assert_close(chain[STATISTICS + "1.running_mean"][k], share * inside.mean(0))
    draws = next(posterior.draw(50))
    index = posterior.mixture.indices(torch.randint(2**62, (50,), generator=_default()))["1.weight"].flatten()
    expected = chain[STATISTICS + "1.running_mean"][index.long()]
    assert torch.equal(draws.stacked["1.running_mean"], expected)


def _default() -> torch.Generator:
    from polymode.seeds import derive_generator, draw_seed

    return torch.Generator().manual_seed(draw_seed(derive_generator(0, "draws")))


def test_a_trained_module_is_kept_in_component_0():
    module = factory()
    module[3].weight.data.mul_(30)  # values that no initialiser would draw
    with pytest.raises(
        InputError, match=r"changes its scale.* Say components_from='weights'.*function that builds"
    ):
        fit(ECMP(), module)
    still = pm.Optimizer("SGD", lr=1e-30)
    posterior = fit(ECMP(components_from="weights", optimizer=still), copy.deepcopy(module), epochs=1)
    [chain] = posterior.chains
    for name in ("1.weight", "1.bias", "3.weight", "3.bias"):
        components = chain[COMPONENTS + name]
        torch.testing.assert_close(components[0], module.get_parameter(name).detach(), rtol=0, atol=1e-25)
        assert not torch.equal(components[1], components[0])


def test_a_function_that_gives_the_same_weights_each_time_gives_no_components():
    module = factory()
    with pytest.raises(
        InputError, match=r"layer '3' the same weights each time .* 5 comp.* Say components_from='weights'"
    ):
        fit(ECMP(), lambda: copy.deepcopy(module))
    fit(ECMP(components_from="weights"), lambda: copy.deepcopy(module), epochs=1)
    fit(ECMP(where="norm"), lambda: copy.deepcopy(module), epochs=1)  # spread makes them differ

    def begins_with_zeros():
        module = factory()
        nn.init.zeros_(module[3].weight)
        nn.init.zeros_(module[3].bias)
        return module

    fit(ECMP(), begins_with_zeros, epochs=1)  # the network's own choice, which is the same each time


def test_learned_probabilities_are_kept_and_drawn_from():
    posterior = fit(EMP(num_components=3, learn_probabilities=True, prior_std=1.0), epochs=20)
    [chain] = posterior.chains
    for layer in ("1", "3"):
        learned = chain[PROBABILITIES + layer]
        assert learned.sum().item() == pytest.approx(1)
        assert not torch.allclose(learned, torch.full((3,), 1 / 3).double())
    drawn = torch.cat([b.stacked["1.weight"] for b in posterior.draw(4000)])
    shares = torch.stack([(drawn == c).all(1).double().mean() for c in chain[COMPONENTS + "1.weight"]])
    error = (chain[PROBABILITIES + "1"] * (1 - chain[PROBABILITIES + "1"]) / 4000).sqrt()
    assert float(((shares - chain[PROBABILITIES + "1"]) / error).abs().max()) < 4.5


@pytest.mark.parametrize("options", [{}, {"l2": 1e-3}, {"prior_std": 1e3}], ids=["none", "l2", "prior"])
def test_probabilities_of_equal_components_return_to_equal(options):
    """What the data cannot tell apart has the largest entropy, whatever stands for the prior over weights."""
    method = _TiltedEMP(
        num_components=3,
        learn_probabilities=True,
        components_from="weights",
        spread=0.0,
        optimizer=pm.Optimizer("Adam", lr=0.1),
        where="norm",
        **options,
    )
    module = factory()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name == "1.weight")
    module[3].weight.data.zero_()  # the patched layer does not matter to the outputs
    [chain] = fit(method, module, data=data(8), epochs=200).chains
    torch.testing.assert_close(
        chain[PROBABILITIES + "1"], torch.full((3,), 1 / 3).double(), rtol=0, atol=1e-3
    )


def test_splits_and_chains_train_side_by_side_as_they_do_alone():
    sets = [data(32), data(24)]
    method = pm.methods.DeepEnsemble(2, of=ECMP(num_components=3, optimizer=SGD))
    together = pm.fit(
        method, factory, sets, likelihood="categorical", epochs=2, progress=False, backend="vmap"
    )
    for source, joint in zip(sets, together, strict=True):
        alone = fit(method, data=source, epochs=2, backend="loop")
        for ours, theirs in zip(joint.chains, alone.chains, strict=True):
            for name, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EMP(num_components=1), "num_components must be a whole number of at least 2, got 1"),
        (lambda: ECMP(probabilities=(0.9, 0.2, 0.1, 0.1, 0.1)), "must sum to one"),
        (lambda: EMP(where=()), "name layers by kind"),
        (lambda: ECMP(components_from="pretrained"), "Unknown components_from 'pretrained'"),
        (lambda: EMP(statistics="own"), "Unknown statistics 'own'"),
        (lambda: ECMP(spread=-1.0), "spread must be at least 0"),
        (
            lambda: ECMP(l2=0.1, optimizer=pm.Optimizer("AdamW")),
            "AdamW.*use Adam or SGD",
        ),
        (lambda: ECMP(l2=0.1, optimizer=pm.Optimizer("SGD", weight_decay=0.1)), "leave l2 out"),
        (lambda: ECMP(prior_std=0.0), "prior_std must be a positive number"),
        (
            lambda: EMP(learn_probabilities=True, probabilities=(0.2,) * 5),
            "probabilities are given and learn_probabilities",
        ),
        (lambda: EMP(learn_probabilities=True, statistics="component"), "cannot be had together"),
        (lambda: DropConnect(rate=1.0), "rate must be above 0 and below 1, got 1.0"),
        (lambda: pm.methods.MCDropout(rate=0.0), "rate must be above 0 and below 1, got 0.0"),
        (lambda: pm.methods.MCDropout(masks="batch"), "Unknown masks 'batch'"),
    ],
)
def test_bad_options_are_named_when_the_method_is_made(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_layers_that_are_not_there_are_found_before_training():
    with pytest.raises(InputError, match=r"'head'.*Known: 0, 1, 3, BatchNorm1d, Linear, all, hidden, input"):
        fit(ECMP(where="head"))
    with pytest.raises(InputError, match="'2' is a ReLU and has no weights"):
        fit(ECMP(where="2"))


def test_names_of_the_users_own_do_not_collide():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
            self.draw = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.head(torch.tanh(self.mixing(x)) * self.draw)

    method = ECMP(learn_probabilities=True, prior_std=1.0)
    [chain] = fit(method, lambda: Net().double()).chains
    assert {SHARED + "mixing.weight", SHARED + "draw", PROBABILITIES + "head"} <= chain.keys()


def test_only_patched_layers_are_drawn_anew():
    """A custom backbone that nobody can re-draw is no obstacle to a fresh head."""
    module = factory()
    module[0].weight.data.mul_(40)
    posterior = fit(ECMP(where="output", optimizer=pm.Optimizer("SGD", lr=1e-30)), module, epochs=1)
    [chain] = posterior.chains
    torch.testing.assert_close(chain[SHARED + "0.weight"], module[0].weight.detach(), rtol=0, atol=1e-20)
    components = chain[COMPONENTS + "3.weight"]
    assert all(not torch.allclose(components[0], other) for other in components[1:])


class _Tilted:
    """Begins with unequal probabilities, as training would have made them."""

    def init(self, problem, generator):
        state = super().init(problem, generator)
        for name, tensor in state.members.shared.items():
            if name.startswith(LOGITS):
                tensor.copy_(TILT)
        return state


class _TiltedEMP(_Tilted, EMP):
    pass


class _TiltedECMP(_Tilted, ECMP):
    pass


@pytest.mark.parametrize("kind", [_TiltedEMP, _TiltedECMP])
@pytest.mark.parametrize(
    ("options", "decayed"),
    [
        ({"l2": 2.0, "optimizer": SGD}, lambda w: 0.6 * w),
        ({"l2": 2.0, "optimizer": pm.Optimizer("Adam", lr=0.1)}, lambda w: w - 0.1 * w.sign()),
        ({"optimizer": pm.Optimizer("SGD", lr=0.1, weight_decay=4.0)}, lambda w: 0.6 * w),
        ({"optimizer": pm.Optimizer("AdamW", lr=0.1, weight_decay=4.0)}, lambda w: 0.6 * w),
    ],
    ids=["l2", "l2 with Adam", "weight_decay", "decoupled"],
)
def test_learned_probabilities_follow_their_entropy_and_carry_no_weight_decay(kind, options, decayed):
    """Between equal components the likelihood has no gradient: the step is that of Σ p log p / N alone."""
    module = factory()
    method = kind(
        num_components=3, learn_probabilities=True, components_from="weights", spread=0.0, **options
    )
    [chain] = fit(method, module, data=data(8), epochs=1).chains  # one step
    p = TILT.softmax(0)
    entropy = -(p * p.log()).sum()
    for layer, scalars in (("1", 12), ("3", 21)):
        number = 1 if isinstance(method, EMP) else scalars  # of independent assignments
        gradient = number * p * (p.log() + entropy) / 8
        logits = TILT - 0.1 * (gradient.sign() if "Adam" in method.optimizer.kind else gradient)
        torch.testing.assert_close(chain[PROBABILITIES + layer], logits.softmax(0), rtol=1e-6, atol=0)
    # Two of the three components of a weight were not drawn: they have decayed, and nothing else.
    weight, components = module[3].weight.detach(), chain[COMPONENTS + "3.weight"]
    torch.testing.assert_close(components.median(0).values, decayed(weight), rtol=0, atol=1e-6)


def test_patches_larger_than_a_block_can_be_fitted(monkeypatch):
    monkeypatch.setattr("polymode.posteriors.component_mixture.BLOCK_BYTES", 2048)
    posterior = fit(ECMP(where="all"), epochs=1)
    assert posterior.record["prediction_backend"] in ("vmap", "loop")


def test_the_users_names_select_layers_beside_a_learned_noise_level():
    make = lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)).double()  # noqa: E731
    x = data().inputs
    posterior = fit(ECMP(where="2"), make, data=pm.ArrayData(x, x[:, :1]), likelihood="gaussian")
    assert posterior.mixture.names == {"network.2.weight", "network.2.bias"}


class TestMCDropout:
    def test_layers_of_transformers_are_sampled(self):
        layer = lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)  # noqa: E731
        make = lambda: nn.Sequential(layer(), nn.Flatten(), nn.Linear(8, 3)).double()  # noqa: E731
        x = torch.randn(16, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        source = pm.ArrayData(x, torch.zeros(16).long(), batch_size=8)
        posterior = fit(pm.methods.MCDropout(), make, data=source, epochs=1)
        for backend in ("loop", "vmap"):
            outputs = torch.cat([o for _, o, _ in posterior.with_backend(backend).outputs(x, 20)])
            assert float(outputs.std(0).min()) > 0

    def test_a_dropout_layer_in_two_places_acts_in_both(self):
        def make():
            drop = nn.Dropout(0.5)
            return nn.Sequential(nn.Linear(4, 8), drop, nn.Linear(8, 8), drop, nn.Linear(8, 3)).double()

        posterior = fit(pm.methods.MCDropout(), make, epochs=1)
        module = posterior.network.module
        assert module[1] is module[3]
        assert not any(type(part) is nn.Dropout for part in module.modules())

    def test_layers_called_by_keyword_get_dropout_too(self):
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Linear(4, 3)

            def forward(self, x):
                return self.head(input=x)

        posterior = fit(pm.methods.MCDropout(), lambda: Net().double(), epochs=1)
        assert float(torch.cat([o for _, o, _ in posterior.outputs(data().inputs, 20)]).std(0).min()) > 0

    def test_the_networks_own_layers_are_sampled_with_their_own_rates(self):
        make = lambda: nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.4), nn.Linear(9, 3)).double()  # noqa: E731
        posterior = fit(pm.methods.MCDropout(rate=0.2), make)
        assert posterior.network.adaptations == (Sampling(),)
        assert [m.p for m in posterior.network.module.modules() if hasattr(m, "sampled")] == [0.4]
        both = fit(pm.methods.MCDropout(where=("0", "output"), rate=0.2), make)
        assert both.network.adaptations == (Sampling(added={"0": 0.2, "2": 0.2}),)

    def test_dropout_is_put_before_the_output_of_a_network_without_any(self):
        posterior = fit(pm.methods.MCDropout(rate=0.25))
        assert posterior.network.adaptations == (Sampling(added={"3": 0.25}),)
        [chain] = posterior.chains
        weights = {n.removeprefix(SHARED): t for n, t in chain.items()}
        x = data().inputs
        hidden = factory()[:3].eval()
        hidden.load_state_dict({n: t for n, t in weights.items() if not n.startswith("3")})
        inside = hidden(x).detach()
        draws = torch.cat([o for _, o, _ in posterior.outputs(x, 6000)])
        mean = F.linear(inside, weights["3.weight"], weights["3.bias"])
        variance = F.linear(inside.square(), weights["3.weight"].square()) * 0.25 / 0.75
        # Where all inputs of the layer are zero, there is nothing to drop.
        error = (variance / 6000).sqrt().clamp(min=1e-12)
        assert float(((draws.mean(0) - mean) / error).abs().max()) < 4.5

    def test_an_embedding_has_no_inputs_to_drop(self):
        make = lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)).double()  # noqa: E731
        tokens = pm.ArrayData(torch.randint(9, (16, 2), generator=torch.Generator()), torch.zeros(16).long())
        with pytest.raises(InputError, match="'0' is an Embedding"):
            fit(pm.methods.MCDropout(where="all"), make, data=tokens)


def test_parameters_are_counted_as_the_paper_counts_them():
    module = factory()
    trained = sum(p.numel() for p in module.parameters())
    patched = 6 + 6 + 18 + 3
    assert EMP().num_parameters(module) == trained + 4 * patched
    assert ECMP(where="norm", num_components=3).num_parameters(module) == trained + 2 * 12
    assert pm.methods.MCDropout().num_parameters(module) == trained
    assert DropConnect().num_parameters(module) == trained
    assert pm.methods.DeepEnsemble(5).num_parameters(module) == 5 * trained
    assert pm.methods.DeepEnsemble(2, of=EMP()).num_parameters(module) == 2 * (trained + 4 * patched)
    for method in (EMP(), ECMP(where="norm", num_components=3), DropConnect()):
        assert fit(method, epochs=1).num_parameters == method.num_parameters(module)
