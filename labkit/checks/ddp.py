"""Checks of lab 4, DDP with the compiler. Each calls the answer with cases of its own; none launches ranks."""

from collections.abc import Callable, Sequence
from math import isclose
from numbers import Integral
from typing import Any, cast

from labkit.checks.ask import Verdict, Wrong, call, check_values, exercise, name_of, passed, shown
from labkit.inductor import Line
from labkit.theory.collectives import AlphaBeta
from labkit.theory.ddp import bucket_plan

MIB = 2**20
PROGRAMS: tuple[tuple[str, list[int], str], ...] = (
    ("extern a x, collective a, extern b x, wait a, other a b", [], "What touches other buffers may run meanwhile."),
    ("extern a x, collective a, other a", [3], "Nothing waits for a before it is returned."),
    ("collective a, kernel a y, wait a, other a", [2], "The wait comes too late for the kernel."),
    ("collective a b, wait b, kernel b y, kernel a y, other", [4], "A wait is for the buffer that it names alone."),
    ("collective a, wait a, kernel a, collective a, other a", [5], "A second request puts the buffer in flight again."),
    ("kernel a, collective a, collective b, wait b, wait a, other a b", [], "Waits may come in another order."),
    ("collective a, kernel a b, extern b a, wait a, other b", [2, 3], "Each line that uses it too early counts."),
)
"""Programs as kind and buffers of each line; the lines that use a buffer too early; a hint."""


@exercise
def alpha_beta(answer: Callable[..., tuple[float, float]]) -> Verdict:
    """Exercise 1: (alpha, beta) in seconds and seconds a byte, from (small_bytes, small_s, large_bytes, large_s)."""
    networks = [AlphaBeta(1e-4, 1e-9), AlphaBeta(2e-5, 4e-10), AlphaBeta(0.0, 1e-9)]
    for network, (small, large) in zip(networks, [(1000, 1_000_000), (4096, 4_194_304), (8, 80)], strict=True):
        arguments = (small, network.seconds(small), large, network.seconds(large))
        asked = f"{name_of(answer)}({', '.join(f'{each:g}' for each in arguments)})"
        found = call(answer, *arguments, in_words=asked)
        try:
            alpha, beta = map(float, found)
        except Exception:  # an integer of hundreds of digits is no float either
            raise Wrong(f"{asked} gave {shown(found)}, not two numbers: return alpha, beta") from None
        for got, right in ((alpha, network.alpha_s), (beta, network.beta_s_per_byte)):
            if not isclose(got, right, rel_tol=1e-6, abs_tol=1e-12):
                expected = f"({network.alpha_s:g}, {network.beta_s_per_byte:g})"
                raise Wrong(f"{asked} gave ({alpha:g}, {beta:g}), expected {expected}. {_hint(alpha, beta, arguments)}")
    return passed(f"{len(networks)} networks agree")


def _hint(alpha: float, beta: float, arguments: tuple[int, float, int, float]) -> str:
    _, small_s, large, large_s = arguments
    if alpha > 0 and isclose(beta, large_s / large):
        return "The large message's time holds a latency too."
    if isclose(alpha, small_s):
        return "The small message's time holds its bytes too."
    if alpha < beta:
        return "Is the latency first?"
    return "Beta is what the additional bytes cost; alpha is what is left of a message without its bytes."


@exercise
def bucket_count(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: the compiler's buckets, from (sizes, bucket_mb); sizes in bytes, in the order of readiness."""
    first = "The first bucket closes at 1 MiB already, whatever bucket_mb says."
    closes = "A bucket closes once it holds bucket_mb MiB, with the gradient that took it there inside."
    last = "What is left when the backward pass ends is a bucket too."
    cases = [
        ([MIB // 2], 25),
        ([MIB // 2, MIB, MIB], 25),
        ([2 * MIB, 3 * MIB, 3 * MIB, 3 * MIB], 5),
        ([2 * MIB, 5 * MIB, 5 * MIB], 5),
        ([2 * MIB, 3 * MIB, 3 * MIB], 5),
        ([8000, 16_000_000] * 4, 25),
    ]
    hints = [last, first, closes, closes, last, closes]
    return check_values(answer, lambda sizes, bucket_mb: len(bucket_plan(sizes, bucket_mb=bucket_mb)), cases, hints)


@exercise
def bounded_buckets(answer: Callable[..., list[list[int]]]) -> Verdict:
    """Exercise 3: the fewest buckets of at most so many bytes, from (sizes, limit); each a list of positions.

    Positions count from 0 and keep their order. A gradient that is larger than the limit has a bucket of its own.
    """
    cases: list[tuple[list[int], int, int]] = [
        ([], 10, 0),
        ([4], 10, 1),
        ([4, 4, 4], 10, 2),
        ([5, 5, 5, 5], 10, 2),
        ([10, 10], 10, 2),
        ([6, 5, 4, 3], 10, 3),
        ([3, 12, 3], 10, 3),
        ([12, 3, 7, 1], 10, 3),
        ([1] * 7, 3, 3),
    ]
    for sizes, limit, fewest in cases:
        asked = f"{name_of(answer)}({sizes}, limit={limit})"
        found = call(answer, list(sizes), limit, in_words=asked)
        problem = _problem_with_buckets(found, sizes, limit, fewest)
        if problem:
            raise Wrong(f"{asked} gave {shown(found)}: {problem}")
    return passed(f"{len(cases)} lists of gradients: order kept, bound met, no bucket too many")


def _problem_with_buckets(found: object, sizes: Sequence[int], limit: int, fewest: int) -> str:
    """What is wrong with buckets of these sizes, or ""."""
    if not isinstance(found, list) or not all(isinstance(bucket, list) for bucket in found):
        return "return a list of lists of positions"
    if not all(isinstance(position, Integral) for bucket in found for position in bucket):
        return "a bucket lists positions, which are whole numbers"
    flat = [int(position) for bucket in found for position in bucket]
    if sorted(flat) != list(range(len(sizes))):
        return f"each position must be in one bucket, and there are {len(sizes)}"
    if flat != sorted(flat):
        return "the order changed: a gradient would wait for one that is ready later"
    if not all(found):
        return "a bucket is empty: it would be a message without bytes"
    for bucket in found:
        held = sum(sizes[position] for position in bucket)
        if held > limit and len(bucket) > 1:
            return f"bucket {bucket} holds {held} bytes, more than {limit}"
    return f"{len(found)} buckets, and {fewest} would do" if len(found) > fewest else ""


@exercise
def early_uses(answer: Callable[..., list[int]]) -> Verdict:
    """Exercise 4: numbers of the lines that use a buffer between its collective and its wait, from (lines).

    Each line is an ``inductor.Line``, of which ``number``, ``kind`` and ``buffers`` are needed.
    """
    for program, expected, hint in PROGRAMS:
        lines = []
        for number, line in enumerate(program.split(", "), start=1):
            kind, *buffers = line.split()
            lines.append(Line(number, cast(Any, kind), kind, tuple(buffers), line))
        text = "; ".join(f"{line.number} {line.text}" for line in lines)
        asked = f"for the program [{text}] {name_of(answer)}"
        found = call(answer, lines, in_words=asked)
        if not isinstance(found, list) or found != expected:
            raise Wrong(f"{asked} gave {shown(found)}, expected {expected}. {hint}")
    return passed(f"{len(PROGRAMS)} programs agree")


@exercise
def wire_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 5: bytes that a rank hands to all-reduces before a step of the optimizer.

    From (parameters, micro_batches, no_sync, bf16): ``no_sync`` sends after the last micro-batch only.
    """
    every = "Without no_sync every backward pass sends all gradients."
    once = "With no_sync the gradients add up on the rank, and one message holds their sum."
    half = "The hook sends bfloat16, 2 bytes a number; without it a gradient has 4."
    cases = [
        (1000, 1, False, False),
        (1000, 1, False, True),
        (1000, 4, False, False),
        (1000, 4, True, False),
        (1000, 8, True, True),
        (500, 3, False, True),
    ]

    hints = [half, half, every, once, once, every]

    def right(parameters: int, micro_batches: int, no_sync: bool, bf16: bool) -> int:
        return parameters * (1 if no_sync else micro_batches) * (2 if bf16 else 4)

    return check_values(answer, right, cases, hints)
