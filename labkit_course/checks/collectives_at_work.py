"""Checks of lab 0b, ranks at work."""

from collections.abc import Callable
from typing import Any

from labkit.theory.collectives import AlphaBeta, collective_wire_bytes
from labkit_course.checks import judge
from labkit_course.checks.collectives import FLOAT32_BYTES, SIZES_TEXT, judge_on_group, judge_sum
from labkit_course.checks.judge import Verdict, exercise, expect, passing_verdict, value_text
from labkit_course.checks.ranks import collectives as tasks


@exercise
def all_reduce_in_two(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 1: an all-reduce made of a reduce-scatter and an all-gather, on 4 real ranks."""
    (length,) = tasks.VECTOR_LENGTHS["in_two"]

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        # The whole vector for the reduce-scatter, then one part for the all-gather.
        least = length * FLOAT32_BYTES * (ranks + 1) // ranks
        judge_sum(sent["got"][0], sent["gloo"][0], ranks, index)
        used = {name for name, size in sent["handed"].items() if size}
        said = f"the sums are right, made by {', '.join(sorted(used)) or 'no collective'}"
        right = "reduce_scatter and all_gather"
        expect(used == {"reduce_scatter", "all_gather"}, said, right, "One of each.")
        handed = sum(sent["handed"].values())
        said = f"the sums are right, but {handed} bytes were handed over"
        expect(handed <= least, said, least, "The all-gather needs one part of each rank.")

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="in_two")
    return passing_verdict(f"equal to gloo's all-reduce on {SIZES_TEXT} ranks")


@exercise
def fitted(answer: Callable[..., tuple[float, float]]) -> Verdict:
    """Exercise 2: (alpha, beta) in s and s/byte, from each round's seconds by size in bytes."""
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
def balancing_tokens(answer: Callable[..., float]) -> Verdict:
    """Exercise 3: tokens per GPU, from (flops_per_s, bytes_per_s, ranks, gradient_bytes)."""
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
