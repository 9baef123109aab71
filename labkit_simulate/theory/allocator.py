"""What torch's allocator reserves of a GPU for the tensors that a program holds: more than their bytes.

It asks the driver for segments, cuts blocks off them and keeps what is freed. A tensor takes a multiple of 512 bytes.
Up to 1 MiB it comes from a segment of 2 MiB, below 10 MiB from one of 20 MiB, and from there on it has a segment of its
own, a multiple of 2 MiB. Of the free blocks the smallest that is large enough is taken; what is left of it becomes a
block if that is worth while (512 bytes in small segments, more than 1 MiB in large ones), and free neighbours join.

Left out: that each CUDA stream has blocks of its own, that cached segments are given back before torch reports that
memory is short, and ``PYTORCH_CUDA_ALLOC_CONF``. Source: c10/cuda/CUDACachingAllocator.cpp in PyTorch (2.11 to 2.13).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import count

MIB = 2**20
UNIT = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE, LARGE_SEGMENT, SEGMENT_UNIT = 10 * MIB, 20 * MIB, 2 * MIB
OUTSIDE: dict[str, int] = {"context and kernels": 550 * MIB, "NCCL": 1024 * MIB, "cuBLAS and cuDNN": 256 * MIB}
"""What a process takes of a GPU beside that, in bytes: round numbers to plan with, not measured for each program."""


@dataclass(eq=False)
class Block:
    """A part of a segment, in use or free, with its neighbours."""

    size: int
    small: bool
    is_free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)
    number: int = field(default_factory=count().__next__)


class CachingAllocator:
    """Follows what is allocated and freed.

    Attributes:
        allocated: bytes in use, each block rounded up.
        reserved: bytes of all segments.
        most_allocated, most_reserved: the largest that these have been.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        """A block for so many bytes."""
        size = rounded(max(size, 1), UNIT)
        block = self._found(size) or self._new_segment(size)
        rest = block.size - size
        if rest >= UNIT if block.small else rest > SMALL:
            left = Block(rest, block.small, before=block, after=block.after)
            if block.after:
                block.after.before = left
            block.size, block.after = size, left
            self._keep(left)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """The block is no longer in use."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other and other.is_free:
                block = self._joined(block, other)
        self._keep(block)

    def _found(self, size: int) -> Block | None:
        free = self._free[size <= SMALL]
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        block = free.pop(place)[2]
        block.is_free = False
        return block

    def _new_segment(self, size: int) -> Block:
        own = rounded(size, SEGMENT_UNIT) if size >= LARGE else LARGE_SEGMENT
        segment = SMALL_SEGMENT if size <= SMALL else own
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        return Block(segment, size <= SMALL)

    def _joined(self, block: Block, other: Block) -> Block:
        free = self._free[other.small]
        free.pop(bisect_left(free, (other.size, other.number)))
        first, second = (other, block) if other is block.before else (block, other)
        first.size += second.size
        first.after = second.after
        if second.after:
            second.after.before = first
        return first

    def _keep(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.small], (block.size, block.number, block))


def rounded(size: int, unit: int) -> int:
    """The next multiple of the unit."""
    return -(-size // unit) * unit
