"""labkit.models.photo: images to train on, the same for the same seed."""

import numpy
import pytest
import torch

from labkit.models import photo


@pytest.mark.parametrize("kind", ["random", "photo"])
@pytest.mark.parametrize(("height", "width"), [(16, 48), (700, 1200)])
def test_shapes_and_types(kind, height, width):
    images, labels = photo.image_batch(kind, 3, height, width, 10, seed=0)
    assert (images.shape, images.dtype) == ((3, 3, height, width), torch.float32)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert (labels.shape, labels.dtype) == ((3,), torch.int64)


@pytest.mark.parametrize(("kind", "classes", "highest"), [("random", 10, 9), ("random", 3, 2), ("photo", 20, 9)])
def test_every_label_occurs_and_none_is_beyond_the_classes(kind, classes, highest):
    _, labels = photo.image_batch(kind, 300, 8, 8, classes, seed=0)
    assert set(labels.tolist()) == set(range(highest + 1))


@pytest.mark.parametrize("kind", ["random", "photo"])
def test_a_seed_gives_the_same_batch_and_another_seed_another(kind):
    first, again, other = (photo.image_batch(kind, 4, 16, 16, 10, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_random_images_are_standard_normal():
    images, _ = photo.image_batch("random", 4, 64, 64, 10, seed=0)
    assert abs(images.mean().item()) < 0.02
    assert images.std().item() == pytest.approx(1, abs=0.02)


def test_tiles_are_cut_from_the_photo_and_labelled_by_where_they_start():
    picture = photo.load_photo()
    assert (picture.shape, picture.dtype) == ((600, 512, 3), numpy.uint8)
    images, labels = photo.image_batch("photo", 6, 16, 24, 10, seed=3)
    assert images.min() >= -1
    assert images.max() <= 1
    mirrored = numpy.pad(picture, ((0, 16), (0, 24), (0, 0)), mode="symmetric")
    windows = numpy.lib.stride_tricks.sliding_window_view(mirrored, (16, 24), axis=(0, 1))[:600, :512]
    for image, label in zip(images, labels, strict=True):
        tile = ((image.numpy() + 1) * 127.5).round().astype(numpy.uint8)
        corner = (windows[..., 0, 0] == tile[:, 0, 0]).all(axis=-1) & (windows[..., -1, -1] == tile[:, -1, -1]).all(-1)
        places = [tuple(place) for place in numpy.argwhere(corner) if (windows[tuple(place)] == tile).all()]
        assert len(places) == 1
        top, left = places[0]
        assert label == top // 120 * 2 + left // 256  # five rows and two columns of regions


def test_fewer_classes_than_regions_are_refused():
    with pytest.raises(ValueError, match="9 classes cannot label the photo's 10 regions: take at least 10"):
        photo.image_batch("photo", 1, 8, 8, 9, seed=0)
