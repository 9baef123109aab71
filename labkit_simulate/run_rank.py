"""What a simulated rank finds itself in. The worker starts ``python -m labkit_simulate.run_rank
PROGRAM``.

Two things of torch make it: the process group "fake", in which every collective returns at once and
has moved nothing, and FakeTensorMode, in which tensors have no memory. What else is replaced here
has to look at numbers where the program does not, and would fail: each replacement says why.
"""

import contextlib
import inspect
import json
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
from torch import Tensor

from labkit import torch_private
from labkit.environment import ENV_SIMULATION
from labkit.errors import LabError, ParameterError
from labkit.launcher.worker import run_program
from labkit.runs.folder import ROOT
from labkit.session.hooks import hooks
from labkit.torch_private import (
    MESH_FACTORIES,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    replace,
    unset_fake_temporarily,
    wrap,
)
from labkit_simulate import patch_cuda, patch_fsdp
from labkit_simulate.external_program import is_labkit_program, record_external_program
from labkit_simulate.meter import SimulationMeter
from labkit_simulate.patch_ddp import patch_reducer
from labkit_simulate.patch_training import (
    drop_arguments,
    patch_training_functions,
    use_real_tensors,
)

# The worker cuts a learner's traceback here, so that it begins with the program's frames.
__tracebackhide__ = True
VALUE_READ_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
"""What torch raises where a fake tensor is asked for its numbers, or for a shape that depends on
them.
"""
VALUE_READ_TEXTS = ("data pointer", ".numpy() is not supported", "its data is not allocated")
"""Words of the errors that it raises for some ways to do so."""
LIBRARY_FOLDERS = (
    *(
        sysconfig.get_path("purelib"),
        sysconfig.get_path("stdlib"),
        str(Path(torch.__file__).parent),
    ),
    *(str(ROOT / folder) for folder in ("labkit/session", "labkit/launcher", "labkit_simulate")),
)


class NoValues(LabError):
    """A simulated program asked for a number in a tensor. The message names the line."""


def main() -> None:
    """Run the program that sys.argv names as a simulated rank."""
    target = sys.argv[1]
    rank, world_size = int(os.environ["RANK"]), set_world_size()
    hooks.make_meter = SimulationMeter
    hooks.device_kind_and_name = lambda device: ("simulated", "simulated")
    # Ranks with the same local index on different hosts would share a core.
    hooks.pins_cores = False
    patch_torch(rank, world_size)
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as around:
        if not is_labkit_program(target):
            held = around.enter_context(record_external_program(rank, world_size))
            around.enter_context(patch_cuda.simulate_gpus(held))
        try:
            run_program(target, [])
        except Exception as error:
            raise explain_error(error) from None


def set_world_size() -> int:
    """Let this rank be one of many, of which torchrun has started a few; return how many."""
    rank, world = int(os.environ["RANK"]), json.loads(os.environ[ENV_SIMULATION])
    on_each = min(world["ranks_per_host"], world["world_size"])
    numbers = {"LOCAL_RANK": rank % on_each, "GROUP_RANK": rank // on_each}
    numbers |= {"WORLD_SIZE": world["world_size"], "LOCAL_WORLD_SIZE": on_each}
    # Most ranks do not exist, so a barrier would wait for them.
    numbers |= {"TORCH_DIST_INIT_BARRIER": 0}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    return int(world["world_size"])


def patch_torch(rank: int, world_size: int) -> None:
    """Let torch do in a simulation what it does elsewhere; for the rest of this process."""
    # This lets collectives take fake tensors.
    torch_private.get("fake_collectives")
    join, make = (
        torch_private.get("distributed:init_process_group"),
        torch_private.get(MESH_FACTORIES[0]),
    )
    signature = inspect.signature(join)

    def init_fake_process_group(*args: Any, **kwargs: Any) -> None:
        asked = signature.bind(*args, **kwargs).arguments
        check_rank_and_world_size(
            asked.get("rank", -1), asked.get("world_size", -1), rank, world_size
        )
        with unset_fake_temporarily():
            join("fake", rank=rank, world_size=world_size, store=FakeStore())

    for module in ("distributed", "distributed_c10d", "device_mesh"):
        replace(f"{module}:init_process_group", init_fake_process_group)
    for module in ("distributed", "distributed_c10d"):
        # whatever a group's backend, it sends nothing
        wrap(f"{module}:new_group", lambda make: drop_arguments(make, "backend", "device_id"))
    # a mesh is made of ranks, and these are numbers in tensors
    for name in MESH_FACTORIES:
        replace(name, use_real_tensors(make))
    wrap("DeviceMesh.__init__", use_real_tensors)
    # It draws again until all numbers are within bounds, and fake tensors hold none.
    replace("no_grad_trunc_normal_", skip_initialisation)
    wrap("swap_tensors", wrap_swap_tensors)
    replace("torch:compile", refuse_to_compile)
    patch_fsdp.patch_sharding()
    patch_reducer()
    patch_training_functions()


def check_rank_and_world_size(rank: int, world_size: int, own: int, simulated: int) -> None:
    """What a program says of itself when it joins, if it does, has to be what is simulated."""
    if world_size not in (-1, simulated):
        raise ParameterError(
            f"the program joins a group of world_size = {world_size}, and {simulated} ranks are"
            f" simulated: simulate with world_size={world_size}, or take the variable WORLD_SIZE"
            " for it"
        )
    if rank not in (-1, own):
        raise ParameterError(
            f"the program joins as rank {rank}, and rank {own} is simulated: take the variable RANK"
        )


def skip_initialisation(tensor: Tensor, *unused: Any, **others: Any) -> Tensor:
    """An initialiser that has nothing to do."""
    return tensor


def refuse_to_compile(*unused: Any, **others: Any) -> None:
    """What the compiler makes holds and sends other amounts, and it needs real tensors to make
    it.
    """
    raise LabError("what torch.compile makes cannot be simulated: simulate the program without it")


def wrap_swap_tensors(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """What ``model.to(...)`` does with a parameter: torch refuses it for a fake one, which
    FakeTensorMode remembers.
    """

    def swap_or_assign(old: Tensor, new: Tensor) -> None:
        if isinstance(old, FakeTensor):
            old.data = new.data
        else:
            swap(old, new)

    return swap_or_assign


def explain_error(error: Exception) -> Exception:
    """The same error; for a question that a simulation cannot answer one that names the line that
    asks.

    NoValues for a simulated tensor's numbers, LabError for what only a GPU knows.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [
        index
        for index, (frame, _) in enumerate(frames)
        if not is_library_file(frame.f_code.co_filename)
    ]
    reads = isinstance(error, VALUE_READ_ERRORS) or any(
        words in str(error) for words in VALUE_READ_TEXTS
    )
    no_gpu = any(words in str(error) for words in patch_cuda.NO_GPU_ERROR_TEXTS)
    if not (reads or no_gpu) or not own:
        return error
    frame, number = frames[own[-1]]
    path = frame.f_code.co_filename
    line = linecache.getline(path, number).strip()
    what = "reads a number from a tensor, and simulated tensors have none, only shapes"
    if not reads:
        what = "asks for what only a GPU knows, and simulated ones are not there"
    fix = (
        "leave it out where the program is simulated (where the environment variable"
        f" {ENV_SIMULATION} is set)"
    )
    down_to_there: types.TracebackType | None = None
    for each, at in reversed(frames[own[0] : own[-1] + 1]):
        down_to_there = types.TracebackType(down_to_there, each, each.f_lasti, at)
    kind = NoValues if reads else LabError
    return kind(f"{path}:{number} {what}: {line}\n{fix}").with_traceback(down_to_there)


def is_library_file(path: str) -> bool:
    """Whether this file is Python's, torch's or another package's, or what of labkit is around the
    program.
    """
    return path.startswith((*LIBRARY_FOLDERS, "<"))


if __name__ == "__main__":
    main()
