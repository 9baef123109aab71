"""Show where a step's communication is hidden: profile one step as bars named by module.

    compute        [forward 1]          [forward 2]
    communication             [gather 2]              exposed: the rank waits for what it needs next

    compute        [forward 1][forward 2]
    communication   [gather 2]                        hidden: gathered while unit 1 computed

Communication is the work of gloo's threads or NCCL's kernels. Compute is every other kernel on a
GPU, but FSDP2's copies of what it sends belong to communication. On a CPU, compute is all that this
rank does except requesting a collective and waiting for it. A collective lasts until its last rank
has arrived. The trace names no unit for it, but for its request: FSDP2 requests inside ranges such
as ``FSDP::all_gather (layers.2)``, and ``_mark_passes`` marks other techniques' units. The profiler
slows a step down: take durations from timed steps.
"""

import contextlib
import gzip
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from labkit.runs import private_files
from labkit.runs.folder import RunFolder
from labkit.runs.records import RecordWriter
from labkit.theory.overlap import uncovered_in_turn
from labkit.torch_private import COMPILED_AUTOGRAD_MODULE, tree_leaves

TraceEvent = dict[str, Any]
NoteTransfers = Callable[[], contextlib.AbstractContextManager[list[tuple[float, float]] | None]]
ROOT_UNIT = "root"
STEP_MARK, WAIT_MARK, UNTIMED_MARK = "labkit::step", "labkit::wait", "labkit::untimed"
FORWARD_MARK = "labkit::forward"
# The gradient of a unit's output, then of its input, is known.
BACKWARD_MARK, BACKWARD_END_MARK = "labkit::backward", "labkit::backward_end"
# Matches the label and the unit of a range: "FSDP::all_gather (layers.2)", "FSDP::pre_forward".
UNIT_RANGE_PATTERN = re.compile(r"((?:FSDP|labkit)::\w+)(?: \((.*?)\))?(?: \[pg=.*\])?$")
_UNIT_BEGINS_AT_START = {FORWARD_MARK, BACKWARD_MARK, "FSDP::pre_forward", "FSDP::pre_backward"}
_UNIT_ENDS_AT_START = {BACKWARD_END_MARK}
_UNIT_ENDS_AT_END = {FORWARD_MARK, "FSDP::post_forward", "FSDP::post_backward_reduce"}
_FSDP_REQUESTS = {"FSDP::all_gather", "FSDP::post_backward_reduce"}
# In these FSDP2 copies what it sends and has received: on a GPU by kernels.
_FSDP_COPIES = {*_FSDP_REQUESTS, "FSDP::all_gather_copy_out"}
# Shorter gaps, in which nothing is waited for, do not split the compute of a unit.
CPU_GAP_US, KERNEL_GAP_US = 100.0, 10.0
_NON_COMPUTE_PREFIXES = (
    *(STEP_MARK, WAIT_MARK, UNTIMED_MARK),
    *("c10d::", "_c10d_functional::", "record_param_comms"),
)
# A compiled program records only the latter.
_WAIT_NAMES = (WAIT_MARK, "_c10d_functional::wait_tensor")
# "!" marks compiled autograd on the caller's thread.
_BACKWARD_PREFIXES = ("autograd::engine", "Torch-Compiled Region: !")
# The longer names come first, because they contain the shorter ones.
_COLLECTIVE_NAMES = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    *("broadcast", "gather", "scatter", "reduce"),
)
_GPU_WORK_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
_GPU_CATEGORIES = _GPU_WORK_CATEGORIES | {"gpu_user_annotation"}


@dataclass(frozen=True)
class LaneBar:
    """One bar of a lane, in microseconds from the start of the step."""

    # compute, communication or exposed
    lane: str
    # of the unit; "bucket 0", ... for all-reduces of a backward pass; "" for the optimizer
    name: str
    # forward, backward or optimizer; of communication the collective
    phase: str
    start_us: float
    dur_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.dur_us


def exposed_bars(bars: Iterable[LaneBar]) -> list[LaneBar]:
    """Return the parts of communication that no compute covers, each named by one collective."""
    # Where collectives overlap, a part counts for the one that started first.
    bars = sorted(bars, key=lambda bar: bar.start_us)
    covers = [(bar.start_us, bar.end_us) for bar in bars if bar.lane == "compute"]
    sent = [bar for bar in bars if bar.lane == "communication"]
    return [
        replace(sent[place], lane="exposed", start_us=start, dur_us=end - start)
        for place, start, end in uncovered_in_turn([(b.start_us, b.end_us) for b in sent], covers)
    ]


def exposed_us(bars: Iterable[LaneBar]) -> float:
    """Return the microseconds of communication that no compute covers."""
    return sum(bar.dur_us for bar in exposed_bars(bars))


@contextlib.contextmanager
def profile_step(
    writer: RecordWriter,
    step: int,
    *,
    units: Mapping[str, Sequence[nn.Module]] | None = None,
    device: str = "cpu",
    note_transfers: NoteTransfers = contextlib.nullcontext,
) -> Iterator[None]:
    """Profile the step inside the block, and write its bars as records. A collective.

    ``units`` are modules by the names of their bars; torch names FSDP2's already, and a compiled
    pass shows none. ``note_transfers`` is that of an emulated wire, whose times then take the place
    of gloo's. The run's folder keeps the raw trace, for ui.perfetto.dev.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    profiler = profile(activities=activities)
    with contextlib.ExitStack() as stack:
        with silence_stderr():
            profiler.start()
        stack.callback(silence_stderr()(profiler.stop))
        for name, modules in (units or {}).items():
            for module in modules:
                for handle in _mark_passes(module, name):
                    stack.enter_context(handle)
        # A blocking call waits there as well.
        stack.enter_context(patch.object(dist.Work, "wait", _wait_range()(dist.Work.wait)))
        if dist.is_initialized():
            # The profiler takes each rank a different time to start.
            dist.barrier()
        transfers = stack.enter_context(note_transfers())
        begun_s = time.monotonic()
        with record_function(STEP_MARK):
            yield
            if device == "cuda":
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = RunFolder(writer.folder or Path(folder)).trace(writer.rank)
        # torch overwrites an existing file, which keeps its permissions.
        private_files.open_file(path, "wb").close()
        profiler.export_chrome_trace(str(path))
        events = read_trace(path)
        if transfers is not None:
            move_to_transfers(events, [[second - begun_s for second in each] for each in transfers])
            cut_untimed(events)
        write_profile(writer, step, *step_us_and_bars(events, device))


@contextlib.contextmanager
def _wait_range() -> Iterator[None]:
    # A range of its own for each call, since threads may wait at the same time.
    with record_function(WAIT_MARK):
        yield


def write_profile(writer: RecordWriter, step: int, step_us: float, bars: Sequence[LaneBar]) -> None:
    """Write a profile as records: its bars, the exposed parts as their own lane, and the sums."""
    for bar in [*bars, *exposed_bars(bars)]:
        writer.write("bar", step=step, **asdict(bar))
    amounts = {
        "profiled_step": step_us,
        # Overlapping collectives count once.
        "communication": exposed_us(bar for bar in bars if bar.lane == "communication"),
        "exposed_communication": exposed_us(bars),
    }
    for name, amount_us in amounts.items():
        writer.write("scalar", name, step, value=amount_us / 1000, unit="ms")


def _mark_passes(module: nn.Module, name: str) -> list[RemovableHandle]:
    """Mark in the profile the forward pass of a unit, and where its backward begins and ends."""
    ranges: list[Any] = []

    def begin_forward(_: Any, args: Any, kwargs: Any) -> None:
        ranges.append(record_function(f"{FORWARD_MARK} ({name})"))
        ranges[-1].__enter__()
        _mark_gradients((args, kwargs), f"{BACKWARD_END_MARK} ({name})")

    def end_forward(_: Any, args: Any, output: Any) -> None:
        _mark_gradients(output, f"{BACKWARD_MARK} ({name})")
        ranges.pop().__exit__(None, None, None)

    before = module.register_forward_pre_hook(begin_forward, prepend=True, with_kwargs=True)
    return [before, module.register_forward_hook(end_forward)]


def _mark_gradients(tensors: Any, label: str) -> None:
    """Mark the moment in the trace at which the gradient of these tensors is known."""
    # In a compiled backward pass hooks are part of the graph, which would be compiled again
    # within the profiled step.
    compiled_autograd = sys.modules.get(COMPILED_AUTOGRAD_MODULE)
    if getattr(compiled_autograd, "compiled_autograd_enabled", False):
        return

    def mark_gradient(_: Tensor) -> None:
        with record_function(label):
            pass

    for tensor in tree_leaves(tensors):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(mark_gradient)


@contextlib.contextmanager
def silence_stderr() -> Iterator[None]:
    """Drop what is written to file descriptor 2: kineto prints each start and stop."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def read_trace(path: Path) -> list[TraceEvent]:
    """Return the complete events of a gzipped Chrome trace."""
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def move_to_transfers(events: list[TraceEvent], transfers: Sequence[Sequence[float]]) -> None:
    """Give gloo's events the times of an emulated wire: starts and ends, s from the step's start.

    Messages between two ranks are left as they are.
    """
    begun = next(event["ts"] for event in events if event["name"] == STEP_MARK)
    gloo = [event for event in events if event["name"].startswith("gloo:") and event["ts"] >= begun]
    for event, (start_s, end_s) in zip(sorted(gloo, key=itemgetter("ts")), transfers, strict=False):
        event["ts"], event["dur"] = begun + 1e6 * start_s, 1e6 * (end_s - start_s)


def cut_untimed(events: Sequence[TraceEvent]) -> None:
    """Take what is untimed out of a step: an emulated device does nothing meanwhile."""
    for begin, took in [(e["ts"], e["dur"]) for e in events if e["name"] == UNTIMED_MARK][::-1]:
        for event in events:
            ends = event["ts"], event["ts"] + event["dur"]
            start, end = (moment - min(took, max(0, moment - begin)) for moment in ends)
            event["ts"], event["dur"] = start, end - start


def step_us_and_bars(
    events: Sequence[TraceEvent], device: str = "cpu"
) -> tuple[float, list[LaneBar]]:
    """Return the length of the step in microseconds, and its bars, sorted by start.

    Raises:
        ValueError: the step is not marked, or ``device`` is "cuda" and no GPU has been seen.
    """
    marks = [e for e in events if e["name"] == STEP_MARK and e.get("cat") != "gpu_user_annotation"]
    if not marks:
        raise ValueError(
            f"no range {STEP_MARK} among {len(events)} events: record the trace with profile_step"
        )
    start, step_us = marks[0]["ts"], marks[0]["dur"]
    inside = [event for event in events if start <= event["ts"] <= start + step_us]
    # An outer range comes before those that it begins with.
    inside.sort(key=lambda event: (event["ts"], -event["dur"]))
    on_gpu = [event for event in inside if event.get("cat") in _GPU_WORK_CATEGORIES]
    nccl = [event for event in on_gpu if "nccl" in event["name"].lower()]
    gloo = [event for event in inside if event["name"].startswith("gloo:")]
    # Gloo's threads record operators as well.
    gloo_threads = {event["tid"] for event in gloo}
    host = _HostActivity(
        [e for e in inside if e.get("cat") not in _GPU_CATEGORIES and e["tid"] not in gloo_threads]
    )
    if device == "cuda" and not on_gpu:
        raise ValueError(
            "the trace of a step on a GPU has no row of the GPU: CUPTI gave none. Another profiler"
            " may hold it, or the container may not (it needs SYS_ADMIN, or root's permission)"
        )
    if on_gpu:
        kernels = [event for event in on_gpu if "nccl" not in event["name"].lower()]
        compute = _merge_bars(host.kernel_bars(kernels), [], KERNEL_GAP_US)
    else:
        waits = [event["ts"] for event in inside if event["name"] in _WAIT_NAMES]
        compute = _merge_bars(host.compute_bars(), waits, CPU_GAP_US)
    bars = [*compute, *host.communication_bars(nccl, gloo)]
    moved = [replace(bar, start_us=bar.start_us - start) for bar in bars]
    return float(step_us), sorted(moved, key=lambda bar: bar.start_us)


class _ThreadInterval(NamedTuple):
    """An interval of one thread in which the innermost recorded range stays the same."""

    start: float
    end: float
    busy: bool
    phase: str


class _HostActivity:
    """What this rank's own threads did, from their events in the order of their starts."""

    def __init__(self, events: Sequence[TraceEvent]):
        threads: dict[Any, list[TraceEvent]] = defaultdict(list)
        for event in events:
            threads[event["tid"]].append(event)
        self._intervals = {tid: list(_thread_intervals(own)) for tid, own in threads.items()}
        self._requests = [event for event in events if event["name"].startswith("c10d::")]
        # A kernel has the same number as the call that launched it.
        self._launches = {
            event["args"].get("correlation"): event
            for event in events
            if str(event.get("cat")).startswith("cuda_")
        }
        ranges = [(UNIT_RANGE_PATTERN.match(event["name"]), event) for event in events]
        marks = [(found[1], unit_name(found[2]), event) for found, event in ranges if found]
        # Before the first unit, and before the first request of FSDP2.
        self._units = [(-math.inf, ROOT_UNIT), *_unit_changes(marks)]
        self._fsdp_requests = [(-math.inf, -math.inf, "")]
        self._fsdp_copies = [(-math.inf, -math.inf, "")]
        for label, unit, event in marks:
            span = event["ts"], event["ts"] + event["dur"], unit
            if label in _FSDP_REQUESTS:
                self._fsdp_requests.append(span)
            if label in _FSDP_COPIES:
                self._fsdp_copies.append(span)

    def compute_bars(self) -> Iterator[LaneBar]:
        """Return the compute of the CPU."""
        for intervals in self._intervals.values():
            for start, end, busy, phase in intervals:
                if busy:
                    yield LaneBar("compute", self._unit(start, phase), phase, start, end - start)

    def kernel_bars(self, kernels: Iterable[TraceEvent]) -> Iterator[LaneBar]:
        """Return the compute of the GPU, named by what launched each kernel."""
        for event in kernels:
            # A kernel may have been launched before the step.
            launch = self._launch(event)
            phase, asked_at = (self._phase(launch), launch["ts"]) if launch else ("forward", 0.0)
            lane, unit = "compute", self._unit(asked_at, phase)
            if launch and (copied := _span_at(self._fsdp_copies, asked_at)):
                lane, unit, phase = "communication", copied, "copy"
            yield LaneBar(lane, unit, phase, event["ts"], event["dur"])

    def communication_bars(
        self, nccl: Iterable[TraceEvent], gloo: Iterable[TraceEvent]
    ) -> Iterator[LaneBar]:
        """Return the bars of communication, named by unit where FSDP2 requested it."""
        collectives = [(event, _nccl_name(event), self._launch(event)) for event in nccl]
        # gloo's collectives start in the order of their requests. It runs a reduce-scatter as an
        # all-reduce, so both share a queue.
        queues: dict[bool, deque[TraceEvent]] = {True: deque(), False: deque()}
        for request in self._requests:
            queues["reduce" in request["name"]].append(request)
        for event in gloo:
            queue = queues["reduce" in event["name"]]
            asked_by = queue.popleft() if queue else None
            collectives.append((event, (asked_by or event)["name"], asked_by))
        gathered: list[str] = []
        buckets = itertools.count()
        for event, name, asked_by in sorted(collectives, key=lambda each: each[0]["ts"]):
            what, unit = _collective_name(name), ""
            if asked_by and not (unit := _span_at(self._fsdp_requests, asked_by["ts"])):
                backward, unit = self._phase(asked_by) == "backward", self._unit(asked_by["ts"])
                if what == "all_reduce" and backward:
                    # DDP's buckets have numbers.
                    unit = f"bucket {next(buckets)}"
                elif what == "all_gather" and not backward:
                    gathered.append(unit)
                elif what == "all_gather" and gathered:
                    # FSDP1's backward pass gathers ahead of time, in the reverse order.
                    unit = gathered.pop()
            yield LaneBar("communication", unit, what, event["ts"], event["dur"])

    def _launch(self, event: TraceEvent) -> TraceEvent | None:
        """Return the call that launched an event on the GPU; None if it was before the step."""
        return self._launches.get(event["args"].get("correlation"))

    def _phase(self, event: TraceEvent) -> str:
        """Return the phase in which an event of these threads started."""
        phase: str = _last_before(self._intervals[event["tid"]], event["ts"]).phase
        return phase

    def _unit(self, moment: float, phase: str = "") -> str:
        """Return the unit whose forward or backward pass ran at this time."""
        unit: str = _last_before(self._units, moment)[1]
        return "" if phase == "optimizer" else unit


def _span_at(spans: Sequence[tuple[float, float, str]], moment: float) -> str:
    """Return the unit of the span, among some sorted by start, that holds a moment, or ""."""
    _, end, unit = _last_before(spans, moment)
    return unit if moment <= end else ""


def _last_before(found: Sequence[Any], moment: float) -> Any:
    """Return the last of some tuples, sorted by time, that is not after a moment, or the first."""
    return found[max(0, bisect_right(found, moment, key=itemgetter(0)) - 1)]


def _thread_intervals(events: Iterable[TraceEvent]) -> Iterator[_ThreadInterval]:
    """Cut one thread's time, but not that outside ranges, where a recorded range begins or ends."""
    # When each call ends, whether it computes, and its phase.
    stack: list[tuple[float, bool, str]] = []
    now, phase = 0.0, "forward"
    for event in [*events, {"name": "", "ts": math.inf, "dur": 0.0}]:
        while stack:
            end, busy, what = stack[-1]
            stop = min(end, event["ts"])
            if stop > now:
                yield _ThreadInterval(now, stop, busy, what)
                now = stop
            if end > event["ts"]:
                break
            stack.pop()
        now = event["ts"]
        name, inherited = event["name"], stack[-1][2] if stack else ""
        if name.startswith("Optimizer."):
            what, phase = "optimizer", "forward"
        elif name.startswith(_BACKWARD_PREFIXES):
            what = phase = "backward"
        elif not inherited and name.startswith((f"{FORWARD_MARK} ", "FSDP::root_pre_forward")):
            what = phase = "forward"
        else:
            what = inherited or phase
        busy = not name.startswith(_NON_COMPUTE_PREFIXES)
        stack.append((now + event["dur"], busy, "" if name == STEP_MARK else what))


def _unit_changes(marks: Iterable[tuple[str, str, TraceEvent]]) -> list[tuple[float, str]]:
    """Return which unit runs from which time on; after a nested unit, the outer one runs again."""
    moments = []
    for label, name, event in marks:
        if label in _UNIT_BEGINS_AT_START | _UNIT_ENDS_AT_START:
            moments.append((event["ts"], label in _UNIT_BEGINS_AT_START, name))
        if label in _UNIT_ENDS_AT_END:
            moments.append((event["ts"] + event["dur"], False, name))
    names, current, changes = {name for _, _, name in moments}, ROOT_UNIT, []
    # One tensor can be the output of a unit and of the unit around it, and the input of the next:
    # in the backward pass their marks come together, in this order. So the beginning of a unit
    # around the current one changes nothing, nor does the end of any other.
    for moment, begins, name in sorted(moments):
        around = [other for other in names if current.startswith(f"{other}.")]
        if begins and name not in (ROOT_UNIT, *around):
            current = name
        elif not begins and current == name:
            current = max(around, key=len, default=ROOT_UNIT)
        changes.append((moment, current))
    return changes


def unit_name(qualified_name: str | None) -> str:
    """Return a unit's name without checkpointing's wrappers; of several modules, the first's."""
    first = (qualified_name or "").split(", ")[0].replace("_checkpoint_wrapped_module", "")
    return first.replace("..", ".").strip(".") or ROOT_UNIT


def _merge_bars(bars: Iterable[LaneBar], waits: Sequence[float], gap_us: float) -> list[LaneBar]:
    """Merge consecutive compute of one unit and phase, unless a wait begins in the gap."""
    runs: list[LaneBar] = []
    for bar in sorted(bars, key=lambda bar: bar.start_us):
        last = runs[-1] if runs else bar
        waited = bisect_left(waits, last.end_us) < bisect_left(waits, bar.start_us)
        same = (last.name, last.phase) == (bar.name, bar.phase)
        if runs and same and bar.start_us - last.end_us <= gap_us and not waited:
            runs[-1] = replace(last, dur_us=max(last.end_us, bar.end_us) - last.start_us)
        else:
            runs.append(bar)
    return runs


def _nccl_name(event: TraceEvent) -> str:
    # Kernels such as ncclDevKernel_SendRecv serve several collectives; Kineto says for which.
    return str(event.get("args", {}).get("Collective name") or event["name"])


def _collective_name(name: str) -> str:
    """Return all_gather for c10d::_allgather_base_ and ncclDevKernel_AllGather_RING_LL alike."""
    plain = re.sub("[^a-z]", "", name.lower())
    known = (what for what in _COLLECTIVE_NAMES if what.replace("_", "") in plain)
    return next(known, "send_recv" if "sendrecv" in plain else "collective")
