"""Posteriors of compact networks: they predict as the draws they were made of, and are read back so."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import polymode as pm
from cases import BY_NAME
from documents import edit, edit_tensors
from polymode.errors import CheckpointError, InputError, NotCollapsible
from polymode.methods import DeepEnsemble, MCDropout, Single
from polymode.models import MLP, resnet8
from polymode.networks.surgery import tensors_of
from tolerances import PASS, assert_equal_up_to_rounding

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = pm.ArrayData(X, (X.sum(1) > 0).long(), batch_size=8)
NUMBERS = pm.ArrayData(X, X[:, :2].sum(1, keepdim=True), batch_size=8)
IMAGES = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PICTURES = pm.ArrayData(IMAGES, torch.arange(16) % 3, batch_size=8)


def net():
    return MLP(5, 2, (12, 10), batch_norm="after", dropout=0.2).double()


def pruned(posterior, rate=0.5):
    """The same posterior with rows of weights that are zero, other ones in each member."""
    generator = torch.Generator().manual_seed(7)
    blocks = []
    for block in posterior.draw():
        block = block.clone()
        for name, tensor in block.stacked.items():
            inner = [n for n in block.stacked if n.endswith(".weight") and block.stacked[n].ndim > 2]
            if name in inner[:-1]:
                kept = torch.rand(tensor.shape[:2], generator=generator) >= rate
                tensor *= kept.reshape(*kept.shape, *[1] * (tensor.ndim - 2))
        blocks.append(block)
    return pm.Particles(posterior.network, blocks=blocks, record=posterior.record)


def fitted(method=None, model=net, data=LABELS, likelihood="categorical", **options):
    method = method or DeepEnsemble(3, of=Single())
    options = {"epochs": 2, "progress": False} | options
    return pm.fit(method, model, data, likelihood=likelihood, **options)


ENSEMBLE = pruned(fitted())


def test_it_predicts_as_the_ensemble_that_it_was_made_of():
    separate = ENSEMBLE.compact(num_draws=None)
    assert separate.num_members == len(separate.modules) == 3
    assert separate.num_parameters < 0.5 * ENSEMBLE.num_parameters
    found, expected = separate.predict(X), ENSEMBLE.predict(X)
    assert_equal_up_to_rounding(found.mean, expected.mean, PASS)
    y = LABELS.targets
    assert_equal_up_to_rounding(separate.log_prob(X, y), ENSEMBLE.log_prob(X, y), PASS)
    assert_equal_up_to_rounding(separate.predict(X, 2).mean, ENSEMBLE.predict(X, 2).mean, PASS)
    [(_, outputs, _)], [(_, others, _)] = separate.by_points(X), ENSEMBLE.by_points(X)
    assert_equal_up_to_rounding(outputs, others, PASS)
    for module, output in zip(separate.modules, outputs, strict=True):
        assert_equal_up_to_rounding(module(X), output, PASS)
        assert any(parameter.requires_grad for parameter in module.parameters())
        assert isinstance(module[3], nn.Dropout)
    assert [c.removed["1.weight"][1] for c in separate.compactions] == [12] * 3
    assert "3 × MLP in 3 shapes" in repr(separate)
    with pytest.raises(InputError, match="asked for, this posterior holds 3"):
        separate.predict(X, 4)


def test_it_is_judged_as_any_posterior():
    found, expected = (pm.evaluate(p, LABELS) for p in (ENSEMBLE.compact(None), ENSEMBLE))
    assert found == pytest.approx(expected)


def test_weights_of_members_stay():
    [block] = ENSEMBLE.draw()
    weighted = pm.Particles(
        ENSEMBLE.network, blocks=[type(block)(block.stacked, log_weights=torch.tensor([0.0, -1.0, -2.0]))]
    )
    separate = weighted.compact(None)
    assert_equal_up_to_rounding(separate.predict(X).mean, weighted.predict(X).mean, PASS)
    both = pm.merge([separate, separate])
    assert both.num_members == 6
    assert_equal_up_to_rounding(both.predict(X).mean, weighted.predict(X).mean, PASS)


def test_numbers_quantiles_and_a_noise_level_of_their_own():
    ensemble = pruned(fitted(model=lambda: MLP(5, 1, (12, 10)).double(), data=NUMBERS, likelihood="gaussian"))
    separate = ensemble.compact(None)
    found, expected = (p.predict(X, quantiles=[0.1, 0.5]) for p in (separate, ensemble))
    for name in ("mean", "variance"):
        assert_equal_up_to_rounding(getattr(found, name), getattr(expected, name), PASS)
    for level in (0.1, 0.5):
        torch.testing.assert_close(found.quantiles[level], expected.quantiles[level])
    assert separate.compactions[0].removed.keys() == {"network.1.weight", "network.3.weight"}
    assert not separate.compactions[0].left


def test_draws_of_one_shape_only():
    separate = ENSEMBLE.compact(num_draws=None)
    with pytest.raises(InputError, match=r"3 networks .* have different shapes.*posterior.parts\[i\]"):
        next(separate.draw())
    with pytest.raises(NotCollapsible, match="3 networks of different shapes"):
        separate.collapse()
    one = ENSEMBLE.compact()
    [block] = one.draw()
    assert block.num_members == one.num_members == 1
    assert_equal_up_to_rounding(one.collapse()(X), one.modules[0](X), PASS)
    whole = fitted().compact(None)  # nothing was pruned: all have one shape
    assert sum(block.num_members for block in whole.draw()) == 3
    with pytest.raises(InputError, match="compact already"):
        separate.compact()
    with pytest.raises(InputError, match="Compact networks cannot be merged with a particles"):
        pm.merge([separate, ENSEMBLE])


def test_draws_without_end():
    posterior = fitted(MCDropout())
    with pytest.raises(InputError, match="any number of networks: say how many"):
        posterior.compact(None)
    separate = posterior.compact(3, seed=1)
    assert separate.num_members == 3
    assert (
        separate.network.adaptations == separate.parts[0].network.adaptations == posterior.network.adaptations
    )


def test_dropout_that_acts_draws_the_masks_that_it_drew():
    sampled = pm.sample_dropout(ENSEMBLE)
    separate = sampled.compact(4, seed=2)
    assert separate.num_parameters < 0.8 * 4 * fitted(Single()).num_parameters
    expected = sampled.predict(X, 4, torch.Generator().manual_seed(2))
    assert_equal_up_to_rounding(separate.predict(X, batch_size=7).mean, expected.mean, PASS)


@pytest.mark.parametrize("case", ["ensemble", "sampled", "images", "noise"])
def test_it_is_read_back(case, tmp_path):
    model, inputs = net, X
    if case == "ensemble":
        separate = ENSEMBLE.compact(None)
    elif case == "sampled":
        separate = pm.sample_dropout(ENSEMBLE).compact(2)
    elif case == "images":
        model, inputs = lambda: resnet8(3).double(), IMAGES
        separate = pruned(fitted(Single(), model, PICTURES)).compact(None)
    else:
        model = lambda: MLP(5, 1, (12, 10)).double()  # noqa: E731
        separate = pruned(fitted(Single(), model, NUMBERS, "gaussian")).compact()
    folder = separate.save(tmp_path / "saved")
    loaded = pm.load_posterior(folder, model)
    assert isinstance(loaded, pm.Separate)
    assert torch.equal(loaded.predict(inputs).mean, separate.predict(inputs).mean)
    for one, other in zip(loaded.compactions, separate.compactions, strict=True):
        assert one.removed == other.removed
        assert one.inputs == other.inputs
        assert one.left == other.left
    assert loaded.record == separate.record
    assert loaded.num_parameters == separate.num_parameters
    loaded.save(tmp_path / "again")
    assert torch.equal(
        pm.load_posterior(tmp_path / "again", model).predict(inputs).mean, separate.predict(inputs).mean
    )


def test_files_are_as_small_as_the_networks(tmp_path):
    def size(folder):
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    def model():
        return MLP(5, 2, (300, 300)).double()

    single = pruned(fitted(Single(), model))
    separate = single.compact()
    fraction = separate.num_parameters / single.num_parameters
    assert fraction < 0.35
    ratio = size(separate.save(tmp_path / "small")) / size(single.save(tmp_path / "whole"))
    assert ratio == pytest.approx(fraction, abs=0.02)


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def test_damaged_files_are_refused(tmp_path):
    separate = ENSEMBLE.compact(2)
    own, members = "part-00000-network.safetensors", "part-00000-members-00000.safetensors"

    def damaged(number, file, change):
        folder = separate.save(tmp_path / str(number))
        edit_tensors(folder, file, change)
        return folder

    def without(name):
        return lambda tensors: {n: t for n, t in tensors.items() if n != name}

    def flipped(tensors):
        return tensors | {"masks/1.weight": ~tensors["masks/1.weight"]}

    for number, (file, change, message) in enumerate(
        (
            (
                own,
                renamed("masks/1.weight", "masks/8.weight"),
                "another network: Unknown weight .* '8.weight'",
            ),
            (own, lambda t: t | {"masks/1.weight": torch.ones(3).bool()}, r"must be booleans \[12\]"),
            (own, lambda t: t | {"masks/1.weight": torch.ones(12)}, r"must be booleans \[12\]"),
            (own, lambda t: t | {"masks/1.weight": torch.ones(12).bool()}, r"'stacked/1.bias' is .*needs"),
            (own, without("masks/1.weight"), r"'stacked/1.bias' is .* the network needs"),
            (own, lambda t: t | {"other": torch.ones(2)}, "holds 'other', which the network does not have"),
            (members, without("stacked/1.weight"), "lacks 'constants/1.weight'"),
            (members, lambda t: t | {"stacked/1.bias": t["stacked/1.bias"] * torch.nan}, "NaN"),
            (members, lambda t: t | {"stacked/1.constant_kernel": torch.ones(1, 2)}, "does not have"),
        )
    ):
        with pytest.raises(CheckpointError, match=message):
            pm.load_posterior(damaged(number, file, change), net)
    for number, (place, value) in enumerate(
        (
            ("options", {}),
            ("options__records", [{}]),
            ("options__records", [{}, 3]),
            ("options__log_weights", [0.0]),
            ("options__log_weights", [0.0, "heavy"]),
            ("options__log_weights", [0.0, float("nan")]),
        )
    ):
        folder = separate.save(tmp_path / f"document-{number}")
        edit(folder / "posterior.json", **{place: value})
        with pytest.raises(CheckpointError):
            pm.load_posterior(folder, net)
    folder = separate.save(tmp_path / "file")
    (folder / own).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        pm.load_posterior(folder, net)
    files = json.loads((folder / "posterior.json").read_text())["files"]
    edit(folder / "posterior.json", files={name: digest for name, digest in files.items() if name != own})
    with pytest.raises(CheckpointError):
        pm.load_posterior(folder, net)
    folder = separate.save(tmp_path / "other network")
    with pytest.raises(CheckpointError, match="belongs to another network"):
        pm.load_posterior(folder, MLP(5, 2, (12, 11), batch_norm="after", dropout=0.2).double())


def test_orders_that_do_not_follow_from_the_masks_are_refused(tmp_path):
    def model():
        return resnet8(3).double()

    folder = pruned(fitted(Single(), model, PICTURES)).compact().save(tmp_path / "saved")
    file = "part-00000-network.safetensors"
    edit_tensors(folder, file, lambda t: t | {n: v.flip(0) for n, v in t.items() if n.endswith("bn.order")})
    with pytest.raises(CheckpointError, match=r"'bn.order' is not what the masks beside it give"):
        pm.load_posterior(folder, model)


def test_training_goes_on_from_it():
    def model():
        return resnet8(3).double()

    still = Single(optimizer=pm.Optimizer("SGD", lr=1e-30))
    separate = pruned(fitted(Single(), model, PICTURES)).compact()
    [part] = separate.parts
    for initial in (part, separate):
        same = fitted(still, separate.modules[0], PICTURES, initial=initial, epochs=1)
        for name, tensor in next(same.draw()).stacked.items():
            if "running" not in name and "num_batches" not in name:
                torch.testing.assert_close(tensor, next(part.draw()).stacked[name])
    adam = Single(optimizer=pm.Optimizer("Adam", lr=3e-3))
    on = fitted(adam, separate.modules[0], PICTURES, initial=separate, epochs=8)
    losses = [row["loss"] for row in on.record["history"]]
    assert losses[-1] < 0.7 * losses[0]
    assert on.num_parameters == separate.num_parameters
    with pytest.raises(InputError, match=r"3 networks .* have different shapes"):
        fitted(still, net, initial=ENSEMBLE.compact(None))


def test_what_was_trained_on_is_kept_in_its_place(tmp_path):
    """Networks that were trained on take the places of those that they began at."""
    separate = ENSEMBLE.compact(None)
    on = [fitted(Single(), m, initial=p) for m, p in zip(separate.modules, separate.parts, strict=True)]
    better = replace(separate, parts=on)
    loaded = pm.load_posterior(better.save(tmp_path / "saved"), net)
    assert torch.equal(loaded.predict(X).mean, better.predict(X).mean)
    assert loaded.parts[1].record["method"] == on[1].record["method"]


def test_it_moves_and_is_run_otherwise():
    separate = ENSEMBLE.compact(None)
    for other in (separate.to("cpu"), separate.with_backend("loop"), separate.with_backend("vmap")):
        assert torch.equal(other.predict(X).mean, separate.predict(X).mean)


def test_the_posterior_is_not_touched():
    before = {name: tensor.clone() for name, tensor in tensors_of(ENSEMBLE.network.module).items()}
    ENSEMBLE.compact(None)
    for name, tensor in tensors_of(ENSEMBLE.network.module).items():
        assert torch.equal(tensor, before[name])


def test_weights_of_members_are_kept_when_compact_posteriors_are_merged():
    case = BY_NAME["mlp"]
    first, second = (
        pm.fit(
            pm.methods.DeepEnsemble(2),
            case.double_factory,
            case.data(),
            likelihood="categorical",
            epochs=1,
            seed=seed,
            progress=False,
        )
        for seed in (0, 1)
    )
    first = replace(first, blocks=[replace(b, log_weights=b.log_weights + 7) for b in first.draw()])
    x = case.data(seed=5).inputs
    merged = first.compact(None).merged([second.compact(None)])
    torch.testing.assert_close(merged.predict(x).mean, first.merged([second]).predict(x).mean)


def test_draws_without_weight_are_refused_and_gradients_stay_on():
    case = BY_NAME["mlp"]
    posterior = pm.fit(
        pm.methods.DeepEnsemble(3),
        case.double_factory,
        case.data(),
        likelihood="categorical",
        epochs=1,
        progress=False,
    )
    light = torch.tensor([-2000.0, 0.0, 0.0], dtype=torch.float64)
    posterior = replace(posterior, blocks=[replace(b, log_weights=light) for b in posterior.draw()])
    x = case.data().inputs
    with pytest.raises(InputError, match="draw more"):
        posterior.predict(x, 1)
    for _ in zip(posterior.outputs(x), posterior.outputs(x), strict=True):
        pass
    assert torch.is_grad_enabled()
