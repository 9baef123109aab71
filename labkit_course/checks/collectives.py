"""Checks of lab 0, ranks and collectives."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.theory.collectives import AlphaBeta, ring_s
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, WrongAnswer, exercise, expect, passing_verdict
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks import collectives as tasks

# Numbers of ranks on which an answer has to be right.
SIZES = 4, 3
SIZES_TEXT = "4 and 3"
FLOAT32_BYTES = 4
WAIT_HINT = "does each rank start its send and its receive before it waits for either?"
_NO_FIT = "a rank received more than its tensor holds: is it shaped like the part that arrives?"
# gloo ends the process that receives too much; another rank may notice that first.
ERROR_HINTS = {
    "SIGABRT": _NO_FIT,
    "Connection reset by peer": _NO_FIT,
    "must match the size of tensor": (
        "parts may differ in length: is what receives a part shaped like the part that arrives?"
    ),
}
judge_on_group = partial(
    judge_on_ranks,
    "collectives",
    sizes=SIZES,
    waiting=WAIT_HINT,
    hints=ERROR_HINTS,
    name_rank=True,
)
_is_close = partial(judge.is_tensor_close, atol=1e-5)


@exercise
def shift(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 1: send a vector to the next rank and return the previous rank's."""
    (length,) = tasks.VECTOR_LENGTHS["shift"]
    hint = "Rank r sends to (r + 1) % ranks and receives from (r - 1) % ranks."

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        given = tasks.rank_vectors(length, ranks)
        got, left = judge.expect_tensor(sent["got"][0], given[index]), (index - 1) % ranks
        likely = {"this rank's own vector": given[index]}
        likely |= {f"rank {rank}'s vector": given[rank] for rank in range(ranks)}
        none, right = "numbers of no rank", f"rank {left}'s"
        judge.expect_close(got, given[left], "the result is", likely, none, right, hint)
        # An all-gather gives the same vector, with more bytes.
        _judge_sent_bytes(given[index].nbytes, sent, "One vector is enough")

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="shift")
    return passing_verdict(f"{SIZES_TEXT} ranks traded, and none waited for ever")


@exercise
def ring_reduce_scatter(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 2: the first pass of a ring, of sends and receives alone, on real ranks."""
    hint = (
        "In step s part (rank - s) % ranks leaves; part (rank - s - 1) % ranks comes, and is added."
    )

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        finished = (index + 1) % ranks
        wanted = f"part {finished} of the sum"
        for got, length in zip(sent["got"], tasks.VECTOR_LENGTHS["ring"], strict=True):
            parts = [vector.tensor_split(ranks) for vector in tasks.rank_vectors(length, ranks)]
            likely: dict[str, Any] = {}
            for part in range(ranks):
                added = torch.zeros_like(parts[index][part])
                for back in range(ranks):
                    added = added + parts[(index - back) % ranks][part]
                    likely[f"part {part}, added up over {back + 1} of {ranks} ranks"] = added
            right = likely[f"part {finished}, added up over {ranks} of {ranks} ranks"]
            start = f"part {index}, added up over 1 of {ranks} ranks"
            returns = "This part left in step 0. Return part (rank + 1) % ranks, the finished one."
            likely[start] = (likely[start], returns)
            is_whole = isinstance(got, Tensor) and len(got) == length
            expect(not is_whole, "the result is a whole vector", wanted, "Return one part.")
            expect(isinstance(got, Tensor), f"the function returned {got}, not a tensor", wanted)
            judge.expect_close(got, right, "the result is", likely, f"not {wanted}", wanted, hint)
        _judge_sends_alone(sent)
        _judge_sent_bytes(
            (ranks - 1) * _largest_parts_bytes(ranks), sent, "Each step sends one part"
        )
        _judge_unchanged(sent)

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="ring")
    return passing_verdict(f"{SIZES_TEXT} ranks hold their part, with no byte more than a ring's")


@exercise
def ring_all_reduce(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 3: a ring all-reduce of sends and receives alone, on 4 real ranks."""
    lengths = tasks.VECTOR_LENGTHS["ring"]

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        for got, gloo in zip(sent["got"], sent["gloo"], strict=True):
            judge_sum(got, gloo, ranks, index)
        _judge_sends_alone(sent)
        _judge_sent_bytes(
            2 * (ranks - 1) * _largest_parts_bytes(ranks), sent, "Each step sends one part"
        )
        _judge_unchanged(sent)

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="ring")
    numbers = f"for {' and '.join(map(str, lengths))} numbers, and no byte more than a ring's"
    return passing_verdict(f"equal to gloo's all-reduce on {SIZES_TEXT} ranks, {numbers}")


@exercise
def step_seconds(answer: Callable[..., float]) -> Verdict:
    """Exercise 5: a step's time, (compute_s, gradient_bytes, ranks, latency_s, bytes_per_s)."""

    def right_seconds(
        compute_s: float, gradient_bytes: int, ranks: int, latency_s: float, bytes_per_s: float
    ) -> float:
        link = AlphaBeta(latency_s, 1 / bytes_per_s)
        sending_s = ring_s("all_reduce", gradient_bytes, ranks, inside=link, between=link)
        return compute_s / ranks + sending_s

    cases = [
        (6.0, 0, 4, 0.0, 1e6, "Without bytes and latency, each rank only computes its share."),
        (0.0, 0, 4, 0.1, 1e6, "A ring of four has 2 · 3 steps, each with its latency."),
        (0.0, 1_000_000, 4, 0.0, 1e6, "Each of the 2 · 3 steps sends a quarter of the bytes."),
        (6.0, 3_000_000, 3, 0.2, 1e6, "Add the three terms."),
        (6.0, 3_000_000, 1, 0.2, 1e6, "A single rank sends nothing."),
    ]
    return judge.judge_cases(answer, right_seconds, cases)


def judge_sum(found: Tensor | str, gloo: Tensor, ranks: int, index: int) -> None:
    """Raise WrongAnswer, with the likely mistake, unless this is the sum over all ranks."""
    got, given = judge.expect_tensor(found, gloo), tasks.rank_vectors(len(gloo), ranks)
    total = given.sum(0)
    assert _is_close(gloo, total)
    right = _matching_parts(got, total, ranks)
    if len(right) == ranks:
        return
    is_mean, is_own = _is_close(got, total / ranks), _is_close(got, given[index])
    expect(not is_mean, "the result is the mean, not the sum", hint="Who divides?")
    hint = "Did anything that arrived go into the result?"
    expect(not is_own, "the result is this rank's own numbers", hint=hint)
    # An answer that adds the finished sum to a part, instead of replacing it, counts this rank
    # and some ranks before it twice.
    before = torch.zeros_like(total)
    for back in range(ranks - 1):
        before = before + given[(index - back) % ranks]
        for part in _matching_parts(got, total + before, ranks):
            hint = "In the second half what arrives is finished: put it in place of the part."
            raise WrongAnswer(f"part {part} is the sum with numbers added once more", hint=hint)
    # A list such as [tensor] * ranks is filled with the last part alone.
    first, *others = got.tensor_split(ranks)
    same = all(each.shape == first.shape and _is_close(each, first) for each in others)
    hint = "[tensor] * ranks holds one tensor several times."
    expect(not same, f"all {ranks} parts of the result are equal", hint=hint)
    # After its first half, a ring has the sum of one part on each rank.
    if len(right) == 1:
        hint = "Every sum is on some rank now. The second half must hand them on."
        raise WrongAnswer(f"only part {right[0]} is the sum over all ranks", hint=hint)
    wrong = next(part for part in range(ranks) if part not in right)
    seen, wanted = (
        ", ".join(f"{number:.2f}" for number in vector.tensor_split(ranks)[wrong][:2].tolist())
        for vector in (got, total)
    )
    hint = "Which part does a step send, which one arrives, and is it added or put in place?"
    said = f"of {len(gloo)} numbers, part {wrong} begins {seen}"
    raise WrongAnswer(said, expected=wanted, hint=hint)


def _judge_sends_alone(sent: Mapping[str, Any]) -> None:
    used = ", ".join(sorted(sent["handed"].keys() - {"send", "recv"}))
    said = f"the numbers are right, but {used} was used"
    expect(not used, said, hint="Use dist.batch_isend_irecv alone.")


def _judge_unchanged(sent: Mapping[str, Any]) -> None:
    hint = "Its parts are views of it: begin with mine.clone()."
    expect(not sent["changed"], "the result is right, but mine was changed in place", hint=hint)


def _largest_parts_bytes(ranks: int) -> int:
    # 10 elements divide by no size, so a limit counts the largest part of each vector.
    return FLOAT32_BYTES * sum(-(-length // ranks) for length in tasks.VECTOR_LENGTHS["ring"])


def _matching_parts(left: Tensor, right: Tensor, ranks: int) -> list[int]:
    pairs = zip(left.tensor_split(ranks), right.tensor_split(ranks), strict=True)
    return [part for part, pair in enumerate(pairs) if _is_close(*pair)]


def _judge_sent_bytes(limit: int, sent: Mapping[str, Any], whose: str) -> None:
    out = sum(size for name, size in sent["handed"].items() if name != "recv")
    said = f"the numbers are right, but {out:,} bytes were sent"
    expect(out <= limit, said, f"at most {limit:,}", f"{whose}: is a step or a copy too many?")


@exercise
def train(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 4: data-parallel training by hand on 4 real ranks, compared with one device."""
    no_step = "Does each batch end in a step, and with its gradients still there?"

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        start = [list(tasks.make_rank_model(each).parameters()) for each in (index, 0)]
        likely: dict[str, tuple[Any, str]] = {
            "has the weights that it began with": (start[0], no_step),
            "has rank 0's first weights": (start[1], no_step),
        }
        # Each mistake is trained here as well, and its weights are compared with the learner's.
        alone, own = {"together": False}, {"same_start": False}
        sums = {"forget": False, "factor": ranks}
        divide, zero = "The loss is a mean: divide the sum.", "Call zero_grad each step."
        broadcast = "First broadcast all weights."
        mistakes: list[tuple[str, str, dict[str, Any]]] = [
            ("trained alone", "All-reduce every gradient before the step.", alone),
            ("used the sum of all gradients", divide, {"factor": ranks}),
            ("averaged gradients of different models", broadcast, own),
            ("added the gradients of earlier steps", zero, {"forget": False}),
            ("added its own gradients of earlier steps", zero, {"forget": False, "keep": False}),
            ("used sums of all gradients so far", zero, sums),
            ("trained alone, from its weights", "Broadcast, then all-reduce.", alone | own),
            ("used the sum over different models", broadcast, own | {"factor": ranks}),
            ("added up means of different models", broadcast, own | {"forget": False}),
            ("added up sums of different models", broadcast, own | sums),
        ]
        for words, hint, options in mistakes:
            likely[words] = (tasks.train_all_ranks(ranks, **options)[index], hint)
        right = tasks.train_all_ranks(ranks)[index]
        other = "ended with other weights than one device"
        wanted = "the weights of one device with all samples"
        hint = "Broadcast once; then, for each batch: zero_grad, loss, backward, mean, step."
        judge.expect_close(sent["got"], right, "the model", likely, other, wanted, hint)

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="train")
    seen = f"{SIZES_TEXT} ranks ended with the weights of one device that saw all samples"
    return passing_verdict(seen)
