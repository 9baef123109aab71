"""Whether what a simulated rank holds fits on a GPU, and what is left."""

from dataclasses import dataclass

from labkit.runs.result import RunResult
from labkit.theory.sizes import readable_bytes
from labkit_simulate.blocks import peak_of
from labkit_simulate.reckoned import events_of
from labkit_simulate.theory.allocator import OUTSIDE

GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """The answer; true where it fits.

    Attributes:
        reserved: bytes that the allocator takes at most for tensors.
        outside: bytes that are taken beside that.
        budget: bytes of the GPU.
        gathered_ahead: bytes of the largest unit of FSDP where most is held in the forward pass: on a GPU it may have
            been gathered while the unit before it computes, and here it was not. In the backward pass it was.
    """

    reserved: int
    outside: int
    budget: int
    gathered_ahead: int = 0

    @property
    def margin(self) -> int:
        """Bytes that are left; negative where it does not fit."""
        return self.budget - self.reserved - self.gathered_ahead - self.outside

    def __bool__(self) -> bool:
        return self.margin >= 0

    def __str__(self) -> str:
        ahead = f"{readable_bytes(self.gathered_ahead)} gathered ahead, " if self.gathered_ahead else ""
        sum_ = (
            f"{readable_bytes(self.reserved)} reserved for tensors, {ahead}{readable_bytes(self.outside)} for all else"
        )
        rest = f"{readable_bytes(abs(self.margin))} {'are left' if self else 'are missing'}"
        return f"{'fits' if self else 'does not fit'} in {readable_bytes(self.budget)}: {sum_}, {rest}"


def fits(result: RunResult, budget_gib: float = 80.0) -> Fit:
    """Whether each simulated rank fits in a GPU's memory.

    Args:
        result: of ``labkit.simulate``.
        budget_gib: GiB that the GPU has.

    Raises:
        UnknownValue: the program followed no memory.
    """
    return fit(int(result.value("gpu_reserved_bytes")), budget_gib, gathered_ahead(result))


def fit(reserved: int, budget_gib: float, ahead: int = 0) -> Fit:
    """The same for so many bytes that the allocator takes, and a unit that is gathered ahead."""
    return Fit(reserved, sum(OUTSIDE.values()), int(budget_gib * GIB), ahead)


def gathered_ahead(result: RunResult) -> int:
    """See ``Fit.gathered_ahead``; of the ranks that were simulated, the largest."""
    return max(_gathered_ahead(result, rank) for rank in result.recorded_ranks)


def _gathered_ahead(result: RunResult, rank: int) -> int:
    if peak_of(result, rank)[0] != "forward":
        return 0
    done = events_of(result, rank)
    return max((call["bytes"] * len(done.groups[call["group"]]) for call in done.calls if call["early"]), default=0)
