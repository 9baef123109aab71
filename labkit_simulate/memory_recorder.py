"""Record a simulated rank's memory over its step: a curve, its owners, and an allocator's reserve.

Memory belongs to the block that ran when it was allocated; parameters and optimizer state belong to
the block of the parameters.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.runs.folder import RunFolder, write_text
from labkit.runs.records import RecordWriter
from labkit.session.meter import category_name
from labkit_simulate.artifacts import ARTIFACT_BLOCKS, ARTIFACT_MEMORY
from labkit_simulate.theory.allocator import AllocatorBlock, CachingAllocator

PhaseAndBlock = tuple[str, str]
"""A phase of the step and a block of the model."""


class MemoryRecorder:
    """Follow every storage that torch's tracker sees created, resized or freed.

    Args:
        tracker: torch's memory tracker.
        where: returns the current phase and block.
        track: models and optimizers that exist already.

    Attributes:
        allocator: a model of CUDA's caching allocator.
        curve: total bytes, at first and after each change.
        marks: where in the curve each block began.
        at_peak: bytes by block and category at the peak, whose index is ``peak``.
    """

    def __init__(self, tracker: Any, where: Callable[[], PhaseAndBlock], track: Iterable[Any]):
        self.allocator, self.curve = CachingAllocator(), [0]
        self.marks: list[tuple[int, str, str]] = []
        self.at_peak: Counter[PhaseAndBlock] = Counter()
        self.peak = 0
        self._where = where
        self._blocks: dict[int, AllocatorBlock] = {}
        # The block, category and bytes of each storage.
        self._owned: dict[int, tuple[str, str, int]] = {}
        self._now: Counter[PhaseAndBlock] = Counter()
        self._take_account = tracker._update_snap
        owners = dict(storages_by_block(track))
        for storage, (info, _) in list(tracker._WINFO.items()):
            self._resize_storage(info, info.mem_consumed, owners.get(storage._cdata, ""))
        self.curve, self.at_peak = self.curve[-1:], self._now.copy()
        tracker._update_snap = self._on_storage_change

    def _on_storage_change(self, kind: Any, info: Any, **old: Any) -> None:
        """Replace the tracker's bookkeeping method, which sees every change."""
        self._take_account(kind, info, **old)
        # Only the category of memory that is already counted changes.
        if kind.name == "REF":
            block, category, size = self._owned.get(id(info), ("", "", 0))
            self._now[block, category] -= size
            self._assign_owner(info, size, block)
            return
        place = self._where()
        if not self.marks or self.marks[-1][1:] != place:
            self.marks.append((len(self.curve), *place))
        block = self._owned[id(info)][0] if id(info) in self._owned else place[1]
        self._resize_storage(info, 0 if kind.name == "DEL" else info.mem_consumed, block)

    def _resize_storage(self, info: Any, size: int, block: str) -> None:
        before = self._blocks.pop(id(info), None)
        if before:
            self.allocator.free(before)
        if size:
            self._blocks[id(info)] = self.allocator.allocate(size)
        owner, category, old = self._owned.pop(id(info), (block, "", 0))
        if size < old:
            self._update_peak()
        self._now[owner, category] -= old
        self._assign_owner(info, size, block)
        self.curve.append(self.curve[-1] + size - old)

    def _assign_owner(self, info: Any, size: int, block: str) -> None:
        category = category_name(info.reftype)
        self._now[block, category] += size
        if size:
            self._owned[id(info)] = block, category, size

    def _update_peak(self) -> None:
        """Compare with the peak, before memory is freed."""
        if self.curve[-1] > self.curve[self.peak]:
            self.peak, self.at_peak = len(self.curve) - 1, self._now.copy()

    def write_records(self, writer: RecordWriter, index: int) -> None:
        """Write the peaks as records, and the curve with its owners as artifacts."""
        self._update_peak()
        writer.write("memory", "gpu_allocated", index, bytes=self.allocator.most_allocated)
        writer.write("memory", "gpu_reserved", index, bytes=self.allocator.most_reserved)
        if not writer.folder:
            return
        held = [[*place, size] for place, size in self.at_peak.items() if size]
        blocks = {"peak": self.peak, "held": held, "marks": self.marks}
        for name, text in (
            (ARTIFACT_MEMORY, "\n".join(map(str, self.curve))),
            (ARTIFACT_BLOCKS, json.dumps(blocks)),
        ):
            write_text(RunFolder(writer.folder).artifact(writer.rank, name), text + "\n")


def storages_by_block(track: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """Return the addresses of existing storages of models and optimizers, with their blocks."""
    from labkit.torch_private import get_untyped_storages
    from labkit_simulate.event_recorder import block_name

    blocks: dict[Tensor, str] = {}
    found: list[tuple[Tensor | None, str]] = []
    for model in (each for each in track if isinstance(each, nn.Module)):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            blocks[tensor] = block_name(name.rpartition(".")[0])
            found += [(tensor, blocks[tensor]), (tensor.grad, blocks[tensor])]
    for optimizer in (each for each in track if isinstance(each, Optimizer)):
        for parameter, state in optimizer.state.items():
            kept = (tensor for tensor in state.values() if isinstance(tensor, Tensor))
            found += [(tensor, blocks.get(parameter, "")) for tensor in kept]
    for each, block in found:
        for storage in [] if each is None else get_untyped_storages(each):
            yield storage._cdata, block
