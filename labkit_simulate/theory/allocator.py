"""Model what torch's caching allocator reserves of a GPU, which is more than the tensors' bytes.

The allocator requests segments from the driver, splits them into blocks and keeps what is freed. A
tensor takes a multiple of 512 bytes. Up to 1 MiB it comes from a segment of 2 MiB, below 10 MiB
from one of 20 MiB, and above it has its own segment, a multiple of 2 MiB. The smallest free block
that is large enough is used; the rest is split off if it has at least 512 bytes in a small segment,
or more than 1 MiB in a large one. Free neighbours are merged.

Not modelled: blocks per CUDA stream, freeing of cached segments before an out-of-memory error, and
``PYTORCH_CUDA_ALLOC_CONF``. Source:
c10/cuda/CUDACachingAllocator.cpp in PyTorch (2.11 to 2.13).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import count

MIB = 2**20
ALLOCATION_UNIT = 512
SMALL_REQUEST, SMALL_SEGMENT = MIB, 2 * MIB
LARGE_REQUEST, LARGE_SEGMENT, SEGMENT_UNIT = 10 * MIB, 20 * MIB, 2 * MIB
# Memory of a process outside the allocator: round numbers to plan with, not measured.
OUTSIDE_ALLOCATOR_BYTES: dict[str, int] = {
    "context and kernels": 550 * MIB,
    "NCCL": 1024 * MIB,
    "cuBLAS and cuDNN": 256 * MIB,
}


@dataclass(eq=False)
class AllocatorBlock:
    """A part of a segment, in use or free, with its neighbours."""

    size: int
    small: bool
    is_free: bool = False
    before: AllocatorBlock | None = field(default=None, repr=False)
    after: AllocatorBlock | None = field(default=None, repr=False)
    number: int = field(default_factory=count().__next__)


class CachingAllocator:
    """Follow allocations and frees.

    Attributes:
        allocated: bytes in use, each block rounded up.
        reserved: bytes of all segments.
        most_allocated, most_reserved: the largest that these have been.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self._free: dict[bool, list[tuple[int, int, AllocatorBlock]]] = {True: [], False: []}

    def allocate(self, size: int) -> AllocatorBlock:
        """Return a block of at least this many bytes."""
        size = round_up(max(size, 1), ALLOCATION_UNIT)
        block = self._take_free_block(size) or self._new_segment(size)
        rest = block.size - size
        if rest >= ALLOCATION_UNIT if block.small else rest > SMALL_REQUEST:
            left = AllocatorBlock(rest, block.small, before=block, after=block.after)
            if block.after:
                block.after.before = left
            block.size, block.after = size, left
            self._add_free_block(left)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: AllocatorBlock) -> None:
        """Return a block to the free ones, merged with its free neighbours."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other and other.is_free:
                block = self._merge_blocks(block, other)
        self._add_free_block(block)

    def _take_free_block(self, size: int) -> AllocatorBlock | None:
        free = self._free[size <= SMALL_REQUEST]
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        block = free.pop(place)[2]
        block.is_free = False
        return block

    def _new_segment(self, size: int) -> AllocatorBlock:
        own = round_up(size, SEGMENT_UNIT) if size >= LARGE_REQUEST else LARGE_SEGMENT
        segment = SMALL_SEGMENT if size <= SMALL_REQUEST else own
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        return AllocatorBlock(segment, size <= SMALL_REQUEST)

    def _merge_blocks(self, block: AllocatorBlock, other: AllocatorBlock) -> AllocatorBlock:
        free = self._free[other.small]
        free.pop(bisect_left(free, (other.size, other.number)))
        first, second = (other, block) if other is block.before else (block, other)
        first.size += second.size
        first.after = second.after
        if second.after:
            second.after.before = first
        return first

    def _add_free_block(self, block: AllocatorBlock) -> None:
        block.is_free = True
        insort(self._free[block.small], (block.size, block.number, block))


def round_up(size: int, unit: int) -> int:
    """The next multiple of the unit."""
    return -(-size // unit) * unit
