"""Checks of lab 0, ranks and collectives."""

from collections.abc import Callable, Mapping, Sequence
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
FLOAT32_BYTES = 4  # bytes of a float32
WAIT_HINT = "does every receive have its send, and does somebody send before all receive?"


@exercise
def shift(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 1: hand a vector to the next rank and return that of the one before, on 4 real
    ranks.
    """
    (length,) = VECTOR_LENGTHS["shift"]
    given = rank_vectors(length, RANKS)

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        got, left = _check_vector(sent["got"][0], index, length), (index - 1) % RANKS
        if not is_tensor_close(got, given[left]):
            holds = next((rank for rank in range(RANKS) if is_tensor_close(got, given[rank])), None)
            whose = "numbers of no rank" if holds is None else f"rank {holds}'s vector"
            whose = "its own vector" if holds == index else whose
            hint = "Rank r sends to (r + 1) % ranks and receives from (r - 1) % ranks."
            raise WrongAnswer(
                f"rank {index} returned {whose}", expected=f"expected rank {left}'s", hint=hint
            )
        _judge_sent_bytes(given[index].nbytes, sent, index, "one vector is")

    judge_on_ranks(
        "collectives",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        what="shift",
    )
    return passing_verdict(f"{RANKS} ranks traded, and none waited for ever")


@exercise
def after_reduce_scatter(answer: Callable[..., list[float]]) -> Verdict:
    """Exercise 2: what a rank holds after a reduce-scatter, from (held, rank); held is a list of
    numbers a rank.
    """
    for held, rank in [
        ([[1, 2], [10, 20]], 1),
        ([[1, 2, 3, 4], [10, 20, 30, 40]], 0),
        (_rank_inputs(3, 6), 2),
    ]:
        ranks, size = len(held), len(held[0]) // len(held)
        own = slice(rank * size, (rank + 1) * size)
        sums = [sum(column) for column in zip(*held, strict=True)]
        asked = f"{answer_name(answer)}({held}, rank={rank})"
        found = call_answer(answer, [list(each) for each in held], rank=rank, in_words=asked)
        try:
            given = [float(number) for number in found]
        except Exception:
            raise WrongAnswer(
                f"{asked} gave {value_text(found)}, not a list of numbers: does every path return?"
            ) from None
        if given == sums[own]:
            continue
        likely = {
            "all sums, which is an all-reduce": (
                sums,
                f"Each of {ranks} ranks keeps one part of {ranks}.",
            ),
            "this rank's own numbers, not added up": (
                held[rank][own],
                "Add the ranks' numbers, place by place.",
            ),
            "the first part of the sums": (sums[:size], "Rank r keeps part r."),
            "sums of each rank's own numbers": (
                [sum(each) for each in held],
                "Add over the ranks, not over a rank.",
            ),
        }
        reading = next((name for name, (wrong, _) in likely.items() if given == wrong), "")
        hint = (
            likely[reading][1]
            if reading
            else "Add the lists place by place; then cut the sum, one part a rank."
        )
        raise WrongAnswer(
            f"{asked} gave {reading + ': ' if reading else ''}{value_text(found)}",
            expected=f"expected {sums[own]}",
            hint=hint,
        )
    return passing_verdict("3 cases agree")


def _rank_inputs(ranks: int, numbers: int) -> list[list[int]]:
    return [[10**rank * (place + 1) for place in range(numbers)] for rank in range(ranks)]


@exercise
def all_reduce_in_two(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 3: an all-reduce made of a reduce-scatter and an all-gather, on 4 real ranks."""

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        _judge_sum(sent["got"][0], sent["gloo"][0], VECTOR_LENGTHS["in_two"][0], index)
        used = {name for name, size in sent["handed"].items() if size}
        if used != {"reduce_scatter", "all_gather"}:
            named = ", ".join(sorted(used)) or "no collective"
            rule = "expected reduce_scatter and all_gather"
            raise WrongAnswer(
                f"the sums are right, but rank {index} used {named}",
                expected=rule,
                hint="One of each.",
            )
        handed = sum(sent["handed"].values())
        least = (
            rank_vectors(VECTOR_LENGTHS["in_two"][0], RANKS)[index].nbytes * (RANKS + 1) // RANKS
        )
        if handed > least:
            said = f"the sums are right, but rank {index} handed over {handed} bytes"
            raise WrongAnswer(
                said,
                expected=f"expected {least}",
                hint="The all-gather needs one part of each rank.",
            )

    judge_on_ranks(
        "collectives",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        what="in_two",
    )
    return passing_verdict(f"equal to gloo's all-reduce on {RANKS} ranks")


@exercise
def ring_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 4: bytes that leave a rank for an all-reduce in a ring, from (handed_bytes,
    ranks).
    """
    hints = [
        "With two ranks each sends half of its tensor twice.",
        "Each step sends one part, of as many as there are ranks.",
        "ranks - 1 steps add the parts up, and ranks - 1 hand the sums on.",
        "One rank has nobody to send to.",
    ]
    cases = [(1000, 2), (1000, 4), (4096, 8), (1000, 1)]
    return judge_values(
        answer,
        lambda handed_bytes, ranks: collective_wire_bytes("all_reduce", handed_bytes, ranks),
        cases,
        hints,
    )


@exercise
def fitted(answer: Callable[..., tuple[float, float]]) -> Verdict:
    """Exercise 5: (alpha, beta) in seconds and seconds a byte, from rounds: seconds of each, by
    size in bytes.
    """
    for network, sizes in (
        (AlphaBeta(1e-4, 1e-9), (1000, 10_000, 1_000_000)),
        (AlphaBeta(2e-5, 4e-10), (4096, 2**22)),
    ):
        rounds = {
            size: [network.seconds(size) * late for late in (1.7, 1.0, 3.0)]
            for size in reversed(sizes)
        }
        asked = f"{answer_name(answer)} of a network with known alpha and beta"
        found = call_answer(
            answer, {size: list(times) for size, times in rounds.items()}, in_words=asked
        )
        try:
            alpha, beta = map(float, found)
        except Exception:
            raise WrongAnswer(
                f"{asked} gave {value_text(found)}, not two numbers", hint="Return alpha, beta."
            ) from None
        right = (network.alpha_s, network.beta_s_per_byte)
        if not _is_fit_close((alpha, beta), right):
            raise WrongAnswer(
                f"{asked} gave {_fit_mistake(alpha, beta, right, rounds)}({alpha:.3g}, {beta:.3g})",
                expected=f"expected ({right[0]:.3g}, {right[1]:.3g})",
                hint=(
                    "Take the fastest round of each size. Beta is what additional bytes cost; alpha"
                    " is what is left."
                ),
            )
    return passing_verdict("2 networks agree, though two of three rounds were disturbed")


def _fit_mistake(
    alpha: float, beta: float, right: tuple[float, float], rounds: Mapping[int, list[float]]
) -> str:
    """What a wrong fit seems to have done, in words that go before its numbers; "" where that is
    not clear.
    """
    small, large = min(rounds), max(rounds)
    if _is_fit_close((beta, alpha), right):
        return "beta first, then alpha: "
    if isclose(beta, min(rounds[large]) / large, rel_tol=1e-6):
        return "a beta that has a latency inside: "
    if isclose(alpha, min(rounds[small]), rel_tol=1e-6):
        return "an alpha that has the small message's bytes inside: "
    if any(
        _is_fit_close((alpha, beta), (right[0] * late, right[1] * late))
        for late in (5.7 / 3, 1.7, 3.0)
    ):
        return "the numbers of disturbed rounds: "
    return ""


def _is_fit_close(found: Sequence[float], right: Sequence[float]) -> bool:
    return all(isclose(each, value, rel_tol=1e-3) for each, value in zip(found, right, strict=True))


@exercise
def ring_all_reduce(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 7: an all-reduce in a ring, of sends and receives alone, on 4 real ranks, held
    against gloo's.
    """

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        for got, gloo in zip(sent["got"], sent["gloo"], strict=True):
            _judge_sum(got, gloo, len(gloo), index)
        used = sorted(name for name in sent["handed"] if name not in ("send", "recv"))
        if used:
            hint = "Use dist.isend and dist.irecv alone."
            raise WrongAnswer(
                f"the sums are right, but rank {index} used {', '.join(used)}", hint=hint
            )
        parts = [
            -(-length // RANKS) for length in VECTOR_LENGTHS["ring"]
        ]  # the largest of each, in numbers
        _judge_sent_bytes(2 * (RANKS - 1) * sum(parts) * FLOAT32_BYTES, sent, index, "a ring sends")

    judge_on_ranks(
        "collectives",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        what="ring",
    )
    lengths = " and ".join(map(str, VECTOR_LENGTHS["ring"]))
    return passing_verdict(
        f"equal to gloo's all-reduce on {RANKS} ranks, for {lengths} numbers, and no byte more than"
        " a ring's"
    )


def _check_vector(got: Tensor | str, index: int, length: int) -> Tensor:
    """A vector of this length. Raises Wrong for anything else; ``got`` is the type of what is no
    tensor.
    """
    if isinstance(got, str):
        raise WrongAnswer(
            f"on rank {index} the function returned {got}, not a tensor",
            hint="Does every path return?",
        )
    if got.shape != (length,):
        raise WrongAnswer(
            f"on rank {index} the shape is {tuple(got.shape)}", expected=f"expected ({length},)"
        )
    return got


def _judge_sum(got: Tensor | str, gloo: Tensor, length: int, index: int) -> None:
    """Raise Wrong, with the likely reason, unless this is the sum over all ranks, here and by
    gloo's all-reduce.
    """
    got, given = _check_vector(got, index, length), rank_vectors(length, RANKS)
    total = given.sum(0)
    assert is_tensor_close(gloo, total, atol=1e-5)
    if is_tensor_close(got, total, atol=1e-5):
        return
    right, own = (
        [
            part
            for part, (a, b) in enumerate(_part_pairs(got, each))
            if is_tensor_close(a, b, atol=1e-5)
        ]
        for each in (total, given[index])
    )
    if is_tensor_close(got, total / RANKS, atol=1e-5):
        raise WrongAnswer(f"rank {index} returned the mean, not the sum", hint="Who divides?")
    if len(own) == RANKS:
        raise WrongAnswer(
            f"rank {index} returned its own numbers",
            hint="Did anything that arrived go into the result?",
        )
    for some in range(
        1, RANKS
    ):  # what this rank had of a part before its sum arrived: of itself and some before it
        before = sum((given[(index - back) % RANKS] for back in range(some)), torch.zeros(length))
        for part, (a, b) in enumerate(_part_pairs(got, total + before)):
            if is_tensor_close(a, b, atol=1e-5):
                hint = "In the second half what arrives is finished: put it in place of the part."
                raise WrongAnswer(
                    f"on rank {index}, part {part} is the sum with numbers added once more",
                    hint=hint,
                )
    if len(right) == 1:
        hint = "Every sum stands on some rank now. The second half must hand them on."
        raise WrongAnswer(
            f"on rank {index} only part {right[0]} is the sum over all ranks", hint=hint
        )
    wrong = next(part for part in range(RANKS) if part not in right)
    numbers = ", ".join(f"{number:.2f}" for number in _part_pairs(got, got)[wrong][0][:2].tolist())
    wanted = ", ".join(
        f"{number:.2f}" for number in _part_pairs(total, total)[wrong][0][:2].tolist()
    )
    said = f"on rank {index}, part {wrong} of {length} numbers begins {numbers}"
    hint = (
        "Which part does this rank send in a step, which one arrives, and is it added or put in"
        " place?"
    )
    raise WrongAnswer(said, expected=f"expected {wanted}", hint=hint)


def _part_pairs(left: Tensor, right: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(left.tensor_split(RANKS), right.tensor_split(RANKS), strict=True))


def _judge_sent_bytes(limit: int, sent: Mapping[str, Any], index: int, whose: str) -> None:
    """Raise Wrong for a rank that sent more bytes than needed."""
    out = sum(size for name, size in sent["handed"].items() if name != "recv")
    if out > limit:
        said = f"the numbers are right, but rank {index} sent {out:,} bytes"
        raise WrongAnswer(
            said, expected=f"expected at most {limit:,}", hint=f"Here {whose} {limit:,} bytes."
        )


@exercise
def train(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 6: data-parallel training by hand, on 4 real ranks, held against one device with all
    samples.
    """
    right = train_all_ranks(RANKS)[0]
    likely = {
        "trained alone: its gradients met no other's": (
            train_all_ranks(RANKS, together=False),
            "Before the step, all-reduce every gradient.",
        ),
        "used the sum of all gradients, a step that is 4 times too long": (
            train_all_ranks(RANKS, factor=RANKS),
            "An all-reduce adds up; the loss is a mean.",
        ),
        "averaged gradients of models that began different": (
            train_all_ranks(RANKS, same_start=False),
            "Before the first step, broadcast every parameter from rank 0.",
        ),
        "trained alone, from weights of its own": (
            train_all_ranks(RANKS, same_start=False, together=False),
            "Broadcast the weights, all-reduce the gradients.",
        ),
        "added the gradients of earlier steps to each": (
            train_all_ranks(RANKS, forget=False),
            "Call zero_grad before each backward pass.",
        ),
    }

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        got = sent["got"]
        if _is_equal_weights(got, list(make_rank_model(index).parameters())) or _is_equal_weights(
            got, list(make_rank_model(0).parameters())
        ):
            raise WrongAnswer(
                f"rank {index} left the weights as they were", hint="Does each batch end in a step?"
            )
        if not _is_equal_weights(got, right):
            reason = next(
                (
                    name
                    for name, (ranks, _) in likely.items()
                    if _is_equal_weights(got, ranks[index])
                ),
                "",
            )
            hint = (
                likely[reason][1]
                if reason
                else "In the ranks' turn: broadcast once; loss, gradients, mean, step."
            )
            said = reason or "ended with other weights than one device"
            raise WrongAnswer(
                f"rank {index} {said}",
                expected="expected the weights of one device with all samples",
                hint=hint,
            )

    judge_on_ranks(
        "collectives",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        what="train",
    )
    return passing_verdict(
        f"{RANKS} ranks ended with the weights of one device that saw all samples"
    )


def _is_equal_weights(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(
        is_tensor_close(a, torch.as_tensor(b).detach(), atol=1e-5)
        for a, b in zip(left, right, strict=True)
    )


@exercise
def tokens_that_pay(answer: Callable[..., float]) -> Verdict:
    """Exercise 8: tokens a GPU needs in a batch, from (flops_per_s, bytes_per_s, ranks,
    gradient_bytes).
    """
    for flops_per_s, bytes_per_s, ranks, gradient_bytes in (
        (6e12, 1e10, 2, 2),
        (4e14, 5e10, 8, 2),
        (4e14, 5e10, 8, 4),
    ):
        right = (
            collective_wire_bytes("all_reduce", gradient_bytes, ranks)
            / bytes_per_s
            * flops_per_s
            / 6
        )
        asked = (
            f"{answer_name(answer)}({flops_per_s:g}, {bytes_per_s:g}, ranks={ranks},"
            f" gradient_bytes={gradient_bytes})"
        )
        found = call_answer(answer, flops_per_s, bytes_per_s, ranks, gradient_bytes, in_words=asked)
        try:
            tokens = float(found)
        except Exception:
            raise WrongAnswer(
                f"{asked} gave {value_text(found)}, not a number: does every path return?"
            ) from None
        if not isclose(tokens, right, rel_tol=1e-3, abs_tol=1):
            handed = gradient_bytes / bytes_per_s * flops_per_s / 6
            reasons = {
                "the tokens of bytes handed over, not on the wire": handed,
                "half of what a ring needs": right / 2,
                "tokens of a forward pass alone": 3 * right,
                "the inverse": 1 / right,
            }
            reason = next(
                (name for name, value in reasons.items() if isclose(tokens, value, rel_tol=1e-3)),
                "",
            )
            hint = (
                "6 FLOP a parameter and token; 2 (ranks - 1) / ranks x gradient_bytes a parameter"
                " on the wire."
            )
            said = f"{asked} gave {reason + ', ' if reason else ''}{tokens:,.4g}"
            raise WrongAnswer(said, expected=f"expected {right:,.4g}", hint=hint)
    return passing_verdict("3 cases agree")
