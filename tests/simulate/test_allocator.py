"""labkit_simulate.theory.allocator by hand, and against the allocator of a GPU where there is one."""

import random

import pytest
import torch

from labkit_simulate.theory.allocator import MIB, CachingAllocator


def test_small_tensors_share_a_segment_and_take_multiples_of_512_bytes():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (1, 512, 513)]
    assert [block.size for block in blocks] == [512, 512, 1024]
    assert (allocator.allocated, allocator.reserved) == (2048, 2 * MIB)


@pytest.mark.parametrize(
    ("size", "reserved"), [(MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)]
)
def test_a_segment_is_as_large_as_the_driver_is_asked_for(size, reserved):
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == reserved * MIB


def test_what_is_freed_is_kept_and_neighbours_become_one():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for block in blocks[1:3]:
        allocator.free(block)
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB, "in the place of the two"
    allocator.allocate(5 * MIB)
    assert (allocator.reserved, allocator.most_reserved) == (40 * MIB, 40 * MIB), "1 MiB was left"
    assert allocator.most_allocated == 25 * MIB, "it is no block of its own"


def test_it_is_the_allocator_of_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.cuda.empty_cache()
    before, model, held, draw = torch.cuda.memory_reserved(), CachingAllocator(), [], random.Random(0)
    for _ in range(2000):
        if held and draw.random() < (0.45 if len(held) < 200 else 0.6):
            model.free(held.pop(draw.randrange(len(held)))[1])
        else:
            size = int(2 ** draw.uniform(0, 26))
            held.append((torch.empty(size, dtype=torch.uint8, device="cuda"), model.allocate(size)))
        assert torch.cuda.memory_reserved() - before == model.reserved
