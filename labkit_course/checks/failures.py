"""Checks of lab 7, when it breaks."""

from collections.abc import Callable
from numbers import Integral
from typing import Any

from labkit.theory import failures as theory
from labkit_course.checks import judge
from labkit_course.checks.judge import (
    Verdict,
    WrongAnswer,
    exercise,
    expect,
    passing_verdict,
    value_text,
)
from labkit_course.checks.mystery import judge_diagnosis

# The mystery runs of exercise 3.
SEEDS = (17, 1, 23)
LOST = "RuntimeError: Connection closed by peer"
# How each rank of a run ended: exit status, time, error. torchrun ends ranks with signal 15.
ENDED_RUNS = {
    "one that raised": [(1, 5.4, LOST), (-15, 5.6, ""), (1, 5.1, "ValueError"), (-15, 5.6, "")],
    "one that was killed": [(1, 7.2, LOST), (-9, 7.3, ""), (1, 7.25, LOST), (-15, 7.4, "")],
    "two that raised": [(1, 9.4, "KeyError"), (-15, 9.6, ""), (0, 8.0, ""), (1, 9.1, "ValueError")],
}
CALLS = {"s": ("all_reduce", (8, 8)), "m": ("all_reduce", (8,)), "b": ("broadcast", (8,))}


@exercise
def culprit(answer: Callable[..., int]) -> Verdict:
    """Exercise 1: the rank that failed first by itself, from how each rank ended."""
    hint = "Leave out who ended well, was ended by torchrun, or lost a connection. Who was first?"
    for name, rows in ENDED_RUNS.items():
        ends: list[dict[str, Any]] = [
            {"rank": rank, "status": status, "time": time, "error": error}
            for rank, (status, time, error) in enumerate(rows)
        ]
        right, copies = theory.first_failed_rank(ends), [dict(end) for end in ends]
        asked = f"{judge.answer_name(answer)} of a run with {name}"
        found = judge.call_answer(answer, copies, in_words=asked)
        is_rank = isinstance(found, Integral) and found in range(len(ends))
        expect(is_rank, f"{value_text(found)} is no rank", f"rank {right}", hint)
        said = f"in a run with {name} it blames rank {found}, {_excuse_text(ends[found])}"
        expect(found == right, said, f"rank {right}", hint)
    return passing_verdict("3 runs agree")


def _excuse_text(end: dict[str, Any]) -> str:
    # A lost connection is the echo of another rank's failure.
    if end["error"] == LOST:
        return "which only lost a connection"
    if end["status"] == -15:
        return "which torchrun ended"
    return "which ended well" if end["status"] == 0 else "which failed later"


@exercise
def where_they_part(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: the first call in which the ranks' logs differ, and the ranks in the minority."""
    in_turn = "Compare all ranks at place 0, then at place 1, and so on."
    minority = "Name the few, not those that differ from rank 0. Compare shapes as well."
    short = "zip stops at the shortest log. What does the rank do that calls nothing more?"
    first = "The first place counts: what comes after it is a consequence."
    cases = (
        ("four equal logs", "sm sm sm sm", "Return None if no place differs."),
        ("rank 2 in another call", "sm sm sb sm", in_turn),
        ("rank 0 with another shape", "sm ss ss ss", minority),
        ("rank 3 one call short", "sms sms sms sm", short),
        ("two places where they differ", "sss sss smb sss", first),
    )
    # Each word is a rank's log, each letter one of its calls.
    for name, text, hint in cases:
        logs = [[CALLS[letter] for letter in log] for log in text.split()]
        right, asked = theory.first_diverging_call(logs), f"{judge.answer_name(answer)} of {name}"
        found = judge.call_answer(answer, [list(log) for log in logs], in_words=asked)
        said = f"of {name} it gave {value_text(found)}"
        is_pair = isinstance(found, list | tuple) and len(found) == 2
        expect(found is None or is_pair, said, right, "Return the place and a list of ranks.")
        expect((tuple(found) if is_pair else None) == right, said, right, hint)
    return passing_verdict(f"{len(cases)} sets of logs agree")


@exercise
def diagnoses(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: rank, cause and the line that proves it of each mystery run, by its seed."""
    found = judge.call_answer(answer)
    said = f"it gave {value_text(found)}"
    expect(isinstance(found, dict), said, "a dict", "{seed: (rank, cause, line)}")
    for seed in SEEDS:
        expect(seed in found, f"mystery {seed} is missing", hint="One entry for each seed.")
        verdict = judge_diagnosis(seed, found[seed])
        if not verdict.ok:
            raise WrongAnswer(verdict.detail, expected=verdict.expected, hint=verdict.hint)
    return passing_verdict(f"{len(SEEDS)} mysteries solved: rank, cause and proof of each")
