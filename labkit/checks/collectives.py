"""Checks of lab 0, ranks and collectives."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.checks import judge
from labkit.checks.judge import Verdict, WrongAnswer, exercise, expect, passing_verdict, value_text
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks import collectives as tasks
from labkit.theory.collectives import AlphaBeta, collective_wire_bytes

# Numbers of ranks on which an answer has to be right.
SIZES = 4, 3
SIZES_TEXT = "4 and 3"
FLOAT32_BYTES = 4
WAIT_HINT = "does every receive have its send, and does somebody send before all receive?"
_on_ranks = partial(judge_on_ranks, "collectives", sizes=SIZES, waiting=WAIT_HINT, name_rank=True)
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
        _judge_sent_bytes(given[index].nbytes, sent, "one vector is")

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="shift")
    return passing_verdict(f"{SIZES_TEXT} ranks traded, and none waited for ever")


@exercise
def after_reduce_scatter(answer: Callable[..., list[float]]) -> Verdict:
    """Exercise 2: a rank's part after a reduce-scatter, from (held, rank), a list per rank."""
    cases = [([[1, 2], [10, 20]], 1), ([[1, 2, 3, 4], [10, 20, 30, 40]], 0)]
    cases.append(([[scale * place for place in range(1, 7)] for scale in (1, 10, 100)], 2))
    for held, rank in cases:
        ranks, size = len(held), len(held[0]) // len(held)
        own = slice(rank * size, (rank + 1) * size)
        sums = [sum(column) for column in zip(*held, strict=True)]
        asked = judge.call_text(answer, held, rank=rank)
        found = judge.call_answer(answer, [[*each] for each in held], rank=rank, in_words=asked)
        no_list = "not a list of numbers: does every path return?"
        with judge.expect_no_error(f"{asked} gave {value_text(found)}, {no_list}"):
            numbers = [float(number) for number in found]
        # Each results from one forgotten step.
        mistakes = (
            ("all sums, which is an all-reduce", sums, f"Each of {ranks} ranks keeps one part."),
            ("this rank's own numbers, not added up", held[rank][own], "Add place by place."),
            ("the first part of the sums", sums[:size], "Rank r keeps part r."),
            ("sums of each rank's own numbers", [*map(sum, held)], "Add over the ranks."),
        )
        shown, right = value_text(found), sums[own]
        likely = {f"{words}: {shown}": (wrong, hint) for words, wrong, hint in mistakes}
        in_turn = "Add the lists place by place; then cut the sum, one part a rank."
        judge.expect_close(numbers, right, f"{asked} gave", likely, shown, right, in_turn)
    return passing_verdict("3 cases agree")


@exercise
def all_reduce_in_two(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 3: an all-reduce made of a reduce-scatter and an all-gather, on 4 real ranks."""
    (length,) = tasks.VECTOR_LENGTHS["in_two"]

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        # The whole vector for the reduce-scatter, then one part for the all-gather.
        least = length * FLOAT32_BYTES * (ranks + 1) // ranks
        _judge_sum(sent["got"][0], sent["gloo"][0], ranks, index)
        used = {name for name, size in sent["handed"].items() if size}
        said = f"the sums are right, made by {', '.join(sorted(used)) or 'no collective'}"
        right = "reduce_scatter and all_gather"
        expect(used == {"reduce_scatter", "all_gather"}, said, right, "One of each.")
        handed = sum(sent["handed"].values())
        said = f"the sums are right, but {handed} bytes were handed over"
        expect(handed <= least, said, least, "The all-gather needs one part of each rank.")

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="in_two")
    return passing_verdict(f"equal to gloo's all-reduce on {SIZES_TEXT} ranks")


@exercise
def ring_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 4: bytes a rank sends in a ring all-reduce, from (handed_bytes, ranks)."""

    def right_bytes(handed_bytes: int, ranks: int) -> float:
        return collective_wire_bytes("all_reduce", handed_bytes, ranks)

    cases = [
        (1000, 2, "With two ranks each sends half of its tensor twice."),
        (1000, 4, "Each step sends one part, of as many as there are ranks."),
        (4096, 8, "ranks - 1 steps add the parts up, and ranks - 1 hand the sums on."),
        (1000, 1, "A single rank sends nothing."),
    ]
    return judge.judge_cases(answer, right_bytes, cases)


@exercise
def fitted(answer: Callable[..., tuple[float, float]]) -> Verdict:
    """Exercise 5: (alpha, beta) in s and s/byte, from each round's seconds by size in bytes."""
    hint = "Take the fastest round of each size. Additional bytes cost beta; alpha is what is left."
    for network, sizes in (
        (AlphaBeta(1e-4, 1e-9), (1000, 10_000, 1_000_000)),
        (AlphaBeta(2e-5, 4e-10), (4096, 2**22)),
    ):
        # Slow rounds and sizes in falling order catch an answer that takes the first of either.
        fastest = {size: network.seconds(size) for size in reversed(sizes)}
        rounds = {size: [1.7 * best, best, 3.0 * best] for size, best in fastest.items()}
        asked = f"{judge.answer_name(answer)} of a network with known alpha and beta"
        found = judge.call_answer(answer, rounds, in_words=asked)
        no_pair = f"{asked} gave {value_text(found)}, not two numbers"
        with judge.expect_no_error(no_pair, hint="Return alpha, beta."):
            alpha, beta = map(float, found)
        small, large, right = sizes[0], sizes[-1], [network.alpha_s, network.beta_s_per_byte]
        # Where one of the two numbers tells the mistake, the other is as found.
        mistakes = {
            "beta first, then alpha": right[::-1],
            "a beta that has a latency inside": [alpha, fastest[large] / large],
            "an alpha that has the small message's bytes inside": [fastest[small], beta],
        }
        for which, late in {"mean": 5.7 / 3, "first": 1.7, "slowest": 3.0}.items():
            disturbed = f"the numbers of disturbed rounds, the {which}"
            mistakes[disturbed] = [late * number for number in right]
        shown, expected = (f"({pair[0]:.3g}, {pair[1]:.3g})" for pair in ([alpha, beta], right))
        likely = {f"{words}: {shown}": pair for words, pair in mistakes.items()}
        fit, said = [alpha, beta], f"{asked} gave"
        judge.expect_close(fit, right, said, likely, shown, expected, hint, rtol=1e-3, atol=0)
    return passing_verdict("2 networks agree, though two of three rounds were disturbed")


@exercise
def ring_all_reduce(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 7: a ring all-reduce of sends and receives alone, on 4 real ranks."""
    lengths = tasks.VECTOR_LENGTHS["ring"]

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        for got, gloo in zip(sent["got"], sent["gloo"], strict=True):
            _judge_sum(got, gloo, ranks, index)
        used = ", ".join(sorted(sent["handed"].keys() - {"send", "recv"}))
        said = f"the sums are right, but {used} was used"
        expect(not used, said, hint="Use dist.isend and dist.irecv alone.")
        # 10 elements divide by no size, so the limit counts the largest part of each vector.
        parts = sum(-(-length // ranks) for length in lengths)
        _judge_sent_bytes(2 * (ranks - 1) * parts * FLOAT32_BYTES, sent, "a ring sends")

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="ring")
    numbers = f"for {' and '.join(map(str, lengths))} numbers, and no byte more than a ring's"
    return passing_verdict(f"equal to gloo's all-reduce on {SIZES_TEXT} ranks, {numbers}")


def _judge_sum(found: Tensor | str, gloo: Tensor, ranks: int, index: int) -> None:
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
    said = f"part {wrong} of {len(gloo)} numbers begins {seen}"
    raise WrongAnswer(said, expected=wanted, hint=hint)


def _matching_parts(left: Tensor, right: Tensor, ranks: int) -> list[int]:
    pairs = zip(left.tensor_split(ranks), right.tensor_split(ranks), strict=True)
    return [part for part, pair in enumerate(pairs) if _is_close(*pair)]


def _judge_sent_bytes(limit: int, sent: Mapping[str, Any], whose: str) -> None:
    out = sum(size for name, size in sent["handed"].items() if name != "recv")
    said, hint = f"the numbers are right, but {out:,} bytes were sent", f"{whose} {limit:,} bytes."
    expect(out <= limit, said, f"at most {limit:,}", f"Here {hint}")


@exercise
def train(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 6: data-parallel training by hand on 4 real ranks, compared with one device."""
    no_step = "Does each batch end in a step?"

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        start = [list(tasks.make_rank_model(each).parameters()) for each in (index, 0)]
        likely: dict[str, tuple[Any, str]] = {
            "has the weights that it began with": (start[0], no_step),
            "has rank 0's first weights": (start[1], no_step),
        }
        # Each mistake is trained here as well, and its weights are compared with the learner's.
        alone, own = {"together": False}, {"same_start": False}
        divide, zero = "The loss is a mean: divide the sum.", "Call zero_grad each step."
        mistakes: list[tuple[str, str, dict[str, Any]]] = [
            ("trained alone", "All-reduce every gradient before the step.", alone),
            ("used the sum of all gradients", divide, {"factor": ranks}),
            ("averaged gradients of different models", "First broadcast all weights.", own),
            ("added the gradients of earlier steps", zero, {"forget": False}),
            ("trained alone, from its weights", "Broadcast, then all-reduce.", alone | own),
        ]
        for words, hint, options in mistakes:
            likely[words] = (tasks.train_all_ranks(ranks, **options)[index], hint)
        right = tasks.train_all_ranks(ranks)[index]
        other = "ended with other weights than one device"
        wanted = "the weights of one device with all samples"
        hint = "In the ranks' turn: broadcast once; loss, gradients, mean, step."
        judge.expect_close(sent["got"], right, "the model", likely, other, wanted, hint)

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="train")
    seen = f"{SIZES_TEXT} ranks ended with the weights of one device that saw all samples"
    return passing_verdict(seen)


@exercise
def tokens_that_pay(answer: Callable[..., float]) -> Verdict:
    """Exercise 8: tokens per GPU, from (flops_per_s, bytes_per_s, ranks, gradient_bytes)."""
    hint = "6 FLOP a parameter and token; 2 (ranks - 1) / ranks x gradient_bytes on the wire."

    def right_tokens(
        flops_per_s: float, bytes_per_s: float, ranks: int, gradient_bytes: int
    ) -> float:
        wire_bytes = collective_wire_bytes("all_reduce", gradient_bytes, ranks)
        return wire_bytes * flops_per_s / 6 / bytes_per_s

    def likely_tokens(
        flops_per_s: float, bytes_per_s: float, ranks: int, gradient_bytes: int
    ) -> dict[str, float]:
        right = right_tokens(flops_per_s, bytes_per_s, ranks, gradient_bytes)
        handed = gradient_bytes * flops_per_s / 6 / bytes_per_s
        return {
            "the tokens of bytes handed over, not on the wire": handed,
            "half of what a ring needs": right / 2,
            "tokens of a forward pass alone": 3 * right,
            "the inverse": 1 / right,
        }

    networks = ((6e12, 1e10, 2, 2), (4e14, 5e10, 8, 2), (4e14, 5e10, 8, 4))
    cases = [(*network, hint) for network in networks]
    # A whole number of tokens is as good.
    return judge.judge_cases(answer, right_tokens, cases, likely_tokens, rtol=1e-3)
