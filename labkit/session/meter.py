"""Measure a training step from inside a rank, and write what was measured as records.

Timed steps are not traced. Memory by category and communication need tracing, so they are recorded
in one more step, which is not timed. The clock is a CUDA event timer on a GPU, and
``time.perf_counter`` on a CPU.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.runs.folder import RunFolder
from labkit.runs.records import PLANNED_STEPS, RecordWriter
from labkit.session.traffic import CommunicationCounter

CATEGORY_NAMES = {
    "sharded param": "parameter",
    "unsharded param": "unsharded_parameter",
    "sharded grad": "gradient",
    "unsharded grad": "unsharded_gradient",
}
"""Our names for those of torch's trackers that have spaces and short forms of them."""


class Step:
    """One training step.

    Attributes:
        index: -1 in warm-up; timed steps count from 0; the last step is traced, not timed.
        timed: whether the spans of this step are recorded.
    """

    def __init__(self, index: int, timed: bool, meter: Meter):
        self.index, self.timed, self._meter = index, timed, meter
        self._spans: list[tuple[str, Any, Any]] = []
        self._scalars: list[tuple[str, Any, str, int]] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the code inside the block, as a record of kind span with this name."""
        start = self._meter.mark_time()
        yield
        self._spans.append((name, start, self._meter.mark_time()))

    def record_scalar(
        self, name: str, value: Tensor | float, unit: str = "", *, before: int = 0
    ) -> None:
        """Record one number, such as the loss. A tensor is read only after the step.

        Args:
            name: the name of the number.
            value: the number.
            unit: its unit.
            before: the number of steps that an earlier run had trained. This run continues it, and
                the record's step counts on from there.
        """
        self._scalars.append(
            (
                name,
                value.detach() if isinstance(value, Tensor) else value,
                unit,
                self.index + before,
            )
        )

    def write_records(self) -> None:
        """Write this step's records. Waits for the device."""
        self._meter.synchronize()
        for name, start, end in self._spans if self.timed else []:
            start_us, dur_us = self._meter.start_and_duration_us(start, end)
            self._meter.writer.write("span", name, self.index, start_us=start_us, dur_us=dur_us)
        for name, value, unit, index in self._scalars:
            if self._meter.can_read(value):
                self._meter.writer.write("scalar", name, index, value=float(value), unit=unit)


class Meter:
    """Times and traces the steps of one rank, and writes the records with ``writer``.

    The clock depends on ``device``.

    Attributes:
        tensors_have_values: whether the numbers in a tensor can be read.
    """

    tensors_have_values: ClassVar[bool] = True

    def __init__(self, writer: RecordWriter, device: torch.device):
        self.writer, self.device = writer, device
        self._origin = self.mark_time()

    def can_read(self, value: Tensor | float) -> bool:
        """Tell whether this value can be read now, and recorded."""
        return self.tensors_have_values or not isinstance(value, Tensor)

    def mark_time(self) -> Any:
        """Return the present time: a CUDA event on a GPU, seconds on a CPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start_and_duration_us(self, start: Any, end: Any) -> tuple[float, float]:
        """Return when the first of two times was, from the meter's creation, and how long after it
        the second. The device must have reached both.
        """
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
        """Run a loop body as measured training steps: ``warmup`` unrecorded steps, ``count`` timed
        ones, then traced ones.

        With ``units``, the first traced step is profiled: its timeline becomes records, and its raw
        trace goes into the run's folder. The last step records communication and, for the models
        and optimizers in ``track``, memory by category. So the loop body runs ``warmup + count +
        1`` times, or once more.

        Args:
            count: the number of timed steps.
            warmup: the number of steps before them.
            track: the models and optimizers whose memory is followed.
            units: modules, by the names that the timeline shows for them.
            mesh: a collective along one of its axes is also counted for this axis, as
                ``tp/all_reduce``.
            after: called after each step, once its records are written; it is not measured.
        """
        self.writer.write("scalar", PLANNED_STEPS, -1, value=count, unit="steps")
        for index in [-1] * warmup + list(range(count)):
            self.synchronize()
            if torch.distributed.is_initialized():
                # no rank may pay in its step for another's earlier delay
                torch.distributed.barrier()
            if index == 0 and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            step = Step(index, index >= 0, self)
            with step.span("step"):
                yield step
            step.write_records()
            after()
        self._write_peaks(count)
        if units:
            yield from self._step_with_profile(count, units)
            after()
        yield from self.step_with_counts(count, track, mesh)
        after()

    def plain_steps(self, count: int, *, most: int | None = None, **unused: Any) -> Iterator[Step]:
        """Run a loop body without measuring, for a check: at most ``most`` steps.

        Takes the arguments of ``steps``, so that a program can use one loop for both.
        """
        return (Step(-1, False, self) for _ in range(count if most is None else min(count, most)))

    def _step_with_profile(
        self, index: int, units: Mapping[str, Sequence[nn.Module]]
    ) -> Iterator[Step]:
        # This imports the profiler.
        from labkit.session import timeline

        step, folder = Step(index, False, self), self.writer.folder
        path = folder and RunFolder(folder).trace(self.writer.rank)
        with timeline.profile_step(path, units=units, device=self.device.type) as recording:
            yield step
        timeline.write_profile(recording, self.writer, index)

    def step_with_counts(
        self, index: int, track: Sequence[Any], mesh: DeviceMesh | None
    ) -> Iterator[Step]:
        """Run one step that counts communication and, for the models in ``track``, memory."""
        step = Step(index, False, self)
        tracker = make_memory_tracker(track) if track else None
        with tracker or contextlib.nullcontext(), self.count_traffic(index, track, tracker, mesh):
            yield step
            at_end = bytes_by_category(tracker, "current", self.device) if tracker else {}
        step.write_records()
        memory = (
            {"peak": bytes_by_category(tracker, "peak", self.device), "end": at_end}
            if tracker
            else {}
        )
        for moment, amounts in memory.items():
            for name, amount in amounts.items():
                self.writer.write("memory", f"{moment}_{name}", index, bytes=amount)

    @contextlib.contextmanager
    def count_traffic(
        self, index: int, track: Sequence[Any], tracker: Any, mesh: DeviceMesh | None
    ) -> Iterator[None]:
        """Count the communication of the step inside the block, and record it at the end.

        Args:
            index: of the step.
            track: the models and optimizers whose memory is followed.
            tracker: torch's memory tracker, already active; None to track no memory.
            mesh: as for ``steps``.
        """
        with let_gloo_free_tensors(), CommunicationCounter(mesh) as counter:
            yield
        write_traffic(self.writer, counter, index)

    def _write_peaks(self, index: int) -> None:
        if self.device.type == "cuda":
            self.writer.write(
                "memory", "max_allocated", index, bytes=torch.cuda.max_memory_allocated(self.device)
            )
            self.writer.write(
                "memory", "max_reserved", index, bytes=torch.cuda.max_memory_reserved(self.device)
            )
        else:
            self.writer.write("memory", "resident", index, bytes=resident_peak_bytes())


def write_traffic(writer: RecordWriter, counter: CommunicationCounter, index: int) -> None:
    """Write the counts of a step as records."""
    for axis, sent in counter.along.items():
        for (name, size, hosts), count in sorted(sent.calls.items()):
            group = {"axis": axis, "group_size": size, "hosts": hosts}
            writer.write(
                "comm", name, index, **group, count=count, bytes=sent.input_bytes[name, size, hosts]
            )


@contextlib.contextmanager
def let_gloo_free_tensors() -> Iterator[None]:
    """Pause for a moment after each wait, so that gloo's thread can release the tensors it sent.

    That thread holds them until it runs again. Where ranks outnumber cores, this may be much later
    in the step, and the memory peak would depend on it.
    """
    # The type of a result that DTensor has not waited for yet.
    from labkit.torch_private import AsyncCollectiveTensor as InFlight

    # not functional.wait_tensor: compiled programs are traced through it, and would be compiled
    # anew
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch.distributed.Work, "wait"),
            (InFlight, "wait"),
            (InFlight, "trigger_wait"),
        ):
            stack.enter_context(patch_attribute(owner, name, add_pause))
        yield


def add_pause(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, which then takes 2 ms longer."""

    def wait_and_pause(*args: Any, **kwargs: Any) -> Any:
        result = wait(*args, **kwargs)
        time.sleep(0.002)
        return result

    return wait_and_pause


@contextlib.contextmanager
def patch_attribute(owner: type, name: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method of a class by ``wrapper(method)`` inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, wrapper(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def make_memory_tracker(track: Sequence[Any]) -> Any:
    """Return a context that follows every tensor of these models and optimizers.

    FSDP2 has memory categories of its own, so it gets torch's FSDP tracker.
    """
    # A program that has not imported FSDP has no tensors sharded by it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = next((each for each in track if fsdp and isinstance(each, fsdp.FSDPModule)), None)
    if sharded is not None:
        from labkit.torch_private import FSDPMemTracker

        optimizer = next((each for each in track if isinstance(each, torch.optim.Optimizer)), None)
        tracker: Any = FSDPMemTracker(sharded, optimizer)
        # a dict with weak keys asks every unit, at every operator, whether it is a tensor: a third
        # of a step that computes nothing
        tracker.memory_tracking = {}
        watch = tracker._fsdp_state_pre_forward
        tracker._fsdp_state_pre_forward = lambda unit, begin: allow_second_forward(
            tracker, watch(unit, begin), unit
        )
        return tracker
    # This imports the compiler, which takes each rank 0.5 s.
    from labkit.torch_private import (
        MemTracker,
    )

    tracker = MemTracker()
    tracker.track_external(*track)
    tracker._pre_fw_hook = allow_second_forward(tracker, tracker._pre_fw_hook)
    return tracker


def allow_second_forward(
    tracker: Any, hook: Callable[..., Any], module: nn.Module | None = None
) -> Callable[..., Any]:
    """Return a tracker's hook before a module's forward pass that allows several batches in a step.

    torch's trackers also keep statistics for each module, assume one batch in a step, and refuse a
    second forward pass (a reviewer asks about it in pytorch/pytorch#125323). Nothing here reads
    these statistics, so they are dropped before the model runs again.

    Args:
        tracker: torch's tracker.
        hook: the tracker's own hook.
        module: the module that the hook is for; None if the hook's first argument is the module.
    """

    def reset_and_run(*args: Any, **kwargs: Any) -> Any:
        modules = tracker._mod_tracker
        own = modules.get_known_fqn(module or args[0])
        if not modules.is_bw and not set(modules.parents) - {own, "Global"}:
            tracker.reset_mod_stats()
        return hook(*args, **kwargs)

    return reset_and_run


def bytes_by_category(tracker: Any, moment: str, device: torch.device) -> dict[str, int]:
    """Return the bytes of each category at a moment, and their sum as ``total``.

    Args:
        tracker: from ``make_memory_tracker``.
        moment: "peak", when the sum was largest, or "current".
        device: the device whose memory counts.
    """
    snapshots = tracker.get_tracker_snapshot(moment)
    snapshot: dict[Any, int] = next(
        (amounts for where, amounts in snapshots.items() if where.type == device.type), {}
    )
    return {category_name(reftype): int(amount) for reftype, amount in snapshot.items()}


def category_name(reftype: Any) -> str:
    """Return labkit's name for one of the tracker's categories."""
    name = str(getattr(reftype, "value", reftype)).lower()
    return CATEGORY_NAMES.get(name, name.replace(" ", "_"))


def resident_peak_bytes() -> int:
    """Return the most RAM that this process has held so far, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
