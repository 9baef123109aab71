"""Run a program as a simulated rank; the worker starts ``python -m labkit_simulate.run_rank``.

torch provides two parts: the process group "fake", whose collectives return at once and move
nothing, and FakeTensorMode, whose tensors have no memory. Everything else that is replaced here
reads values although the program does not, and would fail; each replacement says why.
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
from labkit.session import session
from labkit.torch_private import MESH_FACTORIES, FakeTensor, replace, unset_fake_temporarily, wrap
from labkit_simulate import patch_cuda, patch_fsdp
from labkit_simulate.external_program import is_labkit_program, record_external_program
from labkit_simulate.meter import SimulationMeter
from labkit_simulate.patch_ddp import patch_reducer
from labkit_simulate.patch_fake_tensors import patch_fake_tensors
from labkit_simulate.patch_training import (
    drop_arguments,
    patch_training_functions,
    use_real_tensors,
)

# The worker cuts a learner's traceback here, so that it begins with the program's frames.
__tracebackhide__ = True
# What torch raises if a fake tensor is asked for a value, or for a shape that depends on one; other
# ways to ask end in errors with these words.
VALUE_READ_ERRORS = (
    torch_private.DataDependentOutputException,
    torch_private.DynamicOutputShapeException,
)
VALUE_READ_TEXTS = ("data pointer", ".numpy() is not supported", "its data is not allocated")
LIBRARY_FOLDERS = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
    str(Path(torch.__file__).parent),
    *(str(ROOT / folder) for folder in ("labkit/session", "labkit/launcher", "labkit_simulate")),
)


class NoValues(LabError):
    """A simulated program read a tensor's value; the message names the line."""


def main() -> None:
    """Run the program that sys.argv names as a simulated rank."""
    target = sys.argv[1]
    rank, world_size = int(os.environ["RANK"]), set_world_size()
    session.meter_class = SimulationMeter
    patch_torch(rank, world_size)
    with (
        torch_private.FakeTensorMode(allow_non_fake_inputs=True),
        contextlib.ExitStack() as recording,
    ):
        if not is_labkit_program(target):
            memory = recording.enter_context(record_external_program(rank, world_size))
            recording.enter_context(patch_cuda.simulate_gpus(memory))
        try:
            run_program(target, [])
        except Exception as error:
            raise explain_error(error) from None


def set_world_size() -> int:
    """Set torchrun's variables to those of the simulated world, and return its size."""
    rank, world = int(os.environ["RANK"]), json.loads(os.environ[ENV_SIMULATION])
    on_host = min(world["ranks_per_host"], world["world_size"])
    variables = {
        "LOCAL_RANK": rank % on_host,
        "GROUP_RANK": rank // on_host,
        "WORLD_SIZE": world["world_size"],
        "LOCAL_WORLD_SIZE": on_host,
        # Most ranks do not exist, so a barrier would wait for them.
        "TORCH_DIST_INIT_BARRIER": 0,
    }
    os.environ |= {name: str(number) for name, number in variables.items()}
    return int(world["world_size"])


def patch_torch(rank: int, world_size: int) -> None:
    """Replace functions of torch that would read values, for the rest of this process."""
    # This lets collectives take fake tensors.
    torch_private.get("fake_collectives")
    join = torch_private.get("distributed:init_process_group")
    make_mesh = torch_private.get(MESH_FACTORIES[0])
    signature = inspect.signature(join)

    def init_fake_process_group(*args: Any, **kwargs: Any) -> None:
        asked = signature.bind(*args, **kwargs).arguments
        check_rank_and_world_size(
            asked.get("rank", -1), asked.get("world_size", -1), rank, world_size
        )
        with unset_fake_temporarily():
            join("fake", rank=rank, world_size=world_size, store=torch_private.FakeStore())

    for module in ("distributed", "distributed_c10d", "device_mesh"):
        replace(f"{module}:init_process_group", init_fake_process_group)
    for module in ("distributed", "distributed_c10d"):
        # Whatever a group's backend, it sends nothing.
        wrap(f"{module}:new_group", lambda make: drop_arguments(make, "backend", "device_id"))
    # A mesh is made of ranks, which are values in tensors.
    for name in MESH_FACTORIES:
        replace(name, use_real_tensors(make_mesh))
    wrap("DeviceMesh.__init__", use_real_tensors)
    # It redraws until all values are within bounds, and fake tensors hold none.
    replace("no_grad_trunc_normal_", lambda tensor, *unused, **others: tensor)
    wrap("swap_tensors", wrap_swap_tensors)
    replace("torch:compile", refuse_to_compile)
    patch_fake_tensors()
    patch_fsdp.patch_sharding()
    patch_reducer()
    patch_training_functions()


def check_rank_and_world_size(rank: int, world_size: int, own: int, simulated: int) -> None:
    """Raise ParameterError if the program joins as another rank or into another world size."""
    if world_size not in (-1, simulated):
        raise ParameterError(
            f"the program joins a group of world_size = {world_size}, and {simulated} ranks are"
            f" simulated: simulate with world_size={world_size}, or read WORLD_SIZE for it"
        )
    if rank not in (-1, own):
        raise ParameterError(
            f"the program joins as rank {rank}, and rank {own} is simulated: take the variable RANK"
        )


def refuse_to_compile(*unused: Any, **others: Any) -> None:
    """Raise LabError: the compiler needs real tensors, and compiled code sends other amounts."""
    raise LabError("what torch.compile makes cannot be simulated: simulate the program without it")


def wrap_swap_tensors(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """Let ``model.to(...)`` assign a fake parameter's data."""

    def swap_or_assign(old: Tensor, new: Tensor) -> None:
        # torch refuses to swap a fake tensor, because FakeTensorMode holds a reference to it.
        if isinstance(old, FakeTensor):
            old.data = new.data
        else:
            swap(old, new)

    return swap_or_assign


def explain_error(error: Exception) -> Exception:
    """Return an error that names the program's line if it asked for what a simulation lacks.

    NoValues for a tensor's value, LabError for what only a GPU knows, other errors as they are.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [place for place, (frame, _) in enumerate(frames) if not is_library_frame(frame)]
    message = str(error)
    reads_value = isinstance(error, VALUE_READ_ERRORS) or any(
        text in message for text in VALUE_READ_TEXTS
    )
    needs_gpu = any(text in message for text in patch_cuda.NO_GPU_ERROR_TEXTS)
    if not own or not (reads_value or needs_gpu):
        return error
    frame, number = frames[own[-1]]
    path = frame.f_code.co_filename
    line = linecache.getline(path, number).strip()
    what = (
        "reads a number from a tensor, and simulated tensors have none, only shapes"
        if reads_value
        else "asks for what only a GPU knows, and simulated ones are not there"
    )
    fix = f"skip it in simulations (where the environment variable {ENV_SIMULATION} is set)"
    # The traceback ends at that line, without the library's frames below it.
    shown: types.TracebackType | None = None
    for each, at in reversed(frames[own[0] : own[-1] + 1]):
        shown = types.TracebackType(shown, each, each.f_lasti, at)
    kind = NoValues if reads_value else LabError
    return kind(f"{path}:{number} {what}: {line}\n{fix}").with_traceback(shown)


def is_library_frame(frame: types.FrameType) -> bool:
    """Tell whether a frame is of Python, of a package, or of the parts of labkit around it."""
    return frame.f_code.co_filename.startswith((*LIBRARY_FOLDERS, "<"))


if __name__ == "__main__":
    main()
