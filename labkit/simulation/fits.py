"""Whether what a simulated rank holds fits on a GPU, and what is left."""

from dataclasses import dataclass

from labkit.result import RunResult
from labkit.theory.allocator import OUTSIDE
from labkit.theory.sizes import readable_bytes

GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """The answer; true where it fits.

    Attributes:
        reserved: bytes that the allocator takes at most for tensors.
        outside: bytes that are taken beside that.
        budget: bytes of the GPU.
    """

    reserved: int
    outside: int
    budget: int

    @property
    def margin(self) -> int:
        """Bytes that are left; negative where it does not fit."""
        return self.budget - self.reserved - self.outside

    def __bool__(self) -> bool:
        return self.margin >= 0

    def __str__(self) -> str:
        sum_ = f"{readable_bytes(self.reserved)} reserved for tensors, {readable_bytes(self.outside)} for all else"
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
    return fit(int(result.value("gpu_reserved_bytes")), budget_gib)


def fit(reserved: int, budget_gib: float) -> Fit:
    """The same for so many bytes that the allocator takes."""
    return Fit(reserved, sum(OUTSIDE.values()), int(budget_gib * GIB))
