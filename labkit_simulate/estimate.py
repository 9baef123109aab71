"""Estimate the step time of a simulated rank on any hardware.

    estimate_rank_step(result, "h100-8x").time.step_s

The recorded events (event_recorder.py) do not depend on hardware, so one simulation serves many
kinds of hosts.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from labkit.errors import ParameterError
from labkit.runs.records import RecordWriter
from labkit.runs.result import RunResult
from labkit.theory.links import MEASURED_LINKS, NCCL_NETWORK_STEP_US
from labkit_simulate.artifacts import ARTIFACT_EVENTS
from labkit_simulate.theory.hardware import Hardware, get_hardware
from labkit_simulate.theory.step_time import (
    COMMUNICATION_STREAM,
    COMPUTE_STREAM,
    BackwardEvent,
    CollectiveEvent,
    ComputeEvent,
    Event,
    Group,
    Operator,
    StepTime,
    Task,
    TimelineBar,
    WaitEvent,
    collective_s,
    make_group,
    operator_s,
    schedule_tasks,
    scheduled_s,
    tasks_from_events,
)

COMPUTE_ERROR = 1.2
"""Nine in ten held-out steps that hide their network are met within this factor."""
LINK_ERROR = 1.25
"""Held-out all-reduces are met within this factor, see benchmarks/network.py."""
UNSEEN_NETWORK_ERROR = 2.4
"""How far off all-reduces between hosts are, in the median, if none of them was measured."""
KNOWN_LATENCIES_US = (NCCL_NETWORK_STEP_US, 1e6 * MEASURED_LINKS["b200-8x"].between.alpha_s)
"""Of a step between hosts: NCCL's constant, and the only one that was measured."""
TOUCHING_S = 1e-9
"""Bars that are no farther apart follow one another."""


@dataclass(frozen=True)
class RankStepEstimate:
    """Estimated step of a simulated rank.

    Attributes:
        hardware: the hardware.
        time: the step on its time line.
        model_flops: FLOPs of a rank's matrix products that the model needs: without recomputation,
            with attention counted in full.
        dtype: number type of most multiplications.
        low_s: least seconds of the step that held-out residuals allow.
        high_s: most seconds of it.
    """

    hardware: Hardware
    time: StepTime
    model_flops: float
    dtype: str
    low_s: float
    high_s: float

    @property
    def model_flops_share(self) -> float:
        """Model FLOPs utilisation (MFU), from 0 to 1; 0 without matrix products."""
        if not self.model_flops:
            return 0.0
        return self.time.model_flops_share(
            self.model_flops, self.hardware.peak_flops_per_s(self.dtype)
        )

    @property
    def record_values(self) -> dict[str, tuple[float, str]]:
        """Return the numbers of the record by name, with units."""
        time = self.time
        return {
            "reckoned_step_s": (time.step_s, "s"),
            "reckoned_step_low_s": (self.low_s, "s"),
            "reckoned_step_high_s": (self.high_s, "s"),
            "reckoned_compute_s": (time.compute_s, "s"),
            "reckoned_communication_s": (time.communication_s, "s"),
            "reckoned_exposed_s": (time.exposed_s, "s"),
            "reckoned_overlapped_s": (time.overlap_s, "s"),
            "reckoned_model_flops": (self.model_flops, "FLOP"),
            "reckoned_model_flops_share": (self.model_flops_share, ""),
        }


@dataclass(frozen=True)
class StepEvents:
    """Recorded events of a simulated rank's step.

    Attributes:
        model_flops: see ``RankStepEstimate``.
        groups: ranks of each process group.
        events: in order, see event_recorder.py.
    """

    model_flops: float
    groups: list[list[int]]
    events: list[dict[str, Any]]

    @property
    def collective_calls(self) -> list[dict[str, Any]]:
        """Collectives and point-to-point messages."""
        return [event for event in self.events if "call" in event]

    @property
    def operator_counts(self) -> Iterator[tuple[Operator, int]]:
        """Operators and how often each ran, per stretch of work."""
        for event in self.events:
            for *operator, count in event.get("operators", ()):
                yield Operator(*operator), count


def read_events(result: RunResult, rank: int | None = None) -> StepEvents:
    """Read the events of a simulated rank's step.

    Args:
        result: of ``labkit.simulate``.
        rank: a simulated rank; by default the first.

    Raises:
        LabError: the rank was not simulated, or took no step.
    """
    chosen = min(result.active_ranks) if rank is None else rank
    head, *events = map(json.loads, result.ranks[chosen].artifact(ARTIFACT_EVENTS).splitlines())
    return StepEvents(head["model_flops"], head["groups"], events)


def estimate_rank_step(
    result: RunResult,
    hosts: str | Hardware,
    rank: int | None = None,
    ranks_per_host: int | None = None,
    events: StepEvents | None = None,
) -> RankStepEstimate:
    """Estimate the step time of a simulated rank.

    Args:
        result: of ``labkit.simulate``.
        hosts: hardware, or its name, such as "h100-8x".
        rank: a simulated rank; by default the first.
        ranks_per_host: by default as in the simulation.
        events: those of the rank, if they have been read already.

    Raises:
        ParameterError: no such hardware, or ranks that do not fill its hosts.
        LabError: the rank was not simulated, or took no step.
        ValueError: the hardware has no rate for the dtype of a product.
    """
    kind = resolve_hardware(hosts)
    done = read_events(result, rank) if events is None else events
    on_host = ranks_on_each_host(
        result.world_size, ranks_per_host or result.info["ranks_per_host"], kind
    )
    machine = kind.for_rank(on_host)
    groups = [make_group(ranks, on_host) for ranks in done.groups]
    seconds_of = operator_timer(machine)

    def tasks_on(hardware: Hardware) -> list[Task]:
        return tasks_from_events(
            [event_for_hardware(event, groups, hardware, seconds_of) for event in done.events]
        )

    tasks = tasks_on(machine)
    crossing = {
        f"{COMMUNICATION_STREAM} {at}" for at, group in enumerate(groups) if group.hosts > 1
    }
    overlaps = not machine.shared
    time = schedule_tasks(tasks, overlaps=overlaps)
    quick, slow = (tasks if each is machine else tasks_on(each) for each in known_networks(machine))
    unseen: set[str] = set() if machine.tuning.network_measured else crossing
    low_s, high_s = (
        scheduled_s(tasks, seconds, overlaps=overlaps)
        for seconds in error_bounds(tasks, quick, slow, unseen)
    )
    flops: Counter[str] = Counter()
    for operator, count in done.operator_counts:
        flops[operator.dtype] += int(count * operator.flops)
    dtype = max(flops, key=lambda name: flops[name], default="float32")
    return RankStepEstimate(machine, time, done.model_flops, dtype, low_s=low_s, high_s=high_s)


def known_networks(machine: Hardware) -> list[Hardware]:
    """Return the hardware with the quickest and with the slowest network that is known.

    Both are the hardware itself if its network was measured.
    """
    if machine.tuning.network_measured:
        return [machine, machine]
    return [machine.with_network(latency_us=each) for each in KNOWN_LATENCIES_US]


def error_bounds(
    tasks: Sequence[Task], quick: Sequence[Task], slow: Sequence[Task], unseen: set[str]
) -> tuple[list[float], list[float]]:
    """Return the seconds of the tasks as short and as long as held-out residuals allow.

    Args:
        tasks: with their seconds on the hardware.
        quick: the same on the quickest network that is known.
        slow: the same on the slowest.
        unseen: streams whose network nobody measured. It may be off by as much as others were, and
            may be as quick or as slow as any that is known.
    """
    low, high = [], []
    for task, least, most in zip(tasks, quick, slow, strict=True):
        if task.stream == COMPUTE_STREAM:
            shortest, longest = task.seconds / COMPUTE_ERROR, task.seconds * COMPUTE_ERROR
        else:
            shortest, longest = least.seconds / LINK_ERROR, most.seconds * LINK_ERROR
        if task.stream in unseen:
            shortest = min(shortest, task.seconds / UNSEEN_NETWORK_ERROR)
            longest = max(longest, task.seconds * UNSEEN_NETWORK_ERROR)
        low.append(shortest)
        high.append(longest)
    return low, high


def resolve_hardware(hosts: Any) -> Hardware:
    """Return the hardware of this name; raise ParameterError with all names for an unknown one."""
    if isinstance(hosts, Hardware):
        return hosts
    try:
        return get_hardware(hosts)
    except (ValueError, TypeError) as error:
        raise ParameterError(str(error)) from None


def ranks_on_each_host(world_size: int, ranks_per_host: int, kind: Hardware) -> int:
    """Return the ranks per host; raise ParameterError if hosts are partly filled or overfull."""
    on_host = min(world_size, ranks_per_host)
    if world_size % on_host:
        rest = f"{world_size} % {on_host} = {world_size % on_host}"
        raise ParameterError(
            f"{world_size} ranks do not fill hosts of {on_host} ({kind.name}): {rest}"
        )
    try:
        kind.for_rank(on_host)
    except ValueError as error:
        raise ParameterError(str(error)) from None
    return on_host


def event_for_hardware(
    event: Mapping[str, Any],
    groups: Sequence[Group],
    machine: Hardware,
    seconds_of: Callable[..., float],
) -> Event:
    """Give a recorded event its duration on this hardware; ``seconds_of`` is its operators'."""
    if "work" in event:
        seconds = sum(count * seconds_of(*fields) for *fields, count in event["operators"])
        return ComputeEvent(f"{event['phase']} {event['work']}", seconds)
    if "call" in event:
        group = groups[event["group"]]
        return CollectiveEvent(
            name=f"{event['call']} {event['of']}",
            seconds=collective_s(event["call"], event["bytes"], group, machine),
            stream=f"{COMMUNICATION_STREAM} {event['group']}",
            early=event["early"],
            after=tuple(event.get("after", ())),
        )
    return WaitEvent(event["wait"]) if "wait" in event else BackwardEvent()


def operator_timer(machine: Hardware) -> Callable[..., float]:
    """Return a function from the fields of an operator to its seconds on this hardware.

    Views and the like launch no kernel and take none. Blocks repeat operators, so it remembers.
    """

    @cache
    def seconds_of(*fields: Any) -> float:
        operator = Operator(*fields)
        is_kernel = machine.shared or operator.flops or operator.moved_bytes
        return operator_s(operator, machine) if is_kernel else 0.0

    return seconds_of


def write_estimate(result: RunResult, hosts: Hardware) -> None:
    """Add the estimate for this hardware to a simulation's records: numbers and a time line."""
    for rank in result.active_ranks:
        reckoned = estimate_rank_step(result, hosts, rank)
        step = max((line["step"] for line in result.lines if line["rank"] == rank), default=0)
        writer = RecordWriter(result.folder, rank)
        for lane, bar in lanes_and_bars(reckoned.time):
            phase, _, name = bar.name.partition(" ")
            moment = {"start_us": 1e6 * bar.start_s, "dur_us": 1e6 * bar.dur_s}
            writer.write(
                "bar", "" if phase == "optimizer" else name, step, lane=lane, phase=phase, **moment
            )
        for name, (value, unit) in reckoned.record_values.items():
            writer.write("scalar", name, step, value=value, unit=unit)
        writer.close()


def lanes_and_bars(time: StepTime) -> Iterator[tuple[str, TimelineBar]]:
    """Return time-line bars by lane; adjacent work of one name is merged into one bar."""
    whole: list[TimelineBar] = []
    for bar in (each for each in time.bars if each.stream == COMPUTE_STREAM):
        last = whole[-1] if whole else bar
        if whole and last.name == bar.name and bar.start_s - last.end_s <= TOUCHING_S:
            whole[-1] = replace(last, dur_s=bar.end_s - last.start_s)
        else:
            whole.append(bar)
    yield from (("compute", bar) for bar in whole if bar.dur_s)
    yield from (
        ("communication", bar) for bar in time.bars if bar.stream != COMPUTE_STREAM and bar.dur_s
    )
    yield from (("exposed", bar) for bar in time.exposure_bars)
