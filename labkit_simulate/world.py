"""What a simulated rank finds itself in. The worker starts ``python -m labkit_simulate.world PROGRAM ARGUMENTS``.

Two things of torch make it: the process group "fake", in which every collective returns at once and has moved nothing,
and FakeTensorMode, in which tensors have no memory. What else is replaced here has to look at numbers where the
program does not, and would fail: each replacement says why.
"""

import contextlib
import inspect
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

from labkit.errors import LabError, NoValues, ParameterError
from labkit.launcher.worker import run_program
from labkit.runs.folder import ROOT, SIMULATED
from labkit_simulate import cuda, shards
from labkit_simulate.around import MESH_MAKERS, replace_what_is_around, with_values, without
from labkit_simulate.reducer import replace_reducer
from labkit_simulate.watched import measures_itself, watched

READS = (DataDependentOutputException, DynamicOutputShapeException)
"""What torch raises where a fake tensor is asked for its numbers, or for a shape that depends on them."""
REFUSALS = ("data pointer", ".numpy() is not supported", "its data is not allocated")
"""Words of the errors that it raises for some ways to do so."""
NOT_THE_PROGRAMS = (
    *(sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent)),
    *(str(ROOT / folder) for folder in ("labkit/session", "labkit/launcher", "labkit_simulate")),
)


def main() -> None:
    """Run the program that sys.argv names as a simulated rank."""
    target, arguments = sys.argv[1], sys.argv[2:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    replace_what_needs_values(rank, world_size)
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as around:
        if not measures_itself(target):
            held = around.enter_context(watched(rank, world_size))
            around.enter_context(cuda.gpus(held))
        try:
            run_program(target, arguments)
        except Exception as error:
            raise explained(error) from None


def replace_what_needs_values(rank: int, world_size: int) -> None:
    """Let torch do in a simulation what it does elsewhere; for the rest of this process."""
    distributed: Any = dist
    join, make = distributed.init_process_group, device_mesh.init_device_mesh
    signature = inspect.signature(join)

    def join_fake(*args: Any, **kwargs: Any) -> None:
        asked = signature.bind(*args, **kwargs).arguments
        refuse_another_place(asked.get("rank", -1), asked.get("world_size", -1), rank, world_size)
        with unset_fake_temporarily():
            join("fake", rank=rank, world_size=world_size, store=FakeStore())

    modules: list[Any] = [distributed, distributed.distributed_c10d, device_mesh]
    for module in modules:
        module.init_process_group = join_fake
    # whatever a group's backend, it sends nothing
    of_any_backend = without(distributed.new_group, "backend", "device_id")
    distributed.new_group = distributed.distributed_c10d.new_group = of_any_backend
    # a mesh is made of ranks, and these are numbers in tensors
    for module in MESH_MAKERS:
        module.init_device_mesh = with_values(make)
    distributed.DeviceMesh.__init__ = with_values(distributed.DeviceMesh.__init__)
    init: Any = torch.nn.init
    init._no_grad_trunc_normal_ = unchanged  # draws again and again, until all numbers are within bounds
    torch.utils.swap_tensors = swapped(torch.utils.swap_tensors)
    torch.compile = refuse_to_compile  # type: ignore[assignment]
    shards.replace_what_needs_memory()
    replace_reducer()
    replace_what_is_around()


def refuse_another_place(rank: int, world_size: int, own: int, simulated: int) -> None:
    """What a program says of itself when it joins, if it does, has to be what is simulated."""
    if world_size not in (-1, simulated):
        raise ParameterError(
            f"the program joins a group of world_size = {world_size}, and {simulated} ranks are simulated: "
            f"simulate with world_size={world_size}, or take the variable WORLD_SIZE for it"
        )
    if rank not in (-1, own):
        raise ParameterError(f"the program joins as rank {rank}, and rank {own} is simulated: take the variable RANK")


def unchanged(tensor: Tensor, *unused: Any, **others: Any) -> Tensor:
    """An initialiser that has nothing to do."""
    return tensor


def refuse_to_compile(*unused: Any, **others: Any) -> None:
    """What the compiler makes holds and sends other amounts, and it needs real tensors to make it."""
    raise LabError("what torch.compile makes cannot be simulated: simulate the program without it")


def swapped(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """What ``model.to(...)`` does with a parameter: torch refuses it for a fake one, which FakeTensorMode remembers."""

    def exchange(old: Tensor, new: Tensor) -> None:
        if isinstance(old, FakeTensor):
            old.data = new.data
        else:
            swap(old, new)

    return exchange


def explained(error: Exception) -> Exception:
    """The same error; for a question that a simulation cannot answer one that names the line that asks.

    NoValues for a simulated tensor's numbers, LabError for what only a GPU knows.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [index for index, (frame, _) in enumerate(frames) if not is_around(frame.f_code.co_filename)]
    reads = isinstance(error, READS) or any(words in str(error) for words in REFUSALS)
    no_gpu = any(words in str(error) for words in cuda.MISSING)
    if not (reads or no_gpu) or not own:
        return error
    frame, number = frames[own[-1]]
    path = frame.f_code.co_filename
    line = linecache.getline(path, number).strip()
    what = "reads a number from a tensor, and simulated tensors have none, only shapes"
    if not reads:
        what = "asks for what only a GPU knows, and simulated ones are not there"
    fix = f"leave it out where the program is simulated (where the environment variable {SIMULATED} is set)"
    down_to_there: types.TracebackType | None = None
    for each, at in reversed(frames[own[0] : own[-1] + 1]):
        down_to_there = types.TracebackType(down_to_there, each, each.f_lasti, at)
    kind = NoValues if reads else LabError
    return kind(f"{path}:{number} {what}: {line}\n{fix}").with_traceback(down_to_there)


def is_around(path: str) -> bool:
    """Whether this file is Python's, torch's or another package's, or what of labkit is around the program."""
    return path.startswith((*NOT_THE_PROGRAMS, "<"))


if __name__ == "__main__":
    main()
