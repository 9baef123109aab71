"""Decide whether a simulated rank fits into a GPU's memory."""

from dataclasses import dataclass
from functools import partial

from labkit.runs.result import RunResult
from labkit.theory.sizes import readable_bytes
from labkit_simulate.block_memory import peak_phase_and_block
from labkit_simulate.estimate import read_events
from labkit_simulate.theory.allocator import OUTSIDE_ALLOCATOR_BYTES

GIB = 2**30


@dataclass(frozen=True)
class MemoryFit:
    """The decision; true if the rank fits.

    Attributes:
        allocator_bytes: the most that the allocator reserves.
        overhead_bytes: memory outside the allocator.
        budget_bytes: memory of the GPU.
        prefetch_bytes: of the largest FSDP unit at the forward peak. A GPU may prefetch it during
            the unit before, which a simulation on the CPU does not show.
    """

    allocator_bytes: int
    overhead_bytes: int
    budget_bytes: int
    prefetch_bytes: int = 0

    @property
    def margin_bytes(self) -> int:
        """Remaining bytes; negative if it does not fit."""
        return self.budget_bytes - self.allocator_bytes - self.prefetch_bytes - self.overhead_bytes

    def __bool__(self) -> bool:
        return self.margin_bytes >= 0

    def __str__(self) -> str:
        # Budgets are given in GiB.
        text = partial(readable_bytes, base=1024)
        ahead = f"{text(self.prefetch_bytes)} gathered ahead, " if self.prefetch_bytes else ""
        sum_ = (
            f"{text(self.allocator_bytes)} reserved for tensors, "
            f"{ahead}{text(self.overhead_bytes)} for all else"
        )
        rest = f"{text(abs(self.margin_bytes))} {'are left' if self else 'are missing'}"
        return f"{'fits' if self else 'does not fit'} in {text(self.budget_bytes)}: {sum_}, {rest}"


def memory_fit(result: RunResult, budget_gib: float = 80.0) -> MemoryFit:
    """Decide for each simulated rank whether it fits into a GPU's memory.

    Args:
        result: of ``labkit.simulate``.
        budget_gib: memory of the GPU in GiB.

    Raises:
        UnknownValue: the program tracked no memory.
    """
    return memory_fit_from_bytes(
        int(result.value("gpu_reserved_bytes")), budget_gib, largest_prefetch_bytes(result)
    )


def memory_fit_from_bytes(reserved: int, budget_gib: float, ahead: int = 0) -> MemoryFit:
    """Decide from the allocator's bytes and those of a prefetched unit."""
    return MemoryFit(reserved, sum(OUTSIDE_ALLOCATOR_BYTES.values()), int(budget_gib * GIB), ahead)


def largest_prefetch_bytes(result: RunResult) -> int:
    """Return the largest ``MemoryFit.gathered_ahead`` of the simulated ranks."""
    return max(_rank_prefetch_bytes(result, rank) for rank in result.active_ranks)


def _rank_prefetch_bytes(result: RunResult, rank: int) -> int:
    if peak_phase_and_block(result, rank)[0] != "forward":
        return 0
    done = read_events(result, rank)
    return max(
        (
            call["bytes"] * len(done.groups[call["group"]])
            for call in done.collective_calls
            if call["early"]
        ),
        default=0,
    )
