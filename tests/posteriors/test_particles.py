"""Networks by their labels: some of them, and those of each chain, in memory and in files."""

import gc
import math
from dataclasses import replace

import pytest
import torch

import polymode as pm
from cases import BY_NAME
from polymode.methods import DeepEnsemble, LatePhase, Single, Snapshot
from polymode.networks.members import Members
from polymode.posteriors import Particles, load_posterior, particles
from polymode.posteriors.network import Network
from polymode.posteriors.particles import MemberStore, SomeMembers, StoredMembers, labels_of, rows_of
from tolerances import PASS, assert_equal_up_to_rounding

CASE = BY_NAME["mlp"]
SGD = pm.Optimizer("SGD", lr=0.05)
X = CASE.data().inputs


def fitted(method, **options):
    options = {"epochs": 4, "progress": False, "backend": "loop"} | options
    return pm.fit(method, CASE.double_factory, CASE.data(), likelihood=CASE.likelihood, **options)


@pytest.fixture(scope="module")
def path():
    """Three chains of four networks, with weights."""
    posterior = fitted(DeepEnsemble(3, of=Snapshot(4, optimizer=SGD)))
    weights = torch.linspace(-1, 2, 12, dtype=torch.float64)
    sizes = [block.num_members for block in posterior.blocks]
    pairs = zip(posterior.blocks, weights.split(sizes), strict=True)
    return replace(posterior, blocks=[replace(block, log_weights=own) for block, own in pairs])


def outputs(posterior):
    """Of every network by itself, [M, N, classes], and their weights."""
    module, blocks = CASE.double_factory(), list(posterior.draw())
    members = [block.member(index) for block in blocks for index in range(block.num_members)]
    found = torch.stack([torch.func.functional_call(module, weights, (X,)) for weights in members])
    return found.detach(), torch.cat([block.log_weights for block in blocks]).double().softmax(0)


def assert_mixture(posterior, whole, indices):
    """The networks ``indices`` of the whole, in this order, with their shares among themselves."""
    (found, shares), (everything, of_all) = outputs(posterior), outputs(whole)
    assert_equal_up_to_rounding(found, everything[indices], PASS)
    torch.testing.assert_close(shares, of_all[indices] / of_all[indices].sum())
    mixture = torch.einsum("m,mnc->nc", shares, found.softmax(-1))
    torch.testing.assert_close(posterior.predict(X).mean, mixture)


def versions(posterior, tmp_path):
    """In memory, and as it is read back."""
    posterior.save(tmp_path / "saved")
    return [posterior, pm.load_posterior(tmp_path / "saved", CASE.double_factory)]


def test_labels_name_data_set_chain_and_network(path, tmp_path):
    expected = [[0, chain, number] for chain in range(3) for number in range(4)]
    for each in versions(path, tmp_path):
        assert each.labels.tolist() == expected


@pytest.mark.parametrize("indices", [[0], [11, 2, 2, 5], [3, 4, 5], [-1, 0]])
def test_some_networks_in_the_order_given(path, indices, tmp_path):
    for number, each in enumerate(versions(path, tmp_path)):
        some = each.only(indices)
        assert some.num_members == len(indices)
        assert some.labels.tolist() == path.labels[indices].tolist()
        assert_mixture(some, path, indices)
        again = some.only([some.num_members - 1, 0])  # of some of them, some
        assert_mixture(again, path, [indices[-1], indices[0]])
        some.save(tmp_path / f"some-{number}")
        loaded = pm.load_posterior(tmp_path / f"some-{number}", CASE.double_factory)
        assert loaded.labels.tolist() == some.labels.tolist()
        assert_mixture(loaded, path, indices)
        assert_mixture(loaded.in_memory(), path, indices)


def test_chains_are_in_the_order_of_their_labels(path, tmp_path):
    for each in versions(path, tmp_path):
        chains = each.chains()
        assert list(chains) == [(0, 0), (0, 1), (0, 2)]
        for (_, chain), part in chains.items():
            assert_mixture(part, path, [4 * chain + number for number in range(4)])
    shuffled = path.only([7, 0, 11, 3, 8, 1, 4, 10, 2, 6, 9, 5]).chains()
    for (_, chain), part in shuffled.items():
        assert part.labels[:, 2].tolist() == [0, 1, 2, 3]
        assert_mixture(part, path, [4 * chain + number for number in range(4)])


def test_chains_together_are_the_whole(path):
    parts = list(path.chains().values())
    assert_mixture(pm.merge(parts), path, list(range(12)))


def test_what_is_in_files_stays_there(tmp_path):
    posterior = fitted(DeepEnsemble(2, of=Snapshot(2, optimizer=SGD)), run_dir=tmp_path / "run")
    assert all(isinstance(block, StoredMembers) for block in posterior.blocks)
    for part in [posterior.only([3, 0]), *posterior.chains().values()]:
        for block in part.blocks:
            assert isinstance(block, SomeMembers)
            assert isinstance(block.block, StoredMembers)
    first = next(iter(posterior.chains().values()))
    assert_mixture(first, posterior, [0, 1])
    assert sum(b.num_bytes for b in first.blocks) <= sum(b.num_bytes for b in posterior.blocks)


def test_members_that_share_weights_keep_what_they_share():
    late = LatePhase(3, start=0.5, noise=0.3, optimizer=SGD, keep_members=True)
    posterior = fitted(late)
    assert_mixture(posterior.only([2, 0]), posterior, [2, 0])
    assert_mixture(posterior.chains()[0, 0], posterior, [0, 1, 2])


def test_weights_that_are_far_apart_do_not_overflow(path):
    far = [replace(b, log_weights=b.log_weights + 1e4 * i) for i, b in enumerate(path.blocks)]
    heavy = replace(path, blocks=far)
    assert torch.isfinite(heavy.only([1, 0]).predict(X).mean).all()
    light = heavy.only([0])  # alone it has all of the weight, however little it had among the others
    [block] = light.draw()
    assert block.log_weights.tolist() == [0.0]
    assert math.isclose(float(light.predict(X).mean.sum(-1).mean()), 1.0)


def test_data_sets_are_told_apart():
    sets = [CASE.data(13, seed=1), CASE.data(24, seed=2)]
    both = pm.fit(
        DeepEnsemble(2, of=Single(optimizer=SGD)),
        CASE.double_factory,
        sets,
        likelihood=CASE.likelihood,
        epochs=2,
        progress=False,
    )
    joined = pm.merge(both[::-1])
    assert list(joined.chains()) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for key, part in joined.chains().items():
        assert part.labels.tolist() == [[*key, 0]]
        assert_mixture(part, both[key[0]], [key[1]])


def test_members_beyond_the_memory_limit_go_to_files_that_live_as_long_as_they_are_held(monkeypatch):
    monkeypatch.setattr("polymode.posteriors.particles.MEMORY_BYTES", 3 * 4 * 5)  # three networks of five
    store = MemberStore()
    numbers = [torch.full((1, 5), float(i)) for i in range(6)]
    for each in numbers:
        store.append(Members({"weight": each}))
    kinds = [type(block) for block in store.blocks]
    assert kinds == [Members] * 3 + [StoredMembers] * 3
    folder = store.blocks[-1].file.path.parent
    blocks = store.of_group(0).blocks
    del store
    gc.collect()
    assert [rows_of(b, 0, 1).stacked["weight"][0, 0].item() for b in blocks] == list(range(6))
    assert [labels_of(b)[0, 2].item() for b in blocks] == list(range(6))
    del blocks
    gc.collect()
    assert not folder.exists()


# --- what is merged lies side by side ------------------------------------------------------------------


def naively_drawn(posteriors, count=None):
    """The networks of several posteriors in a row, or some of them, by the formula of ``draw``."""
    everything = [
        block.member(index)
        for posterior in posteriors
        for block in posterior.draw()
        for index in range(block.num_members)
    ]
    total = len(everything)
    count = total if count is None else count
    chosen = [everything[(index * total) // count] for index in range(count)]
    return {name: torch.stack([weights[name] for weights in chosen]) for name in chosen[0]}


def drawn_by(posterior, count=None):
    blocks = list(posterior.draw(count))
    members = [block.member(index) for block in blocks for index in range(block.num_members)]
    return {name: torch.stack([weights[name] for weights in members]) for name in members[0]}


@pytest.fixture(scope="module")
def fits():
    """Three posteriors of three, one and two networks."""
    return [fitted(DeepEnsemble(n, of=Single(optimizer=SGD)), seed=n) for n in (3, 1, 2)]


@pytest.mark.parametrize("count", [None, 1, 2, 3, 4, 5, 6])
def test_merged_networks_are_drawn_in_their_order(fits, count):
    merged, expected = pm.merge(fits), naively_drawn(fits, count)
    found = drawn_by(merged, count)
    assert all(torch.equal(t, expected[n]) for n, t in found.items())  # copied, not computed
    labels = torch.cat([posterior.labels for posterior in fits])
    assert merged.labels.tolist() == labels.tolist()


def test_merged_networks_are_one_block_that_is_drawn_as_it_is(fits):
    merged = pm.merge(fits)
    [block] = merged.blocks
    assert isinstance(block, Members)
    assert (block.num_members, block.num_groups) == (6, 1)
    for _ in range(2):  # nothing is put together at a prediction any more
        [drawn] = merged.draw()
        assert all(drawn.stacked[n].data_ptr() == t.data_ptr() for n, t in block.stacked.items())
    assert len(fits[0].blocks) == 1  # what was merged is as it was
    assert fits[0].num_members == 3


def test_merged_networks_predict_the_mixture_of_all(fits):
    merged = pm.merge(fits)
    found, shares = outputs(merged)
    expected = torch.cat([outputs(posterior)[0] for posterior in fits])
    assert_equal_up_to_rounding(found, expected, PASS)
    torch.testing.assert_close(shares, torch.full((6,), 1 / 6, dtype=torch.float64))
    torch.testing.assert_close(merged.predict(X).mean, expected.softmax(-1).mean(0))


def test_merged_networks_keep_their_weights(fits):
    raised = []
    for number, posterior in enumerate(fits):
        own = [
            replace(b, log_weights=torch.arange(b.num_members).double() - 3 * number)
            for b in posterior.blocks
        ]
        raised.append(replace(posterior, blocks=own))
    merged = pm.merge(raised)
    logs = torch.tensor([0, 1, 2, -3, -6, -5], dtype=torch.float64)
    found, shares = outputs(merged)
    torch.testing.assert_close(shares, logs.softmax(0))
    torch.testing.assert_close(merged.predict(X).mean, torch.einsum("m,mnc->nc", shares, found.softmax(-1)))


def test_merged_blocks_stay_bounded(fits, monkeypatch):
    monkeypatch.setattr("polymode.posteriors.particles.BLOCK_MEMBERS", 4)
    merged = pm.merge(fits)
    assert [block.num_members for block in merged.blocks] == [4, 2]
    assert all(torch.equal(t, naively_drawn(fits)[n]) for n, t in drawn_by(merged).items())


def test_a_block_too_large_for_a_pass_is_drawn_in_pieces(fits, monkeypatch):
    merged = pm.merge(fits)
    monkeypatch.setattr("polymode.posteriors.particles.BLOCK_MEMBERS", 4)
    assert [block.num_members for block in merged.draw()] == [4, 2]
    assert all(torch.equal(t, naively_drawn(fits)[n]) for n, t in drawn_by(merged).items())


def test_files_between_what_is_in_memory_keep_their_place(fits, tmp_path):
    fits[1].save(tmp_path / "saved")
    stored = pm.load_posterior(tmp_path / "saved", CASE.double_factory)
    merged = pm.merge([fits[0], fits[2], stored, fits[0]])
    assert [type(block) for block in merged.blocks] == [Members, StoredMembers, Members]
    order = [fits[0], fits[2], fits[1], fits[0]]
    for count in (None, 4, 7):
        expected = naively_drawn(order, count)
        assert all(torch.equal(t, expected[n]) for n, t in drawn_by(merged, count).items())
    mixture = torch.cat([outputs(posterior)[0] for posterior in order]).softmax(-1).mean(0)
    torch.testing.assert_close(merged.predict(X).mean, mixture)


def test_merged_members_that_share_weights_stay_in_their_groups():
    late = LatePhase(3, start=0.5, noise=0.3, optimizer=SGD, keep_members=True)
    parts = [fitted(late, seed=seed) for seed in (1, 2)]
    merged = pm.merge(parts)
    assert merged.num_members == 6
    for count in (None, 2, 4):
        expected = naively_drawn(parts, count)
        assert all(torch.equal(t, expected[n]) for n, t in drawn_by(merged, count).items())
    shares = torch.stack([posterior.predict(X).mean for posterior in parts]).mean(0)
    torch.testing.assert_close(merged.predict(X).mean, shares)


def test_merged_kernels_of_convolutions_stay_channels_last():
    case = BY_NAME["convolution"]
    parts = [
        pm.fit(
            DeepEnsemble(2, of=Single(optimizer=SGD)),
            case.double_factory,
            case.data(),
            likelihood=case.likelihood,
            epochs=1,
            seed=seed,
            progress=False,
            backend="loop",
        )
        for seed in (1, 2)
    ]
    [block] = pm.merge(parts).blocks
    kernels = [posterior.blocks[0].stacked["0.weight"] for posterior in parts]
    assert torch.equal(block.stacked["0.weight"], torch.cat(kernels))
    assert block.stacked["0.weight"][3].stride() == kernels[1][1].stride()
    x = case.data(5, seed=4).inputs
    each = torch.stack([posterior.predict(x).mean for posterior in parts])
    torch.testing.assert_close(pm.merge(parts).predict(x).mean, each.mean(0))


def test_members_that_fit_into_a_block_are_read_once_and_others_in_parts(tmp_path, monkeypatch):
    """2,000 networks on disk predict as those in memory, held or read for every prediction."""
    module = pm.models.MLP(3, 1, hidden=[4])
    generator = torch.Generator().manual_seed(0)
    stacked = {n: torch.randn(2000, *p.shape, generator=generator) for n, p in module.named_parameters()}
    weights = torch.randn(2000, generator=generator)
    labels = torch.stack([torch.zeros(2000), torch.arange(2000), torch.zeros(2000)], 1).long()
    network = Network(module, pm.likelihoods.FixedGaussian(0.1), "vmap")
    whole = Particles(network, blocks=[Members(stacked, log_weights=weights, labels=labels)])
    whole.save(tmp_path)
    stored = load_posterior(tmp_path, module)
    inputs = torch.randn(50, 3, generator=generator)
    expected = whole.predict(inputs, quantiles=(0.1, 0.9))
    read, largest = [], []
    plain = particles.read_some

    def reads(path, rows_of):
        found = plain(path, rows_of)
        read.append(path)
        largest.append(sum(t.numel() * t.element_size() for t in found.values()))
        return found

    monkeypatch.setattr(particles, "read_some", reads)
    held = stored.held()
    read.clear()
    for _ in range(2):
        found = held.predict(inputs, quantiles=(0.1, 0.9))
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.quantiles[0.1], expected.quantiles[0.1])
    assert not read
    each = sum(t[0].numel() * 4 for t in stacked.values()) + 28  # with its weight and its labels
    monkeypatch.setattr(particles, "BLOCK_BYTES", 10 * each)
    assert stored.held() is stored
    largest.clear()
    torch.testing.assert_close(stored.predict(inputs).mean, expected.mean)
    assert len(largest) > 150
    assert max(largest) <= 2000 * 24 // 15 + 20 * each  # labels of a file are read at once
