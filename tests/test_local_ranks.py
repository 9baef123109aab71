"""labkit.local_ranks: every rank's shard in one process, and no process group left behind."""

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from labkit.local_ranks import shards_by_rank

MATRIX = torch.arange(16.0).reshape(4, 4)


def expected(rows, columns):
    return MATRIX[rows, columns].numpy()


ALL = slice(None)
LEFT, RIGHT, UPPER, LOWER = slice(0, 2), slice(2, 4), slice(0, 2), slice(2, 4)


@pytest.mark.parametrize(
    ("mesh", "placements", "held"),
    [
        ((4,), [Shard(0)], [(slice(rank, rank + 1), ALL) for rank in range(4)]),
        ((4,), [Shard(1)], [(ALL, slice(rank, rank + 1)) for rank in range(4)]),
        ((3,), [Replicate()], [(ALL, ALL)] * 3),
        ((3,), [Shard(1)], [(ALL, LEFT), (ALL, RIGHT), (ALL, slice(4, 4))]),
        ((2, 2), [Shard(0), Shard(1)], [(UPPER, LEFT), (UPPER, RIGHT), (LOWER, LEFT), (LOWER, RIGHT)]),
        ((2, 2), [Shard(0), Replicate()], [(UPPER, ALL), (UPPER, ALL), (LOWER, ALL), (LOWER, ALL)]),
    ],
)
def test_shards_of_every_rank(mesh, placements, held):
    shards = shards_by_rank(MATRIX, mesh, placements)
    assert list(shards) == list(range(len(held)))
    for rank, (rows, columns) in enumerate(held):
        assert isinstance(shards[rank], numpy.ndarray)
        numpy.testing.assert_array_equal(shards[rank], expected(rows, columns))


def test_it_can_be_called_again_and_leaves_no_process_group():
    for ranks in (2, 4, 2):
        assert len(shards_by_rank(MATRIX, (ranks,), [Shard(0)])) == ranks
        assert not dist.is_initialized()
    with pytest.raises(Exception, match=r"."):
        shards_by_rank(MATRIX, (2,), [Shard(0), Shard(1)])  # a placement too many
    assert not dist.is_initialized()


def test_inside_a_process_group_it_is_refused_and_the_group_stays():
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="in a process group already: call shards_by_rank from a notebook"):
            shards_by_rank(MATRIX, (2,), [Shard(0)])
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
