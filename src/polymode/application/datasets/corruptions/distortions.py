"""The common corruptions (Hendrycks and Dietterich 2019), each of one image.

A function takes an image of bytes [H, W, C] with one or three channels, a source of random numbers and the
numbers of one severity (``severities``), and returns pixels in [0, 255] that the caller cuts to
bytes. Needs the extra ``corruptions``; ``making.corrupt`` is what users call.
"""

import io
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image
from scipy import ndimage

from polymode.application.datasets.corruptions.severities import FROST_PHOTOGRAPHS

Pixels = np.ndarray
Random = np.random.Generator

TURQUOISE = (175.0, 238.0, 238.0)  # water on the lens
BROWN = (63.0, 42.0, 20.0)  # mud on the lens


# Noise.


def gaussian_noise(image: Pixels, random: Random, std: float) -> Pixels:
    """Add a normal number to each value. std: its standard deviation, of a range of 1."""
    x = image / 255
    return _bytes_of(x + random.normal(scale=std, size=x.shape))


def shot_noise(image: Pixels, random: Random, photons: float) -> Pixels:
    """Count photons: a Poisson number. photons: those expected of the brightest value."""
    return _bytes_of(random.poisson(image / 255 * photons) / photons)


def impulse_noise(image: Pixels, random: Random, amount: float) -> Pixels:
    """Salt and pepper. amount: the share of values that become 0 or 1, each as often as the other."""
    hit, salt = random.random(image.shape) <= amount, random.random(image.shape) < 0.5
    return np.where(hit, np.where(salt, 255, 0), image)


def speckle_noise(image: Pixels, random: Random, std: float) -> Pixels:
    """Multiply each value by 1 plus a normal number. std: its standard deviation."""
    x = image / 255
    return _bytes_of(x + x * random.normal(scale=std, size=x.shape))


# Blur.


def gaussian_blur(image: Pixels, random: Random, sigma: float) -> Pixels:
    """Convolve with a Gaussian. sigma: its width in pixels."""
    return _bytes_of(_smooth(image / 255, sigma))


def defocus_blur(image: Pixels, random: Random, radius: float, softness: float) -> Pixels:
    """Convolve with a disk. radius: of the disk. softness: width of the Gaussian that softens its edge."""
    reach = max(8, int(radius))
    places = np.arange(-reach, reach + 1)
    disk = (places[:, None] ** 2 + places**2 <= radius**2).astype(np.float32)
    size = 3 if radius <= 8 else 5
    kernel = cv2.GaussianBlur(disk / disk.sum(), (size, size), softness)
    return _bytes_of(_filtered(image / 255, kernel, cv2.BORDER_REFLECT_101))


def glass_blur(image: Pixels, random: Random, sigma: float, reach: float, passes: float) -> Pixels:
    """Let pixels take the place of near ones, between two Gaussian blurs.

    sigma: width of the blurs. reach: how far a pixel comes from, in [-reach, reach). passes: over the image.
    The published code means to swap pixels and copies them; so does this.
    """
    height, width = image.shape[:2]
    near = int(reach)
    rows = np.arange(height - near, near, -1)
    columns = np.arange(width - near, near, -1)
    places = (rows[:, None] * width + columns).ravel().tolist()
    source = list(range(height * width))
    for _ in range(int(passes)):
        down, right = random.integers(-near, near, (2, len(places)))
        # In order, since a pixel may pass on what it has just been given; a list is faster than an array.
        for place, move in zip(places, (down * width + right).tolist(), strict=True):
            source[place] = source[place + move]
    blurred = (_smooth(image / 255, sigma) * 255).astype(np.uint8)
    moved = blurred.reshape(height * width, -1)[source].reshape(image.shape)
    return _bytes_of(_smooth(moved / 255, sigma))


def motion_blur(image: Pixels, random: Random, radius: float, sigma: float) -> Pixels:
    """Smear along a line at an angle from -45° to 45°. radius, sigma: length and fading of the trail."""
    return np.round(_smeared(image, radius, sigma, random.uniform(-45, 45)))


def zoom_blur(image: Pixels, random: Random, end: float, step: float) -> Pixels:
    """Average the image with itself zoomed in by the factors 1, 1 + step, … below ``end``.

    Rounding lets ``end`` itself in where the published code has it.
    """
    x = image / 255
    factors = np.arange(1, end, step)
    return _bytes_of((x + sum(_zoomed(x, factor) for factor in factors)) / (len(factors) + 1))


# Weather.


def snow(
    image: Pixels,
    random: Random,
    mean: float,
    std: float,
    zoom: float,
    threshold: float,
    radius: float,
    sigma: float,
    keep: float,
) -> Pixels:
    """Flakes that fall, on an image that has become pale.

    mean, std: of the noise that flakes grow from. zoom: their size. threshold: values below it are no flakes.
    radius, sigma: of their motion blur. keep: the share of the image that does not become pale.
    """
    x = image / 255
    layer = _zoomed(random.normal(mean, std, image.shape[:2])[..., None], zoom)
    flakes = (np.clip(np.where(layer < threshold, 0, layer), 0, 1) * 255).astype(np.uint8)
    flakes = np.round(_smeared(flakes, radius, sigma, random.uniform(-135, -45))) / 255
    pale = np.maximum(x, _grey(x) * 1.5 + 0.5)
    return _bytes_of(keep * x + (1 - keep) * pale + flakes + np.rot90(flakes, 2))


def frost(
    image: Pixels, random: Random, keep: float, weight: float, shrink: float, *, folder: Path
) -> Pixels:
    """Add a piece of a photograph of frost.

    keep, weight: what image and photograph are multiplied by. shrink: by which the photograph is scaled; it
    is enlarged where it would be smaller than the image. folder: of the photographs.
    """
    height, width = image.shape[:2]
    name = FROST_PHOTOGRAPHS[random.integers(len(FROST_PHOTOGRAPHS))]
    photograph = _photograph(folder / name, shrink, height, width)
    top = random.integers(photograph.shape[0] - height)
    left = random.integers(photograph.shape[1] - width)
    piece = photograph[top : top + height, left : left + width]
    return np.clip(keep * image.astype(float) + weight * _coloured(piece, image), 0, 255)


def fog(image: Pixels, random: Random, strength: float, decay: float) -> Pixels:
    """Add a plasma fractal. strength: its height. decay: how much smoother each coarser step of it is."""
    height, width = image.shape[:2]
    x = image / 255
    brightest = x.max()
    haze = _plasma(1 << (max(height, width) - 1).bit_length(), decay, random)[:height, :width, None]
    return _bytes_of((x + strength * haze) * brightest / (brightest + strength))


def spatter(
    image: Pixels,
    random: Random,
    mean: float,
    std: float,
    sigma: float,
    threshold: float,
    strength: float,
    mud: float,
) -> Pixels:
    """Drops on the lens.

    mean, std, sigma: of the smooth noise that drops grow from. threshold: values below it are no drops.
    mud: 0 for water, which adds ``strength`` of its colour; 1 for mud, which covers, and where ``strength``
    is the width of its soft edge.
    """
    x = image / 255
    liquid = _smooth(random.normal(mean, std, image.shape[:2])[..., None], sigma)[..., 0]
    liquid[liquid < threshold] = 0
    if mud:
        cover = _smooth((liquid > threshold).astype(float)[..., None], strength)
        cover[cover < 0.8] = 0
        return _bytes_of(x * (1 - cover) + cover * _coloured(np.array(BROWN) / 255, image))
    depth = (liquid * 255).astype(np.uint8)
    drops = depth * _relief(depth)
    if drops.max() > 0:  # few and small images have no drop at all
        drops *= strength / drops.max()
    return _bytes_of(x + drops[..., None] * _coloured(np.array(TURQUOISE) / 255, image))


# Colour, and what cameras and files do.


def brightness(image: Pixels, random: Random, amount: float) -> Pixels:
    """Raise the value of HSV colours, the largest of red, green and blue. amount: by how much, of 1."""
    x = image / 255
    value = x.max(-1, keepdims=True)
    raised = np.clip(value + amount, 0, 1)
    # With hue and saturation fixed, red, green and blue are proportional to the value; black becomes grey.
    return _bytes_of(np.where(value > 0, x * (raised / np.where(value > 0, value, 1)), raised))


def saturate(image: Pixels, random: Random, factor: float, amount: float) -> Pixels:
    """Scale the saturation of HSV colours. factor, amount: the new one is factor · s + amount, at most 1.

    A grey pixel has the hue of red; images with one channel have no saturation and are returned as they are.
    """
    if image.shape[-1] == 1:
        return image
    x = image / 255
    value = x.max(-1, keepdims=True)
    below = value - x
    spread = below.max(-1, keepdims=True)
    saturation = spread / np.where(value > 0, value, 1)
    wanted = np.clip(saturation * factor + amount, 0, 1)
    red = value * np.array([0.0, 1.0, 1.0])
    direction = np.where(spread > 0, below / np.where(saturation > 0, saturation, 1), red)
    return _bytes_of(value - wanted * direction)


def contrast(image: Pixels, random: Random, factor: float) -> Pixels:
    """Bring values nearer to the mean of their channel. factor: by which distances shrink."""
    x = image / 255
    means = x.mean((0, 1), keepdims=True)
    return _bytes_of((x - means) * factor + means)


def elastic_transform(image: Pixels, random: Random, strength: float, sigma: float, affine: float) -> Pixels:
    """Move three points at random and the image with them, then every pixel by a smooth field.

    All are parts of the image's side. strength, sigma: height and width of the field, smoothed noise.
    affine: how far a point moves.
    """
    height, width = image.shape[:2]
    side = min(height, width)
    middle, reach = np.array([height, width]) // 2, side // 3
    corners = np.array([middle + reach, [middle[0] + reach, middle[1] - reach], middle - reach], np.float32)
    moved = corners + random.uniform(-affine * side, affine * side, corners.shape).astype(np.float32)
    x = (image / 255).astype(np.float32)
    map_to = cv2.getAffineTransform(corners, moved)
    x = cv2.warpAffine(x, map_to, (width, height), borderMode=cv2.BORDER_REFLECT_101)
    x = x.reshape(image.shape)
    places: list[Any] = list(np.indices((height, width), dtype=float))
    for axis in (1, 0):
        noise = random.uniform(-1, 1, (height, width))
        places[axis] += strength * side * _field(noise, sigma * side)
    channels = [
        ndimage.map_coordinates(x[..., channel], places, order=1, mode="reflect")
        for channel in range(image.shape[-1])
    ]
    return _bytes_of(np.stack(channels, -1))


def pixelate(image: Pixels, random: Random, share: float) -> Pixels:
    """Make the image smaller and large again. share: the smaller side over the larger."""
    height, width = image.shape[:2]
    small = _picture(image).resize((int(width * share), int(height * share)), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX)).reshape(image.shape)


def jpeg_compression(image: Pixels, random: Random, quality: float) -> Pixels:
    """Write the image as JPEG and read it. quality: of the file, at most 100."""
    file = io.BytesIO()
    _picture(image).save(file, "JPEG", quality=int(quality))
    return np.asarray(Image.open(file)).reshape(image.shape)


DISTORTIONS: dict[str, Callable[..., Pixels]] = {
    function.__name__: function
    for function in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        defocus_blur,
        glass_blur,
        motion_blur,
        zoom_blur,
        snow,
        frost,
        fog,
        brightness,
        contrast,
        elastic_transform,
        pixelate,
        jpeg_compression,
        speckle_noise,
        gaussian_blur,
        spatter,
        saturate,
    )
}


# Parts of several of them.


def _bytes_of(x: Pixels) -> Pixels:
    return np.clip(x, 0, 1) * 255


def _smooth(x: Pixels, sigma: float) -> Pixels:
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest")


def _filtered(x: Pixels, kernel: Pixels, border: int) -> Pixels:
    """Correlate every channel with a kernel [K, K]."""
    return cv2.filter2D(x, -1, kernel, borderType=border).reshape(x.shape)


def _smeared(x: Pixels, radius: float, sigma: float, angle: float) -> Pixels:
    """Motion blur as ImageMagick does it: half a Gaussian along a line of whole pixels; edges repeated."""
    reach = 2 * int(radius)
    steps = np.arange(reach + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    down, right = (
        np.ceil(steps * part - 0.5).astype(int)
        for part in (math.sin(math.radians(angle)), math.cos(math.radians(angle)))
    )
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    np.add.at(kernel, (reach + down, reach + right), weights / weights.sum())
    return np.clip(_filtered(x.astype(float), kernel, cv2.BORDER_REPLICATE), 0, 255)


def _zoomed(x: Pixels, factor: float) -> Pixels:
    """The middle of an image, enlarged to its size by linear interpolation."""
    for axis in (0, 1):
        size = x.shape[axis]
        kept = math.ceil(size / factor)
        enlarged = round(kept * factor)
        places = (np.arange(size) + (enlarged - size) // 2) * ((kept - 1) / (enlarged - 1))
        low = np.minimum(places.astype(int), kept - 2)
        share = (places - low)[:, None, None] if axis == 0 else (places - low)[:, None]
        low += (size - kept) // 2
        x = x.take(low, axis) * (1 - share) + x.take(low + 1, axis) * share
    return x


def _plasma(size: int, decay: float, random: Random) -> Pixels:
    """Heights in [0, 1] on a torus of ``size``, a power of two, by the diamond-square algorithm."""
    heights = np.zeros((size, size))
    step, roughness = size, 100.0

    def filled(total: Pixels) -> Pixels:
        return total / 4 + roughness * random.uniform(-roughness, roughness, total.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        pairs = corners + np.roll(corners, -1, 0)
        heights[half::step, half::step] = filled(pairs + np.roll(pairs, -1, 1))
        centres = heights[half::step, half::step]
        beside = corners + np.roll(corners, -1, 1)
        heights[::step, half::step] = filled(centres + np.roll(centres, 1, 0) + beside)
        beside = corners + np.roll(corners, -1, 0)
        heights[half::step, ::step] = filled(centres + np.roll(centres, 1, 1) + beside)
        step, roughness = half, roughness / decay
    heights -= heights.min()
    return heights / heights.max()


def _relief(depth: Pixels) -> Pixels:
    """Light and shade of drops: edges, the distance to them, and an embossing filter."""
    distance = cv2.distanceTransform(255 - cv2.Canny(depth, 50, 150), cv2.DIST_L2, 5)
    near = cv2.blur(np.minimum(distance, 20), (3, 3)).astype(np.uint8)
    emboss = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], np.float32)
    lit = cv2.filter2D(cv2.equalizeHist(near), cv2.CV_8U, emboss)
    return cv2.blur(lit, (3, 3)).astype(np.float32)


def _field(noise: Pixels, sigma: float) -> Pixels:
    """Noise smoothed along both axes, by a matrix: a Gaussian wider than the image is slow otherwise."""
    height, width = noise.shape
    return _smoothing(height, sigma) @ noise @ _smoothing(width, sigma).T


@lru_cache(maxsize=64)
def _smoothing(size: int, sigma: float) -> Pixels:
    """The matrix [size, size] of a Gaussian filter, cut at three widths, of the image and its mirror."""
    if sigma == 0:
        return np.eye(size)
    return ndimage.gaussian_filter1d(np.eye(size), sigma, axis=0, mode="reflect", truncate=3)


@lru_cache(maxsize=64)
def _photograph(path: Path, shrink: float, height: int, width: int) -> Pixels:
    """A photograph in RGB, scaled so that it is larger than an image."""
    with Image.open(path) as file:
        pixels = np.asarray(file.convert("RGB"))
    fits = max((height + 1) / pixels.shape[0], (width + 1) / pixels.shape[1])
    factor = shrink if shrink > fits else 1.1 * fits
    if factor == 1:
        return pixels
    return cv2.resize(pixels, (0, 0), fx=factor, fy=factor, interpolation=cv2.INTER_LINEAR)


def _grey(x: Pixels) -> Pixels:
    """Luminance [..., 1] of colours [..., 3]; grey stays as it is."""
    return x if x.shape[-1] == 1 else x @ np.array([[0.299], [0.587], [0.114]])


def _coloured(colours: Pixels, image: Pixels) -> Pixels:
    """Colours, or their luminance where the image is grey."""
    return _grey(colours) if image.shape[-1] == 1 else colours


def _picture(image: Pixels) -> Image.Image:
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
