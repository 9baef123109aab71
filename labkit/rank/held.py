"""What a simulated rank holds while its step goes on: a curve, and what an allocator would reserve of a GPU for it."""

from pathlib import Path
from typing import Any

from labkit.folder import RunFolder, write_text
from labkit.records import Writer
from labkit.theory.allocator import Block, CachingAllocator

CURVE = "memory"
"""The name of the text with the curve, for ``result.ranks[0].kept``."""


class Held:
    """Follows a tracker of torch's from now on: every storage that it sees made, changed in size or freed.

    Attributes:
        allocator: a model of CUDA's.
        curve: the sum of all bytes after each of these.
    """

    def __init__(self, tracker: Any):
        self.allocator, self.curve = CachingAllocator(), [0]
        self._blocks: dict[int, Block] = {}
        self._sizes: dict[int, int] = {}
        self._total = 0
        self._take_account = tracker._update_snap
        for info, _ in list(tracker._WINFO.values()):
            self._resize(info, info.mem_consumed)
        tracker._update_snap = self._follow

    def _follow(self, kind: Any, info: Any, **old: Any) -> None:
        """In place of the method in which the tracker keeps its accounts, which says of all that happens."""
        self._take_account(kind, info, **old)
        if kind.name != "REF":  # another category for the same memory
            self._resize(info, 0 if kind.name == "DEL" else info.mem_consumed)

    def _resize(self, info: Any, size: int) -> None:
        before = self._blocks.pop(id(info), None)
        if before:
            self.allocator.free(before)
        if size:
            self._blocks[id(info)] = self.allocator.allocate(size)
        self._total += size - self._sizes.pop(id(info), 0)
        self._sizes |= {id(info): size} if size else {}
        self.curve.append(self._total)

    def write(self, writer: Writer, index: int) -> None:
        """Write the peaks as records, and keep the curve with the run."""
        writer.write("memory", "gpu_allocated", index, bytes=self.allocator.most_allocated)
        writer.write("memory", "gpu_reserved", index, bytes=self.allocator.most_reserved)
        path = RunFolder(writer.folder or Path()).kept(writer.rank, CURVE)
        if writer.folder:
            write_text(path, "\n".join(map(str, self.curve)) + "\n")
