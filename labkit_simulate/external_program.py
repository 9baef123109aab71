"""Record memory and communication of a program that does not use labkit.

Such a program does not mark its steps, so a step lasts from the end of one ``optimizer.step()`` to
the end of the next. What precedes the first end is the start, where models are built and broadcast:
its memory peak is ``start_peak_total_bytes``, its communication counts as warm-up.
``peak_..._bytes`` cover everything after it. Communication after the last step is a step of its
own. A program without a whole step is recorded as one.
"""

import ast
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from labkit import requirements, torch_private
from labkit.environment import ENV_RUN_FOLDER
from labkit.runs.folder import RunFolder, rank_of_process, write_json
from labkit.runs.records import RecordWriter
from labkit.session.meter import allow_second_forward, bytes_by_category, write_traffic
from labkit.torch_private import MESH_FACTORIES, MemTracker
from labkit_simulate.event_recorder import EventRecorder
from labkit_simulate.memory_recorder import MemoryRecorder

WARM_UP_STEP = -1


def is_labkit_program(target: str) -> bool:
    """Tell whether a program records itself: a module of labkit, or a file that imports labkit."""
    if not target.endswith(".py"):
        return True
    try:
        tree = ast.parse(Path(target).read_bytes())
    # Running the program reports this error with more context.
    except SyntaxError:
        return True
    names = [each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    names += [
        alias.name
        for each in ast.walk(tree)
        if isinstance(each, ast.Import)
        for alias in each.names
    ]
    return any(name.partition(".")[0] == "labkit" for name in names)


@contextlib.contextmanager
def record_external_program(rank: int, world_size: int) -> Iterator["ProgramMemoryTracker"]:
    """Record what a program holds and sends; call under fake tensors."""
    folder = RunFolder(Path(os.environ[ENV_RUN_FOLDER]))
    if rank == rank_of_process(0):
        write_json(folder.session_json, external_session_info(world_size))
    writer = RecordWriter(folder.path, rank)
    steps = ExternalStepRecorder(writer)
    hook = register_optimizer_step_post_hook(
        lambda optimizer, *unused: steps.finish_step(optimizer)
    )
    try:
        with steps.tracker, steps.counter, record_mesh_axes(steps):
            yield steps.tracker
    finally:
        hook.remove()
        steps.close()
        writer.close()


class ExternalStepRecorder:
    """Write the memory and traffic of each step as records."""

    def __init__(self, writer: RecordWriter):
        self.tracker = ProgramMemoryTracker()
        self.counter = EventRecorder(None, self.tracker._mod_tracker)
        self._writer, self._index = writer, WARM_UP_STEP
        self._held: MemoryRecorder | None = None

    def finish_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Close a step: an optimizer has updated parameters."""
        write_traffic(self._writer, self.counter, self._index)
        self.counter.write_artifact(self._writer)
        self.counter.reset()
        if self._index == WARM_UP_STEP:
            whole = self.tracker.peak_by_category()["total"]
            self._writer.write("memory", "start_peak_total", WARM_UP_STEP, bytes=whole)
            self.tracker.reset_peak()
            known = self.tracker._mod_tracker._known_modules.items()
            roots = [module for module, name in known if "." not in name]
            self._held = MemoryRecorder(
                self.tracker, self.counter.current_phase_and_block, [*roots, optimizer]
            )
        self._index += 1

    def close(self) -> None:
        """Write what is left at the end of the program."""
        if self._held:
            self._held.write_records(self._writer, self._index)
        write_traffic(self._writer, self.counter, max(self._index, 0))
        if self._index == WARM_UP_STEP:
            self.counter.write_artifact(self._writer)
        for name, amount in self.tracker.peak_by_category().items():
            self._writer.write("memory", f"peak_{name}", max(self._index, 0), bytes=amount)


@contextlib.contextmanager
def record_mesh_axes(steps: ExternalStepRecorder) -> Iterator[None]:
    """Count traffic by axis for every mesh that the program creates."""
    make = torch_private.get(MESH_FACTORIES[0])

    def make_and_add_mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
        mesh = make(*args, **kwargs)
        steps.counter.add_mesh(mesh)
        return mesh

    for name in MESH_FACTORIES:
        torch_private.replace(name, make_and_add_mesh)
    yield


class ProgramMemoryTracker(MemTracker):
    """Track memory over a whole program; torch's tracker covers one step of known modules.

    Attributes:
        most: largest number of bytes since ``reset_peak``; ``peak`` is that of a step.
    """

    _pre_fw_hook: Any
    memory_tracking: Any

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._pre_fw_hook = allow_second_forward(self, self._pre_fw_hook)

    @property
    def current_bytes(self) -> int:
        return bytes_by_category(self, "current", torch.device("cpu")).get("total", 0)

    def peak_by_category(self) -> dict[str, int]:
        """Bytes by category at the peak."""
        return bytes_by_category(self, "peak", torch.device("cpu"))

    def reset_peak(self) -> None:
        """Start a new peak."""
        self._peak_mem_snap = self.get_tracker_snapshot()
        self._peak_mem = {device: held["Total"] for device, held in self._peak_mem_snap.items()}

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if module in self.memory_tracking:
            super()._post_fw_hook(module, inputs, outputs)

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        if module in self.memory_tracking:
            super()._pre_bw_hook(module, args)

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        if module in self.memory_tracking:
            super()._post_bw_hook(module, args)

    def _update_peak_stats(self, peak_state: Any) -> None:
        modules, self.memory_tracking = self.memory_tracking, type(self.memory_tracking)()
        super()._update_peak_stats(peak_state)
        self.memory_tracking = modules
        self.most = max([self.most, *(held["Total"] for held in self._curr_mem_snap.values())])


def external_session_info(world_size: int) -> dict[str, Any]:
    """Return what session.json says of the machine, for a program without a session."""
    machine = {
        "device": "simulated",
        "device_name": "simulated",
        "backend": "fake",
        "world_size": world_size,
    }
    return machine | {
        "cores": len(requirements.usable_cores()),
        "torch": torch_private.TORCH_VERSION,
        "note": "",
    }
