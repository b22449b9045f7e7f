"""``patch``, ``draw`` and ``kl`` in a plain PyTorch loop."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.networks.surgery import trainable_names
from polymode.seeds import global_seed

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Net(nn.Module):
    """Nested, with a normalisation layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def patched(**options) -> nn.Module:
    with global_seed(1):
        return pm.patch(Net(), **options)


SCHEMES = ["ecmp", "emp", "explicit", "dropout", "dropconnect"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_trains_in_a_plain_loop_and_draws_what_the_posterior_draws(scheme):
    module = patched(scheme=scheme, where=("norm", "output"))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    with global_seed(2):
        for _ in range(120):
            optimizer.zero_grad()
            (F.cross_entropy(module(X), Y) + 0.01 * pm.kl(module) / len(X)).backward()
            optimizer.step()
    module.eval()
    outputs = pm.draw(module, X)
    probabilities = outputs.softmax(-1).mean(0)
    assert (probabilities.argmax(-1) == Y).double().mean() > 0.9
    posterior = pm.patched_posterior(module, "categorical")
    generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(posterior.predict(X, None, generator).mean, probabilities)
    count = sum(p.numel() for p in module.parameters())
    assert posterior.num_parameters == count


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_call_is_one_of_the_draws(scheme):
    """What a call computes is the plain network with the weights that the layers show afterwards."""
    module = patched(scheme=scheme, where=("norm", "output")).eval()
    with global_seed(3):
        outputs = [module(X).detach() for _ in range(6)]
    assert len(torch.stack(outputs).flatten(1).unique(dim=0)) > 1
    plain = Net().eval()
    weights = {"body.0.weight": module.body[0].weight, "body.0.bias": module.body[0].bias}
    weights |= {"body.1.0.weight": module.body[1][0].weight, "body.1.0.bias": module.body[1][0].bias}
    weights |= {"head.weight": module.head.weight, "head.bias": module.head.bias}
    torch.testing.assert_close(torch.func.functional_call(plain, weights, (X,)), outputs[-1])


def test_the_copy_is_an_ordinary_module():
    original = Net()
    before = copy.deepcopy(original.state_dict())
    module = pm.patch(original, num_components=3)
    with global_seed(0):
        module(X)  # what was drawn is no part of its state
    assert all(torch.equal(t, before[n]) for n, t in original.state_dict().items())
    assert isinstance(module.head, nn.Linear)
    assert module.head.in_features == 8
    assert sum(p.numel() for p in module.parameters()) == 40 + 16 + 18 + 2 * (16 + 18)
    twin = pm.patch(Net(), num_components=3)
    twin.load_state_dict(module.state_dict())
    torch.testing.assert_close(pm.draw(twin.eval(), X, 20), pm.draw(module.eval(), X, 20))
    clone = copy.deepcopy(module)
    pm.draw(clone, X, 2)
    module(X)  # a copy does not take anything from the original


@pytest.mark.parametrize("scheme", ["emp", "explicit"])
def test_running_statistics_of_each_component(scheme):
    module = patched(scheme=scheme, num_components=3, statistics="component")
    norm = module.body[1][0]
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    drawn = []
    with global_seed(5):
        for _ in range(40):
            module(X)
            drawn.append(int(norm.parametrizations.weight[0].index.flatten()[0]))
    counts = torch.tensor([drawn.count(k) for k in range(3)])
    assert torch.equal(norm.of_components_num_batches_tracked, counts)
    mean = module.body[0](X).mean(0)
    for k in range(3):
        share = 1 - 0.9 ** int(counts[k])
        torch.testing.assert_close(norm.of_components_running_mean[k], share * mean, rtol=1e-4, atol=1e-6)


def test_kl_is_that_of_the_method():
    module = patched(scheme="ecmp", num_components=3, probabilities=(0.2, 0.3, 0.5))
    expected = 0.0
    for name, parameter in module.named_parameters():
        squares = parameter.detach().double().square()
        if "parametrizations" in name:
            shares = torch.tensor([0.2, 0.3, 0.5]).double()
            expected += float(shares @ squares.flatten(1).sum(1)) / (2 * 0.25)
        else:
            expected += float(squares.sum()) / (2 * 0.25)
    assert pm.kl(module, 0.5).item() == pytest.approx(expected, rel=1e-5)
    assert pm.kl(module, {"head.*": 0.1, "*": 0.5}).item() > expected
    assert pm.kl(module, pm.priors.FanIn()).requires_grad


def test_a_trained_module_keeps_its_weights_in_component_0():
    trained = Net()
    trained.head.weight.data.mul_(50)
    with pytest.raises(
        InputError, match="'head' holds trained or custom values: say components_from='weights'"
    ):
        pm.patch(trained)
    module = pm.patch(trained, components_from="weights", spread=0.0)
    assert torch.equal(module.head.parametrizations.weight.original[0], trained.head.weight)
    trained.eval()
    module.eval()
    torch.testing.assert_close(pm.draw(module, X, 5), trained(X).expand(5, -1, -1))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_it_trains_with_lightning():
    lightning = pytest.importorskip("lightning")

    class Training(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = patched()

        def training_step(self, batch, _):
            return F.cross_entropy(self.network(batch[0]), batch[1]) + pm.kl(self.network) / len(X)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.02)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=20)
    training = Training()
    plain = copy.deepcopy(training)
    with global_seed(0):
        lightning.Trainer(
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        ).fit(training, loader)
    with global_seed(0):  # as a loop of one's own would
        optimizer = plain.configure_optimizers()
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                plain.training_step(batch, None).backward()
                optimizer.step()
    torch.testing.assert_close(training.state_dict(), plain.state_dict())


def test_layers_whose_forward_is_never_called_are_drawn():
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    module = pm.patch(Attends(), "attention.out_proj", components_from="weights", spread=1.0)
    x = X.reshape(10, 4, 4)
    with global_seed(0):
        outputs = torch.stack([module(x).detach() for _ in range(20)])
    assert float(outputs.std(0).max()) > 0


def test_a_layer_that_is_used_twice_has_one_draw_in_a_pass():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) - self.layer(x)

    module = pm.patch(Twice(), "all")
    with global_seed(0):
        assert float(module(X).detach().abs().max()) == 0


def test_it_can_be_averaged_frozen_and_drawn_from():
    module = patched()
    with global_seed(0):
        module(X)
    averaged = torch.optim.swa_utils.AveragedModel(module)
    averaged.update_parameters(module)
    averaged.update_parameters(module)
    module.requires_grad_(False).eval()
    assert pm.draw(module, X, 5).shape == (5, 40, 2)
    with pytest.raises(InputError, match="are frozen"):
        pm.kl(module)


def test_a_learned_noise_level_is_patched_with_the_network():
    likelihood = pm.likelihoods.LearnedGaussian()
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(InputError, match=r"patch likelihood.prepare\(module\)"):
        pm.patched_posterior(pm.patch(plain, "output", components_from="weights"), "gaussian")
    module = pm.patch(likelihood.prepare(plain), "output", components_from="weights").eval()
    predicted = pm.patched_posterior(module, likelihood).predict(X, 10)
    assert float((predicted.std - 0.5).abs().max()) < 0.2


def test_fresh_networks_with_one_output_are_patched():
    """Eight weights have no telling spread, but they are not taken for trained ones: five are drawn."""
    for seed in range(60):
        with global_seed(seed):
            network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            module = pm.patch(network, "output")
        components = module[2].parametrizations.weight.original
        assert len(components.unique(dim=0)) == 5
        assert components.abs().max() <= 8**-0.5  # the bound of nn.Linear
        assert torch.equal(module[0].weight, network[0].weight)


def test_mistakes_are_named():
    with pytest.raises(InputError, match="has a rate, not probabilities"):
        pm.patch(Net(), scheme="dropout", probabilities=(0.5, 0.5))
    with pytest.raises(InputError, match="parametrised layers already"):
        pm.patch(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))), "output")
    with pytest.raises(InputError, match="Did you mean 'ecmp'"):
        pm.patch(Net(), scheme="ecm")
    with pytest.raises(InputError, match=r"Unknown layer.*'tail'.*head"):
        pm.patch(Net(), "tail")
    with pytest.raises(InputError, match="at least 2, got 1"):
        pm.patch(Net(), num_components=1)
    with pytest.raises(InputError, match="needs one component for a whole layer"):
        pm.patch(Net(), statistics="component")
    with pytest.raises(InputError, match="parametrised layers already"):
        pm.patch(patched())
    with pytest.raises(InputError, match="not a patched module"):
        pm.kl(Net())
    with pytest.raises(InputError, match="num_draws must be a whole number of at least 1, got 0"):
        pm.draw(patched(), X, 0)
    with pytest.raises(InputError, match=r"patch needs an .*Module, got function"):
        pm.patch(lambda: Net())
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    for where in ("output", "input", "all"):
        with pytest.raises(InputError, match=r"0\.weight and 1\.weight are tied"):
            pm.patch(tied, where, scheme="emp")
    assert trainable_names(tied) == {"0.weight", "0.bias", "1.bias"}
