import pytest
import torch

import polymode as pm
from polymode.data.augmentation import Cutout, RandomCrop, RandomFlip, augmented
from polymode.errors import InputError
from polymode.seeds import fold, mix, uniform
from polymode.training.loop.batches import Batches

IMAGES = torch.arange(200 * 2 * 6 * 5, dtype=torch.float32).reshape(200, 2, 6, 5) + 1
SEEDS = torch.arange(200) * 7919


def draws(number, count):
    keys = fold(SEEDS)
    return uniform(mix(keys ^ mix(torch.full_like(keys, number))), count)


@pytest.mark.parametrize("fill", ["zeros", "reflect"])
def test_crops_equal_slices_of_the_padded_image(fill):
    got = augmented(IMAGES, [RandomCrop(2, fill)], SEEDS)
    mode = "constant" if fill == "zeros" else "reflect"
    padded = torch.nn.functional.pad(IMAGES, [2] * 4, mode=mode)
    places = (draws(1, 2) * 5).long()
    for image, expected, (top, left) in zip(got, padded, places.tolist(), strict=True):
        assert torch.equal(image, expected[:, top : top + 6, left : left + 5])
    assert set(places.flatten().tolist()) == set(range(5))  # every offset occurs


def test_flips_mirror_about_half_of_the_images():
    got = augmented(IMAGES, [RandomFlip()], SEEDS)
    flipped = torch.tensor([bool(torch.equal(a, b.flip(-1))) for a, b in zip(got, IMAGES, strict=True)])
    same = torch.tensor([bool(torch.equal(a, b)) for a, b in zip(got, IMAGES, strict=True)])
    assert bool((flipped ^ same).all())
    assert abs(int(flipped.sum()) - 100) < 4 * 50**0.5  # four standard deviations of a fair coin


def test_cutout_clears_one_square_and_nothing_else():
    got = augmented(IMAGES, [Cutout(3)], SEEDS)
    uniforms = draws(1, 2)
    for image, before, (u, v) in zip(got, IMAGES, uniforms.tolist(), strict=True):
        row, column = int(u * 6) - 1, int(v * 5) - 1
        expected = before.clone()
        expected[:, max(row, 0) : row + 3, max(column, 0) : column + 3] = 0
        assert torch.equal(image, expected)


def test_an_example_is_changed_alike_whatever_its_batch():
    steps = [RandomCrop(1), RandomFlip(), Cutout(2)]
    whole = augmented(IMAGES, steps, SEEDS)
    rows = torch.tensor([17, 3, 150])
    assert torch.equal(augmented(IMAGES[rows], steps, SEEDS[rows]), whole[rows])
    assert not torch.equal(augmented(IMAGES, steps, SEEDS + 1), whole)


def test_a_chain_sees_the_same_images_alone_and_beside_others():
    data = pm.ArrayData(IMAGES, torch.zeros(200), batch_size=64, augment=[RandomCrop(2), RandomFlip()])
    together = [
        r[0].pieces[0].examples.inputs[1]
        for r in Batches([data], [0, 1], [5], shared_order=False).epoch(3, 1)
    ]
    alone = [
        r[0].pieces[0].examples.inputs[0] for r in Batches([data], [1], [5], shared_order=False).epoch(3, 1)
    ]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    first = [
        r[0].pieces[0].examples.inputs[0]
        for r in Batches([data], [0, 1], [5], shared_order=False).epoch(3, 1)
    ]
    assert not torch.equal(first[0], together[0])


def test_evaluation_sees_the_images_as_they_are():
    data = pm.ArrayData(IMAGES, torch.zeros(200), augment=[RandomCrop(2)])
    assert torch.equal(torch.cat([part.inputs for part in data.in_order(64)]), IMAGES)
    assert torch.equal(data.subset([4, 2]).inputs, IMAGES[[4, 2]])


def test_a_data_set_given_for_several_seeds_is_held_once():
    data = pm.ArrayData(IMAGES, torch.arange(200), batch_size=200)
    batches = Batches([data, data], [0], [1, 2], shared_order=False)
    assert batches.source is data
    [[batch]] = batches.epoch(0, 1)
    for row, seed in enumerate((1, 2)):
        [[alone]] = Batches([data], [0], [seed], shared_order=False).epoch(0, 1)
        assert torch.equal(batch.pieces[0].examples.targets[row], alone.pieces[0].examples.targets[0])


def test_bad_augmentation_is_refused():
    with pytest.raises(InputError, match=r"images \[N, C, H, W\], the inputs are \[3, 2\]"):
        pm.ArrayData(torch.zeros(3, 2), torch.zeros(3), augment=[RandomFlip()])
    with pytest.raises(InputError, match="at least 1, got 0"):
        RandomCrop(0)
    with pytest.raises(InputError, match="at least 1, got -2"):
        Cutout(-2)
    with pytest.raises(InputError, match="'zeros' and 'reflect'"):
        RandomCrop(fill="edge")
