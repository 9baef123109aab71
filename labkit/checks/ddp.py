"""Checks of lab 4, DDP with the compiler. Each calls the answer with cases of its own; none launches ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isclose
from numbers import Integral, Real
from typing import Any

from labkit.checks.verdict import Verdict, check_values, is_empty, passed, wrong
from labkit.generated import Line
from labkit.theory.alpha_beta import AlphaBeta
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


def alpha_beta(answer: Callable[..., tuple[float, float]]) -> Verdict:
    """Exercise 1: (alpha, beta) in seconds and seconds a byte, from (small_bytes, small_s, large_bytes, large_s)."""
    if is_empty(answer):
        return Verdict("not attempted")
    networks = [AlphaBeta(1e-4, 1e-9), AlphaBeta(2e-5, 4e-10), AlphaBeta(0.0, 1e-9)]
    for network, (small, large) in zip(networks, [(1000, 1_000_000), (4096, 4_194_304), (8, 80)], strict=True):
        arguments = (small, network.seconds(small), large, network.seconds(large))
        call = f"{answer.__name__}({', '.join(f'{each:g}' for each in arguments)})"
        try:
            found = answer(*arguments)
        except Exception as error:
            return wrong(f"{call} raised {type(error).__name__}: {error}")
        if not _is_pair(found):
            return wrong(f"{call} gave {found!r}, not two numbers: return alpha, beta")
        if not (_near(found[0], network.alpha_s) and _near(found[1], network.beta_s_per_byte)):
            expected = f"({network.alpha_s:g}, {network.beta_s_per_byte:g})"
            return wrong(f"{call} gave ({found[0]:g}, {found[1]:g}), expected {expected}. {_hint(found, arguments)}")
    return passed(f"{len(networks)} networks agree")


def _is_pair(found: object) -> bool:
    return isinstance(found, Sequence) and len(found) == 2 and all(isinstance(each, Real) for each in found)


def _near(found: float, expected: float) -> bool:
    return isclose(found, expected, rel_tol=1e-6, abs_tol=1e-12)


def _hint(found: Sequence[float], arguments: tuple[int, float, int, float]) -> str:
    _, small_s, large, large_s = arguments
    if found[0] > 0 and isclose(found[1], large_s / large):
        return "The large message's time holds a latency too."
    if isclose(found[0], small_s):
        return "The small message's time holds its bytes too."
    if found[0] < found[1]:
        return "Is the latency first?"
    return "Beta is what the additional bytes cost; alpha is what is left of a message without its bytes."


def bucket_count(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: the compiler's buckets, from (sizes, bucket_mb); sizes in bytes, in the order of readiness."""
    first = "The first bucket closes at 1 MiB already, whatever bucket_mb says."
    closes = "A bucket closes once it holds bucket_mb MiB, with the gradient that took it there inside."
    last = "What is left when the backward pass ends is a bucket too."
    cases = [
        ([MIB // 2], 25, last),
        ([MIB // 2, MIB, MIB], 25, first),
        ([2 * MIB, 3 * MIB, 3 * MIB, 3 * MIB], 5, closes),
        ([2 * MIB, 5 * MIB, 5 * MIB], 5, closes),
        ([2 * MIB, 3 * MIB, 3 * MIB], 5, last),
        ([8000, 16_000_000] * 4, 25, closes),
    ]
    return check_values(
        answer,
        [
            ({"sizes": sizes, "bucket_mb": bucket_mb}, len(bucket_plan(sizes, bucket_mb=bucket_mb)), hint)
            for sizes, bucket_mb, hint in cases
        ],
    )


def bounded_buckets(answer: Callable[..., list[list[int]]]) -> Verdict:
    """Exercise 3: the fewest buckets of at most so many bytes, from (sizes, limit); each a list of positions.

    Positions count from 0 and keep their order. A gradient that is larger than the limit has a bucket of its own.
    """
    if is_empty(answer):
        return Verdict("not attempted")
    cases = [
        ([], 10), ([4], 10), ([4, 4, 4], 10), ([5, 5, 5, 5], 10), ([10, 10], 10), ([6, 5, 4, 3], 10),
        ([3, 12, 3], 10), ([12, 3, 7, 1], 10), ([1] * 7, 3),
    ]  # fmt: skip
    for sizes, limit in cases:
        call = f"{answer.__name__}({sizes}, limit={limit})"
        try:
            found = answer(list(sizes), limit)
        except Exception as error:
            return wrong(f"{call} raised {type(error).__name__}: {error}")
        problem = _problem_with_buckets(found, sizes, limit)
        if problem:
            return wrong(f"{call} gave {found!r}: {problem}")
    return passed(f"{len(cases)} lists of gradients: order kept, bound met, no bucket too many")


def _problem_with_buckets(found: object, sizes: Sequence[int], limit: int) -> str:
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
    fewest = _fewest(sizes, limit)
    return f"{len(found)} buckets, and {fewest} would do" if len(found) > fewest else ""


def _fewest(sizes: Sequence[int], limit: int) -> int:
    """The fewest buckets that keep order and bound: filling each as far as it goes is optimal."""
    count, held = 0, limit + 1
    for size in sizes:
        if held + size > limit:
            count, held = count + 1, 0
        held += size
    return count


def early_uses(answer: Callable[..., list[int]]) -> Verdict:
    """Exercise 4: numbers of the lines that use a buffer between its collective and its wait, from (lines).

    Each line is a ``generated.Line``, of which ``number``, ``kind`` and ``buffers`` are needed.
    """
    if is_empty(answer):
        return Verdict("not attempted")
    for program, expected, hint in PROGRAMS:
        lines = [_line(number, text) for number, text in enumerate(program.split(", "), start=1)]
        shown = "; ".join(f"{line.number} {line.text}" for line in lines)
        try:
            found = answer(lines)
        except Exception as error:
            return wrong(f"for the program [{shown}] {answer.__name__} raised {type(error).__name__}: {error}")
        if found != expected:
            return wrong(f"for the program [{shown}] {answer.__name__} gave {found!r}, expected {expected}. {hint}")
    return passed(f"{len(PROGRAMS)} programs agree")


def _line(number: int, text: str) -> Line:
    words: list[Any] = text.split()  # the first is a kind, of which Line's type knows a few alone
    return Line(number, words[0], words[0], tuple(words[1:]), text)


def wire_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 5: bytes that a rank hands to all-reduces before a step of the optimizer.

    From (parameters, micro_batches, no_sync, bf16): ``no_sync`` sends after the last micro-batch only.
    """
    every = "Without no_sync every backward pass sends all gradients."
    once = "With no_sync the gradients add up on the rank, and one message holds their sum."
    half = "The hook sends bfloat16, 2 bytes a number; without it a gradient has 4."
    cases = [
        (1000, 1, False, False, half), (1000, 1, False, True, half), (1000, 4, False, False, every),
        (1000, 4, True, False, once), (1000, 8, True, True, once), (500, 3, False, True, every),
    ]  # fmt: skip
    names = ("parameters", "micro_batches", "no_sync", "bf16")
    return check_values(
        answer,
        [
            (dict(zip(names, case, strict=True)), case[0] * (1 if case[2] else case[1]) * (2 if case[3] else 4), hint)
            for *case, hint in cases
        ],
    )
