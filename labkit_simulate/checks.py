"""Checks of lab 6, a cluster that is simulated."""

from collections.abc import Callable, Sequence
from typing import Any

from labkit.checks.judge import (
    Verdict,
    WrongAnswer,
    answer_name,
    call_answer,
    exercise,
    passing_verdict,
    value_text,
)
from labkit.theory.collectives import AlphaBeta
from labkit_simulate.theory import simulation as theory

LAB = "simulation"
TOLERANCE = 1e-6
QUESTIONS = {
    "peak memory of a rank": (True, "Sizes of tensors do not depend on numbers in them."),
    "bytes sent between hosts": (True, "Sizes of tensors and the ranks of each group are known."),
    "number of all-gathers in a step": (True, "The program asks for them, whatever the numbers."),
    "loss after 100 steps": (False, "A simulated tensor has no numbers, and the loss is one."),
    "whether gradients overflow in float16": (
        False,
        "That depends on the numbers in the gradients.",
    ),
    "which rank is late": (
        False,
        "All ranks are taken to be alike. Lateness is measured, as in lab 7.",
    ),
    "how long the data loader takes": (
        False,
        "Nothing is read. The samples have a shape and no content.",
    ),
}
"""What is asked in exercise 6, whether a simulation can know it, and why."""


@exercise
def fewest_hosts(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: hosts of 8 on which each rank finds room, from (shared_bytes, own_bytes,
    budget_bytes), or None.
    """
    for shared, own, budget in (
        (1280.0, 20.0, 60.0),
        (1281.0, 20.0, 60.0),
        (8.0, 1.0, 80.0),
        (640.0, 60.0, 60.0),
    ):
        right = theory.fewest_hosts(shared, own, budget)
        asked = f"{answer_name(answer)}({shared:g}, {own:g}, {budget:g})"
        found = call_answer(answer, shared, own, budget, in_words=asked)
        if found == right and not isinstance(found, bool):
            continue
        said = f"{asked} gave {value_text(found)}"
        if right is None:
            hint = "The own bytes alone fill the budget. More ranks do not make them fewer."
            raise WrongAnswer(said, expected="None: no number of hosts is enough", hint=hint)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise WrongAnswer(said, expected=f"{right}", hint="Give a number of hosts.")
        raise WrongAnswer(
            said,
            expected=f"{right}",
            hint=_fewest_hosts_hint(found, right, shared, own, budget),
        )
    return passing_verdict("4 cases agree, one of them without an answer")


def _fewest_hosts_hint(found: float, right: int, shared: float, own: float, budget: float) -> str:
    room = budget - own
    likely = {
        shared / room: "That is the number of ranks. A host has 8.",
        shared / budget / 8: "Each rank also holds its own bytes.",
        shared / room / 8: "There are no parts of hosts: round up.",
        shared // (8 * room): "Rounded down, the last bytes find no room.",
    }
    near = next(
        (text for value, text in likely.items() if abs(found - value) <= TOLERANCE * value), ""
    )
    if near or found <= 0:
        return near or "It takes one host at least."
    held = own + shared / (8 * found)
    return f"On {found:g} hosts a rank holds {held:g} of {budget:g}." + (
        " Fewer do." if found > right else ""
    )


@exercise
def ring_s(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: seconds of an all-gather over hosts, from (shard_bytes, hosts, nproc, inside,
    between).
    """
    inside, between = AlphaBeta(2.0, 0.5), AlphaBeta(10.0, 6.0)
    for shard, hosts, nproc in ((4.0, 1, 8), (4.0, 2, 8), (0.0, 3, 4), (4.0, 4, 16)):
        right = theory.ring_s(shard, hosts, nproc, inside, between)
        asked = f"{answer_name(answer)}({shard:g}, hosts={hosts}, nproc={nproc}, inside, between)"
        found = call_answer(answer, shard, hosts, nproc, inside, between, in_words=asked)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise WrongAnswer(f"{asked} gave {value_text(found)}", expected="a number of seconds")
        if abs(found - right) <= TOLERANCE * right:
            continue
        hops, crossing = hosts * nproc - 1, hosts - 1
        latency, seconds = (hops - crossing) * 2.0 + crossing * 10.0, hops * shard
        slower = max(0.5, 6.0 / nproc) if crossing else 0.5
        likely = {
            latency
            + seconds
            * (
                6.0 if crossing else 0.5
            ): "A host has a card for each rank, and the rings fill all.",
            latency + seconds * 0.5: "What leaves the host may be slower than what stays.",
            latency + seconds * 6.0 / nproc: (
                "The slower of the two decides, and on one host nothing crosses."
            ),
            hops * 2.0 + seconds * slower: "Some hops go between hosts, with another latency.",
            hops * 10.0 + seconds * slower: "Most hops stay inside a host.",
            latency
            + (hops + 1)
            * shard
            * slower: "A shard makes a hop to every other rank: one less than there are.",
            latency + shard * slower: "Bytes travel with every hop, not only with one.",
        }
        hint = next(
            (text for value, text in likely.items() if abs(found - value) <= TOLERANCE * value), ""
        )
        links = "inside 2 s and 0.5 s a byte, between 10 s and 6 s a byte of one card"
        raise WrongAnswer(
            f"{asked} gave {found:g} s", expected=f"{right:g} s, with {links}", hint=hint
        )
    return passing_verdict("4 cases agree, on one host and on several")


@exercise
def forward_s(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: when a forward pass ends whose units are gathered one ahead, from (gathers_s,
    computes_s).
    """
    cases = (
        ([1.0], [2.0]),
        ([1.0, 1.0, 1.0], [3.0, 3.0, 3.0]),
        ([3.0, 3.0, 3.0], [1.0, 1.0, 1.0]),
        ([1.0, 1.0, 5.0], [4.0, 1.0, 1.0]),
        ([2.0, 0.5, 4.0, 1.0], [1.0, 3.0, 0.5, 2.0]),
    )
    for gathers, computes in cases:
        right = theory.forward_s(gathers, computes)
        asked = f"{answer_name(answer)}({gathers}, {computes})"
        found = call_answer(answer, list(gathers), list(computes), in_words=asked)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise WrongAnswer(f"{asked} gave {value_text(found)}", expected="a number of seconds")
        if abs(found - right) > TOLERANCE:
            hint = _forward_hint(found, gathers, computes)
            raise WrongAnswer(f"{asked} gave {found:g} s", expected=f"{right:g} s", hint=hint)
    return passing_verdict(f"{len(cases)} passes end when they should")


def _forward_hint(found: float, gathers: Sequence[float], computes: Sequence[float]) -> str:
    """Return the one omission that explains a wrong number, or ""."""
    gathered = over = 0.0
    # This leaves out the wait for a free buffer.
    for gather, compute in zip(gathers, computes, strict=True):
        gathered += gather
        over = max(over, gathered) + compute
    likely = {
        max(sum(gathers), sum(computes)): "The first unit is gathered while nothing computes.",
        sum(gathers) + sum(computes): "While a unit computes, the next one is gathered.",
        over: (
            "There is room for two units: a gather waits until the unit before the last has"
            " computed."
        ),
    }
    return next((text for value, text in likely.items() if abs(found - value) <= TOLERANCE), "")


@exercise
def hosts_spanned(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: on how many hosts the ranks of a group are, from (size, stride, nproc)."""
    for size, stride, nproc in (
        (8, 1, 8),
        (16, 1, 8),
        (16, 8, 8),
        (4, 2, 8),
        (4, 4, 8),
        (3, 16, 8),
    ):
        right = theory.hosts_spanned(size, stride, nproc)
        asked = f"{answer_name(answer)}(size={size}, stride={stride}, nproc={nproc})"
        found = call_answer(answer, size, stride, nproc, in_words=asked)
        if found == right and not isinstance(found, bool):
            continue
        ranks = [place * stride for place in range(size)]
        few = ", ".join(map(str, ranks[:4])) + (", …" if size > 4 else "")
        hint = (
            f"The group is ranks {few}, and each host has {nproc}: on which host is each of them?"
        )
        raise WrongAnswer(f"{asked} gave {value_text(found)}", expected=f"{right}", hint=hint)
    return passing_verdict("6 groups placed")


@exercise
def efficiencies(answer: Callable[..., Any]) -> Verdict:
    """Exercise 5: what a rank does at each size, as a part of what it does at the first."""
    for ranks, total in (
        ([8, 16, 64], [80.0, 160.0, 320.0]),
        ([1, 2], [50.0, 75.0]),
        ([8, 1024], [1.0, 128.0]),
    ):
        right = theory.efficiencies(ranks, total)
        asked = f"{answer_name(answer)}({ranks}, {total})"
        found = call_answer(answer, list(ranks), list(total), in_words=asked)
        if not isinstance(found, list | tuple) or len(found) != len(ranks):
            raise WrongAnswer(f"{asked} gave {value_text(found)}", expected=f"{len(ranks)} numbers")
        if all(
            abs(mine - expected) <= TOLERANCE for mine, expected in zip(found, right, strict=True)
        ):
            continue
        likely = {
            tuple(
                each / total[0] for each in total
            ): "All ranks together do more. What does one of them do?",
            tuple(
                each / count for each, count in zip(total, ranks, strict=True)
            ): "As a part of what one does first.",
            tuple(
                each / total[-1] for each in total
            ): "Compare with the first size, not with the last.",
        }
        hint = next(
            (text for values, text in likely.items() if _is_series_close(found, values)), ""
        )
        said = ", ".join(f"{value:g}" for value in found)
        raise WrongAnswer(
            f"{asked} gave {said}",
            expected=f"{', '.join(f'{each:g}' for each in right)}",
            hint=hint,
        )
    return passing_verdict("3 series agree")


def _is_series_close(found: Sequence[float], values: Sequence[float]) -> bool:
    return all(abs(mine - value) <= TOLERANCE for mine, value in zip(found, values, strict=True))


@exercise
def can_know(answer: Callable[..., Any]) -> Verdict:
    """Exercise 6: for each question whether a simulation without numbers and clocks can answer
    it.
    """
    for question, (right, why) in QUESTIONS.items():
        found = call_answer(answer, question, in_words=f"{answer_name(answer)}({question!r})")
        if found is not right:
            said = f"{answer_name(answer)}({question!r}) gave {value_text(found)}"
            raise WrongAnswer(said, expected=f"{right}", hint=why)
    return passing_verdict(f"{len(QUESTIONS)} questions sorted")
