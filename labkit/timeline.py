"""Where does a step's communication hide? One step under torch.profiler, turned into bars named by FSDP unit.

A rank has two lanes. *Communication* is what gloo's threads or NCCL's kernels do. *Compute* is, on a GPU, every other
kernel; on a CPU, all that the profiler sees this rank do except to ask and to wait for a collective. *Exposed* is the
communication that no compute of the same rank covers:

    compute        [forward 1]          [forward 2]
    communication             [gather 2]              exposed: the rank waits for what it needs next

    compute        [forward 1][forward 2]
    communication   [gather 2]                        hidden: unit 2 was gathered while unit 1 computed

A collective lasts until its last rank has arrived, so one late rank shows as long communication on all the others. The
profiler slows a step down: compare timelines with timelines, and take durations from timed steps.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from labkit import trace
from labkit.records import Writer
from labkit.trace import Bar


@dataclass
class Recording:
    """One profiled step of this rank; empty until the step is over."""

    bars: list[Bar] = field(default_factory=list)
    step_us: float = 0.0

    @property
    def communication_us(self) -> float:
        """How long any communication was under way."""
        return exposed_us(bar for bar in self.bars if bar.lane == "communication")

    @property
    def exposed_us(self) -> float:
        """How long communication was under way while this rank computed nothing."""
        return exposed_us(self.bars)


def exposed(bars: Iterable[Bar]) -> list[Bar]:
    """The stretches of communication that no compute covers, each once, named by the collective that started first."""
    bars = sorted(bars, key=lambda bar: bar.start_us)
    covers = [(bar.start_us, bar.end_us) for bar in bars if bar.lane == "compute"]
    found: list[Bar] = []
    for bar in bars:
        if bar.lane == "communication":
            for start, end in _uncovered(bar.start_us, bar.end_us, sorted(covers)):
                found.append(replace(bar, lane="exposed", start_us=start, dur_us=end - start))
            covers.append((bar.start_us, bar.end_us))
    return found


def exposed_us(bars: Iterable[Bar]) -> float:
    """Microseconds of communication that no compute covers; collectives at the same time count once."""
    return sum(bar.dur_us for bar in exposed(bars))


def _uncovered(start: float, end: float, covers: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """What is left of a stretch where ``covers``, ordered by start, do not reach."""
    for cover_start, cover_end in covers:
        if cover_start >= end:
            break
        if cover_start > start:
            yield start, cover_start
        start = max(start, cover_end)
    if start < end:
        yield start, end


@contextlib.contextmanager
def record(
    path: Path | None = None, *, units: Mapping[str, Sequence[nn.Module]] | None = None, device: str = "cpu"
) -> Iterator[Recording]:
    """Profile the step inside; the recording is filled when it ends. A collective: the ranks start together.

    Args:
        path: where the raw trace goes, for Perfetto (ui.perfetto.dev); gzipped if it ends in ``.gz``. None keeps none.
        units: modules by unit name, as ``apply_fsdp2`` returns them. FSDP2 names its units itself; other techniques
            need this, and so does a forward pass that sleeps, which is no operator. In a compiled pass no unit is told
            apart.
        device: ``cuda`` records kernels as well.
    """
    recording = Recording()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    profiler = profile(activities=activities)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_profiling(profiler))
        stack.enter_context(name_units(units or {}))
        stack.enter_context(_named_waits())
        if dist.is_initialized():
            dist.barrier()  # to start the profiler takes each rank its own time
        with record_function(trace.STEP):
            yield recording
            if device == "cuda":
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        raw = path or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        recording.step_us, recording.bars = trace.step_and_bars(trace.read(raw))


def write(recording: Recording, writer: Writer, step: int) -> None:
    """Write a recording as records: spans ``<lane>/<what>/<unit>`` whose start counts from the step's, and scalars."""
    for bar in [*recording.bars, *exposed(recording.bars)]:
        name = f"{bar.lane}/{bar.what}/{bar.unit}"
        writer.write("span", name, step, start_us=bar.start_us, dur_us=bar.dur_us)
    amounts = {
        "profiled_step": recording.step_us,
        "communication": recording.communication_us,
        "exposed_communication": recording.exposed_us,
    }
    for name, amount_us in amounts.items():
        writer.write("scalar", name, step, value=amount_us / 1000, unit="ms")


@contextlib.contextmanager
def name_units(units: Mapping[str, Sequence[nn.Module]]) -> Iterator[None]:
    """In here, the profiler sees when a unit's forward pass runs, and between which moments its backward pass lies."""
    handles = []
    for name, modules in units.items():
        for module in modules:
            ranges: list[Any] = []

            def enter(_: Any, args: Any, kwargs: Any, name: str = name, ranges: list[Any] = ranges) -> None:
                ranges.append(record_function(f"{trace.FORWARD} {name}"))
                ranges[-1].__enter__()
                _mark_gradients((args, kwargs), f"{trace.BACKWARD_END} {name}")

            def leave(_: Any, args: Any, output: Any, name: str = name, ranges: list[Any] = ranges) -> None:
                _mark_gradients(output, f"{trace.BACKWARD} {name}")
                ranges.pop().__exit__(None, None, None)

            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mark_gradients(tensors: Any, label: str) -> None:
    """Leave a mark in the trace at the moment when the gradient of these tensors is known.

    Not in a compiled backward pass: hooks are part of its graph, which would be compiled anew within the profiled step.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled_autograd, "compiled_autograd_enabled", False):
        return

    def mark(_: Tensor) -> None:
        with record_function(label):
            pass

    for tensor in tree_leaves(tensors):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(mark)


@contextlib.contextmanager
def _named_waits() -> Iterator[None]:
    """In here, the profiler sees when this rank waits for a collective; a blocking call waits in the same place."""
    wait = dist.Work.wait

    def named(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        with record_function(trace.WAIT):
            return wait(work, *args, **kwargs)

    dist.Work.wait = named  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


@contextlib.contextmanager
def _profiling(profiler: profile) -> Iterator[None]:
    with _quiet_stderr():
        profiler.start()
    try:
        yield
    finally:
        with _quiet_stderr():
            profiler.stop()


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Drop what is written to file descriptor 2 in here: kineto reports each start and stop, at any log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
