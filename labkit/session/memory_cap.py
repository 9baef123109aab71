"""Limit the memory of a rank, so that allocations fail as they would on a smaller device."""

import contextlib
import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from labkit.errors import MemoryCapExceeded

MIB = 2**20
ALLOCATION_ERROR_TEXTS = (
    *("can't allocate memory", "not enough memory", "bad_alloc", "bad allocation"),
    # oneDNN's
    *("could not create a memory", "could not create a primitive"),
)


@contextlib.contextmanager
def cap_memory(mib: int | None, device: torch.device) -> Iterator[None]:
    """Let this process allocate at most ``mib`` MiB more than it holds now; None sets no limit.

    On a GPU, torch's allocator enforces the limit, and counts whole segments (2 or 20 MiB) and the
    workspace of cuBLAS: a little more than the tensors. On a CPU, Linux does (RLIMIT_DATA), and
    counts all writable memory: tensors, but also the stacks of threads that start later, 8 MiB
    each; torch's own are started before. Raises MemoryCapExceeded for an allocation beyond it, and
    ValueError on a CPU without Linux.
    """
    if mib is None:
        yield
        return
    remove_limit = _set_limit(mib, device)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # A GPU's OutOfMemoryError is a RuntimeError.
        short = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not short and not any(text in str(error) for text in ALLOCATION_ERROR_TEXTS):
            raise
        said, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise MemoryCapExceeded(
            f"more than its cap of {mib} MiB was needed ({said}): shard over more ranks, keep"
            " less (checkpointing, a smaller batch or image), or raise memory_cap_mib"
        ) from error
    finally:
        remove_limit()


def _set_limit(mib: int, device: torch.device) -> Callable[[], None]:
    """Limit the memory of this process, and return the function that removes the limit."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        held = torch.cuda.memory_reserved(device)
        set_fraction = torch.cuda.set_per_process_memory_fraction
        set_fraction(min(1.0, (held + mib * MIB) / total), device)
        return partial(set_fraction, 1.0, device)
    if sys.platform != "linux":
        raise ValueError(
            f"memory_cap_mib {mib} needs a GPU or Linux, and this is {sys.platform}: leave it out"
        )
    # Threads that torch starts later would count with their stacks: 64 MiB on 8 cores.
    torch.ones(MIB, requires_grad=True).mul(2).sum().backward()
    # VmData is what counts towards RLIMIT_DATA.
    lines = Path("/proc/self/status").read_text().splitlines()
    (held_kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held_kib * 1024 + mib * MIB, before[1]))
    return partial(resource.setrlimit, resource.RLIMIT_DATA, before)
