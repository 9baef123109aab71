"""Checks of lab 6b, how long?"""

import functools
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any

import labkit
from labkit.runs.result import RunResult
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise, expect
from labkit_simulate.estimate import RankStepEstimate, estimate_rank_step
from labkit_simulate.theory import simulation as theory
from labkit_simulate.theory.hardware import Hardware, get_hardware
from launch.given import TRAIN

LAB = "step_time"
# The task of exercise 3: so many GPUs, the first blocks of the model, sequences of 1024 tokens, six
# sizes of a group, and four networks, each with its latency in µs and the job's share of a card.
RANKS, LAYERS, SEQUENCE = 1024, 8, 1024
SIZES = (8, 16, 32, 64, 128, 256)
LATENCIES_US, PARTS = (14, 434), (1.0, 0.9)
NETWORKS = [(us, part) for us in LATENCIES_US for part in PARTS]
FIGURES = ("latency", "cards")
ANSWER = ("shard_over", "low_ms", "high_ms", "slower", "measure_first")
APART, WIDER = 1.2, 1.02
"""How much longer counts as slower, and how far a range may go beyond what is known."""


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


@exercise
def defence(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: how many GPUs share a model on four networks, the range of the step, which sizes
    are told apart from it, and which figure to measure first.
    """
    found = judge.call_answer(answer)
    is_dict = isinstance(found, Mapping) and set(found) == set(ANSWER)
    expect(is_dict, f"it gave {judge.value_text(found)}", f"a dict with {', '.join(ANSWER)}")
    size, low_ms, high_ms, slower, first = (found[name] for name in ANSWER)
    are_numbers = all(isinstance(each, Real) for each in (low_ms, high_ms))
    expect(are_numbers and low_ms < high_ms, f"{low_ms!r} to {high_ms!r} is no range of numbers")
    expect(first in FIGURES, f"measure_first is {first!r}", " or ".join(map(repr, FIGURES)))
    expect(size in SIZES, f"shard_over is {size!r}", f"one of {', '.join(map(str, SIZES))}")
    estimates = {at: task_estimates(*at) for at in NETWORKS}
    steps = {
        at: {one: each.time.step_s for one, each in row.items()} for at, row in estimates.items()
    }
    _judge_size(size, steps)
    _judge_range(low_ms, high_ms, {at: row[size] for at, row in estimates.items()})
    _judge_slower(slower, size, steps)
    mine = {at: row[size] for at, row in steps.items()}
    moves = {
        "latency": max(mine[434, part] / mine[14, part] for part in PARTS),
        "cards": max(mine[us, 0.9] / mine[us, 1.0] for us in LATENCIES_US),
    }
    said = f"{first} moves your step by a factor of {moves[first]:.2f} at most"
    hint = "Change one figure from end to end, and leave the other as it is."
    expect(first == max(FIGURES, key=lambda name: moves[name]), said, "the other figure", hint)
    return judge.passing_verdict(
        f"groups of {size}: {low_ms:.0f} to {high_ms:.0f} ms, never far from the best"
    )


Steps = Mapping[tuple[int, float], Mapping[int, float]]
"""Seconds by network and by size of a group."""


def _judge_size(size: int, steps: Steps) -> None:
    """Expect the size whose worst share of the best speed is largest."""

    def share(one: int, at: tuple[int, float]) -> float:
        return min(steps[at].values()) / steps[at][one]

    best = max(SIZES, key=lambda one: min(share(one, at) for at in NETWORKS))
    at = min(NETWORKS, key=lambda at: share(size, at))
    said = f"groups of {size} have {share(size, at):.0%} of the best speed with {_words(at)}"
    hint = "Look at the worst network of each size, and take the size that is best there."
    expect(size == best, said, "a size that is nowhere so far from the best", hint)


def _judge_range(
    low_ms: float, high_ms: float, mine: Mapping[tuple[int, float], RankStepEstimate]
) -> None:
    """Expect a range that holds the step on all networks, error bounds included, and no more."""
    hint = "The error bounds of the estimate belong to the range, on all four networks."
    for at, step in mine.items():
        low, high = 1e3 * step.low_s, 1e3 * step.high_s
        said = f"with {_words(at)} the step may take {low:.1f} to {high:.1f} ms"
        holds = low_ms <= low * 1.005 and high_ms >= high * 0.995
        yours = f"{said}, and yours is {low_ms:.1f} to {high_ms:.1f}"
        expect(holds, yours, "a range around it", hint)
    least_ms, most_ms = (
        1e3 * min(step.low_s for step in mine.values()),
        1e3 * max(step.high_s for step in mine.values()),
    )
    is_narrow = low_ms >= least_ms / WIDER and high_ms <= most_ms * WIDER
    said = f"{low_ms:.1f} to {high_ms:.1f} ms is wider than what is known"
    expect(is_narrow, said, f"{least_ms:.1f} to {most_ms:.1f} ms")


def _judge_slower(slower: Any, size: int, steps: Steps) -> None:
    """Expect for each network the sizes that are told apart from the chosen one."""
    is_lists = isinstance(slower, Mapping) and all(
        isinstance(each, Collection) and not isinstance(each, str) for each in slower.values()
    )
    keys = ", ".join(map(str, NETWORKS))
    said = f"slower is {judge.value_text(slower)}"
    expect(is_lists and set(slower) == set(NETWORKS), said, f"a list for each of {keys}")
    for at in NETWORKS:
        right = {one for one in SIZES if steps[at][one] > APART * steps[at][size]}
        said = f"with {_words(at)} you say that {_sizes(slower[at])} are slower"
        hint = f"Slower is what takes more than {APART} times as long as your way on that network."
        expect(set(slower[at]) == right, said, _sizes(right), hint)


def _sizes(sizes: Collection[Any]) -> str:
    return ", ".join(str(size) for size in SIZES if size in sizes) or "none"


def _words(at: tuple[int, float]) -> str:
    us, part = at
    return f"{us} µs and {part:.0%} of each card"


def network(latency_us: float, share: float = 1.0) -> Hardware:
    """Return hosts of eight H100 whose network was measured.

    Args:
        latency_us: of a step between hosts.
        share: what the job has of each network card.
    """
    hosts = get_hardware("h100-8x")
    return hosts.with_network(latency_us=latency_us, bandwidth_share=share, measured=True)


@functools.cache
def task_estimates(latency_us: float, share: float) -> Mapping[int, RankStepEstimate]:
    """Return the estimated step of exercise 3 by the size of a group.

    Args:
        latency_us: of a step between hosts.
        share: what the job has of each network card.
    """
    hosts = network(latency_us, share)
    return MappingProxyType(
        {size: estimate_rank_step(result, hosts) for size, result in _simulations().items()}
    )


@functools.cache
def _simulations() -> dict[int, RunResult]:
    """Simulate the task once for each size of a group; nothing in it depends on the network."""
    found = labkit.plan(
        TRAIN,
        world_size=RANKS,
        hardware="h100-8x",
        shard_over=list(SIZES),
        batch=1,
        layers=LAYERS,
        sequence=SEQUENCE,
    )
    return {size: found.load_simulation(place) for place, size in enumerate(SIZES)}
