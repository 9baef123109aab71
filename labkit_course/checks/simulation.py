"""Checks of lab 6, a cluster that is simulated."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from labkit.theory.collectives import AlphaBeta
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise
from labkit_simulate.theory import simulation as theory

LAB = "simulation"
# Any order of the operations is right, so rounding may differ.
TOLERANCES = {"rtol": 1e-9, "atol": 0.0}
# What is asked in exercise 6, whether a simulation can know it, and why.
QUESTIONS = {
    "peak memory of a rank": (True, "Sizes of tensors do not depend on numbers in them."),
    "bytes sent between hosts": (True, "Sizes of tensors and the ranks of each group are known."),
    "number of all-gathers in a step": (True, "The program asks for them, whatever the numbers."),
    "loss after 100 steps": (False, "A simulated tensor has no numbers, and the loss is one."),
    "whether gradients overflow in float16": (False, "That depends on their numbers."),
    "which rank is late": (False, "All ranks are alike here. Lateness is measured, as in lab 7."),
    "how long the data loader takes": (False, "Samples have a shape here, and nothing is read."),
}


@exercise
def fewest_hosts(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: hosts of 8 on which each rank finds room, or None, as ``theory.fewest_hosts``."""

    def right_hosts(shared_bytes: float, own_bytes: float, budget_bytes: float) -> int:
        return math.ceil(shared_bytes / 8 / (budget_bytes - own_bytes))

    # Each case brings one more rule into play.
    cases = [
        (1280.0, 0.0, 40.0, "That many ranks share the bytes, and a host has 8 of them."),
        (1280.0, 20.0, 60.0, "Each rank also holds its own bytes."),
        (1281.0, 20.0, 60.0, "Rounded down, the last bytes find no room."),
    ]
    judge.judge_cases(answer, right_hosts, cases)
    # None is no number, so this case is judged by itself.
    asked = judge.call_text(answer, 640.0, 60.0, 60.0)
    found = judge.call_answer(answer, 640.0, 60.0, 60.0)
    hint = "The own bytes alone fill the budget. More ranks do not make them fewer."
    said, expected = f"{asked} gave {judge.value_text(found)}", "None: no number of hosts is enough"
    judge.expect(found is None, said, expected, hint)
    return judge.passing_verdict("4 cases agree, one of them without an answer")


@exercise
def ring_s(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: seconds of an all-gather over hosts, with the arguments of ``theory.ring_s``."""
    links = AlphaBeta(2.0, 0.5), AlphaBeta(10.0, 6.0)
    hops = "A shard makes a hop to every other rank, one less than there are, with all its bytes."
    crossing = "hosts - 1 of the hops go between hosts, with another latency."
    slower = "Each rank has a card, and the rings fill all. The slower of the two links decides."
    cases = [
        (4.0, 1, 8, *links, f"{hops} On one host nothing crosses."),
        # Without bytes, latencies alone count.
        (0.0, 3, 4, *links, crossing),
        (4.0, 2, 8, *links, slower),
        (4.0, 4, 16, *links, slower),
    ]
    judge.judge_cases(answer, theory.ring_s, cases)
    return judge.passing_verdict("4 cases agree, on one host and on several")


@exercise
def forward_s(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: when a forward pass ends whose units are gathered one ahead, from (gathers_s,
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
def hosts_spanned(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: on how many hosts the ranks of a group are, from (size, stride, nproc)."""
    hint = "The group is ranks 0, stride, 2 * stride, …: on which host is each of them?"
    cases = [(8, 1, 8), (16, 1, 8), (16, 8, 8), (4, 2, 8), (4, 4, 8), (3, 16, 8)]
    judge.judge_cases(answer, theory.hosts_spanned, [(*case, hint) for case in cases])
    return judge.passing_verdict("6 groups placed")


@exercise
def efficiencies(answer: Callable[..., Any]) -> Verdict:
    """Exercise 5: what a rank does at each size, as a part of what it does at the first."""
    cases = [
        ([8, 16, 64], [80.0, 160.0, 320.0]),
        ([1, 2], [50.0, 75.0]),
        ([8, 1024], [1.0, 128.0]),
    ]
    for ranks, totals in cases:
        right, asked = theory.efficiencies(ranks, totals), judge.call_text(answer, ranks, totals)
        found = judge.call_answer(answer, [*ranks], [*totals], in_words=asked)
        is_series = isinstance(found, list | tuple) and len(found) == len(ranks)
        said = f"{asked} gave {judge.value_text(found)}"
        are_numbers = is_series and all(isinstance(value, Real) for value in found)
        judge.expect(are_numbers, said, f"{len(ranks)} numbers")
        each = [total / count for count, total in zip(ranks, totals, strict=True)]
        likely = {
            "All ranks together do more. What does one do?": [x / totals[0] for x in totals],
            "As a part of what one does first.": each,
            "Compare with the first size, not with the last.": [x / totals[-1] for x in totals],
        }
        is_right = judge.is_close(found, right, **TOLERANCES)
        judge.expect(is_right, said, right, judge.likely_hint(found, likely))
    return judge.passing_verdict(f"{len(cases)} series agree")


@exercise
def can_know(answer: Callable[..., Any]) -> Verdict:
    """Exercise 6: for each question, whether a simulation without numbers and clocks answers it."""
    for question, (right, why) in QUESTIONS.items():
        found = judge.call_answer(answer, question)
        said = f"{judge.call_text(answer, question)} gave {judge.value_text(found)}"
        judge.expect(found is right, said, right, why)
    return judge.passing_verdict(f"{len(QUESTIONS)} questions sorted")
