"""What a simulated rank finds itself in. The worker starts ``python -m labkit.simulation.world PROGRAM ARGUMENTS``.

Two things of torch make it: the process group "fake", in which every collective returns at once and has moved nothing,
and FakeTensorMode, in which tensors have no memory. What else is replaced here has to look at numbers where the
program does not, and would fail: each replacement says why.
"""

import contextlib
import linecache
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives of fake tensors
import torch.distributed._tools.mem_tracker
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.errors import LabError, NoValues
from labkit.folder import ROOT, SIMULATED
from labkit.launcher.worker import run_program
from labkit.simulation import shards
from labkit.simulation.reducer import replace_reducer
from labkit.simulation.watched import measures_itself, watched

READS = (DataDependentOutputException, DynamicOutputShapeException)
"""What torch raises where a fake tensor is asked for its numbers, or for a shape that depends on them."""
REFUSALS = ("data pointer", ".numpy() is not supported", "its data is not allocated")
"""Words of the errors that it raises for some ways to do so."""
NOT_THE_PROGRAMS = (
    *(sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent)),
    *(str(ROOT / "labkit" / folder) for folder in ("rank", "simulation", "launcher")),
)


def main() -> None:
    """Run the program that sys.argv names as a simulated rank."""
    target, arguments = sys.argv[1], sys.argv[2:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    replace_what_needs_values(rank, world_size)
    watch = contextlib.nullcontext() if measures_itself(target) else watched(rank, world_size)
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        try:
            run_program(target, arguments)
        except Exception as error:
            raise explained(error) from None


def replace_what_needs_values(rank: int, world_size: int) -> None:
    """Let torch do in a simulation what it does elsewhere; for the rest of this process."""
    distributed: Any = dist
    join, make = distributed.init_process_group, device_mesh.init_device_mesh

    def join_fake(*unused: Any, **others: Any) -> None:
        with unset_fake_temporarily():
            join("fake", rank=rank, world_size=world_size, store=FakeStore())

    distributed.init_process_group = distributed.distributed_c10d.init_process_group = join_fake
    # a mesh is made of ranks, and these are numbers in tensors
    distributed.init_device_mesh = device_mesh.init_device_mesh = with_values(make)
    distributed.DeviceMesh.__init__ = with_values(distributed.DeviceMesh.__init__)
    init: Any = torch.nn.init
    init._no_grad_trunc_normal_ = unchanged  # draws again and again, until all numbers are within bounds
    torch.utils.swap_tensors = swapped(torch.utils.swap_tensors)
    torch.compile = refuse_to_compile  # type: ignore[assignment]
    shards.replace_what_needs_memory()
    replace_reducer()


def unchanged(tensor: Tensor, *unused: Any, **others: Any) -> Tensor:
    """An initialiser that has nothing to do."""
    return tensor


def refuse_to_compile(*unused: Any, **others: Any) -> None:
    """What the compiler makes holds and sends other amounts, and it needs real tensors to make it."""
    raise LabError("what torch.compile makes cannot be simulated: simulate the program without it")


def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, in which tensors have numbers."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def swapped(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """What ``model.to(...)`` does with a parameter: torch refuses it for a fake one, which FakeTensorMode remembers."""

    def exchange(old: Tensor, new: Tensor) -> None:
        if isinstance(old, FakeTensor):
            old.data = new.data
        else:
            swap(old, new)

    return exchange


def explained(error: Exception) -> Exception:
    """The same error; for a question for a simulated tensor's numbers NoValues, which names the line that asks."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [index for index, (frame, _) in enumerate(frames) if not is_around(frame.f_code.co_filename)]
    asks = isinstance(error, READS) or any(words in str(error) for words in REFUSALS)
    if not asks or not own:
        return error
    frame, number = frames[own[-1]]
    path = frame.f_code.co_filename
    line = linecache.getline(path, number).strip()
    what = f"{path}:{number} reads a number from a tensor, and simulated tensors have none, only shapes: {line}"
    fix = f"leave it out where the program is simulated (where the environment variable {SIMULATED} is set)"
    down_to_there: types.TracebackType | None = None
    for each, at in reversed(frames[own[0] : own[-1] + 1]):
        down_to_there = types.TracebackType(down_to_there, each, each.f_lasti, at)
    return NoValues(f"{what}\n{fix}").with_traceback(down_to_there)


def is_around(path: str) -> bool:
    """Whether this file is Python's, torch's or another package's, or what of labkit is around the program."""
    return path.startswith((*NOT_THE_PROGRAMS, "<"))


if __name__ == "__main__":
    main()
