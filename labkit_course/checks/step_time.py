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
# The task of exercise 4: so many GPUs, the first blocks of the model, and two networks.
RANKS, LAYERS, SEQUENCE = 1024, 8, 2048
LATENCIES_US = (14, 434)
SIZES = (None, 8, 16, 32, 64, 128, 256)
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
def unbeaten(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: the ways that no other beats on every network, from steps[way][network]."""
    cases = [
        {"a": {"near": 1.0, "far": 2.0}, "b": {"near": 3.0, "far": 4.0}},
        {
            "a": {"near": 1.0, "far": 9.0},
            "b": {"near": 2.0, "far": 3.0},
            "c": {"near": 2.5, "far": 8.0},
        },
        {
            "a": {"x": 5.0, "y": 5.0, "z": 5.0},
            "b": {"x": 4.0, "y": 6.0, "z": 4.0},
            "c": {"x": 6.0, "y": 4.0, "z": 6.0},
        },
    ]
    for steps in cases:
        asked = judge.call_text(answer, steps)
        given = {way: dict(each) for way, each in steps.items()}
        found = judge.call_answer(answer, given, in_words=asked)
        said = f"{asked} gave {judge.value_text(found)}"
        is_names = isinstance(found, list | tuple | set) and set(found) <= set(steps)
        expect(is_names, said, f"a list of some of {', '.join(steps)}")
        right = theory.unbeaten(steps)
        extra, missing = set(found) - set(right), set(right) - set(found)
        hint = ""
        if extra:
            hint = f"One other way is quicker than {min(extra)} on every network."
        elif missing:
            hint = f"No single way is quicker than {min(missing)} on every network."
        expect(not extra and not missing, said, right, hint)
    return judge.passing_verdict(f"{len(cases)} tables agree")


@exercise
def robust(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: the way that keeps most of the best speed on the network that is worst for it."""
    cases = [
        (
            {"a": {"near": 90.0, "far": 40.0}, "b": {"near": 100.0, "far": 10.0}},
            "On the far network b has a quarter of a's speed.",
        ),
        (
            {"a": {"near": 60.0, "far": 40.0}, "b": {"near": 100.0, "far": 35.0}},
            "a is best where it is worst, but b is never far from the best.",
        ),
        (
            {
                "a": {"x": 50.0, "y": 900.0, "z": 7.0},
                "b": {"x": 40.0, "y": 990.0, "z": 6.0},
                "c": {"x": 10.0, "y": 2000.0, "z": 8.0},
            },
            "Compare on each network with the best of that network.",
        ),
    ]
    for speeds, hint in cases:
        asked = judge.call_text(answer, speeds)
        given = {way: dict(each) for way, each in speeds.items()}
        found = judge.call_answer(answer, given, in_words=asked)
        said = f"{asked} gave {judge.value_text(found)}"
        expect(isinstance(found, str) and found in speeds, said, "the name of a way")
        expect(found == (right := theory.robust(speeds)), said, right, hint)
    return judge.passing_verdict(f"{len(cases)} tables agree")


@exercise
def defence(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: how many GPUs share a model, and a range of its step that holds twice."""
    found = judge.call_answer(answer)
    shown, names = judge.value_text(found), ("shard_over", "low_ms", "high_ms")
    is_dict = isinstance(found, Mapping) and set(found) == set(names)
    expect(is_dict, f"it gave {shown}", f"a dict with {', '.join(names)}")
    size, low_ms, high_ms = (found[name] for name in names)
    are_numbers = all(isinstance(each, Real) for each in (low_ms, high_ms))
    expect(are_numbers and low_ms < high_ms, f"{low_ms!r} to {high_ms!r} is no range of numbers")
    try:
        ends_ms = simulated_ranges_ms(size)
    except (ParameterError, TypeError) as error:
        said = f"shard_over {size!r} is refused: {str(error).partition(chr(10))[0]}"
        raise judge.WrongAnswer(said, expected=f"a divisor of {RANKS}, or None") from None
    for latency_us, kept in kept_parts(size).items():
        said = f"shard_over {size!r} has {kept:.0%} of the best speed at {latency_us} µs"
        hint = "Which messages get longer with the latency: those inside a group, or across groups?"
        expect(kept >= NEAR, said, f"at least {NEAR:.0%} on both networks", hint)
    least_ms = min(low for low, _ in ends_ms.values())
    most_ms = max(high for _, high in ends_ms.values())
    for latency_us, (low, high) in ends_ms.items():
        said = f"at {latency_us} µs the step may take {low:.1f} to {high:.1f} ms"
        hint = "The error bounds of the estimate belong to the range, on both networks."
        holds = low_ms <= low * 1.001 and high_ms >= high * 0.999
        expect(
            holds, f"{said}, and yours is {low_ms:.1f} to {high_ms:.1f}", "a range around it", hint
        )
    is_narrow = low_ms >= least_ms / WIDER and high_ms <= most_ms * WIDER
    said = f"{low_ms:.1f} to {high_ms:.1f} ms is wider than what is known"
    expect(is_narrow, said, f"{least_ms:.1f} to {most_ms:.1f} ms")
    return judge.passing_verdict(
        f"shard_over {size}: {least_ms:.0f} to {most_ms:.0f} ms, near the best on both networks"
    )


def network(latency_us: float) -> Hardware:
    """Return hosts of eight H100 whose network was measured and has this latency of a step."""
    return get_hardware("h100-8x").with_network(latency_us=latency_us, measured=True)


@functools.cache
def simulated_steps(shard_over: int | None) -> dict[int, RankStepEstimate]:
    """Return the simulated step of the task by latency in microseconds."""
    how: dict[str, Any] = {"layers": LAYERS, "sequence": SEQUENCE, "shard_over": shard_over}
    result = labkit.simulate(TRAIN, world_size=RANKS, **how)
    return {us: estimate_rank_step(result, network(us)) for us in LATENCIES_US}


def simulated_ranges_ms(shard_over: int | None) -> dict[int, tuple[float, float]]:
    """Return least and most milliseconds of the task's step by latency in microseconds."""
    steps = simulated_steps(shard_over)
    return {us: (1e3 * step.low_s, 1e3 * step.high_s) for us, step in steps.items()}


def kept_parts(shard_over: int | None) -> dict[int, float]:
    """Return by latency how much of the speed of the best size of a group is left.

    The formula says which size is the best, and simulations how long both take, as in the lab.
    """
    kept = {}
    for latency_us, step in simulated_steps(shard_over).items():
        best = min(SIZES, key=lambda size: formula_step_s(size, latency_us))
        best_s = min(simulated_steps(best)[latency_us].time.step_s, step.time.step_s)
        kept[latency_us] = best_s / step.time.step_s
    return kept


def formula_step_s(shard_over: int | None, latency_us: float) -> float:
    """Return the seconds of the task's step from the shape of the model alone."""
    return theory.sharded_step_s(shard_over, RANKS, LAYERS, SEQUENCE, network(latency_us))
