"""Whether what a simulated rank holds fits on a GPU, and what is left."""

from dataclasses import dataclass

from labkit.runs.result import RunResult
from labkit.theory.sizes import readable_bytes
from labkit_simulate.block_memory import peak_phase_and_block
from labkit_simulate.estimate import read_events
from labkit_simulate.theory.allocator import OUTSIDE_ALLOCATOR_BYTES

GIB = 2**30


@dataclass(frozen=True)
class MemoryFit:
    """The answer; true where it fits.

    Attributes:
        reserved: bytes that the allocator takes at most for tensors.
        outside: bytes that are taken beside that.
        budget: bytes of the GPU.
        gathered_ahead: bytes of the largest unit of FSDP where most is held in the forward pass: on a GPU it may have
            been gathered while the unit before it computes, and here it was not. In the backward pass it was.
    """

    allocator_bytes: int
    overhead_bytes: int
    budget_bytes: int
    prefetch_bytes: int = 0

    @property
    def margin_bytes(self) -> int:
        """Bytes that are left; negative where it does not fit."""
        return self.budget_bytes - self.allocator_bytes - self.prefetch_bytes - self.overhead_bytes

    def __bool__(self) -> bool:
        return self.margin_bytes >= 0

    def __str__(self) -> str:
        ahead = (
            f"{readable_bytes(self.prefetch_bytes)} gathered ahead, " if self.prefetch_bytes else ""
        )
        sum_ = (
            f"{readable_bytes(self.allocator_bytes)} reserved for tensors, "
            f"{ahead}{readable_bytes(self.overhead_bytes)} for all else"
        )
        rest = f"{readable_bytes(abs(self.margin_bytes))} {'are left' if self else 'are missing'}"
        return f"{'fits' if self else 'does not fit'} in {readable_bytes(self.budget_bytes)}: {sum_}, {rest}"


def memory_fit(result: RunResult, budget_gib: float = 80.0) -> MemoryFit:
    """Whether each simulated rank fits in a GPU's memory.

    Args:
        result: of ``labkit.simulate``.
        budget_gib: GiB that the GPU has.

    Raises:
        UnknownValue: the program followed no memory.
    """
    return memory_fit_from_bytes(
        int(result.value("gpu_reserved_bytes")), budget_gib, largest_prefetch_bytes(result)
    )


def memory_fit_from_bytes(reserved: int, budget_gib: float, ahead: int = 0) -> MemoryFit:
    """The same for so many bytes that the allocator takes, and a unit that is gathered ahead."""
    return MemoryFit(reserved, sum(OUTSIDE_ALLOCATOR_BYTES.values()), int(budget_gib * GIB), ahead)


def largest_prefetch_bytes(result: RunResult) -> int:
    """See ``Fit.gathered_ahead``; of the ranks that were simulated, the largest."""
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
