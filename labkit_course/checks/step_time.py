"""Checks of lab 6b, how long?"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pandas

from labkit.runs.result import RunResult
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise, expect
from labkit_simulate.estimate import (
    COMPUTE_ERROR,
    LINK_ERROR,
    RankStepEstimate,
    estimate_rank_step,
    event_for_hardware,
    operator_timer,
    read_events,
)
from labkit_simulate.theory import simulation as theory
from labkit_simulate.theory.hardware import Hardware, get_hardware
from labkit_simulate.theory.step_time import (
    COMMUNICATION_STREAM,
    StepTime,
    make_group,
    schedule_tasks,
    tasks_from_events,
)
from labkit_simulate.theory.transformer import LLAMA_2_7B

LAB = "step_time"
# The task of exercise 3: a million steps of so many sequences, whatever the number of GPUs.
STEPS, SEQUENCES, SEQUENCE = 1_000_000, 1536, 2048
DOLLARS = {384: 3.0, 512: 2.5, 768: 2.0, 1536: 1.2}
"""Price of a GPU-hour by the number of GPUs."""
GROUPS, DEADLINE_DAYS = (8, None), 24
NETWORKS = {"quick": (14, 1.0), "slow": (434, 1 / 8)}
"""Latency in µs, and the share of a network card that a GPU has."""
Plans = Mapping[str, Mapping[str, Any]]
"""Plans by name: ``days`` are the least and the most by network, ``bills`` are dollars."""


@exercise
def forward_s(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: when a forward pass ends whose units are gathered one ahead, from (gathers_s,
    computes_s).
    """
    first = "The first unit is gathered while nothing computes."
    beside = "While a unit computes, the next one is gathered."
    late = "A unit computes once it is gathered, and then the next one's gather is under way."
    room = "There is room for two: a gather waits until the unit before the last has computed."
    cases = [
        ([1.0], [2.0], first),
        ([1.0, 1.0, 1.0], [3.0, 3.0, 3.0], beside),
        ([3.0, 3.0, 3.0], [1.0, 1.0, 1.0], late),
        ([1.0, 1.0, 5.0], [4.0, 1.0, 1.0], room),
        ([2.0, 0.5, 4.0, 1.0], [1.0, 3.0, 0.5, 2.0], room),
    ]
    judge.judge_cases(answer, theory.forward_s, cases)
    return judge.passing_verdict(f"{len(cases)} passes end when they should")


@exercise
def backward_s(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: when a backward pass has sent its last gradients, from (gathers_s, computes_s,
    reduces_s).
    """
    alone = "A unit is gathered, computes, and sends its gradients, one after the other."
    ahead = "While a unit computes, the next one is gathered."
    ready = "A reduce-scatter starts once its unit has computed."
    shared = "The gather of unit 2 waits for the reduce-scatter of unit 0: they share a stream."
    cases = [
        ([1.0], [2.0], [4.0], alone),
        ([1.0, 1.0], [3.0, 3.0], [0.5, 0.5], ahead),
        ([1.0, 5.0], [2.0, 1.0], [1.0, 1.0], ready),
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0], shared),
        ([0.0, 4.0, 4.0, 0.0], [3.0, 5.0, 5.0, 0.5], [0.0, 6.0, 6.0, 7.0], shared),
    ]
    judge.judge_cases(answer, theory.backward_s, cases)
    return judge.passing_verdict(f"{len(cases)} passes end when they should")


@dataclass(frozen=True)
class Question:
    """Plans of which one is right, and what is said of another.

    Attributes:
        plans: as the learner's function gets them.
        deadline_days: by when the training must be over.
        right: the plan to rent, None for none.
        said: what is wrong with the other plan.
        hint: where to look.
    """

    plans: Plans
    deadline_days: float
    right: str | None
    said: str
    hint: str = ""


def _plan(days: Sequence[tuple[float, float]], bills: Sequence[float]) -> dict[str, Any]:
    names = ("quick", "middle", "slow") if len(bills) == 3 else ("quick", "slow")
    return {
        "days": dict(zip(names, days, strict=True)),
        "bills": dict(zip(names, bills, strict=True)),
    }


QUESTIONS = [
    Question(
        {"sure": _plan([(5, 6), (6, 7)], [68, 80]), "cheap": _plan([(5, 7), (9, 12)], [37, 65])},
        8,
        "sure",
        "it rents the plan that is late for certain on the slow network",
        "A plan has to be over in time on every network.",
    ),
    Question(
        {"sure": _plan([(5, 6), (5, 6.5)], [68, 71]), "cheap": _plan([(6, 7), (6, 9)], [40, 46])},
        8,
        "sure",
        "it rents a plan that may take 9 days on the slow network, and there are 8",
        "A promise is about the most that a plan may take, not about the middle of its range.",
    ),
    Question(
        {"some": _plan([(5, 9), (6, 12)], [86, 111]), "more": _plan([(4, 5), (7, 9)], [110, 197])},
        8,
        None,
        "no plan is sure to be over in 8 days, and it rents one",
        "They want to hear it if nobody can promise the date: return None.",
    ),
    Question(
        {"many": _plan([(2, 3), (2, 4)], [61, 74]), "few": _plan([(5, 6), (6, 7)], [34, 40])},
        8,
        "few",
        "it rents the plan that is over first, which costs more on every network",
        "Once it is in time, nobody pays for being early.",
    ),
    Question(
        {"steady": _plan([(6, 7), (6, 7)], [80, 84]), "wide": _plan([(4, 7), (5, 7.5)], [65, 73])},
        8,
        "wide",
        "it rents the plan with the narrow range, which costs more on every network",
        "Ranges that overlap are no reason: compare two bills on the same network.",
    ),
    Question(
        {"gamble": _plan([(2, 3), (6, 7)], [26, 83]), "even": _plan([(2, 3), (3, 4)], [27, 40])},
        8,
        "even",
        "it saves 1 if the network is quick, and pays 43 more if it is slow",
        "Nobody said that the network is quick. What does a plan cost where it is worst?",
    ),
]
Bills = Sequence[float]


def _regret(mine: Bills, every: Sequence[Bills]) -> float:
    return max(
        bill - min(column) for bill, column in zip(mine, zip(*every, strict=True), strict=True)
    )


def _relative_regret(mine: Bills, every: Sequence[Bills]) -> float:
    return max(
        bill / min(column) for bill, column in zip(mine, zip(*every, strict=True), strict=True)
    )


RULES: Mapping[str, Callable[[Bills, Sequence[Bills]], float]] = {
    "the smallest worst bill": lambda mine, _: max(mine),
    "the smallest sum": lambda mine, _: sum(mine),
    "the smallest regret": _regret,
    "the smallest regret in percent": _relative_regret,
}
"""Rules that can be defended: what a plan's bills count, beside those of all plans in time."""


def rented(rule: str, plans: Plans, deadline_days: float) -> str | None:
    """Return the plan that one of ``RULES`` takes among those in time; None if there is none."""
    bills = {
        name: list(plan["bills"].values())
        for name, plan in plans.items()
        if _most_days(plan) <= deadline_days
    }
    every = list(bills.values())
    return min(bills, key=lambda name: RULES[rule](bills[name], every), default=None)


@functools.cache
def telling_plans() -> Sequence[Plans]:
    """Return sets of made-up plans, on two or three networks, among which the rules differ.

    One plan of each is the cheapest, and late.
    """
    draw = random.Random(6)
    found: list[Plans] = []
    while len(found) < 12:
        count = 2 + len(found) % 2
        plans = {}
        for name in "abcde":
            rising = sorted(draw.randrange(100, 900) for _ in range(count))
            plans[name] = _plan([(2, 4 + at) for at in range(count)], rising)
        columns = zip(*(plan["bills"].values() for plan in plans.values()), strict=True)
        late = [min(column) / 2 for column in columns]
        plans["late"] = _plan([(5, 9)] * count, late)
        taken = [rented(rule, plans, 8) for rule in RULES]
        if len(set(taken[:3])) == 3 and taken[3] not in taken[:2]:
            found.append(plans)
    return found


@exercise
def choose(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: a rule by which to rent GPUs, from (plans, deadline_days)."""
    judge.raise_if_not_attempted(answer)
    for question in QUESTIONS:
        # In both orders, because a rule does not depend on which plan stands first.
        for names in (list(question.plans), list(question.plans)[::-1]):
            plans = {name: question.plans[name] for name in names}
            found = _chosen(answer, plans, question.deadline_days)
            right = repr(question.right)
            none = "it rents none, and there is a plan that is in time on every network"
            said = none if found is None else question.said
            expect(found == question.right, said, right, question.hint)
    rule = _rule_of(answer)
    name = _chosen(answer, rental_plans(), DEADLINE_DAYS)
    wanted = rented(rule, rental_plans(), DEADLINE_DAYS)
    expect(
        name == wanted, f"of the real plans it rents {name}, by another rule than before", wanted
    )
    reason = (getattr(answer, "__doc__", "") or "").strip()
    hint = "One sentence in quotes, as the first line of the function: why is this right for them?"
    expect(bool(reason), "your rule works, and does not say why it is right", hint=hint)
    bills = " or ".join(f"{bill:,.0f}" for bill in rental_plans()[str(name)]["bills"].values())
    others = [
        f"{each} rents {rented(each, rental_plans(), DEADLINE_DAYS)}"
        for each in RULES
        if each != rule
    ]
    return judge.passing_verdict(
        f"by {rule} you rent {name}, for {bills} dollars; {'; '.join(others)}"
    )


def _rule_of(answer: Callable[..., Any]) -> str:
    """Return the one of ``RULES`` by which the learner's function takes every made-up plan."""
    left = list(RULES)
    for plans in telling_plans():
        found = _chosen(answer, plans, 8)
        wanted = {rule: rented(rule, plans, 8) for rule in RULES}
        left = [rule for rule in left if wanted[rule] == found]
        bills = ", ".join(
            f"{name} {[*plan['bills'].values()]}" for name, plan in plans.items() if name != "late"
        )
        by_rule = ", ".join(f"{name!r} by {rule}" for rule, name in wanted.items())
        expect(
            bool(left),
            f"it follows no single rule: it takes {found!r} of plans with the bills {bills}",
            by_rule,
            "Decide on one rule. A late plan is no measure: regret is what a plan costs above the"
            " cheapest plan that is in time, on the same network.",
        )
    return left[0]


def _most_days(plan: Mapping[str, Any]) -> float:
    return max(most for _, most in plan["days"].values())


def _chosen(answer: Callable[..., Any], plans: Plans, deadline_days: float) -> str | None:
    """Return the plan that the learner's function takes, from a copy that it may change."""
    copy = {
        name: {"days": dict(plan["days"]), "bills": dict(plan["bills"])}
        for name, plan in plans.items()
    }
    words = f"{judge.answer_name(answer)}(plans, deadline_days)"
    found = judge.call_answer(answer, copy, deadline_days, in_words=words)
    expect(
        found is None or (isinstance(found, str) and found in plans),
        f"it gave {judge.value_text(found)}",
        f"None, or the name of a plan: {', '.join(plans)}",
    )
    return found


@functools.cache
def rental_plans() -> Plans:
    """Return the plans of exercise 3: all blocks of Llama 2 7B, by the formula of section 4.

    A bill is that of the most days, in whole thousands of dollars.
    """
    plans = {}
    for gpus, dollars in DOLLARS.items():
        for size in GROUPS:
            days = {name: _days(gpus, size, network(*at)) for name, at in NETWORKS.items()}
            bills = {at: round(dollars * 24 * gpus * most, -3) for at, (_, most) in days.items()}
            name = f"{gpus} GPUs, " + (f"groups of {size}" if size else "one group")
            plans[name] = MappingProxyType(
                {"days": MappingProxyType(days), "bills": MappingProxyType(bills)}
            )
    return MappingProxyType(plans)


def _days(gpus: int, size: int | None, hosts: Hardware) -> tuple[float, float]:
    """Return the least and the most days: every task as short, or as long, as its factor allows."""
    shape = {"shard_over": size, "layers": None, "sequence": SEQUENCE, "batch": SEQUENCES // gpus}
    least, most = (
        theory.sharded_step_s(ranks=gpus, hosts=each, **shape)  # type: ignore[arg-type]
        for each in (
            _slowed(hosts, 1 / COMPUTE_ERROR, 1 / LINK_ERROR),
            _slowed(hosts, COMPUTE_ERROR, LINK_ERROR),
        )
    )
    return least * STEPS / 86400, most * STEPS / 86400


def _slowed(hosts: Hardware, computing: float, links: float) -> Hardware:
    """Return hosts whose operators and collectives take so many times as long."""
    return replace(
        hosts,
        matmul_share=hosts.matmul_share / computing,
        memory_bytes_per_s=hosts.memory_bytes_per_s / computing,
        operator_s=hosts.operator_s * computing,
    ).with_links(hosts.links.slower(links))


def unit_times(result: RunResult) -> pandas.DataFrame:
    """Return the milliseconds that root, a block and the head compute in each pass.

    Args:
        result: of a simulation of ``train.py`` with ``hardware=``. What comes before its blocks in
            the forward pass belongs to the root, what comes after them to the head.
    """
    bars = result.frame.query("lane == 'compute'")
    block = bars.name.str.startswith("blocks.")
    computed = {}
    for phase, (before, after) in {
        "forward": ("root", "head"),
        "backward": ("head", "root"),
    }.items():
        of_pass = bars.phase == phase
        first_us = bars[of_pass & block].start_us.min()
        ms = bars[of_pass].dur_us / 1e3
        is_block, is_before = block[of_pass], bars[of_pass].start_us < first_us
        blocks = bars[of_pass & block].name.nunique()
        computed[phase] = {
            before: ms[~is_block & is_before].sum(),
            "block": ms[is_block].sum() / blocks,
            after: ms[~is_block & ~is_before].sum(),
        }
    return pandas.DataFrame(computed).loc[["root", "block", "head"]]


def all_blocks_s(time: StepTime, blocks: int = 8, whole: int = LLAMA_2_7B.layers) -> float:
    """Return the seconds of a step with all blocks, continued from the record of a few.

    Each further block adds what lies between two in the middle of the record: in the forward pass,
    and on the stream of the backward pass that falls behind. The optimizer grows with the
    parameters.

    Args:
        time: the estimated step of ``train.py``.
        blocks: that it has, at least eight.
        whole: number of blocks to continue to.
    """
    ends: dict[str, list[float]] = {}
    for bar in time.bars:
        ends.setdefault(bar.name, []).append(bar.end_s)

    def between(task: str, before: int, after: int, which: Callable[..., float] = min) -> float:
        first, second = (ends.get(f"{task} blocks.{block}") for block in (before, after))
        return which(second) - which(first) if first and second else 0.0

    ahead = between("forward", 4, 5)
    # A block is gathered in both passes, so its last gather is the one of the backward pass.
    back = [between(task, 3, 2) for task in ("backward", "reduce_scatter", "all_reduce")]
    further_s = ahead + max(*back, between("all_gather", 3, 2, max))
    update_s = sum(bar.dur_s for bar in time.bars if bar.name.startswith("optimizer"))
    grown = [replace(LLAMA_2_7B, layers=number).parameters for number in (blocks, whole)]
    return time.step_s + (whole - blocks) * further_s + update_s * (grown[1] / grown[0] - 1)


def network(latency_us: float, share: float = 1.0) -> Hardware:
    """Return hosts of eight H100 whose network was measured.

    Args:
        latency_us: of a step between hosts.
        share: what the job has of each network card.
    """
    hosts = get_hardware("h100-8x")
    return hosts.with_network(latency_us=latency_us, bandwidth_share=share, measured=True)


def estimate_in_turns(result: RunResult, hosts: Hardware) -> RankStepEstimate:
    """Estimate a step whose messages between hosts take turns, as bytes do that share a card.

    ``estimate_rank_step`` lets the collectives of different groups run side by side, each as fast
    as if the network were its own.
    """
    done = read_events(result)

    def timed(machine: Hardware) -> StepTime:
        seconds_of = operator_timer(machine)
        groups = [make_group(ranks, machine.devices) for ranks in done.groups]
        crossing = {
            f"{COMMUNICATION_STREAM} {at}" for at, group in enumerate(groups) if group.hosts > 1
        }
        events = (event_for_hardware(each, groups, machine, seconds_of) for each in done.events)
        return schedule_tasks(
            [
                replace(task, stream="network") if task.stream in crossing else task
                for task in tasks_from_events([*events])
            ]
        )

    low, high = (
        timed(_slowed(hosts, COMPUTE_ERROR**sign, LINK_ERROR**sign)).step_s for sign in (-1, 1)
    )
    beside = estimate_rank_step(result, hosts, events=done)
    return replace(beside, time=timed(hosts), low_s=low, high_s=high)


def ways_left(
    estimates: Mapping[int, Sequence[RankStepEstimate]], *, whole: bool, margin: float
) -> list[int]:
    """Return the sizes of groups that no other size beats by more than a margin.

    Args:
        estimates: steps by size, each on the same networks in the same order.
        whole: whether the steps are continued to all blocks.
        margin: as a fraction.
    """
    steps = {
        str(size): {
            str(place): all_blocks_s(each.time) if whole else each.time.step_s
            for place, each in enumerate(row)
        }
        for size, row in estimates.items()
    }
    return [int(size) for size in theory.unbeaten(steps, margin)]
