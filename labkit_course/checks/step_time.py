"""Checks of lab 6b, how long?"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise, expect
from labkit_simulate.estimate import COMPUTE_ERROR, LINK_ERROR, RankStepEstimate
from labkit_simulate.theory import simulation as theory
from labkit_simulate.theory.hardware import Hardware, get_hardware
from labkit_simulate.theory.step_time import StepTime
from labkit_simulate.theory.transformer import LLAMA_2_7B

LAB = "step_time"
# The task of exercise 3: a million steps of so many sequences, whatever the number of GPUs, on four
# networks, each with its latency in µs and the job's share of a card.
STEPS, SEQUENCES, SEQUENCE = 1_000_000, 1024, 2048
GPUS, GROUPS, DEADLINE_DAYS = (256, 512, 1024), (32, None), 8
NETWORKS = [(us, part) for us in (14, 434) for part in (1.0, 0.9)]
Plans = Mapping[str, Mapping[str, Any]]
"""Plans by name; ``gpus`` is a number, ``days`` are the least and the most by network."""


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


def _plan(gpus: int, quick: tuple[float, float], slow: tuple[float, float]) -> dict[str, Any]:
    return {"gpus": gpus, "days": {"quick": quick, "slow": slow}}


QUESTIONS = [
    Question(
        {"sure": _plan(512, (5, 6), (6, 7)), "cheap": _plan(256, (5, 7), (9, 12))},
        8,
        "sure",
        "it rents the plan that is late for certain on the slow network",
        "A plan has to be over in time on every network.",
    ),
    Question(
        {"sure": _plan(512, (5, 6), (5, 6.5)), "cheap": _plan(256, (6, 7.5), (6, 9))},
        8,
        "sure",
        "it rents a plan that may take 9 days on the slow network, and there are 8",
        "A promise is about the most that a plan may take, not about the middle of its range.",
    ),
    Question(
        {"some": _plan(512, (5, 9), (6, 12)), "more": _plan(1024, (4, 5), (7, 9))},
        8,
        None,
        "no plan is sure to be over in 8 days, and it rents one",
        "They want to hear it if nobody can promise the date: return None.",
    ),
    Question(
        {"many": _plan(1024, (2, 3), (2.5, 3.5)), "few": _plan(256, (5, 6), (6, 7))},
        8,
        "few",
        "it rents 1024 GPUs, which cost more on every network than the 256 that are in time, too",
        "Once it is in time, nobody pays for being early. A bill counts GPUs times hours.",
    ),
    Question(
        {"steady": _plan(512, (6, 7), (6.5, 7.2)), "wide": _plan(512, (4, 6.5), (5, 6.9))},
        8,
        "wide",
        "it rents the plan with the narrow range, which costs more on every network",
        "Ranges that overlap are no reason: compare two plans on the same network.",
    ),
    Question(
        {"gamble": _plan(512, (2.0, 2.2), (6, 7.5)), "even": _plan(512, (2.1, 2.3), (3, 3.5))},
        8,
        "even",
        "it saves 5 % if the network is quick, and pays twice as much if it is slow",
        "Nobody said that the network is quick. What does a plan cost where it is worst?",
    ),
]
KINDS = {
    "largest": (
        _plan(100, (2.7, 3.3), (4.5, 5.5)),
        "keeps the largest bill low, and may pay three times as much as needed on a quick network",
    ),
    "equal": (
        _plan(100, (1.215, 1.485), (5.0, 6.1)),
        "adds up the networks, as if each were as likely: say where you have the odds from",
    ),
    "near": (
        _plan(100, (0.9, 1.1), (5.4, 6.6)),
        "stays near the cheapest plan of each network, also where another's largest bill is lower",
    ),
}
"""Plans among which the criteria differ that can be defended, and what choosing one gives up."""


@exercise
def choose(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: a criterion by which to rent GPUs, from (plans, deadline_days)."""
    judge.raise_if_not_attempted(answer)
    for question in QUESTIONS:
        # In both orders, because a criterion does not depend on which plan stands first.
        for names in (list(question.plans), list(question.plans)[::-1]):
            plans = {name: question.plans[name] for name in names}
            found = _chosen(answer, plans, question.deadline_days)
            right = repr(question.right)
            none = "it rents none, and there is a plan that is in time on every network"
            said = none if found is None else question.said
            expect(found == question.right, said, right, question.hint)
    kind = _chosen(answer, {name: plan for name, (plan, _) in KINDS.items()}, DEADLINE_DAYS)
    expect(kind is not None, "it rents none of three plans that are in time", "one of them")
    name = _chosen(answer, rental_plans(), DEADLINE_DAYS)
    late = "of the real plans it rents one that may be late, or none"
    in_time = [each for each, plan in rental_plans().items() if _most_days(plan) <= DEADLINE_DAYS]
    expect(name in in_time, late, f"one of {', '.join(in_time)}")
    reason = (getattr(answer, "__doc__", "") or "").strip()
    hint = "One sentence in quotes, as the first line of the function: why is this right for them?"
    expect(bool(reason), "your criterion works, and does not say why it is right", hint=hint)
    return judge.passing_verdict(f"you rent {name}. Your criterion {KINDS[str(kind)][1]}")


def _most_days(plan: Mapping[str, Any]) -> float:
    return max(most for _, most in plan["days"].values())


def _chosen(answer: Callable[..., Any], plans: Plans, deadline_days: float) -> str | None:
    """Return the plan that the learner's function takes, from a copy that it may change."""
    copy = {
        name: {"gpus": plan["gpus"], "days": dict(plan["days"])} for name, plan in plans.items()
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
    """Return the plans of exercise 3: all blocks of Llama 2 7B, by the formula of section 4."""
    plans = {}
    for gpus in GPUS:
        for size in GROUPS:
            days = {at: _days(gpus, size, network(*at)) for at in NETWORKS}
            name = f"{gpus} GPUs, " + (f"groups of {size}" if size else "one group")
            plans[name] = MappingProxyType({"gpus": gpus, "days": MappingProxyType(days)})
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
