"""Measure a training step from inside a rank, and write what was measured as records.

Timed steps carry no tracing. What tracing alone can see, memory by category and communication, is recorded in one more
step that is not timed. The clock is CUDA's event timer on a GPU, ``time.perf_counter`` on a CPU.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.folder import RunFolder
from labkit.records import Writer

_NAMESPACES = ("c10d", "_c10d_functional")
_NOT_TRAFFIC = {"wait_tensor", "barrier", "monitored_barrier_", "check_for_nan", "_wrap_tensor_autograd"}
_VARIANT = re.compile("_(coalesced|into_tensor|tensor|out|base|single|any_source)(?=_|$)")
_NAMES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all", "isend": "send", "irecv": "recv",
}  # fmt: skip
_FSDP_CATEGORIES = {
    "sharded param": "parameter", "unsharded param": "unsharded_parameter", "sharded grad": "gradient",
    "unsharded grad": "unsharded_gradient",
}  # fmt: skip
_IN_PLACE = {"all_reduce", "broadcast", "reduce", "send", "recv"}


def messages_of(namespace: str, name: str, args: Sequence[Any]) -> list[tuple[str, Any]]:
    """What an operation of torch's communication namespaces moves: a label and the tensors that this rank hands in."""
    if name == "batch_p2p_ops":
        kinds, _, _, tensors = args[:4]
        return [(_NAMES[kind], tensor) for kind, tensor in zip(kinds, tensors, strict=True)]
    plain = _VARIANT.sub("", name).strip("_")  # allgather_into_tensor_coalesced_ is an allgather
    label = _NAMES.get(plain, plain)
    # c10d takes the output first where it is another tensor than the input
    return [(label, args[1 if namespace == "c10d" and label not in _IN_PLACE else 0])]


def axis_of(args: Sequence[Any], axes: Mapping[str, str]) -> str:
    """The mesh axis that an operation of torch's communication namespaces runs on, "" where it is none of them.

    Args:
        args: of the operation, its process group (c10d) or the group's name (functional collectives) among them.
        axes: the axis of every group, by the group's name.
    """
    groups = [each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())]
    names = [str(torch.distributed.ProcessGroup.unbox(group).group_name) for group in groups]
    names += [each for each in args if isinstance(each, str)]
    return next((axes[name] for name in names if name in axes), "")


class CommunicationCounter(TorchDispatchMode):
    """Counts calls and bytes of every collective and point-to-point message that this rank takes part in.

    ``counts`` and ``bytes`` are keyed by name (``all_reduce``, ``all_gather``, ``send``, ...). Bytes are those of the
    tensor that this rank hands in (for ``recv``, that it receives); how many of them cross a wire, and how often, is
    the algorithm's business: see ``theory.ring_all_reduce_bytes``.

    Args:
        axes: mesh axes by the names of their process groups. What runs on one of these is counted a second time, as
            ``tp/all_reduce`` for an axis ``tp``.
    """

    def __init__(self, axes: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.axes = axes or {}
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as compiled code in here, and count what it sends; else torch would run it eagerly."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
            return NotImplemented  # let DTensor turn the operation into local ones and collectives first
        namespace, _, name = func.name().split(".")[0].partition("::")
        if namespace in _NAMESPACES and name not in _NOT_TRAFFIC:
            axis = axis_of(args, self.axes)
            for label, given in messages_of(namespace, name, args):
                size = sum(t.numel() * t.element_size() for t in tree_leaves(given) if isinstance(t, Tensor))
                for key in (label, f"{axis}/{label}") if axis else (label,):
                    self.counts[key] += 1
                    self.bytes[key] += size
        return func(*args, **(kwargs or {}))


class Step:
    """One training step. ``index`` is -1 in warm-up, counts from 0 while timed; the last one is traced, not timed.

    Attributes:
        index: see above.
        timed: whether spans of this step are recorded.
    """

    def __init__(self, index: int, timed: bool, meter: Meter):
        self.index, self.timed, self._meter = index, timed, meter
        self._spans: list[tuple[str, Any, Any]] = []
        self._scalars: list[tuple[str, Any, str]] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what happens inside, as a record of kind span with this name."""
        start = self._meter.now()
        yield
        self._spans.append((name, start, self._meter.now()))

    def scalar(self, name: str, value: Tensor | float, unit: str = "") -> None:
        """Record one number, such as the loss. A tensor is read only once the step is over."""
        self._scalars.append((name, value.detach() if isinstance(value, Tensor) else value, unit))

    def write(self) -> None:
        """Write this step's records. Waits for the device."""
        self._meter.synchronize()
        for name, start, end in self._spans if self.timed else []:
            start_us, dur_us = self._meter.microseconds(start, end)
            self._meter.writer.write("span", name, self.index, start_us=start_us, dur_us=dur_us)
        for name, value, unit in self._scalars:
            self._meter.writer.write("scalar", name, self.index, value=float(value), unit=unit)


class Meter:
    """Times and traces one rank's steps and writes them with ``writer``. ``device`` decides on the clock."""

    def __init__(self, writer: Writer, device: torch.device):
        self.writer, self.device = writer, device
        self._origin = self.now()

    def now(self) -> Any:
        """A moment: a CUDA event on a GPU, seconds on a CPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def microseconds(self, start: Any, end: Any) -> tuple[float, float]:
        """Start since the meter was made, and duration, of two moments. The device must have reached both."""
        if self.device.type == "cuda":
            return self._origin.elapsed_time(start) * 1e3, start.elapsed_time(end) * 1e3
        return (start - self._origin) * 1e6, (end - start) * 1e6

    def synchronize(self) -> None:
        """Wait until the GPU has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def steps(
        self,
        count: int,
        warmup: int,
        track: Sequence[Any],
        units: Mapping[str, Sequence[nn.Module]] | None = None,
        axes: Mapping[str, str] | None = None,
    ) -> Iterator[Step]:
        """Yield warm-up steps, ``count`` timed steps, then one or two traced steps. See ``rank.Here.steps``."""
        self.writer.write("scalar", "planned_steps", -1, value=count, unit="steps")
        for index in [-1] * warmup + list(range(count)):
            self._align()
            if index == 0 and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            step = Step(index, index >= 0, self)
            with step.span("step"):
                yield step
            step.write()
        self._write_peaks(count)
        if units:
            yield from self._profiled_step(count, units)
        yield from self._traced_step(count, track, axes)

    def _profiled_step(self, index: int, units: Mapping[str, Sequence[nn.Module]]) -> Iterator[Step]:
        from labkit import timeline  # brings in the profiler

        step, folder = Step(index, False, self), self.writer.folder
        with timeline.record(
            folder and RunFolder(folder).trace(self.writer.rank), units=units, device=self.device.type
        ) as recording:
            yield step
        timeline.write(recording, self.writer, index)

    def _align(self) -> None:
        """Let all ranks start a step together, so that none pays for another's lateness before it."""
        self.synchronize()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def _traced_step(self, index: int, track: Sequence[Any], axes: Mapping[str, str] | None) -> Iterator[Step]:
        step = Step(index, False, self)
        counter, tracker = CommunicationCounter(axes), tracker_of(track) if track else None
        with contextlib.ExitStack() as modes:
            if tracker is not None:
                modes.enter_context(tracker)
            modes.enter_context(finished_collectives_let_go())
            modes.enter_context(counter)
            yield step
            at_end = by_category(tracker, "current", self.device) if tracker is not None else {}
        step.write()
        for name, count in sorted(counter.counts.items()):
            self.writer.write("comm", name, index, count=count, bytes=counter.bytes[name])
        if tracker is not None:
            for name, amount in by_category(tracker, "peak", self.device).items():
                self.writer.write("memory", f"peak_{name}", index, bytes=amount)
            for name, amount in at_end.items():
                self.writer.write("memory", f"end_{name}", index, bytes=amount)

    def _write_peaks(self, index: int) -> None:
        if self.device.type == "cuda":
            self.writer.write("memory", "max_allocated", index, bytes=torch.cuda.max_memory_allocated(self.device))
            self.writer.write("memory", "max_reserved", index, bytes=torch.cuda.max_memory_reserved(self.device))
        else:
            self.writer.write("memory", "resident", index, bytes=resident_peak_bytes())


@contextlib.contextmanager
def finished_collectives_let_go() -> Iterator[None]:
    """In here, a rank that has waited for a collective gives gloo's thread a moment to drop the tensors of it.

    That thread holds them until it runs once more. Where ranks outnumber cores, that may be much later in the step, and
    the peak of memory would depend on it.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as InFlight  # what DTensor waits for

    # not functional.wait_tensor: compiled programs are traced through it, and would be compiled anew
    with (
        rest_after(torch.distributed.Work, "wait"),
        rest_after(InFlight, "wait"),
        rest_after(InFlight, "trigger_wait"),
    ):
        yield


@contextlib.contextmanager
def rest_after(owner: Any, name: str) -> Iterator[None]:
    """In here, each call of this method of a class takes 2 ms longer."""
    original = getattr(owner, name)

    def call_and_rest(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        time.sleep(0.002)
        return result

    setattr(owner, name, call_and_rest)
    try:
        yield
    finally:
        setattr(owner, name, original)


def tracker_of(track: Sequence[Any]) -> Any:
    """A context that follows every tensor of these models and optimizers: FSDP2 has categories of its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it has nothing that is sharded by it
    sharded = next((each for each in track if fsdp and isinstance(each, fsdp.FSDPModule)), None)
    if sharded is not None:
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

        optimizer = next((each for each in track if isinstance(each, torch.optim.Optimizer)), None)
        return FSDPMemTracker(sharded, optimizer)
    from torch.distributed._tools.mem_tracker import MemTracker  # brings in the compiler: half a second for each rank

    tracker = MemTracker()
    tracker.track_external(*track)
    return tracker


def by_category(tracker: Any, moment: str, device: torch.device) -> dict[str, int]:
    """Bytes of each category at a moment, and their sum as ``total``.

    Args:
        tracker: from ``tracker_of``.
        moment: "peak", when the sum was largest, or "current".
        device: whose memory.
    """
    snapshots = tracker.get_tracker_snapshot(moment)
    snapshot: dict[Any, int] = next((amounts for where, amounts in snapshots.items() if where.type == device.type), {})
    found = {getattr(category, "value", str(category)).lower(): int(amount) for category, amount in snapshot.items()}
    return {_FSDP_CATEGORIES.get(name, name.replace(" ", "_")): amount for name, amount in found.items()}


def resident_peak_bytes() -> int:
    """The most memory that this process has held in RAM so far."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
