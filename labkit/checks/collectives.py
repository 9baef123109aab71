"""Checks of lab 0, ranks and collectives."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isclose
from typing import Any

import torch
from torch import Tensor

from labkit.checks.judge import (
    Verdict,
    WrongAnswer,
    answer_name,
    call_answer,
    exercise,
    is_tensor_close,
    judge_values,
    passing_verdict,
    value_text,
)
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks.collectives import (
    VECTOR_LENGTHS,
    make_rank_model,
    rank_vectors,
    train_all_ranks,
)
from labkit.theory.collectives import AlphaBeta, collective_wire_bytes

RANKS = 4
FLOAT32_BYTES = 4
WAIT_HINT = "does every receive have its send, and does somebody send before all receive?"
_judge_on_four = partial(judge_on_ranks, "collectives", ranks=RANKS, waiting=WAIT_HINT)


@exercise
def shift(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 1: send a vector to the next rank and return the previous rank's."""
    (length,) = VECTOR_LENGTHS["shift"]
    given = rank_vectors(length, RANKS)

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        got, left = _check_vector(sent["got"][0], index, length), (index - 1) % RANKS
        if not is_tensor_close(got, given[left]):
            whose = "numbers of no rank"
            for rank in range(RANKS):
                if is_tensor_close(got, given[rank]):
                    whose = "its own vector" if rank == index else f"rank {rank}'s vector"
            hint = "Rank r sends to (r + 1) % ranks and receives from (r - 1) % ranks."
            said, right = f"rank {index} returned {whose}", f"rank {left}'s"
            raise WrongAnswer(said, expected=right, hint=hint)
        _judge_sent_bytes(given[index].nbytes, sent, index, "one vector is")

    _judge_on_four(answer, judge=judge_rank, timeout_s=timeout_s, what="shift")
    return passing_verdict(f"{RANKS} ranks traded, and none waited for ever")


@exercise
def after_reduce_scatter(answer: Callable[..., list[float]]) -> Verdict:
    """Exercise 2: a rank's part after a reduce-scatter, from (held, rank), a list per rank."""
    cases = [
        ([[1, 2], [10, 20]], 1),
        ([[1, 2, 3, 4], [10, 20, 30, 40]], 0),
        ([[scale * place for place in range(1, 7)] for scale in (1, 10, 100)], 2),
    ]
    for held, rank in cases:
        ranks, size = len(held), len(held[0]) // len(held)
        own = slice(rank * size, (rank + 1) * size)
        sums = [sum(column) for column in zip(*held, strict=True)]
        asked = f"{answer_name(answer)}({held}, rank={rank})"
        found = call_answer(answer, [list(each) for each in held], rank=rank, in_words=asked)
        try:
            given = [float(number) for number in found]
        except Exception:
            said = f"{asked} gave {value_text(found)}, not a list of numbers"
            raise WrongAnswer(f"{said}: does every path return?") from None
        if given == sums[own]:
            continue
        row_sums = [sum(each) for each in held]
        likely = [
            (
                sums,
                "all sums, which is an all-reduce",
                f"Each of {ranks} ranks keeps one part of {ranks}.",
            ),
            (
                held[rank][own],
                "this rank's own numbers, not added up",
                "Add the ranks' numbers, place by place.",
            ),
            (sums[:size], "the first part of the sums", "Rank r keeps part r."),
            (row_sums, "sums of each rank's own numbers", "Add over the ranks, not over a rank."),
        ]
        said, hint = "", "Add the lists place by place; then cut the sum, one part a rank."
        for wrong, reading, its_hint in likely:
            if given == wrong:
                said, hint = f"{reading}: ", its_hint
                break
        said = f"{asked} gave {said}{value_text(found)}"
        raise WrongAnswer(said, expected=f"{sums[own]}", hint=hint)
    return passing_verdict("3 cases agree")


@exercise
def all_reduce_in_two(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 3: an all-reduce made of a reduce-scatter and an all-gather, on 4 real ranks."""
    (length,) = VECTOR_LENGTHS["in_two"]

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        _judge_sum(sent["got"][0], sent["gloo"][0], length, index)
        used = {name for name, size in sent["handed"].items() if size}
        if used != {"reduce_scatter", "all_gather"}:
            named = ", ".join(sorted(used)) or "no collective"
            said = f"the sums are right, but rank {index} used {named}"
            right = "reduce_scatter and all_gather"
            raise WrongAnswer(said, expected=right, hint="One of each.")
        handed = sum(sent["handed"].values())
        # The whole vector for the reduce-scatter, then one part for the all-gather.
        least = length * FLOAT32_BYTES * (RANKS + 1) // RANKS
        if handed > least:
            said = f"the sums are right, but rank {index} handed over {handed} bytes"
            hint = "The all-gather needs one part of each rank."
            raise WrongAnswer(said, expected=f"{least}", hint=hint)

    _judge_on_four(answer, judge=judge_rank, timeout_s=timeout_s, what="in_two")
    return passing_verdict(f"equal to gloo's all-reduce on {RANKS} ranks")


@exercise
def ring_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 4: bytes a rank sends in a ring all-reduce, from (handed_bytes, ranks)."""

    def right_bytes(handed_bytes: int, ranks: int) -> float:
        return collective_wire_bytes("all_reduce", handed_bytes, ranks)

    hints = [
        "With two ranks each sends half of its tensor twice.",
        "Each step sends one part, of as many as there are ranks.",
        "ranks - 1 steps add the parts up, and ranks - 1 hand the sums on.",
        "One rank has nobody to send to.",
    ]
    return judge_values(answer, right_bytes, [(1000, 2), (1000, 4), (4096, 8), (1000, 1)], hints)


@exercise
def fitted(answer: Callable[..., tuple[float, float]]) -> Verdict:
    """Exercise 5: (alpha, beta) in s and s/byte, from each round's seconds by size in bytes."""
    for network, sizes in (
        (AlphaBeta(1e-4, 1e-9), (1000, 10_000, 1_000_000)),
        (AlphaBeta(2e-5, 4e-10), (4096, 2**22)),
    ):
        # Slow rounds and sizes in falling order catch an answer that takes the first of either.
        rounds = {
            size: [network.seconds(size) * late for late in (1.7, 1.0, 3.0)]
            for size in reversed(sizes)
        }
        asked = f"{answer_name(answer)} of a network with known alpha and beta"
        copied = {size: list(times) for size, times in rounds.items()}
        found = call_answer(answer, copied, in_words=asked)
        try:
            alpha, beta = map(float, found)
        except Exception:
            said = f"{asked} gave {value_text(found)}, not two numbers"
            raise WrongAnswer(said, hint="Return alpha, beta.") from None
        right = (network.alpha_s, network.beta_s_per_byte)
        if not _is_fit_close((alpha, beta), right):
            mistake = _fit_mistake(alpha, beta, right, rounds)
            raise WrongAnswer(
                f"{asked} gave {mistake}({alpha:.3g}, {beta:.3g})",
                expected=f"({right[0]:.3g}, {right[1]:.3g})",
                hint="Take the fastest round of each size. "
                "Beta is what additional bytes cost; alpha is what is left.",
            )
    return passing_verdict("2 networks agree, though two of three rounds were disturbed")


def _fit_mistake(
    alpha: float, beta: float, right: tuple[float, float], rounds: Mapping[int, list[float]]
) -> str:
    """Return the likely mistake of a wrong fit as a prefix of its values, or ""."""
    small, large = min(rounds), max(rounds)
    if _is_fit_close((beta, alpha), right):
        return "beta first, then alpha: "
    if isclose(beta, min(rounds[large]) / large, rel_tol=1e-6):
        return "a beta that has a latency inside: "
    if isclose(alpha, min(rounds[small]), rel_tol=1e-6):
        return "an alpha that has the small message's bytes inside: "
    # The mean, the first and the slowest of the three rounds.
    for late in (5.7 / 3, 1.7, 3.0):
        if _is_fit_close((alpha, beta), (right[0] * late, right[1] * late)):
            return "the numbers of disturbed rounds: "
    return ""


def _is_fit_close(found: Sequence[float], right: Sequence[float]) -> bool:
    return all(isclose(each, value, rel_tol=1e-3) for each, value in zip(found, right, strict=True))


@exercise
def ring_all_reduce(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 7: a ring all-reduce of sends and receives alone, on 4 real ranks."""

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        for got, gloo in zip(sent["got"], sent["gloo"], strict=True):
            _judge_sum(got, gloo, len(gloo), index)
        used = sorted(name for name in sent["handed"] if name not in ("send", "recv"))
        if used:
            said = f"the sums are right, but rank {index} used {', '.join(used)}"
            raise WrongAnswer(said, hint="Use dist.isend and dist.irecv alone.")
        # 10 elements do not divide by 4 ranks, so the limit counts the largest part of each vector.
        parts = [-(-length // RANKS) for length in VECTOR_LENGTHS["ring"]]
        _judge_sent_bytes(2 * (RANKS - 1) * sum(parts) * FLOAT32_BYTES, sent, index, "a ring sends")

    _judge_on_four(answer, judge=judge_rank, timeout_s=timeout_s, what="ring")
    lengths = " and ".join(map(str, VECTOR_LENGTHS["ring"]))
    return passing_verdict(
        f"equal to gloo's all-reduce on {RANKS} ranks, "
        f"for {lengths} numbers, and no byte more than a ring's"
    )


def _check_vector(got: Tensor | str, index: int, length: int) -> Tensor:
    if isinstance(got, str):
        said = f"on rank {index} the function returned {got}, not a tensor"
        raise WrongAnswer(said, hint="Does every path return?")
    if got.shape != (length,):
        said = f"on rank {index} the shape is {tuple(got.shape)}"
        raise WrongAnswer(said, expected=f"({length},)")
    return got


def _judge_sum(got: Tensor | str, gloo: Tensor, length: int, index: int) -> None:
    """Raise WrongAnswer, with the likely mistake, unless this is the sum over all ranks."""
    got, given = _check_vector(got, index, length), rank_vectors(length, RANKS)
    total = given.sum(0)
    assert is_tensor_close(gloo, total, atol=1e-5)
    if is_tensor_close(got, total, atol=1e-5):
        return
    if is_tensor_close(got, total / RANKS, atol=1e-5):
        raise WrongAnswer(f"rank {index} returned the mean, not the sum", hint="Who divides?")
    if is_tensor_close(got, given[index], atol=1e-5):
        hint = "Did anything that arrived go into the result?"
        raise WrongAnswer(f"rank {index} returned its own numbers", hint=hint)
    # An answer that adds the finished sum to a part, instead of replacing it, counts this rank
    # and some ranks before it twice.
    before = torch.zeros(length)
    for back in range(RANKS - 1):
        before = before + given[(index - back) % RANKS]
        for part in _matching_parts(got, total + before):
            said = f"on rank {index}, part {part} is the sum with numbers added once more"
            hint = "In the second half what arrives is finished: put it in place of the part."
            raise WrongAnswer(said, hint=hint)
    right = _matching_parts(got, total)
    if len(right) == 1:
        said = f"on rank {index} only part {right[0]} is the sum over all ranks"
        hint = "Every sum stands on some rank now. The second half must hand them on."
        raise WrongAnswer(said, hint=hint)
    wrong = next(part for part in range(RANKS) if part not in right)
    seen, wanted = (
        ", ".join(f"{number:.2f}" for number in vector.tensor_split(RANKS)[wrong][:2].tolist())
        for vector in (got, total)
    )
    raise WrongAnswer(
        f"on rank {index}, part {wrong} of {length} numbers begins {seen}",
        expected=f"{wanted}",
        hint="Which part does this rank send in a step, which one arrives, "
        "and is it added or put in place?",
    )


def _matching_parts(left: Tensor, right: Tensor) -> list[int]:
    pairs = zip(left.tensor_split(RANKS), right.tensor_split(RANKS), strict=True)
    return [part for part, (a, b) in enumerate(pairs) if is_tensor_close(a, b, atol=1e-5)]


def _judge_sent_bytes(limit: int, sent: Mapping[str, Any], index: int, whose: str) -> None:
    out = sum(size for name, size in sent["handed"].items() if name != "recv")
    if out > limit:
        said = f"the numbers are right, but rank {index} sent {out:,} bytes"
        right, hint = f"at most {limit:,}", f"Here {whose} {limit:,} bytes."
        raise WrongAnswer(said, expected=right, hint=hint)


@exercise
def train(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 6: data-parallel training by hand on 4 real ranks, compared with one device."""
    right = train_all_ranks(RANKS)[0]
    simulate = partial(train_all_ranks, RANKS)
    likely = [
        (
            simulate(together=False),
            "trained alone: its gradients met no other's",
            "Before the step, all-reduce every gradient.",
        ),
        (
            simulate(factor=RANKS),
            "used the sum of all gradients, a step that is 4 times too long",
            "An all-reduce adds up; the loss is a mean.",
        ),
        (
            simulate(same_start=False),
            "averaged gradients of models that began different",
            "Before the first step, broadcast every parameter from rank 0.",
        ),
        (
            simulate(same_start=False, together=False),
            "trained alone, from weights of its own",
            "Broadcast the weights, all-reduce the gradients.",
        ),
        (
            simulate(forget=False),
            "added the gradients of earlier steps to each",
            "Call zero_grad before each backward pass.",
        ),
    ]

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        got = sent["got"]
        for start in (index, 0):
            if _is_equal_weights(got, list(make_rank_model(start).parameters())):
                said = f"rank {index} left the weights as they were"
                raise WrongAnswer(said, hint="Does each batch end in a step?")
        if _is_equal_weights(got, right):
            return
        said = "ended with other weights than one device"
        hint = "In the ranks' turn: broadcast once; loss, gradients, mean, step."
        for ranks, mistake, its_hint in likely:
            if _is_equal_weights(got, ranks[index]):
                said, hint = mistake, its_hint
                break
        expected = "the weights of one device with all samples"
        raise WrongAnswer(f"rank {index} {said}", expected=expected, hint=hint)

    _judge_on_four(answer, judge=judge_rank, timeout_s=timeout_s, what="train")
    return passing_verdict(
        f"{RANKS} ranks ended with the weights of one device that saw all samples"
    )


def _is_equal_weights(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(is_tensor_close(a, b, atol=1e-5) for a, b in zip(left, right, strict=True))


@exercise
def tokens_that_pay(answer: Callable[..., float]) -> Verdict:
    """Exercise 8: tokens per GPU, from (flops_per_s, bytes_per_s, ranks, gradient_bytes)."""
    cases = [(6e12, 1e10, 2, 2), (4e14, 5e10, 8, 2), (4e14, 5e10, 8, 4)]
    for flops_per_s, bytes_per_s, ranks, gradient_bytes in cases:
        handed = gradient_bytes / bytes_per_s * flops_per_s / 6
        wire_bytes = collective_wire_bytes("all_reduce", gradient_bytes, ranks)
        right = wire_bytes / bytes_per_s * flops_per_s / 6
        asked = (
            f"{answer_name(answer)}({flops_per_s:g}, {bytes_per_s:g}, "
            f"ranks={ranks}, gradient_bytes={gradient_bytes})"
        )
        found = call_answer(answer, flops_per_s, bytes_per_s, ranks, gradient_bytes, in_words=asked)
        try:
            tokens = float(found)
        except Exception:
            said = f"{asked} gave {value_text(found)}, not a number"
            raise WrongAnswer(f"{said}: does every path return?") from None
        if isclose(tokens, right, rel_tol=1e-3, abs_tol=1):
            continue
        likely = {
            "the tokens of bytes handed over, not on the wire, ": handed,
            "half of what a ring needs, ": right / 2,
            "tokens of a forward pass alone, ": 3 * right,
            "the inverse, ": 1 / right,
        }
        matching = [name for name, value in likely.items() if isclose(tokens, value, rel_tol=1e-3)]
        raise WrongAnswer(
            f"{asked} gave {matching[0] if matching else ''}{tokens:,.4g}",
            expected=f"{right:,.4g}",
            hint="6 FLOP a parameter and token; "
            "2 (ranks - 1) / ranks x gradient_bytes a parameter on the wire.",
        )
    return passing_verdict("3 cases agree")
