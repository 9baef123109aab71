"""How long a step takes by reckoning: operators by roofline, collectives by alpha and beta, overlap
by streams.

    gather = collective_s("all_gather", shard_bytes, Group(16, hosts=2), hardware("h100-8x"))

An operator takes as long as its arithmetic or its memory traffic, whichever is longer. A collective
takes its steps' latency and its bytes over the link that holds it up. Both are tasks of a stream; a
stream does its tasks one after another, each no sooner than what it needs is there:

    communication  [gather 1][gather 2]      [gather 3]
    compute                  [forward 1     ][forward 2     ][forward 3     ]

Units are gathered ahead by one here: gather 3 waits until forward 1 has ended, because only then is
there room.

Source of the roofline: Williams, Waterman and Patterson, "Roofline", 2009.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from labkit.theory.collectives import WIRE_FRACTIONS, collective_wire_bytes
from labkit.theory.overlap import uncovered_in_turn
from labkit_simulate.theory.hardware import Hardware

COMPUTE_STREAM, COMMUNICATION_STREAM = "compute", "communication"


@dataclass(frozen=True)
class Operator:
    """One call of an operator on one rank.

    Attributes:
        name: such as "mm".
        flops: multiplications and additions of matrix products, each counted; 0 for one that
            multiplies no matrices.
        moved_bytes: read and written.
        dtype: of its numbers, one of ``Hardware.flops_per_s``.
    """

    name: str
    flops: float = 0.0
    moved_bytes: float = 0.0
    dtype: str = "float32"


def operator_s(operator: Operator, rank: Hardware) -> float:
    """Roofline: the longer of arithmetic and memory traffic, and what any operator takes.

    Args:
        operator: what is computed.
        rank: what the rank has, ``Hardware.for_rank``.
    """
    arithmetic_s = (
        operator.flops / (rank.matmul_share * rank.peak_flops_per_s(operator.dtype))
        if operator.flops
        else 0.0
    )
    return rank.operator_s + max(arithmetic_s, operator.moved_bytes / rank.memory_bytes_per_s)


@dataclass(frozen=True)
class Group:
    """The ranks of a collective, spread evenly over hosts.

    Attributes:
        ranks: how many.
        hosts: on how many hosts they are.
    """

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
        """Ranks of the group on the fullest of its hosts."""
        return math.ceil(self.ranks / self.hosts)


def make_group(ranks: Iterable[int], ranks_on_host: int) -> Group:
    """The group of these ranks, where torchrun fills host after host with so many."""
    found = list(ranks)
    return Group(len(found), len({rank // ranks_on_host for rank in found}))


def collective_s(
    name: str, handed_bytes: float, group: Group, hosts: Hardware, *, algorithm: str = "best"
) -> float:
    """Time of one collective or message.

    ``ring``: a rank passes parts on to its neighbour, n - 1 times, an all-reduce twice as often.
    The rings together use every network card that belongs to the group's ranks, and each part
    leaves a host once. ``tree``, for an all-reduce alone: the ranks of a host in a chain, the hosts
    in two binary trees, up and down again; fewer steps, and twice the tensor's bytes. ``best`` is
    the faster. An all-to-all sends each part on its own way: most of them leave the host.

    Sources: Patarasuk and Yuan, 2009 (ring); Sanders, Speck and Träff, "Two-tree algorithms for
    full bandwidth broadcast, reduction and scan", 2009; what counts as a step inside and between
    hosts: ``ncclTopoTuneModel`` in NCCL's src/graph/tuning.cc.

    Args:
        name: such as "all_reduce", see ``collectives.WIRE_FRACTIONS``.
        handed_bytes: of the tensor that a rank hands to the call.
        group: who takes part. Other groups of the same kind fill the hosts, and do the same at the
            same time.
        hosts: on what; for ranks that share cores ``Hardware.for_rank``.
        algorithm: "ring", "tree" or "best".

    Raises:
        ValueError: another name or algorithm; a tree for anything but an all-reduce; more ranks
            than devices.
    """
    if algorithm not in ("best", "ring", "tree") or (algorithm == "tree" and name != "all_reduce"):
        raise ValueError(f"{name} by {algorithm!r}: take best or ring, or tree for an all_reduce")
    if name not in WIRE_FRACTIONS:
        raise ValueError(f"{name!r} is none of {', '.join(WIRE_FRACTIONS)}")
    if group.ranks_per_host > hosts.devices and not hosts.shared:
        fix = f"spread them over {math.ceil(group.ranks / hosts.devices)} hosts"
        raise ValueError(
            f"{group.ranks_per_host} ranks on a host of {hosts.devices} devices ({hosts.name}):"
            f" {fix}"
        )
    if group.ranks == 1 or not handed_bytes:
        return 0.0
    if algorithm == "tree":
        return _tree_s(handed_bytes, group, hosts)
    ring_s = _ring_s(name, handed_bytes, group, hosts)
    if algorithm == "ring" or name != "all_reduce":
        return ring_s
    return min(ring_s, _tree_s(handed_bytes, group, hosts))


def ring_step_count(name: str, ranks: int) -> int:
    """Messages of a rank, one after another, for one collective in a ring of these ranks."""
    if ranks == 1:
        return 0
    return {"all_reduce": 2 * (ranks - 1), "send": 1, "recv": 1}.get(name, ranks - 1)


def _ring_s(name: str, handed_bytes: float, group: Group, hosts: Hardware) -> float:
    steps, between = ring_step_count(name, group.ranks), ring_step_count(name, group.hosts)
    latency_s = (steps - between) * hosts.inside.alpha_s + between * hosts.between.alpha_s
    leaving = collective_wire_bytes(name, handed_bytes, group.ranks)
    # There is no ring: what goes to other hosts leaves through the rank's own network card.
    if name == "all_to_all":
        outside = handed_bytes * (group.ranks - group.ranks_per_host) / group.ranks
        bytes_s = max(
            (leaving - outside) * hosts.inside.beta_s_per_byte, outside * _card_s_per_byte(1, hosts)
        )
    else:
        bytes_s = max(
            leaving * hosts.inside.beta_s_per_byte, leaving * _cross_host_s_per_byte(group, hosts)
        )
    return hosts.call_s + latency_s + bytes_s


def _tree_s(handed_bytes: float, group: Group, hosts: Hardware) -> float:
    up = (group.ranks_per_host - 1) * hosts.inside.alpha_s + math.ceil(
        math.log2(group.hosts)
    ) * hosts.between.alpha_s
    slowest = max(hosts.inside.beta_s_per_byte, _cross_host_s_per_byte(group, hosts))
    return hosts.call_s + 2 * up + 2 * handed_bytes * slowest


def _cross_host_s_per_byte(group: Group, hosts: Hardware) -> float:
    """Seconds for a byte that leaves a host, over all network cards that its ranks of the group
    have; 0 on one host.
    """
    return _card_s_per_byte(group.ranks_per_host, hosts) if group.hosts > 1 else 0.0


def _card_s_per_byte(ranks_on_host: int, hosts: Hardware) -> float:
    """The same for so many ranks of a host: their share of its cards, which other groups fill as
    well.
    """
    return hosts.between.beta_s_per_byte / (hosts.cards * min(1.0, ranks_on_host / hosts.devices))


@dataclass(frozen=True)
class Task:
    """What a stream has to do.

    Attributes:
        stream: which; one for arithmetic, one or more for communication.
        name: what it is, for people.
        seconds: how long it takes.
        after: the tasks that must be over first, as places in the program.
    """

    stream: str
    name: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class TimelineBar:
    """A task in its place on the time line, in seconds from the start of the step."""

    stream: str
    name: str
    start_s: float
    dur_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.dur_s


@dataclass(frozen=True)
class StepTime:
    """A step on its time line.

    Attributes:
        bars: by start.
    """

    bars: Sequence[TimelineBar]

    @property
    def step_s(self) -> float:
        """From the first task's start to the last one's end."""
        return max((bar.end_s for bar in self.bars), default=0.0)

    @property
    def compute_s(self) -> float:
        """How long arithmetic was under way."""
        return busy_s(bar for bar in self.bars if bar.stream == COMPUTE_STREAM)

    @property
    def communication_s(self) -> float:
        """How long any communication was under way."""
        return busy_s(bar for bar in self.bars if bar.stream != COMPUTE_STREAM)

    @property
    def exposed_s(self) -> float:
        """How long communication was under way while nothing was computed."""
        return busy_s(self.bars) - self.compute_s

    @property
    def exposure_bars(self) -> Sequence[TimelineBar]:
        """The stretches of communication beside which nothing was computed, each once, named by
        what began first.
        """
        sent = [bar for bar in self.bars if bar.stream != COMPUTE_STREAM]
        computed = [(bar.start_s, bar.end_s) for bar in self.bars if bar.stream == COMPUTE_STREAM]
        open_parts = uncovered_in_turn([(bar.start_s, bar.end_s) for bar in sent], computed)
        return [
            replace(sent[place], start_s=start, dur_s=end - start)
            for place, start, end in open_parts
        ]

    @property
    def overlap_s(self) -> float:
        """How long communication was under way beside arithmetic."""
        return self.communication_s - self.exposed_s

    def model_flops_share(self, model_flops: float, peak_flops_per_s: float) -> float:
        """MFU: the part of what the device could compute in this time that the model needs,
        recomputing not counted.

        Source: Chowdhery et al., "PaLM", 2022 (arXiv:2204.02311), appendix B.
        """
        return model_flops / (self.step_s * peak_flops_per_s)


def busy_s(bars: Iterable[TimelineBar]) -> float:
    """How long any of these bars lasts; what several do at once counts once."""
    total, until = 0.0, -math.inf
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        total += max(0.0, bar.end_s - max(until, bar.start_s))
        until = max(until, bar.end_s)
    return total


def schedule_tasks(program: Sequence[Task], *, overlaps: bool = True) -> StepTime:
    """When each task runs: streams do theirs in the program's order, each as soon as those it waits
    for are over.

    Args:
        program: a task waits for earlier ones alone.
        overlaps: whether streams run beside each other; otherwise one task after another, in the
            program's order.

    Raises:
        ValueError: a task that waits for itself or a later one.
    """
    ends: list[float] = []
    free: dict[str, float] = {}
    bars = []
    for place, task in enumerate(program):
        if any(not 0 <= earlier < place for earlier in task.after):
            raise ValueError(
                f"task {place} ({task.name}) waits for {task.after}: it can only wait for those"
                " before it"
            )
        stream = task.stream if overlaps else ""
        start_s = max([free.get(stream, 0.0), *(ends[earlier] for earlier in task.after)])
        bars.append(TimelineBar(task.stream, task.name, start_s, task.seconds))
        ends.append(start_s + task.seconds)
        free[stream] = ends[-1]
    return StepTime(sorted(bars, key=lambda bar: bar.start_s))


@dataclass(frozen=True)
class ComputeEvent:
    """A program's event: arithmetic, of so many seconds."""

    name: str
    seconds: float


@dataclass(frozen=True)
class CollectiveEvent:
    """A program's event: a collective is asked for.

    Attributes:
        name: for the time line.
        seconds: how long it takes.
        stream: on which it runs; collectives of one group share one.
        early: whether what it sends was there long before, as parameters are: it is then asked for
            one unit ahead.
        after: earlier calls whose results it sends, by their places among the events, besides those
            waited for.
    """

    name: str
    seconds: float
    stream: str = COMMUNICATION_STREAM
    early: bool = False
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class WaitEvent:
    """A program's event: what follows needs the result of a call, given by its place among the
    events.
    """

    call: int


@dataclass(frozen=True)
class BackwardEvent:
    """A program's event: the backward pass begins. What it gathers is not asked for before."""


def tasks_from_events(
    events: Sequence[ComputeEvent | CollectiveEvent | WaitEvent | BackwardEvent],
) -> list[Task]:
    """The tasks of a step that was recorded event by event, on a device that did one thing after
    another.

    A call waits for the arithmetic before it, whose result it sends. An early one is asked for when
    the one before it is used, since there is room for two: so fully sharded training gathers one
    unit ahead, which a recording on the CPU does not show.

    Raises:
        ValueError: a wait for anything but an earlier call.
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
                raise ValueError(
                    f"event {number} waits for event {event.call}, which is no call before it"
                )
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


def _move_early_calls(
    events: Sequence[ComputeEvent | CollectiveEvent | WaitEvent | BackwardEvent],
) -> list[tuple[int, ComputeEvent | CollectiveEvent | WaitEvent | BackwardEvent]]:
    """Events with their places, early calls moved to where the one before them is used, or the
    backward pass begins.
    """
    order: list[tuple[int, ComputeEvent | CollectiveEvent | WaitEvent | BackwardEvent]] = []
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
    """What FSDP gathers together: the times of a step's parts, in seconds.

    Attributes:
        name: for the time line.
        gather_s: of the all-gather of its parameters.
        forward_s: of its forward pass.
        backward_s: of its backward pass, with what is recomputed there.
        reduce_s: of the reduce-scatter of its gradients.
        replicate_s: of the all-reduce from group to group under hybrid sharding, or 0.
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
    """The tasks of a step under FSDP, in the order in which ``fully_shard`` asks for them.

    Gathers and reduce-scatters share a stream, since NCCL does one collective of a group after
    another. In the backward pass, the next unit is asked for before this one's gradients are
    reduced. Source of the order: PyTorch's torch/distributed/fsdp/_fully_shard, as in
    ``theory.fsdp``.

    Args:
        units: in the order of the forward pass.
        update_s: of the optimizer, which waits for all gradients.
        ahead: how many units are gathered ahead of the one that computes; 0 where a unit is asked
            for when needed.
    """
    return _FSDPTaskBuilder(units, ahead).build_tasks(update_s)


class _FSDPTaskBuilder:
    """Writes the program down, pass by pass."""

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
        """A unit's forward or backward pass: before it, the gathers that are due, its own and those
        ahead.
        """
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
        """Ask for a pass's parameters, once the pass that frees the room for them is over."""
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
