"""The network of lab 3, which says from which of ten regions of the photo a tile was cut."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.models import photo
from labkit.models.mlp import MLP

TILE_PIXELS, CLASSES = 16, 10
# The number of tiles in a training step.
BATCH = 64


def tile_network(dim: int) -> nn.Sequential:
    """Build linear layer, two MLPs, linear layer: [N, 3, 16, 16] to [N, 10], without bias."""
    first = nn.Linear(3 * TILE_PIXELS * TILE_PIXELS, dim, bias=False)
    last = nn.Linear(dim, CLASSES, bias=False)
    return nn.Sequential(nn.Flatten(), first, MLP(dim, bias=False), MLP(dim, bias=False), last)


def tile_batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return tiles [N, 3, 16, 16] of the photo, and the regions [N] that they were cut from."""
    return photo.image_batch("photo", count, TILE_PIXELS, TILE_PIXELS, CLASSES, seed)


@cache
def tile_network_weights(dim: int, steps: int) -> dict[str, Tensor]:
    """Return the weights after ``steps`` steps of Adam from seed 0, by name, cached: read only."""
    threads = torch.get_num_threads()
    # So that the number of cores changes nothing; matrices this small are not faster on two.
    torch.set_num_threads(1)
    try:
        return _train_weights(dim, steps)
    finally:
        torch.set_num_threads(threads)


def _train_weights(dim: int, steps: int) -> dict[str, Tensor]:
    # The global RNG is the caller's.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tile_network(dim)
    # All tiles at once, because each call reads the photo.
    images, labels = tile_batch(max(1, steps) * BATCH, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    for part in torch.arange(steps * BATCH).split(BATCH) if steps else ():
        optimizer.zero_grad()
        cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}
