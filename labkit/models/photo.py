"""Images to train on without a download: random ones, or tiles of a photo in matplotlib.

The task on the photo, a portrait of Grace Hopper: say which of ten regions a tile was cut from.
Tiles start at random places, so no two are alike, and a network has to look at their content.
"""

import functools
import importlib.util
from pathlib import Path
from typing import Literal

import numpy
import torch
from PIL import Image
from torch import Tensor

REGION_ROWS, REGION_COLUMNS = 5, 2


@functools.cache
def load_photo() -> numpy.ndarray:
    """Return the photo, [height, width, 3] = [600, 512, 3], bytes, read-only."""
    # Locate the file without importing its package, which would take each rank 0.5 s.
    matplotlib = importlib.util.find_spec("matplotlib")
    assert matplotlib and matplotlib.origin
    data = Path(matplotlib.origin).parent / "mpl-data"
    with Image.open(data / "sample_data" / "grace_hopper.jpg") as file:
        return numpy.asarray(file)


def brightness_term(picture: numpy.ndarray, index: int, terms: int) -> numpy.ndarray:
    """Return one of ``terms`` pictures that add up to this one: its part of the values 0 to 255."""
    low, high = 256 * index // terms, 256 * (index + 1) // terms
    return picture.clip(low, high) - numpy.asarray(low, picture.dtype)


def image_batch(
    kind: Literal["random", "photo"], count: int, height: int, width: int, classes: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return images [N, 3, height, width], channels last, and labels [N] below ``classes``."""
    regions = REGION_ROWS * REGION_COLUMNS
    if kind == "photo" and classes < regions:
        rule = f"{classes} classes cannot label the photo's {regions} regions"
        raise ValueError(f"{rule}: take at least {regions}")
    random = numpy.random.default_rng(seed)
    if kind == "photo":
        images, labels = photo_tiles(random, count, height, width)
    else:
        images = random.standard_normal((count, 3, height, width), dtype=numpy.float32)
        labels = random.integers(0, classes, count)
    stored = torch.from_numpy(images).contiguous(memory_format=torch.channels_last)
    return stored, torch.from_numpy(labels)


def photo_tiles(
    random: numpy.random.Generator, count: int, height: int, width: int
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return random tiles of the photo, from -1 to 1, and the region where each starts, 0 to 9."""
    picture = load_photo()
    rows, columns = picture.shape[:2]
    # Beyond its border the photo is mirrored, so any size works.
    padded = numpy.pad(picture, ((0, height), (0, width), (0, 0)), mode="symmetric")
    tops, lefts = random.integers(0, rows, count), random.integers(0, columns, count)
    cut = [padded[y : y + height, x : x + width] for y, x in zip(tops, lefts, strict=True)]
    tiles = numpy.stack(cut).transpose(0, 3, 1, 2) / numpy.float32(127.5) - 1
    regions = tops * REGION_ROWS // rows * REGION_COLUMNS + lefts * REGION_COLUMNS // columns
    return tiles.astype(numpy.float32), regions
