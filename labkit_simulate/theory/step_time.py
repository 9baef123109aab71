"""Estimate step time: operators by roofline, collectives by links, overlap by streams.

    gather_s = collective_s("all_gather", shard_bytes, Group(16, hosts=2), get_hardware("h100-8x"))

An operator takes as long as its arithmetic or its memory traffic, whichever is longer. A collective
takes what ``labkit.theory.links`` says of its links. Both are tasks of a stream. A
stream runs its tasks in order, each once its dependencies have ended:

    communication  [gather 1][gather 2]      [gather 3]
    compute                  [forward 1     ][forward 2     ][forward 3     ]

Here units are gathered one ahead: gather 3 waits for the end of forward 1, which frees its memory.

Source of the roofline: Williams, Waterman and Patterson, "Roofline", 2009.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from labkit.theory.overlap import uncovered_in_turn
from labkit_simulate.theory.hardware import Hardware

COMPUTE_STREAM, COMMUNICATION_STREAM = "compute", "communication"


@dataclass(frozen=True)
class Operator:
    """One call of an operator on one rank.

    Attributes:
        name: such as "mm".
        flops: multiplications and additions of matrix products; 0 for other operators.
        moved_bytes: bytes read and written.
        dtype: a key of ``Hardware.flops_per_s``.
    """

    name: str
    flops: float = 0.0
    moved_bytes: float = 0.0
    dtype: str = "float32"


def operator_s(operator: Operator, rank: Hardware) -> float:
    """Return the overhead plus the longer of arithmetic and memory traffic (roofline).

    Args:
        operator: the operator.
        rank: the rank's share of a host, from ``Hardware.for_rank``.
    """
    arithmetic_s = 0.0
    if operator.flops:
        arithmetic_s = operator.flops / (rank.matmul_share * rank.peak_flops_per_s(operator.dtype))
    return rank.operator_s + max(arithmetic_s, operator.moved_bytes / rank.memory_bytes_per_s)


@dataclass(frozen=True)
class Group:
    """The number of ranks of a collective, and of the hosts over which they are spread evenly."""

    ranks: int
    hosts: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.ranks:
            raise ValueError(
                f"{self.ranks} ranks on {self.hosts} hosts: a group needs 1 host, and a rank on"
                " each"
            )

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on the fullest host."""
        return math.ceil(self.ranks / self.hosts)


def make_group(ranks: Iterable[int], ranks_on_host: int) -> Group:
    """Return the group of these ranks; torchrun fills one host after another."""
    members = list(ranks)
    return Group(len(members), len({rank // ranks_on_host for rank in members}))


def collective_s(
    name: str, handed_bytes: float, group: Group, hosts: Hardware, *, algorithm: str = "best"
) -> float:
    """Return the seconds of one collective or message, see ``labkit.theory.links``.

    Args:
        name: such as "all_reduce", see ``collectives.WIRE_FRACTIONS``.
        handed_bytes: size of a rank's input tensor.
        group: the group; equal groups fill the hosts and communicate at the same time.
        hosts: the hardware; for ranks that share cores, from ``Hardware.for_rank``.
        algorithm: "ring", "tree" or "best".

    Raises:
        ValueError: name, algorithm or their combination is unknown, or ranks exceed devices.
    """
    if group.ranks_per_host > hosts.devices and not hosts.shared:
        fix = f"spread them over {math.ceil(group.ranks / hosts.devices)} hosts"
        raise ValueError(
            f"{group.ranks_per_host} ranks on a host of {hosts.devices} devices ({hosts.name}):"
            f" {fix}"
        )
    return hosts.links.collective_s(name, handed_bytes, group.ranks, group.hosts, algorithm)


@dataclass(frozen=True)
class Task:
    """A task of a stream; ``after`` holds the indices of the tasks it depends on."""

    stream: str
    name: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class TimelineBar:
    """A scheduled task, in seconds from the start of the step."""

    stream: str
    name: str
    start_s: float
    dur_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.dur_s


@dataclass(frozen=True)
class StepTime:
    """The time line of a step; ``bars`` are sorted by start."""

    bars: Sequence[TimelineBar]

    @cached_property
    def step_s(self) -> float:
        """Duration of the step."""
        return max((bar.end_s for bar in self.bars), default=0.0)

    @cached_property
    def compute_s(self) -> float:
        """Time with computation."""
        return busy_s(bar for bar in self.bars if bar.stream == COMPUTE_STREAM)

    @cached_property
    def communication_s(self) -> float:
        """Time with communication."""
        return busy_s(bar for bar in self.bars if bar.stream != COMPUTE_STREAM)

    @property
    def exposed_s(self) -> float:
        """Time with communication but no computation."""
        return busy_s(self.bars) - self.compute_s

    @property
    def exposure_bars(self) -> Sequence[TimelineBar]:
        """The intervals of exposed communication, each named by the collective that began first."""
        sent = [bar for bar in self.bars if bar.stream != COMPUTE_STREAM]
        computed = [(bar.start_s, bar.end_s) for bar in self.bars if bar.stream == COMPUTE_STREAM]
        open_parts = uncovered_in_turn([(bar.start_s, bar.end_s) for bar in sent], computed)
        return [
            replace(sent[place], start_s=start, dur_s=end - start)
            for place, start, end in open_parts
        ]

    @property
    def overlap_s(self) -> float:
        """Time with both communication and computation."""
        return self.communication_s - self.exposed_s

    def model_flops_share(self, model_flops: float, peak_flops_per_s: float) -> float:
        """Return model FLOPs utilisation (MFU), which counts no recomputation.

        Source: Chowdhery et al., "PaLM", 2022 (arXiv:2204.02311), appendix B.
        """
        return model_flops / (self.step_s * peak_flops_per_s)


def busy_s(bars: Iterable[TimelineBar]) -> float:
    """Return the time covered by these bars; overlapping bars count once."""
    total, until = 0.0, -math.inf
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        total += max(0.0, bar.end_s - max(until, bar.start_s))
        until = max(until, bar.end_s)
    return total


def schedule_tasks(program: Sequence[Task], *, overlaps: bool = True) -> StepTime:
    """Schedule tasks: each stream runs its own in order, each task once its dependencies end.

    Args:
        program: tasks, which depend only on earlier ones.
        overlaps: whether streams run concurrently; otherwise all tasks run one after another.

    Raises:
        ValueError: a task depends on itself or a later one.
    """
    seconds = [task.seconds for task in program]
    starts = _task_starts(program, seconds, overlaps)
    bars = [
        TimelineBar(task.stream, task.name, start, task.seconds)
        for task, start in zip(program, starts, strict=True)
    ]
    return StepTime(sorted(bars, key=lambda bar: bar.start_s))


def scheduled_s(program: Sequence[Task], seconds: Sequence[float], *, overlaps: bool) -> float:
    """Return when the last task ends if the tasks take these seconds instead of their own."""
    starts = _task_starts(program, seconds, overlaps)
    return max((start + own for start, own in zip(starts, seconds, strict=True)), default=0.0)


def _task_starts(
    program: Sequence[Task], seconds: Sequence[float], overlaps: bool
) -> Sequence[float]:
    starts: list[float] = []
    ends: list[float] = []
    free: dict[str, float] = {}
    for place, task in enumerate(program):
        if any(not 0 <= earlier < place for earlier in task.after):
            rule = "it can only wait for those before it"
            raise ValueError(f"task {place} ({task.name}) waits for {task.after}: {rule}")
        stream = task.stream if overlaps else ""
        starts.append(max([free.get(stream, 0.0), *(ends[earlier] for earlier in task.after)]))
        ends.append(starts[-1] + seconds[place])
        free[stream] = ends[-1]
    return starts


@dataclass(frozen=True)
class ComputeEvent:
    """Computation."""

    name: str
    seconds: float


@dataclass(frozen=True)
class CollectiveEvent:
    """The call of a collective.

    Attributes:
        name: shown on the time line.
        seconds: its duration.
        stream: its stream; collectives of a group share one.
        early: whether its input exists long before, as parameters do; it is then called one unit
            ahead.
        after: indices of earlier calls whose results it sends.
    """

    name: str
    seconds: float
    stream: str = COMMUNICATION_STREAM
    early: bool = False
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class WaitEvent:
    """A wait for the result of the call with this index among the events."""

    call: int


@dataclass(frozen=True)
class BackwardEvent:
    """The start of the backward pass, before which its gathers are not called."""


Event = ComputeEvent | CollectiveEvent | WaitEvent | BackwardEvent


def tasks_from_events(events: Sequence[Event]) -> list[Task]:
    """Return the tasks of a step that was recorded on a device without concurrency.

    A call depends on the computation before it, whose result it sends. An early call is moved to
    where the previous early result is used, because memory holds two: FSDP gathers one unit ahead,
    which a recording on the CPU does not show.

    Raises:
        ValueError: a wait for something that is not an earlier call.
    """
    program: list[Task] = []
    # The task of each call, by the call's index among the events.
    places: dict[int, int] = {}
    needed: list[int] = []  # by the next arithmetic
    # The index of the last computation, if any.
    computed: list[int] = []
    for number, event in _move_early_calls(events):
        if isinstance(event, WaitEvent):
            if event.call not in places:
                rule = "which is no call before it"
                raise ValueError(f"event {number} waits for event {event.call}, {rule}")
            needed.append(places[event.call])
        elif isinstance(event, CollectiveEvent):
            places[number] = len(program)
            after = computed if event.early else [*computed, *needed]
            sent = (places[call] for call in event.after)
            program.append(Task(event.stream, event.name, event.seconds, (*after, *sent)))
        elif isinstance(event, ComputeEvent):
            program.append(Task(COMPUTE_STREAM, event.name, event.seconds, (*computed, *needed)))
            computed, needed = [len(program) - 1], []
    return program


def _move_early_calls(events: Sequence[Event]) -> list[tuple[int, Event]]:
    """Return indices and events, with early calls where their predecessor is used or backward
    begins.
    """
    order: list[tuple[int, Event]] = []
    ahead = 0
    for number, event in enumerate(events):
        if isinstance(event, CollectiveEvent) and event.early:
            order.insert(ahead, (number, event))
            ahead += 1
            continue
        order.append((number, event))
        used = (
            isinstance(event, WaitEvent)
            and 0 <= event.call < number
            and getattr(events[event.call], "early", False)
        )
        if used or isinstance(event, BackwardEvent):
            ahead = len(order)
    return order


@dataclass(frozen=True)
class UnitTimes:
    """The durations of an FSDP unit's parts.

    Attributes:
        name: shown on the time line.
        gather_s: all-gather of its parameters.
        forward_s: its forward pass.
        backward_s: its backward pass with recomputation.
        reduce_s: reduce-scatter of its gradients.
        replicate_s: all-reduce across groups under hybrid sharding, or 0.
        regathered: whether it is gathered again for the backward pass.
    """

    name: str
    gather_s: float
    forward_s: float
    backward_s: float
    reduce_s: float
    replicate_s: float = 0.0
    regathered: bool = True


def fsdp_tasks(units: Sequence[UnitTimes], *, update_s: float = 0.0, ahead: int = 1) -> list[Task]:
    """Return the tasks of an FSDP step, in the order in which ``fully_shard`` issues them.

    Gathers and reduce-scatters share a stream, because NCCL runs a group's collectives in order. In
    the backward pass, the next gather is issued before the reduce-scatter of the current unit.
    Source of the order: PyTorch's torch/distributed/fsdp/_fully_shard, as in ``theory.fsdp``.

    Args:
        units: in the order of the forward pass.
        update_s: duration of the optimizer, which waits for all gradients.
        ahead: number of units that are gathered ahead of the computing one.
    """
    return _FSDPTaskBuilder(units, ahead).build_tasks(update_s)


class _FSDPTaskBuilder:
    """Append the tasks of a step, pass by pass."""

    def __init__(self, units: Sequence[UnitTimes], ahead: int):
        self.units, self.ahead = units, ahead
        self.program: list[Task] = []
        # The indices of the passes so far, in their order.
        self.computed: list[int] = []
        # The index of the gather of each pass.
        self.gathered: dict[int, int] = {}

    def build_tasks(self, update_s: float) -> list[Task]:
        count = len(self.units)
        for index in range(count):
            self.add_pass(index, "forward", self.units[index].forward_s)
        reduced = []
        for index in range(count):
            unit = self.units[-1 - index]
            gradients = self.add_pass(count + index, "backward", unit.backward_s)
            reduced.append(
                self.add_task(
                    COMMUNICATION_STREAM, f"reduce_scatter {unit.name}", unit.reduce_s, gradients
                )
            )
            if unit.replicate_s:
                replicated = self.add_task(
                    "replicate", f"all_reduce {unit.name}", unit.replicate_s, reduced[-1]
                )
                reduced.append(replicated)
        if update_s:
            self.add_task(COMPUTE_STREAM, "optimizer", update_s, *reduced)
        return self.program

    def add_pass(self, number: int, name: str, seconds: float) -> int:
        """Append the due gathers and a unit's forward or backward pass."""
        for coming in range(number, min(number + self.ahead, 2 * len(self.units) - 1) + 1):
            self.add_gather(coming)
        unit = self.unit_at(number)
        own = [self.gathered[number]] if number in self.gathered else []
        place = self.add_task(
            COMPUTE_STREAM, f"{name} {unit.name}", seconds, *own, *self.computed[-1:]
        )
        self.computed.append(place)
        return place

    def add_gather(self, number: int) -> None:
        """Append the gather of a pass, after the pass that frees its memory."""
        unit = self.unit_at(number)
        backward = number >= len(self.units)
        if number in self.gathered or (backward and not unit.regathered):
            return
        if backward and len(self.computed) < len(self.units):
            # The forward pass requests nothing that the backward pass will need.
            return
        # The gather is requested with the pass after that one.
        ended = number - self.ahead - 1
        if backward:
            ended = max(ended, len(self.units) - 1)
        after = [self.computed[ended]] if ended >= 0 else []
        self.gathered[number] = self.add_task(
            COMMUNICATION_STREAM, f"all_gather {unit.name}", unit.gather_s, *after
        )

    def unit_at(self, number: int) -> UnitTimes:
        count = len(self.units)
        return self.units[number if number < count else 2 * count - 1 - number]

    def add_task(self, stream: str, name: str, seconds: float, *after: int) -> int:
        self.program.append(Task(stream, name, seconds, after))
        return len(self.program) - 1
