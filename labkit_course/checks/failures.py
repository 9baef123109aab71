"""Checks of lab 7, when it breaks."""

import copy
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

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
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks import failures as ranks_failures

# The mystery runs of exercise 4.
SEEDS = (17, 45, 23, 48)
LOST, READ = "RuntimeError: Connection closed by peer", "RuntimeError: Read error"
RESET, PIPE = "RuntimeError: Connection reset by peer", "RuntimeError: Broken pipe"
LATE = "RuntimeError: Timed out waiting 1000ms for recv operation to complete"
# How each rank of a run ended: exit status, time, error. torchrun ends ranks with signal 15.
ENDED_RUNS = {
    "one that raised": [(1, 5.4, LOST), (-15, 5.6, ""), (1, 5.1, "ValueError"), (-15, 5.6, "")],
    "one that was killed": [(1, 7.2, READ), (-9, 7.3, ""), (1, 7.25, LOST), (-15, 7.4, "")],
    "one that raised on another system": [
        (-15, 5.3, ""),
        (1, 5.0, RESET),
        (1, 5.2, "KeyError"),
        (1, 5.1, PIPE),
    ],
    "one that was aborted": [(-15, 6.2, READ), (1, 6.1, LOST), (-6, 6.0, ""), (1, 6.1, READ)],
    "one that came late": [(1, 8.0, LATE), (1, 8.1, LATE), (-15, 8.3, ""), (1, 8.0, LOST)],
    "two that raised": [(1, 9.4, "KeyError"), (-15, 9.6, ""), (0, 8.0, ""), (1, 9.1, "ValueError")],
}
CALLS = {"s": ("all_reduce", (8, 8)), "m": ("all_reduce", (8,)), "b": ("broadcast", (8,))}


@exercise
def culprit(answer: Callable[..., int]) -> Verdict:
    """Exercise 1: the rank that failed first by itself, or None, from how each rank ended."""
    hint = "Leave out who ended well, was ended or aborted, lost a connection, or timed out."
    for name, rows in ENDED_RUNS.items():
        ends: list[dict[str, Any]] = [
            {"rank": rank, "status": status, "time": time, "error": error}
            for rank, (status, time, error) in enumerate(rows)
        ]
        right, copies = theory.first_failed_rank(ends), [dict(end) for end in ends]
        asked = f"{judge.answer_name(answer)} of a run with {name}"
        found = judge.call_answer(answer, copies, in_words=asked)
        wanted = "None" if right is None else f"rank {right}"
        is_rank = isinstance(found, Integral) and found in range(len(ends))
        expect(is_rank or found is None, f"{value_text(found)} is no rank", wanted, hint)
        whom = f"rank {found}, {_excuse_text(ends[found])}" if is_rank else "no rank"
        said = f"in a run with {name} it blames {whom}"
        expect((found is None) == (right is None) and found == right, said, wanted, hint)
    return passing_verdict(f"{len(ENDED_RUNS)} runs agree")


def _excuse_text(end: dict[str, Any]) -> str:
    # A lost connection is the echo of another rank's failure.
    if end["error"] in (LOST, READ, RESET, PIPE):
        return "which only lost a connection"
    if end["error"] == LATE:
        return "which only waited for another rank until it timed out"
    if end["status"] == -15:
        return "which torchrun ended"
    if end["status"] == -6:
        return "which was aborted, perhaps for what another rank sent"
    return "which ended well" if end["status"] == 0 else "which failed later"


@exercise
def where_they_part(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: where the ranks' logs part, the ranks in the minority, and how early it began."""
    in_turn = "Compare all ranks at place 0, then at place 1, and so on."
    minority = "Name the few, not those that differ from rank 0. Compare shapes as well."
    short = "zip stops at the shortest log. What does the rank do that calls nothing more?"
    first = "The first place counts: what comes after it is a consequence."
    back = (
        "Go back from the place as long as the calls before it, of those that agree, are the same."
    )
    cases = (
        ("four equal logs", "sm sm sm sm", "Return None if no place differs."),
        ("rank 2 in another call", "sm sm sb sm", in_turn),
        ("rank 0 with another shape", "bm bs bs bs", minority),
        ("rank 3 one call short", "smb smb smb sm", short),
        ("two places where they differ", "bmm bmm bsb bmm", first),
        ("one call of three left out", "bsss bsss bsss bss", back),
        ("a call left out before another kind", "mssb mssb msb mssb", back),
        ("a call that was made before, with another between", "msms msms msmb msms", back),
    )
    # Each word is a rank's log, each letter one of its calls.
    for name, text, hint in cases:
        logs = [[CALLS[letter] for letter in log] for log in text.split()]
        right, asked = first_parting(logs), f"{judge.answer_name(answer)} of {name}"
        found = judge.call_answer(answer, [list(log) for log in logs], in_words=asked)
        said = f"of {name} it gave {value_text(found)}"
        is_triple = isinstance(found, list | tuple) and len(found) == 3
        expect(found is None or is_triple, said, right, "Return (earliest, place, list of ranks).")
        is_place_right = is_triple and right is not None and tuple(found[1:]) == right[1:]
        hint = back if is_place_right else hint
        expect((tuple(found) if is_triple else None) == right, said, right, hint)
    return passing_verdict(f"{len(cases)} sets of logs agree")


def first_parting(logs: Sequence[Sequence[Any]]) -> tuple[int, int, list[int]] | None:
    """Return where equal calls before the parting began, the parting, and the minority."""
    found = theory.first_diverging_call(logs)
    if found is None:
        return None
    place, odd = found
    usual = next(log for rank, log in enumerate(logs) if rank not in odd)
    earliest = place
    while 0 < earliest <= place < len(usual) and usual[earliest - 1] == usual[place]:
        earliest -= 1
    return earliest, place, odd


def loss_of(model: nn.Module, samples: Tensor) -> Tensor:
    """Return the loss that the networks of exercise 3 are trained with, a mean over samples."""
    return model(samples).square().mean()


def small_network() -> nn.Sequential:
    """Return the network of exercise 3, always with the same weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def right_gaps(
    model: nn.Module, samples: Tensor, loss_of: Callable[..., Tensor]
) -> dict[str, float]:
    """Return what exercise 3 asks for."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    loss_of(alone, samples).backward()
    pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
    return {
        name: float((_gradient(mine) - _gradient(right)).norm() / _gradient(right).norm())
        for (name, mine), right in pairs
    }


@exercise
def gradient_gaps(answer: Callable[..., dict[str, float]]) -> Verdict:
    """Exercise 3: how far each averaged gradient is from one device's, as a fraction of it."""
    samples = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    alone = small_network()
    loss_of(alone, samples).backward()
    names = [name for name, _ in alone.named_parameters()]
    own = "Compute one device's gradients in a copy (copy.deepcopy), over all samples."
    ratio = "Divide the norm of the difference by the norm of one device's gradient."
    cases: dict[str, tuple[list[float], str]] = {
        "equal gradients": ([1.0] * 4, own),
        "a sum of two": ([2.0] * 4, ratio),
        "a gradient of the wrong sign": ([1.0, -1.0, 1.0, 1.0], ratio),
        "a bias at half its size": ([1.0, 1.0, 1.0, 0.5], ratio),
    }
    for name, (factors, hint) in cases.items():
        model = small_network()
        pairs = zip(model.parameters(), alone.parameters(), factors, strict=True)
        for parameter, right, factor in pairs:
            parameter.grad = factor * _gradient(right)
        before = copy.deepcopy([_gradient(each) for each in model.parameters()])
        asked = f"{judge.answer_name(answer)} of {name}"
        found = judge.call_answer(answer, model, samples, loss_of, in_words=asked)
        after = [each.grad for each in model.parameters()]
        same = all(judge.is_tensor_close(a, b) for a, b in zip(after, before, strict=True))
        expect(same, f"{asked} changed the model's own gradients", "the same as before", own)
        is_dict = isinstance(found, dict) and list(found) == names
        expect(is_dict, f"{asked} gave {value_text(found)}", f"a number for each of {names}")
        gaps = {key: abs(factor - 1) for key, factor in zip(names, factors, strict=True)}
        for key, gap in gaps.items():
            said = f"of {name} it gave {value_text(found[key])} for {key}"
            expect(judge.is_close(found[key], gap, atol=1e-5), said, f"{gap:g}", hint)
    return passing_verdict(f"{len(cases)} sets of gradients agree")


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@exercise
def diagnoses(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: rank, cause and the line that proves it of each mystery run, by its seed."""
    found = judge.call_answer(answer)
    said = f"it gave {value_text(found)}"
    expect(isinstance(found, dict), said, "a dict", "{seed: (rank, cause, line)}")
    for seed in SEEDS:
        expect(seed in found, f"mystery {seed} is missing", hint="One entry for each seed.")
        verdict = judge_diagnosis(seed, found[seed])
        if not verdict.ok:
            raise WrongAnswer(verdict.detail, expected=verdict.expected, hint=verdict.hint)
    return passing_verdict(f"{len(SEEDS)} mysteries solved: rank, cause and proof of each")


@exercise
def odd_ranks(answer: Callable[..., list[int]]) -> Verdict:
    """Exercise 5: the ranks whose weights are not those of most ranks, on every rank."""
    few = "Send something short, such as a hash of the bytes, not the weights themselves."

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        for name, found in output["found"].items():
            right = ranks_failures.odd_ones(name, ranks)
            expect(found == right, f"of {name} it gave {value_text(found)}", right, HINTS[name])
        sent, weights = output["sent"], output["weights"]
        said = f"the ranks are right, but {sent:,} bytes were sent for {weights:,} of weights"
        expect(sent < weights, said, "less than the weights have", few)

    outputs = judge_on_ranks(
        "failures",
        answer,
        judge=judge_rank,
        sizes=(3, 4),
        timeout_s=30,
        waiting="does every rank call the same collectives?",
    )
    return passing_verdict(f"{len(outputs[0]['found'])} sets of weights agree, on 3 and 4 ranks")


HINTS = {
    "equal weights": "Return an empty list if all are equal.",
    "other weights on the last rank": "Return the same list on every rank.",
    "other weights on rank 0": "Name the few, not those that differ from rank 0.",
    "two weights of rank 1 in each other's place": "A sum does not see this; what does?",
    "one last bit on rank 1": "Compare bits: what rounds, or has a tolerance, loses this one.",
}
