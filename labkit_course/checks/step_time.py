"""Checks of lab 6b, how long?"""

import functools
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import labkit
from labkit.errors import ParameterError
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise, expect
from labkit_simulate.estimate import RankStepEstimate, estimate_rank_step
from labkit_simulate.theory import simulation as theory
from labkit_simulate.theory.hardware import Hardware, get_hardware
from launch.given import TRAIN

LAB = "step_time"
# The task of exercise 4: so many GPUs, the first blocks of the model, and four networks.
RANKS, LAYERS, SEQUENCE = 1024, 8, 2048
FIGURES = ("latency", "cards")
SHARES = {1.0: "whole cards", 0.5: "half of each card"}
NETWORKS = {
    f"{us} µs and {words}": (us, share) for us in (14, 434) for share, words in SHARES.items()
}
BEST = (16, 32, 64)
"""Groups of which one is quickest on each network, or within 1 %; others need no simulation."""
NEAR, WIDER = 0.95, 1.25


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
def robust(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: the ways that keep most of the best speed on the network that is worst for them,
    with all that tie, from (steps, tie).
    """
    far = "On the far network b takes four times as long as a."
    share = "a is best where it is worst, but b is never far from the best."
    tied = "Two ways tie if their worst shares differ by at most tie; the best comes first."
    cases = [
        ({"a": {"near": 1.2, "far": 2.0}, "b": {"near": 1.0, "far": 8.0}}, 0.01, far),
        ({"a": {"near": 2.0, "far": 8.0}, "b": {"near": 1.0, "far": 9.0}}, 0.01, share),
        (
            {
                "a": {"x": 1.05, "y": 4.0, "z": 7.0},
                "b": {"x": 1.0, "y": 4.1, "z": 7.1},
                "c": {"x": 1.5, "y": 4.0, "z": 7.0},
            },
            0.05,
            tied,
        ),
    ]
    for steps, tie, hint in cases:
        asked = judge.call_text(answer, steps, tie)
        given = {way: dict(each) for way, each in steps.items()}
        found = judge.call_answer(answer, given, tie, in_words=asked)
        said = f"{asked} gave {judge.value_text(found)}"
        is_names = isinstance(found, list | tuple) and set(found) <= set(steps)
        expect(is_names, said, f"a list of some of {', '.join(steps)}")
        expect(list(found) == (right := theory.robust(steps, tie)), said, right, hint)
    return judge.passing_verdict(f"{len(cases)} tables agree")


@exercise
def defence(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: how many GPUs share a model on hosts whose cards may be shared, a range of the
    step, and which figure to measure first.
    """
    found = judge.call_answer(answer)
    shown, names = judge.value_text(found), ("shard_over", "low_ms", "high_ms", "measure_first")
    is_dict = isinstance(found, Mapping) and set(found) == set(names)
    expect(is_dict, f"it gave {shown}", f"a dict with {', '.join(names)}")
    size, low_ms, high_ms, first = (found[name] for name in names)
    are_numbers = all(isinstance(each, Real) for each in (low_ms, high_ms))
    expect(are_numbers and low_ms < high_ms, f"{low_ms!r} to {high_ms!r} is no range of numbers")
    expect(first in FIGURES, f"measure_first is {first!r}", " or ".join(map(repr, FIGURES)))
    try:
        ends_ms = simulated_ranges_ms(size)
    except (ParameterError, TypeError) as error:
        said = f"shard_over {size!r} is refused: {str(error).partition(chr(10))[0]}"
        raise judge.WrongAnswer(said, expected=f"a divisor of {RANKS}, or None") from None
    for name, kept in kept_parts(size).items():
        said = f"shard_over {size!r} has {kept:.0%} of the best speed with {name}"
        hint = "Which messages cross hosts: those inside a group, or those between groups?"
        expect(kept >= NEAR, said, f"at least {NEAR:.0%} on all four networks", hint)
    least_ms = min(low for low, _ in ends_ms.values())
    most_ms = max(high for _, high in ends_ms.values())
    for name, (low, high) in ends_ms.items():
        said = f"with {name} the step may take {low:.1f} to {high:.1f} ms"
        hint = "The error bounds of the estimate belong to the range, on all four networks."
        holds = low_ms <= low * 1.001 and high_ms >= high * 0.999
        expect(
            holds, f"{said}, and yours is {low_ms:.1f} to {high_ms:.1f}", "a range around it", hint
        )
    is_narrow = low_ms >= least_ms / WIDER and high_ms <= most_ms * WIDER
    said = f"{low_ms:.1f} to {high_ms:.1f} ms is wider than what is known"
    expect(is_narrow, said, f"{least_ms:.1f} to {most_ms:.1f} ms")
    moves = moved_by(size)
    said = f"the step depends on {first} by up to {moves[first]:.0%}"
    hint = "Change one figure from end to end, and leave the other as it is."
    expect(first == max(moves, key=lambda name: moves[name]), said, "the other figure", hint)
    return judge.passing_verdict(
        f"shard_over {size}: {least_ms:.0f} to {most_ms:.0f} ms, near the best on all four networks"
    )


def network(latency_us: float, share: float = 1.0) -> Hardware:
    """Return hosts of eight H100 whose network was measured.

    Args:
        latency_us: of a step between hosts.
        share: what the job has of each network card.
    """
    hosts = get_hardware("h100-8x")
    return hosts.with_network(latency_us=latency_us, bandwidth_share=share, measured=True)


@functools.cache
def simulated_steps(shard_over: int | None) -> dict[str, RankStepEstimate]:
    """Return the simulated step of the task by network."""
    how: dict[str, Any] = {"layers": LAYERS, "sequence": SEQUENCE, "shard_over": shard_over}
    result = labkit.simulate(TRAIN, world_size=RANKS, **how)
    return {name: estimate_rank_step(result, network(*each)) for name, each in NETWORKS.items()}


def simulated_ranges_ms(shard_over: int | None) -> dict[str, tuple[float, float]]:
    """Return least and most milliseconds of the task's step by network."""
    steps = simulated_steps(shard_over)
    return {name: (1e3 * step.low_s, 1e3 * step.high_s) for name, step in steps.items()}


def kept_parts(shard_over: int | None) -> dict[str, float]:
    """Return by network how much of the speed of the best size of a group is left."""
    candidates = [simulated_steps(size) for size in {*BEST, shard_over}]
    return {
        name: min(each[name].time.step_s for each in candidates) / step.time.step_s
        for name, step in simulated_steps(shard_over).items()
    }


def moved_by(shard_over: int | None) -> dict[str, float]:
    """Return by how much each figure, from end to end, makes the step longer at most."""
    seconds = {
        NETWORKS[name]: step.time.step_s for name, step in simulated_steps(shard_over).items()
    }
    latency = max(seconds[434, share] / seconds[14, share] for share in SHARES)
    cards = max(seconds[us, 0.5] / seconds[us, 1.0] for us in (14, 434))
    return {"latency": latency - 1, "cards": cards - 1}
