"""Read what torch.profiler recorded of one training step on one rank: bars of compute and of communication.

    {"name": "aten::addmm", "cat": "cpu_op", "tid": 17, "ts": 104.2, "dur": 1.9, "args": {}}    microseconds

A trace names no unit where communication runs, on gloo's threads or NCCL's streams. It does where communication is
asked for: FSDP2 asks inside of ranges such as ``FSDP::all_gather (layers.2)``, and ``timeline.name_units`` leaves marks
for other techniques. So each collective is led back to the moment when this rank asked for it.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
Collective = tuple[Event, str, Event | None]  # on gloo's thread or the GPU, its name, and the call that asked for it
ROOT = "root"
STEP, WAIT, FORWARD, BACKWARD, BACKWARD_END = (
    f"labkit::{what}" for what in ("step", "wait", "forward", "backward", "backward_end")
)
GAP_US, KERNEL_GAP_US = 100.0, 10.0  # a unit's compute is one bar across shorter gaps in which nothing is waited for
_NOT_COMPUTE = (STEP, WAIT, "c10d::", "_c10d_functional::", "record_param_comms")
_WAITS = (WAIT, "_c10d_functional::wait_tensor")  # in a compiled program, the latter alone
_BACKWARD = ("autograd::engine", "Torch-Compiled Region: !")  # "!" is compiled autograd, on the caller's thread
_FSDP_RANGE = re.compile(r"FSDP::(\w+)(?: \((.*?)\))?(?: \[pg=.*\])?$")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather", "scatter", "reduce")
_GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_GPU = _GPU_WORK | {"gpu_user_annotation"}


@dataclass(frozen=True)
class Bar:
    """One stretch of a lane, in microseconds from the start of the step."""

    lane: str
    """``compute``, ``communication`` or ``exposed``."""
    unit: str
    """Name of the FSDP unit; ``bucket 0``, ... for all-reduces of a backward pass; "" for the optimizer."""
    what: str
    """forward, backward or optimizer; all_gather, reduce_scatter, all_reduce, ..."""
    start_us: float
    dur_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.dur_us


def read(path: Path) -> list[Event]:
    """The complete events of a chrome trace, plain or gzipped."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def step_and_bars(events: Sequence[Event]) -> tuple[float, list[Bar]]:
    """The length of the step in microseconds, and its bars, by start.

    Raises:
        ValueError: there is no step in the trace.
    """
    step = next((e for e in events if e["name"] == STEP and e.get("cat") != "gpu_user_annotation"), None)
    if step is None:
        raise ValueError(f"no range {STEP} among {len(events)} events: record the trace with timeline.record")
    inside = [e for e in events if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]]
    gpu = [e for e in inside if e.get("cat") in _GPU_WORK]
    gloo = [e for e in inside if e["name"].startswith("gloo:")]
    others = {e["tid"] for e in gloo}  # gloo's threads record operators as well
    asked = _Asked([e for e in inside if e.get("cat") not in _ON_GPU and e["tid"] not in others])
    nccl = [(e, e["name"], asked.launch(e)) for e in gpu if _is_nccl(e)]
    waits = sorted(e["ts"] for e in inside if e["name"] in _WAITS)
    compute = (
        _joined(_gpu_compute(gpu, asked), [], KERNEL_GAP_US) if gpu else _joined(_cpu_compute(asked), waits, GAP_US)
    )
    bars = [*compute, *_named([*nccl, *_gloo_calls(gloo, asked)], asked)]
    moved = [replace(bar, start_us=bar.start_us - step["ts"]) for bar in bars]
    return float(step["dur"]), sorted(moved, key=lambda bar: bar.start_us)


class _Stretch(NamedTuple):
    """A stretch of one thread in which the innermost recorded range is the same."""

    start: float
    end: float
    busy: bool
    what: str


class _Asked:
    """What this rank's own threads did, and when: phases, units, launches of kernels, calls for collectives."""

    def __init__(self, events: Sequence[Event]):
        threads: dict[Any, list[Event]] = defaultdict(list)
        for event in events:
            threads[event["tid"]].append(event)
        self.stretches = {tid: list(_stretches(own)) for tid, own in threads.items()}
        self.calls = sorted((e for e in events if e["name"].startswith("c10d::")), key=lambda e: e["ts"])
        self._launches = {e["args"].get("correlation"): e for e in events if str(e.get("cat")).startswith("cuda_")}
        self._moments = sorted(_unit_moments(events))
        self._units = list(_current_units(self._moments))
        self._fsdp = sorted(
            (e["ts"], e["ts"] + e["dur"], _unit_of(found[2])) for e in events
            if (found := _FSDP_RANGE.match(e["name"])) and found[1] in ("all_gather", "post_backward_reduce")
        )  # fmt: skip

    def launch(self, event: Event) -> Event | None:
        """The call that put an event onto the GPU; None where it was made before the step."""
        return self._launches.get(event["args"].get("correlation"))

    def what(self, event: Event) -> str:
        """The phase in which an event of these threads started."""
        stretches = self.stretches[event["tid"]]
        index = bisect_right(stretches, event["ts"], key=lambda stretch: stretch.start) - 1
        return stretches[max(index, 0)].what

    def unit(self, moment: float) -> str:
        """Whose forward or backward pass ran at this moment."""
        index = bisect_right(self._moments, moment, key=lambda found: found[0]) - 1
        return self._units[index] if index >= 0 else ROOT

    def fsdp_unit(self, moment: float) -> str | None:
        """The unit for which FSDP2 asked for communication at this moment, if it did."""
        index = bisect_right(self._fsdp, moment, key=lambda found: found[0]) - 1
        return self._fsdp[index][2] if index >= 0 and moment <= self._fsdp[index][1] else None


def _stretches(events: Iterable[Event]) -> Iterator[_Stretch]:
    """Cut one thread's time where a recorded range begins or ends; time in no range is left out."""
    stack: list[tuple[float, bool, str]] = []  # end, whether it computes, phase
    now, phase = 0.0, "forward"

    def until(moment: float) -> Iterator[_Stretch]:
        nonlocal now
        while stack:
            end, busy, what = stack[-1]
            if min(end, moment) > now:
                yield _Stretch(now, min(end, moment), busy, what)
                now = min(end, moment)
            if end > moment:
                break
            stack.pop()
        now = moment

    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        yield from until(event["ts"])
        name, inherited = event["name"], stack[-1][2] if stack else ""
        if name.startswith("Optimizer."):
            what, phase = "optimizer", "forward"
        elif name.startswith(_BACKWARD):
            what = phase = "backward"
        elif not inherited and name.startswith((FORWARD, "FSDP::root_pre_forward")):
            what = phase = "forward"
        else:
            what = inherited or phase
        stack.append((event["ts"] + event["dur"], not name.startswith(_NOT_COMPUTE), "" if name == STEP else what))
    yield from until(max((end for end, _, _ in stack), default=now))


def _unit_moments(events: Iterable[Event]) -> Iterator[tuple[float, int, str]]:
    """When a unit begins (1) or ends (0) its forward or backward pass."""
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        label, _, name = event["name"].partition(" ")
        if label == FORWARD:
            yield start, 1, name
            yield end, 0, name
        elif label in (BACKWARD, BACKWARD_END):
            yield start, int(label == BACKWARD), name
        elif found := _FSDP_RANGE.match(event["name"]):
            if found[1] in ("pre_forward", "pre_backward"):
                yield start, 1, _unit_of(found[2])
            elif found[1] in ("post_forward", "post_backward_reduce"):
                yield end, 0, _unit_of(found[2])


def _current_units(moments: Sequence[tuple[float, int, str]]) -> Iterator[str]:
    """The unit at work from each of these moments on; what ends gives way to the unit that it lies in.

    One tensor can be the output of a unit, of the unit around it, and the input of the next: in the backward pass their
    marks come together, in this order. So the beginning of a unit around the present one changes nothing, nor does the
    end of any other.
    """
    names, current = {name for _, _, name in moments}, ROOT
    for _, begins, name in moments:
        around = [other for other in names if current.startswith(f"{other}.")]
        if begins and name not in (ROOT, *around):
            current = name
        elif not begins and current == name:
            current = max(around, key=len, default=ROOT)
        yield current


def _unit_of(qualified_name: str | None) -> str:
    """The unit's name: without checkpointing's wrappers, the first module's where several make one unit."""
    first = (qualified_name or "").split(", ")[0].replace("_checkpoint_wrapped_module", "")
    return first.replace("..", ".").strip(".") or ROOT


def _cpu_compute(asked: _Asked) -> list[Bar]:
    return [
        Bar("compute", "" if what == "optimizer" else asked.unit(start), what, start, end - start)
        for stretches in asked.stretches.values()
        for start, end, busy, what in stretches
        if busy
    ]


def _gpu_compute(events: Iterable[Event], asked: _Asked) -> list[Bar]:
    bars = []
    for event in events:
        if _is_nccl(event):
            continue
        call = asked.launch(event)
        what = asked.what(call) if call else "forward"
        unit = "" if what == "optimizer" else asked.unit(call["ts"]) if call else ROOT
        bars.append(Bar("compute", unit, what, event["ts"], event["dur"]))
    return bars


def _joined(bars: Iterable[Bar], waits: Sequence[float], gap_us: float) -> list[Bar]:
    """One bar for each run of compute of the same unit and phase; ``waits`` begin at these moments."""
    runs: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.start_us):
        last = runs[-1] if runs else bar
        gap_starts, gap_ends = last.end_us, bar.start_us
        waited = bisect_left(waits, gap_starts) < bisect_left(waits, gap_ends)
        same = (last.unit, last.what) == (bar.unit, bar.what)
        if runs and same and gap_ends - gap_starts <= gap_us and not waited:
            runs[-1] = replace(last, dur_us=max(last.end_us, bar.end_us) - last.start_us)
        else:
            runs.append(bar)
    return runs


def _is_nccl(event: Event) -> bool:
    return "nccl" in event["name"].lower()


def _collective_of(name: str) -> str:
    """``all_gather`` for c10d::_allgather_base_, gloo:all_gather and ncclDevKernel_AllGather_RING_LL alike."""
    plain = re.sub("[^a-z]", "", name.lower())
    return next((what for what in _COLLECTIVES if what.replace("_", "") in plain), plain)


def _gloo_calls(events: Iterable[Event], asked: _Asked) -> Iterator[Collective]:
    """The stretches of gloo's threads with the calls that asked for them: first come, first served.

    gloo carries a reduce-scatter out as an all-reduce, so both stand in one line.
    """
    lines: dict[bool, deque[Event]] = {True: deque(), False: deque()}
    for call in asked.calls:
        lines["reduce" in call["name"]].append(call)
    for event in sorted(events, key=lambda e: e["ts"]):
        line = lines["reduce" in event["name"]]
        asked_by = line.popleft() if line else None
        yield event, (asked_by or event)["name"], asked_by


def _named(collectives: Iterable[Collective], asked: _Asked) -> Iterator[Bar]:
    """Communication's bars, named by FSDP2 where it asked for them.

    FSDP1 names nothing; in the backward pass it gathers its units in the reverse of the forward pass's order, ahead of
    time. All-reduces of a backward pass are numbered: they are DDP's buckets.
    """
    gathered: list[str] = []
    buckets = 0
    for event, name, call in sorted(collectives, key=lambda found: found[0]["ts"]):
        what = _collective_of(name)
        unit = asked.fsdp_unit(call["ts"]) if call else ""
        if unit is None and call:
            unit, backward = asked.unit(call["ts"]), asked.what(call) == "backward"
            if what == "all_reduce" and backward:
                unit, buckets = f"bucket {buckets}", buckets + 1
            elif what == "all_gather" and not backward:
                gathered.append(unit)
            elif what == "all_gather" and gathered:
                unit = gathered.pop()
        yield Bar("communication", unit or "", what, event["ts"], event["dur"])
