"""Show where a step's communication is hidden: profile one step, and turn it into bars named by
module.

A rank has two lanes. *Communication* is the work of gloo's threads or of NCCL's kernels. *Compute*
is every other kernel on a GPU; on a CPU, it is everything the profiler sees this rank do, except
requesting a collective and waiting for it. *Exposed* is the communication during which the same
rank computes nothing:

    compute        [forward 1]          [forward 2]
    communication             [gather 2]              exposed: the rank waits for what it needs next

    compute        [forward 1][forward 2]
    communication   [gather 2]                        hidden: gathered while unit 1 computed

A collective lasts until its last rank has arrived, so one late rank shows as long communication on
all the others. The profiler slows a step down: compare timelines with timelines, and take durations
from timed steps.

In the trace, communication runs on gloo's threads or NCCL's streams and names no unit:

    {"name": "aten::addmm", "cat": "cpu_op", "tid": 17, "ts": 104.2, "dur": 1.9, "args": {}}  # µs

The request for it does name one: FSDP2 requests inside ranges such as ``FSDP::all_gather
(layers.2)``, and ``name_units`` marks the units of other techniques. So each collective is assigned
to the unit that was running when this rank requested it.
"""

import contextlib
import gzip
import json
import os
import re
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from labkit.runs import private_files
from labkit.runs.records import RecordWriter
from labkit.session.meter import patch_attribute
from labkit.theory.overlap import uncovered_in_turn
from labkit.torch_private import COMPILED_AUTOGRAD_MODULE, tree_leaves

TraceEvent = dict[str, Any]
# The record on gloo's thread or the GPU, its name, and the call that requested it.
CollectiveSpan = tuple[TraceEvent, str, TraceEvent | None]
ROOT_UNIT = "root"
STEP_MARK, WAIT_MARK, FORWARD_MARK, BACKWARD_MARK, BACKWARD_END_MARK = (
    f"labkit::{what}" for what in ("step", "wait", "forward", "backward", "backward_end")
)
# Shorter gaps, in which nothing is waited for, do not split the compute of a unit.
CPU_GAP_US, KERNEL_GAP_US = (
    100.0,
    10.0,
)
_NON_COMPUTE_PREFIXES = (STEP_MARK, WAIT_MARK, "c10d::", "_c10d_functional::", "record_param_comms")
# A compiled program records only the latter.
_WAIT_NAMES = (
    WAIT_MARK,
    "_c10d_functional::wait_tensor",
)
# "!" marks compiled autograd on the caller's thread.
_BACKWARD_PREFIXES = (
    "autograd::engine",
    "Torch-Compiled Region: !",
)
FSDP_RANGE_PATTERN = re.compile(r"FSDP::(\w+)(?: \((.*?)\))?(?: \[pg=.*\])?$")
_COLLECTIVE_NAMES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "reduce",
)
_GPU_WORK_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
_GPU_CATEGORIES = _GPU_WORK_CATEGORIES | {"gpu_user_annotation"}


@dataclass(frozen=True)
class LaneBar:
    """One bar of a lane, in microseconds from the start of the step."""

    lane: str
    """``compute``, ``communication`` or ``exposed``."""
    name: str
    """Of the unit, one or more modules; ``bucket 0``, ... for all-reduces of a backward pass; ""
    for the optimizer.
    """
    phase: str
    """forward, backward or optimizer; of communication the collective: all_gather, reduce_scatter,
    all_reduce, ...
    """
    start_us: float
    dur_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.dur_us


@dataclass
class StepProfile:
    """The profile of one step of this rank; empty until the step ends."""

    bars: list[LaneBar] = field(default_factory=list)
    step_us: float = 0.0

    @property
    def communication_us(self) -> float:
        """The microseconds during which any communication was running."""
        return exposed_us(bar for bar in self.bars if bar.lane == "communication")

    @property
    def exposed_us(self) -> float:
        """The microseconds of communication during which this rank computed nothing."""
        return exposed_us(self.bars)


def exposed_bars(bars: Iterable[LaneBar]) -> list[LaneBar]:
    """Return the parts of communication that no compute covers.

    Where collectives overlap, a part counts once and has the name of the one that started first.
    """
    bars = sorted(bars, key=lambda bar: bar.start_us)
    covers = [(bar.start_us, bar.end_us) for bar in bars if bar.lane == "compute"]
    sent = [bar for bar in bars if bar.lane == "communication"]
    open_parts = uncovered_in_turn([(bar.start_us, bar.end_us) for bar in sent], covers)
    return [
        replace(sent[place], lane="exposed", start_us=start, dur_us=end - start)
        for place, start, end in open_parts
    ]


def exposed_us(bars: Iterable[LaneBar]) -> float:
    """Return the microseconds of communication that no compute covers; simultaneous collectives
    count once.
    """
    return sum(bar.dur_us for bar in exposed_bars(bars))


@contextlib.contextmanager
def profile_step(
    path: Path | None = None,
    *,
    units: Mapping[str, Sequence[nn.Module]] | None = None,
    device: str = "cpu",
) -> Iterator[StepProfile]:
    """Profile the step inside the block; the yielded StepProfile is filled at its end. A
    collective: all ranks start together.

    Args:
        path: file for the raw trace, which Perfetto opens (ui.perfetto.dev); gzipped if it ends in
            ``.gz``; None saves none.
        units: modules, by the names of their bars. FSDP2's units are named by torch already, except
            for a forward pass that sleeps, which is no operator. In a compiled pass, units cannot
            be told apart.
        device: ``cuda`` records kernels as well.
    """
    recording = StepProfile()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    profiler = profile(activities=activities)
    with contextlib.ExitStack() as stack:
        with _silence_stderr():
            profiler.start()
        stack.callback(_silence_stderr()(profiler.stop))
        stack.enter_context(name_units(units or {}))
        # A blocking call waits there as well.
        stack.enter_context(patch_attribute(dist.Work, "wait", _add_wait_range))
        if dist.is_initialized():
            # The profiler takes each rank a different time to start.
            dist.barrier()
        with record_function(STEP_MARK):
            yield recording
            if device == "cuda":
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        raw = path or Path(folder) / "trace.json"
        with private_files.open_file(raw, "wb"):
            # torch overwrites an existing file.
            pass
        profiler.export_chrome_trace(str(raw))
        recording.step_us, recording.bars = step_us_and_bars(read_trace(raw))


def write_profile(recording: StepProfile, writer: RecordWriter, step: int) -> None:
    """Write a profile as records: its bars, the exposed parts as a lane of their own, and the
    sums.
    """
    for bar in [*recording.bars, *exposed_bars(recording.bars)]:
        writer.write("bar", step=step, **asdict(bar))
    amounts = {
        "profiled_step": recording.step_us,
        "communication": recording.communication_us,
        "exposed_communication": recording.exposed_us,
    }
    for name, amount_us in amounts.items():
        writer.write("scalar", name, step, value=amount_us / 1000, unit="ms")


@contextlib.contextmanager
def name_units(units: Mapping[str, Sequence[nn.Module]]) -> Iterator[None]:
    """Mark in the profile when each unit's forward pass runs, and where its backward pass begins
    and ends.
    """
    handles = []
    for name, modules in units.items():
        for module in modules:
            ranges: list[Any] = []

            def begin_forward(
                _: Any, args: Any, kwargs: Any, name: str = name, ranges: list[Any] = ranges
            ) -> None:
                ranges.append(record_function(f"{FORWARD_MARK} {name}"))
                ranges[-1].__enter__()
                _mark_gradients((args, kwargs), f"{BACKWARD_END_MARK} {name}")

            def end_forward(
                _: Any, args: Any, output: Any, name: str = name, ranges: list[Any] = ranges
            ) -> None:
                _mark_gradients(output, f"{BACKWARD_MARK} {name}")
                ranges.pop().__exit__(None, None, None)

            handles.append(
                module.register_forward_pre_hook(begin_forward, prepend=True, with_kwargs=True)
            )
            handles.append(module.register_forward_hook(end_forward))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mark_gradients(tensors: Any, label: str) -> None:
    """Mark the moment in the trace at which the gradient of these tensors is known.

    Does nothing in a compiled backward pass: hooks are part of its graph, which would be compiled
    again within the profiled step.
    """
    compiled_autograd = sys.modules.get(COMPILED_AUTOGRAD_MODULE)
    if getattr(compiled_autograd, "compiled_autograd_enabled", False):
        return

    def mark_gradient(_: Tensor) -> None:
        with record_function(label):
            pass

    for tensor in tree_leaves(tensors):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(mark_gradient)


def _add_wait_range(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, whose calls the profiler records as a wait for a collective."""

    def wait_in_range(*args: Any, **kwargs: Any) -> Any:
        with record_function(WAIT_MARK):
            return wait(*args, **kwargs)

    return wait_in_range


@contextlib.contextmanager
def _silence_stderr() -> Iterator[None]:
    """Drop what is written to file descriptor 2 inside the block.

    kineto prints each start and stop, at any log level.
    """
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
    """Return the complete events of a Chrome trace, plain or gzipped."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def step_us_and_bars(events: Sequence[TraceEvent]) -> tuple[float, list[LaneBar]]:
    """Return the length of the step in microseconds, and its bars, sorted by start.

    Raises:
        ValueError: there is no step in the trace.
    """
    step = next(
        (e for e in events if e["name"] == STEP_MARK and e.get("cat") != "gpu_user_annotation"),
        None,
    )
    if step is None:
        raise ValueError(
            f"no range {STEP_MARK} among {len(events)} events: record the trace with"
            " timeline.record"
        )
    inside = [e for e in events if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]]
    gpu = [e for e in inside if e.get("cat") in _GPU_WORK_CATEGORIES]
    gloo = [e for e in inside if e["name"].startswith("gloo:")]
    # Gloo's threads record operators as well.
    others = {e["tid"] for e in gloo}
    asked = _HostActivity(
        [e for e in inside if e.get("cat") not in _GPU_CATEGORIES and e["tid"] not in others]
    )
    nccl = [(e, e["name"], asked.launch_call(e)) for e in gpu if _is_nccl(e)]
    waits = sorted(e["ts"] for e in inside if e["name"] in _WAIT_NAMES)
    compute = (
        _merge_bars(_gpu_compute_bars(gpu, asked), [], KERNEL_GAP_US)
        if gpu
        else _merge_bars(_cpu_compute_bars(asked), waits, CPU_GAP_US)
    )
    bars = [*compute, *_communication_bars([*nccl, *_gloo_collectives(gloo, asked)], asked)]
    moved = [replace(bar, start_us=bar.start_us - step["ts"]) for bar in bars]
    return float(step["dur"]), sorted(moved, key=lambda bar: bar.start_us)


class _ThreadInterval(NamedTuple):
    """An interval of one thread in which the innermost recorded range stays the same."""

    start: float
    end: float
    busy: bool
    what: str


class _HostActivity:
    """What this rank's own threads did, and when: phases, units, kernel launches, and requests for
    collectives.
    """

    def __init__(self, events: Sequence[TraceEvent]):
        threads: dict[Any, list[TraceEvent]] = defaultdict(list)
        for event in events:
            threads[event["tid"]].append(event)
        self.stretches = {tid: list(_thread_intervals(own)) for tid, own in threads.items()}
        self.calls = sorted(
            (e for e in events if e["name"].startswith("c10d::")), key=lambda e: e["ts"]
        )
        self._launches = {
            e["args"].get("correlation"): e for e in events if str(e.get("cat")).startswith("cuda_")
        }
        moments = sorted(_unit_moments(events))
        self._units = [
            (moment, unit)
            for (moment, _, _), unit in zip(moments, _current_units(moments), strict=True)
        ]
        ranges = [
            (e["ts"], e["ts"] + e["dur"], FSDP_RANGE_PATTERN.match(e["name"])) for e in events
        ]
        asking = ("all_gather", "post_backward_reduce")
        self._fsdp = sorted(
            (start, end, unit_name(it[2])) for start, end, it in ranges if it and it[1] in asking
        )

    def launch_call(self, event: TraceEvent) -> TraceEvent | None:
        """Return the call that launched an event on the GPU; None if it was launched before the
        step.
        """
        return self._launches.get(event["args"].get("correlation"))

    def phase_for_event(self, event: TraceEvent) -> str:
        """Return the phase in which an event of these threads started."""
        stretches = self.stretches[event["tid"]]
        return (_last_before(stretches, event["ts"]) or stretches[0]).what

    def unit_at(self, moment: float) -> str:
        """Return the unit whose forward or backward pass ran at this time."""
        found = _last_before(self._units, moment)
        return found[1] if found else ROOT_UNIT

    def fsdp_unit_at(self, moment: float) -> str | None:
        """Return the unit for which FSDP2 requested communication at this time, or "" for none."""
        found = _last_before(self._fsdp, moment)
        return found[2] if found and moment <= found[1] else None


def _last_before(found: Sequence[Any], moment: float) -> Any:
    """Return the last tuple whose time, its first value, is not after this one; None for none.

    The tuples are sorted by time.
    """
    index = bisect_right(found, moment, key=itemgetter(0)) - 1
    return found[index] if index >= 0 else None


def _thread_intervals(events: Iterable[TraceEvent]) -> Iterator[_ThreadInterval]:
    """Cut one thread's time wherever a recorded range begins or ends; time outside ranges is left
    out.
    """
    # When each call ends, whether it computes, and its phase.
    stack: list[tuple[float, bool, str]] = []
    now, phase = 0.0, "forward"

    def intervals_until(moment: float) -> Iterator[_ThreadInterval]:
        nonlocal now
        while stack:
            end, busy, what = stack[-1]
            if min(end, moment) > now:
                yield _ThreadInterval(now, min(end, moment), busy, what)
                now = min(end, moment)
            if end > moment:
                break
            stack.pop()
        now = moment

    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        yield from intervals_until(event["ts"])
        name, inherited = event["name"], stack[-1][2] if stack else ""
        if name.startswith("Optimizer."):
            what, phase = "optimizer", "forward"
        elif name.startswith(_BACKWARD_PREFIXES):
            what = phase = "backward"
        elif not inherited and name.startswith((FORWARD_MARK, "FSDP::root_pre_forward")):
            what = phase = "forward"
        else:
            what = inherited or phase
        stack.append(
            (
                event["ts"] + event["dur"],
                not name.startswith(_NON_COMPUTE_PREFIXES),
                "" if name == STEP_MARK else what,
            )
        )
    yield from intervals_until(max((end for end, _, _ in stack), default=now))


def _unit_moments(events: Iterable[TraceEvent]) -> Iterator[tuple[float, int, str]]:
    """Return when each unit begins (1) or ends (0) its forward or backward pass."""
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        label, _, name = event["name"].partition(" ")
        if label == FORWARD_MARK:
            yield start, 1, name
            yield end, 0, name
        elif label in (BACKWARD_MARK, BACKWARD_END_MARK):
            yield start, int(label == BACKWARD_MARK), name
        elif found := FSDP_RANGE_PATTERN.match(event["name"]):
            if found[1] in ("pre_forward", "pre_backward"):
                yield start, 1, unit_name(found[2])
            elif found[1] in ("post_forward", "post_backward_reduce"):
                yield end, 0, unit_name(found[2])


def _current_units(moments: Sequence[tuple[float, int, str]]) -> Iterator[str]:
    """Return which unit runs from each of these times on; after a nested unit, the outer one runs
    again.

    One tensor can be the output of a unit, the output of the unit around it, and the input of the
    next: in the backward pass their marks come together, in this order. So the beginning of a unit
    around the current one changes nothing, nor does the end of any other.
    """
    names, current = {name for _, _, name in moments}, ROOT_UNIT
    for _, begins, name in moments:
        around = [other for other in names if current.startswith(f"{other}.")]
        if begins and name not in (ROOT_UNIT, *around):
            current = name
        elif not begins and current == name:
            current = max(around, key=len, default=ROOT_UNIT)
        yield current


def unit_name(qualified_name: str | None) -> str:
    """Return the unit's name without checkpointing's wrappers; the first module's name where
    several form one unit.
    """
    first = (qualified_name or "").split(", ")[0].replace("_checkpoint_wrapped_module", "")
    return first.replace("..", ".").strip(".") or ROOT_UNIT


def _cpu_compute_bars(asked: _HostActivity) -> list[LaneBar]:
    return [
        LaneBar(
            "compute", "" if what == "optimizer" else asked.unit_at(start), what, start, end - start
        )
        for stretches in asked.stretches.values()
        for start, end, busy, what in stretches
        if busy
    ]


def _gpu_compute_bars(events: Iterable[TraceEvent], asked: _HostActivity) -> list[LaneBar]:
    bars = []
    for event in events:
        if _is_nccl(event):
            continue
        call = asked.launch_call(event)
        what = asked.phase_for_event(call) if call else "forward"
        unit = "" if what == "optimizer" else asked.unit_at(call["ts"]) if call else ROOT_UNIT
        bars.append(LaneBar("compute", unit, what, event["ts"], event["dur"]))
    return bars


def _merge_bars(bars: Iterable[LaneBar], waits: Sequence[float], gap_us: float) -> list[LaneBar]:
    """Merge consecutive compute of the same unit and phase into one bar; ``waits`` begin at these
    times.
    """
    runs: list[LaneBar] = []
    for bar in sorted(bars, key=lambda bar: bar.start_us):
        last = runs[-1] if runs else bar
        gap_starts, gap_ends = last.end_us, bar.start_us
        waited = bisect_left(waits, gap_starts) < bisect_left(waits, gap_ends)
        same = (last.name, last.phase) == (bar.name, bar.phase)
        if runs and same and gap_ends - gap_starts <= gap_us and not waited:
            runs[-1] = replace(last, dur_us=max(last.end_us, bar.end_us) - last.start_us)
        else:
            runs.append(bar)
    return runs


def _is_nccl(event: TraceEvent) -> bool:
    return "nccl" in event["name"].lower()


def _collective_name(name: str) -> str:
    """Return ``all_gather`` for c10d::_allgather_base_, gloo:all_gather and
    ncclDevKernel_AllGather_RING_LL alike.
    """
    plain = re.sub("[^a-z]", "", name.lower())
    return next((what for what in _COLLECTIVE_NAMES if what.replace("_", "") in plain), plain)


def _gloo_collectives(
    events: Iterable[TraceEvent], asked: _HostActivity
) -> Iterator[CollectiveSpan]:
    """Return the collectives on gloo's threads with the calls that requested them, in
    first-in-first-out order.

    gloo runs a reduce-scatter as an all-reduce, so both share a queue.
    """
    lines: dict[bool, deque[TraceEvent]] = {True: deque(), False: deque()}
    for call in asked.calls:
        lines["reduce" in call["name"]].append(call)
    for event in sorted(events, key=lambda e: e["ts"]):
        line = lines["reduce" in event["name"]]
        asked_by = line.popleft() if line else None
        yield event, (asked_by or event)["name"], asked_by


def _communication_bars(
    collectives: Iterable[CollectiveSpan], asked: _HostActivity
) -> Iterator[LaneBar]:
    """Return the bars of communication, named by unit where FSDP2 requested it.

    FSDP1 names nothing; its backward pass gathers units in the reverse order of the forward pass,
    ahead of time. All-reduces in a backward pass are numbered: they are DDP's buckets.
    """
    gathered: list[str] = []
    buckets = 0
    for event, name, call in sorted(collectives, key=lambda found: found[0]["ts"]):
        what = _collective_name(name)
        unit = asked.fsdp_unit_at(call["ts"]) if call else ""
        if unit is None and call:
            unit, backward = asked.unit_at(call["ts"]), asked.phase_for_event(call) == "backward"
            if what == "all_reduce" and backward:
                unit, buckets = f"bucket {buckets}", buckets + 1
            elif what == "all_gather" and not backward:
                gathered.append(unit)
            elif what == "all_gather" and gathered:
                unit = gathered.pop()
        yield LaneBar("communication", unit or "", what, event["ts"], event["dur"])
