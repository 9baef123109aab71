"""Measure a training step from inside a rank, and write what was measured as records.

Timed steps are not traced. Memory by category and communication need tracing, so they are recorded
in one more step, which is not timed. The clock is a CUDA event timer on a GPU, and
``time.perf_counter`` on a CPU.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from labkit import torch_private
from labkit.runs.records import PLANNED_STEPS, RecordWriter
from labkit.session import timeline
from labkit.session.core_use import CoreUse
from labkit.session.emulated_device import EmulatedDevice
from labkit.session.traffic import CommunicationCounter

MAX_RELEASE_S = 0.2
# labkit's names for those of torch's trackers that have spaces and short forms of them.
CATEGORY_NAMES = {
    "sharded param": "parameter",
    "unsharded param": "unsharded_parameter",
    "sharded grad": "gradient",
    "unsharded grad": "unsharded_gradient",
}


class Step:
    """One training step, whose spans are recorded if it is timed."""

    def __init__(self, index: int, timed: bool, meter: Meter):
        # The index is -1 in warm-up; timed steps count from 0, and traced ones from their number.
        self.index, self.timed, self._meter = index, timed, meter
        self._spans: list[tuple[str, Any, Any]] = []
        self._untimed: list[tuple[Any, Any]] = []
        self._scalars: list[tuple[str, Any, str, int]] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the code inside the block, as a record of kind span with this name."""
        start = self._meter.mark_time()
        yield
        self._spans.append((name, start, self._meter.mark_time()))

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave the code inside the block, such as drawing samples, out of the spans around it."""
        start, emulated = self._meter.mark_time(), self._meter.emulated
        with record_function(timeline.UNTIMED_MARK) if emulated else contextlib.nullcontext():
            yield
        end = self._meter.mark_time()
        self._untimed.append((start, end))
        if emulated:
            emulated.pause(end - start)

    def record_scalar(
        self, name: str, value: Tensor | float, unit: str = "", *, before: int = 0
    ) -> None:
        """Record one number after the step; ``before`` steps were in a run that this continues."""
        kept = value.detach() if isinstance(value, Tensor) else value
        self._scalars.append((name, kept, unit, self.index + before))

    def write_records(self) -> None:
        """Write this step's records. Waits for the device."""
        meter = self._meter
        meter.synchronize()
        pauses = [meter.start_and_duration_us(*pause) for pause in self._untimed]
        for name, start, end in self._spans if self.timed else []:
            start_us, dur_us = meter.start_and_duration_us(start, end)
            last_us = start_us + dur_us
            dur_us -= sum(took for begun, took in pauses if start_us <= begun < last_us)
            meter.writer.write("span", name, self.index, start_us=start_us, dur_us=dur_us)
        for name, value, unit, index in self._scalars:
            meter.write_scalar(name, index, value, unit)


class Meter:
    """Times and traces the steps of one rank, and writes the records with ``writer``."""

    # Whether the numbers in a tensor can be read.
    tensors_have_values: ClassVar[bool] = True
    # Whether a rank on a CPU keeps to its share of the host's cores.
    pins_cores: ClassVar[bool] = True

    def __init__(
        self,
        writer: RecordWriter,
        device: torch.device,
        emulated: EmulatedDevice | None = None,
        cores: Collection[int] = (),
    ):
        # The cores are those that all ranks of this host may use.
        self.writer, self.device, self.emulated, self.cores = writer, device, emulated, cores
        self._origin = self.mark_time()

    def device_kind_and_name(self) -> tuple[str, str]:
        """Return the device's kind, such as "cuda", and its name, such as "NVIDIA H100"."""
        if self.emulated:
            return "emulated", self.emulated.wire.hardware.describe()
        kind = self.device.type
        return kind, torch.cuda.get_device_name(self.device) if kind == "cuda" else "CPU"

    def write_scalar(self, name: str, step: int, value: Tensor | float, unit: str) -> None:
        """Record one number, unless it is in a tensor that has no values."""
        if self.tensors_have_values or not isinstance(value, Tensor):
            self.writer.write("scalar", name, step, value=float(value), unit=unit)

    def mark_time(self) -> Any:
        """Return the present time: a CUDA event on a GPU, seconds on a CPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start_and_duration_us(self, start: Any, end: Any) -> tuple[float, float]:
        """Return ``start``, from the meter's creation, and the time from ``start`` to ``end``."""
        if self.device.type == "cuda":
            return self._origin.elapsed_time(start) * 1e3, start.elapsed_time(end) * 1e3
        return (start - self._origin) * 1e6, (end - start) * 1e6

    def synchronize(self) -> None:
        """Wait until the GPU has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def steps(
        self,
        count: int,
        *,
        warmup: int = 1,
        track: Sequence[Any] = (),
        units: Mapping[str, Sequence[nn.Module]] | None = None,
        mesh: DeviceMesh | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> Iterator[Step]:
        """Run a loop body as training steps: ``warmup`` unrecorded, ``count`` timed, then traced.

        ``units`` are modules by name; with them, one step is profiled, and its timeline becomes
        records. The last step records communication, also along each axis of ``mesh`` (as
        ``tp/all_reduce``), and the memory of the models and optimizers in ``track``. ``after`` is
        called after each step, and not measured.
        """
        self.writer.write("scalar", PLANNED_STEPS, -1, value=count, unit="steps")
        on_gpu = self.device.type == "cuda"
        for index in [-1] * warmup + list(range(count)):
            self.synchronize()
            if dist.is_initialized():
                # No rank may pay in its step for another's earlier delay.
                dist.barrier()
            if index == 0:
                core_use = CoreUse(self.cores)
            if index == 0 and on_gpu:
                # What building the model has cached counts as reserved until it is given back.
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
            if self.emulated:
                self.emulated.start_step()
            step = Step(index, index >= 0, self)
            with step.span("step"):
                yield step
            step.write_records()
            after()
        if not on_gpu:
            if dist.is_initialized():
                # What other ranks do in this stretch of time, they must count in the same one.
                dist.barrier()
            core_use.write_records(self.writer, count)
        peaks = {"resident": resident_peak_bytes()}
        if on_gpu:
            allocated = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            peaks = {"max_allocated": allocated, "max_reserved": reserved}
        for name, size in peaks.items():
            self.writer.write("memory", name, count, bytes=size)
        if units:
            how: Any = {"units": units, "device": self.device.type}
            if self.emulated:
                # Begins the step once the profiler has started, on all ranks.
                how["note_transfers"] = self.emulated.start_profiled_step
            with timeline.profile_step(self.writer, count, **how):
                yield Step(count, False, self)
            after()
        yield from self.step_with_counts(count, track, mesh)
        after()

    def plain_steps(self, count: int, *, most: int | None = None, **unused: Any) -> Iterator[Step]:
        """Run at most ``most`` steps without measuring, for a check."""
        # Takes the arguments of ``steps``, so that a program can use one loop for both.
        for _ in range(count if most is None else min(count, most)):
            if self.emulated:
                self.emulated.start_step()
            yield Step(-1, False, self)

    def step_with_counts(
        self, index: int, track: Sequence[Any], mesh: DeviceMesh | None
    ) -> Iterator[Step]:
        """Run one step that counts communication and, for the models in ``track``, memory."""
        step = Step(index, False, self)
        tracker = make_memory_tracker(track) if track else None
        with tracker or contextlib.nullcontext(), self.count_traffic(index, track, tracker, mesh):
            yield step
            at_end = bytes_at_end(tracker, self.device)
        step.write_records()
        at_peak = bytes_by_category(tracker, "peak", self.device)
        for moment, amounts in (("peak", at_peak), ("end", at_end)):
            for name, amount in amounts.items():
                self.writer.write("memory", f"{moment}_{name}", index, bytes=amount)

    @contextlib.contextmanager
    def count_traffic(
        self, index: int, track: Sequence[Any], tracker: Any, mesh: DeviceMesh | None
    ) -> Iterator[None]:
        """Count the communication of the step inside the block, and record it at the end."""
        with let_gloo_free_tensors(), CommunicationCounter(mesh) as counter:
            yield
        write_traffic(self.writer, counter, index)


def write_traffic(writer: RecordWriter, counter: CommunicationCounter, index: int) -> None:
    """Write the counts of a step as records."""
    for axis, sent in counter.along.items():
        for key, count in sorted(sent.calls.items()):
            name, size, hosts = key
            group = {"axis": axis, "group_size": size, "hosts": hosts}
            writer.write("comm", name, index, **group, count=count, bytes=sent.input_bytes[key])


@contextlib.contextmanager
def _pause_at_end() -> Iterator[None]:
    yield
    time.sleep(0.002)


@contextlib.contextmanager
def let_gloo_free_tensors() -> Iterator[None]:
    """Pause for 2 ms after each wait, so that gloo's thread can release the tensors it sent."""
    # It holds them until it runs again. Where ranks outnumber cores, this may be much later in the
    # step, and the memory peak would depend on it.
    in_flight = torch_private.AsyncCollectiveTensor
    # Not functional.wait_tensor, through which compiled programs are traced: they would be
    # compiled again.
    waits = ((dist.Work, "wait"), (in_flight, "wait"), (in_flight, "trigger_wait"))
    with contextlib.ExitStack() as stack:
        for owner, name in waits:
            stack.enter_context(patch.object(owner, name, _pause_at_end()(getattr(owner, name))))
        yield


def make_memory_tracker(track: Sequence[Any]) -> Any:
    """Return a context that follows every tensor of these models and optimizers."""
    # On a GPU torch counts blocks of 512 bytes, and theory the bytes of tensors. The allocator's
    # own numbers are recorded as max_allocated.
    torch_private.replace("PYTORCH_MIN_ALLOCATE", 1)
    # FSDP2 has memory categories of its own. A program that has not imported it has no such model.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = next((each for each in track if fsdp and isinstance(each, fsdp.FSDPModule)), None)
    if sharded is None:
        # Importing this tracker imports the compiler, which takes each rank 0.5 s.
        tracker: Any = torch_private.MemTracker()
        tracker.track_external(*track)
        tracker._pre_fw_hook = allow_second_forward(tracker, tracker._pre_fw_hook)
        return tracker
    optimizer = next((each for each in track if isinstance(each, torch.optim.Optimizer)), None)
    tracker = torch_private.FSDPMemTracker(sharded, optimizer)
    # A dict with weak keys asks every unit, at every operator, whether it is a tensor: a third of
    # a step that computes nothing.
    tracker.memory_tracking = {}
    watch = tracker._fsdp_state_pre_forward
    tracker._fsdp_state_pre_forward = lambda unit, begin: allow_second_forward(
        tracker, watch(unit, begin), unit
    )
    # torch's tracker hooks each module of a unit, and would end the unit with the first of them.
    finish = tracker._fsdp_state_post_forward
    tracker._fsdp_state_post_forward = lambda unit, end: finish(
        unit, end if unit is unit._get_fsdp_state()._modules[-1] else lambda _, __, output: output
    )
    return tracker


def allow_second_forward(
    tracker: Any, hook: Callable[..., Any], module: nn.Module | None = None
) -> Callable[..., Any]:
    """Return a tracker's pre-forward hook, for ``module`` or all, that allows several batches."""

    def reset_and_run(*args: Any, **kwargs: Any) -> Any:
        # torch's trackers also keep statistics for each module, which are not used here, and
        # refuse a second forward pass (a reviewer asks about it in pytorch/pytorch#125323). So
        # they are dropped before the model runs again.
        modules = tracker._mod_tracker
        own = modules.get_known_fqn(module or args[0])
        if not modules.is_bw and not set(modules.parents) - {own, "Global"}:
            tracker.reset_mod_stats()
        return hook(*args, **kwargs)

    return reset_and_run


def bytes_by_category(tracker: Any, moment: str, device: torch.device) -> dict[str, int]:
    """Return each category's bytes, and their ``total``, at a moment: "peak" or "current"."""
    for where, amounts in tracker.get_tracker_snapshot(moment).items() if tracker else []:
        if where.type == device.type:
            return {category_name(reftype): int(amount) for reftype, amount in amounts.items()}
    return {}


def bytes_at_end(tracker: Any, device: torch.device) -> dict[str, int]:
    """Return each category's bytes at a step's end, and their ``total``."""
    # As ``let_gloo_free_tensors``: beside other work, gloo's thread may hold the last message's
    # tensor for longer than the pause after it.
    latest_s = time.monotonic() + MAX_RELEASE_S
    while True:
        amounts = bytes_by_category(tracker, "current", device)
        may_fall = device.type != "cuda" and amounts.get("temp")
        if not may_fall or time.monotonic() > latest_s:
            return amounts
        time.sleep(0.005)


def category_name(reftype: Any) -> str:
    """Return labkit's name for one of the tracker's categories."""
    name = str(getattr(reftype, "value", reftype)).lower()
    return CATEGORY_NAMES.get(name, name.replace(" ", "_"))


def resident_peak_bytes() -> int:
    """Return the most RAM that this process has held so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
