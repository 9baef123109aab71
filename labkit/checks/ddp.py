"""Checks of lab 4, DDP with the compiler."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor

from labkit.checks import judge
from labkit.checks.judge import Verdict, exercise
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks import ddp as ranks_ddp
from labkit.inductor import ProgramLine
from labkit.parallel.buckets import assign_buckets
from labkit.theory import ddp as theory
from labkit.theory.collectives import AlphaBeta

RANKS = 2
MIB = 2**20
WAIT_HINT = "does every rank call the same collectives, in the same order?"
FUTURE_HINT = "return a future of a tensor: handle.get_future().then(…)"
HOOK_HINTS = dict.fromkeys(["register_comm_hook", "Future", "communication hook"], FUTURE_HINT)
judge_on_pair = partial(judge_on_ranks, "ddp", ranks=RANKS, waiting=WAIT_HINT)
SUM = "the sum over the ranks"
TWICE = "the sum, divided twice"
OWN = "this rank's own"
ORDER_HINT = "Wait for the bucket before you read it; cut it in the order of filling."
PROGRAM_CASES: dict[str, tuple[list[int], str]] = {
    "extern a x, collective a, extern b x, wait a, other a b": ([], "Other buffers may be used."),
    "extern a x, collective a, other a": ([3], "Nothing waits for a before it is returned."),
    "collective a, kernel a y, wait a, other a": ([2], "The wait comes too late for the kernel."),
    "collective a b, wait b, kernel b y, kernel a y, other": ([4], "That wait is for b alone."),
    "collective a, wait a, kernel a, collective a, other a": ([5], "A second request counts, too."),
    "kernel a, collective a, collective b, wait b, wait a, other a b": ([], "The order is free."),
    "collective a, kernel a b, extern b a, wait a, other b": ([2, 3], "Each early line counts."),
    "collective a, collective a, wait a, other a": ([2], "A second request uses the buffer early."),
    "collective a b, kernel a b, wait a, wait b, other": ([2], "Name a line once."),
}
"""Programs, as kind and buffers of each line: the lines that use a buffer too early; a hint."""


@exercise
def fitted(answer: Callable[..., tuple[float, float]]) -> Verdict:
    """Exercise 1: (alpha, beta) from (rounds, total_bytes), seconds of rounds by message count."""
    for network, total, counts in (
        (AlphaBeta(1e-4, 1e-9), 10**6, (1, 20, 200)),
        (AlphaBeta(5e-6, 3e-8), 4096, (2, 8)),
    ):
        times = {count: network.seconds(total, messages=count) for count in counts}
        # Rounds of 2.7, 1 and 0.9 times the time: their median is right, their mean is not.
        rounds = {count: [2.7 * times[count], times[count], 0.9 * times[count]] for count in counts}
        asked = f"{judge.answer_name(answer)} of a network with known alpha and beta"
        found = judge.call_answer(answer, dict(reversed(rounds.items())), total, in_words=asked)
        alpha, beta = _as_floats(found, 2, asked, "Return alpha, beta.")
        right = (network.alpha_s, network.beta_s_per_byte)
        few, many = min(counts), max(counts)
        with_bytes, with_latency = times[many] / many, times[few] / total
        median, rest = "Take each count's median round.", "beta = (time - messages * alpha) / bytes"
        likely = {
            "beta first": ([right[1], right[0]], "Return alpha, then beta."),
            "the numbers of the fastest round": ([0.9 * right[0], 0.9 * right[1]], median),
            "the numbers of the mean round": ([4.6 / 3 * right[0], 4.6 / 3 * right[1]], median),
            "an alpha that has bytes inside": ([with_bytes, beta], "A difference has no bytes."),
            "a beta that has latency inside": ([alpha, with_latency], rest),
            "the right alpha and another beta": ([right[0], beta], rest),
        }
        judge.expect_close(
            torch.tensor([alpha, beta]).double(),
            torch.tensor(right).double(),
            f"{asked} gave ({alpha:.3g}, {beta:.3g}),",
            {words: (torch.tensor(each), hint) for words, (each, hint) in likely.items()},
            otherwise="which is wrong",
            expected=f"({right[0]:.3g}, {right[1]:.3g})",
            hint="Alpha is what additional messages cost; beta is what is left, for each byte.",
            rtol=1e-3,
            atol=0,
        )
    return judge.passing_verdict("2 networks agree, though some rounds were disturbed")


def _as_floats(found: Any, count: int, asked: str, hint: str) -> list[float]:
    try:
        numbers = [float(each) for each in found]
    except Exception:
        # Even float() refuses an integer of hundreds of digits.
        numbers = []
    said = f"{asked} gave {judge.value_text(found)}, not a list of {count} numbers"
    judge.expect(len(numbers) == count, said, hint=hint)
    return numbers


@exercise
def bucket_plan(answer: Callable[..., list[list[int]]]) -> Verdict:
    """Exercise 2: positions of the gradients by bucket, from (sizes, bucket_mb, first_mb)."""
    closes = "A bucket closes once it holds its size, with the gradient that took it there inside."
    cases: list[tuple[list[int], float, float, str]] = [
        ([MIB // 2], 25, 1, "What is left when the backward pass ends is a bucket too."),
        ([MIB // 2, MIB, MIB], 25, 1, "The first bucket closes at first_mb MiB, not bucket_mb."),
        ([2 * MIB, 3 * MIB, 2 * MIB, 3 * MIB], 5, 5, closes),
        ([2 * MIB, 5 * MIB, 5 * MIB], 5, 1, closes),
        ([1_000_000, 100_000, 1_000_000, 100_000], 1, 1, "A MiB has 2**20 bytes."),
        ([MIB // 2] * 4, 0.5, 1, "first_mb limits the first bucket even if bucket_mb is smaller."),
        ([8000, 16_000_000] * 4, 25, 1, closes),
    ]
    for sizes, bucket_mb, first_mb, hint in cases:
        asked = f"{judge.answer_name(answer)}({sizes}, bucket_mb={bucket_mb}, first_mb={first_mb})"
        found = judge.call_answer(answer, [*sizes], bucket_mb, first_mb, in_words=asked)
        right = theory.bucket_plan(sizes, bucket_mb, first_mb)
        _expect_bucket_form(found, asked, sizes)
        judge.expect(found == right, f"{asked} gave {judge.value_text(found)}", right, hint)
    return judge.passing_verdict(f"{len(cases)} lists of gradients agree")


def _expect_bucket_form(found: Any, asked: str, sizes: Sequence[int]) -> None:
    """Expect a list of lists that holds each position once, in order."""
    said = f"{asked} gave {judge.value_text(found)}:"
    is_list = isinstance(found, list) and all(isinstance(bucket, list) for bucket in found)
    hint = "Return a list of buckets, and a bucket is a list of positions."
    judge.expect(is_list, f"{said} no list of lists", hint=hint)
    flat = [*chain(*found)]
    are_whole = all(isinstance(position, Integral) for position in flat)
    judge.expect(are_whole, f"{said} positions are whole numbers", hint="Use enumerate(sizes).")
    problem = f"{said} each of {len(sizes)} positions must be in one bucket"
    are_complete = sorted(flat) == [*range(len(sizes))]
    judge.expect(are_complete, problem, hint="Append positions, not sizes; lose none.")
    hint = "A gradient would wait for one that is ready later."
    judge.expect(flat == sorted(flat), f"{said} the order changed", hint=hint)
    hint = "It would be a message without bytes. Open a bucket when a gradient needs it."
    judge.expect(all(found), f"{said} a bucket is empty", hint=hint)


@exercise
def bounded_buckets(answer: Callable[..., list[list[int]]]) -> Verdict:
    """Exercise 8: the fewest buckets of at most ``limit`` bytes, from (sizes, limit).

    Positions stay in order. A larger gradient has a bucket of its own.
    """
    cases: list[tuple[list[int], int, int]] = [
        ([4], 10, 1),
        ([4, 4, 4], 10, 2),
        ([5, 5, 5, 5], 10, 2),
        ([10, 10], 10, 2),
        ([6, 5, 4, 3], 10, 3),
        ([3, 12, 3], 10, 3),
        ([12, 3, 7, 1], 10, 3),
        ([1] * 7, 3, 3),
        ([], 10, 0),
    ]
    for sizes, limit, fewest in cases:
        asked = f"{judge.answer_name(answer)}({sizes}, limit={limit})"
        found = judge.call_answer(answer, [*sizes], limit, in_words=asked)
        _expect_bucket_form(found, asked, sizes)
        for bucket in found:
            held = sum(sizes[position] for position in bucket)
            said = f"{asked} gave {found}: bucket {bucket} holds {held} bytes"
            hint = "Before you put a gradient in: would the bucket hold more than the limit?"
            judge.expect(held <= limit or len(bucket) == 1, said, hint=hint)
        hint = "A bucket that holds exactly the limit keeps it; put in as much as fits."
        judge.expect(len(found) <= fewest, f"{asked} gave {len(found)} buckets", fewest, hint)
    return judge.passing_verdict(
        f"{len(cases)} lists of gradients: order kept, bound met, no bucket too many"
    )


@exercise
def small_ddp(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 3: average gradients in buckets while the backward pass runs, on 2 real ranks."""
    own = [[_device_gradients([(rank, step)]) for rank in range(RANKS)] for step in range(2)]
    mean = [[sum(each) / RANKS for each in zip(*ranks, strict=True)] for ranks in own]
    sizes = [gradient.nbytes for gradient in reversed(mean[0])]
    plan = assign_buckets(sizes, ranks_ddp.LIMIT_BYTES)
    buckets = [sum(sizes[position] for position in bucket) for bucket in plan]

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        for step, (passage, right) in enumerate(zip(sent["passes"], mean, strict=True)):
            where, seen = f"on rank {index}, in backward pass {step},", passage["seen"]
            asked = [int(event.split()[1]) for event in seen if event.startswith("asked")]
            # Wrong buckets would explain wrong gradients, so they come first.
            _judge_all_reduces(where, asked, sizes, buckets)
            add = "An all-reduce adds up. The mean is the sum, divided by the ranks."
            likely = {
                SUM: (right, RANKS, add),
                TWICE: (right, 1 / RANKS, "Divide once: before the all-reduce, or after it."),
                OWN: (own[step][index], 1, ORDER_HINT),
                f"{OWN}, divided": (own[step][index], 1 / RANKS, ORDER_HINT),
            }
            _judge_gradients(where, passage["gradients"], right, likely)
            # Right gradients may still have been sent late, or waited for too early.
            last = len(seen) - 1 - seen[::-1].index("gradient")
            overlap = any(event.startswith("asked") for event in seen[:last])
            hint = "Ask for the all-reduce in the hook of the gradient that completes the bucket."
            said = f"{where} the first bucket left after the last gradient was there"
            judge.expect(overlap, said, hint=hint)
            early = seen.index("waited") if "waited" in seen[:last] else last
            left = seen[early:].count("gradient")
            hint = "Ask with async_op=True, keep the handle, and wait after the last gradient."
            said = f"{where} the rank waited while {left} gradients were still to come"
            judge.expect(early == last, said, hint=hint)
            # A handle that was kept is waited for again in the next pass.
            waits, before = seen.count("waited"), sent["passes"][0]["seen"].count("waited")
            hint = "Forget the buckets on their way once they have arrived: they stay in memory."
            said = f"{where} the rank waited {waits} times, before {before}"
            judge.expect(waits <= before, said, hint=hint)

    judge_on_pair(answer, judge=judge_rank, timeout_s=timeout_s, what="small_ddp")
    passed = f"in {len(buckets)} buckets that leave while gradients are still to come"
    return judge.passing_verdict(f"the mean on {RANKS} ranks, {passed}")


def _judge_all_reduces(
    where: str, asked: list[int], sizes: Sequence[int], buckets: list[int]
) -> None:
    """Expect all-reduces of these buckets."""
    said = f"all-reduces of {', '.join(map(str, asked))} bytes were asked for"
    hint = "Go from the last parameter to the first; a full bucket holds bucket_bytes, or more."
    if not asked:
        said = "no all-reduce was asked for"
        hint = "Register a hook with every parameter: register_post_accumulate_grad_hook."
    elif len(asked) == len(sizes):
        said = "each gradient had an all-reduce of its own"
        hint = "Count the gradients of a bucket that are still missing; ask when none is."
    elif asked == [sum(sizes)]:
        said, hint = "one all-reduce carried all gradients", "Close a bucket when full."
    elif len(asked) < len(buckets):
        hint = "What is left at the end is a bucket, too. After a pass, reset the counts."
    elif asked[: len(buckets)] == buckets:
        hint = "After a backward pass, reset the counts of missing gradients."
    expected = f"{len(buckets)} all-reduces, of {', '.join(map(str, buckets))} bytes"
    judge.expect(asked == buckets, f"{where} {said}", expected, hint)


def _judge_gradients(
    where: str,
    got: Sequence[Tensor | None],
    right: Sequence[Tensor],
    likely: Mapping[str, tuple[Sequence[Tensor], float, str]],
    **tolerances: float,
) -> None:
    """Expect these gradients; a likely mistake is a list of gradients, a factor and a hint."""
    for place, (gradient, expected) in enumerate(zip(got, right, strict=True)):
        name = f"{where} the gradient of parameter {place}"
        if gradient is None:
            raise judge.WrongAnswer(f"{name} is None", hint="Leave the mean in parameter.grad.")
        shape, right_shape = tuple(gradient.shape), tuple(expected.shape)
        hint = "Give each piece its own shape back."
        judge.expect(shape == right_shape, f"{name} has shape {shape}", right_shape, hint)
        judge.expect_close(
            gradient,
            expected,
            f"{name} is",
            {words: (scale * each[place], hint) for words, (each, scale, hint) in likely.items()},
            otherwise="another than one device gives",
            hint=ORDER_HINT,
            **tolerances,
        )


def _device_gradients(batches: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return one device's gradients of the mean loss over batches, given by rank and step."""
    model = ranks_ddp.make_linear_model()
    losses = [ranks_ddp.mean_squared_error(model, *ranks_ddp.step_batch(*each)) for each in batches]
    torch.stack(losses).mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@exercise
def arrivals(answer: Callable[..., list[float]]) -> Verdict:
    """Exercise 4: when each bucket has arrived, one at a time and in order, from (ready, takes)."""
    idle = "A bucket starts when it is ready, if nothing else is on its way."
    busy = "A bucket starts when the one before has arrived, if that is later than it is ready."
    order = "Buckets leave in order: one that is ready early waits for a late one before it."
    cases = [
        ([2.0], [3.0], idle),
        ([1.0, 8.0], [2.0, 2.0], idle),
        ([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], busy),
        ([9.0, 2.0, 4.0], [1.0, 1.0, 1.0], order),
        ([1.0, 2.0, 20.0, 4.0], [3.0, 3.0, 1.0, 2.0], order),
    ]
    for ready, takes, hint in cases:
        asked = f"{judge.answer_name(answer)}({ready}, {takes})"
        found = judge.call_answer(answer, [*ready], [*takes], in_words=asked)
        given = _as_floats(found, len(ready), asked, "One number a bucket.")
        right = theory.arrivals(ready, takes)
        judge.expect(given == right, f"{asked} gave {judge.value_text(found)}", right, hint)
    return judge.passing_verdict(f"{len(cases)} backward passes agree")


@exercise
def accumulate(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 5: gradients of micro-batches, averaged over the ranks once, on 2 real ranks."""
    count = ranks_ddp.MICRO_BATCHES
    right = _device_gradients([(rank, step) for rank in range(RANKS) for step in range(count)])
    last = _device_gradients([(rank, count - 1) for rank in range(RANKS)])

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        where, calls = f"on rank {index},", sent["calls"]
        said = {0: "nothing was sent", count: "every backward pass sent its gradients"}
        hint = "All micro-batches but the last run in `with model.no_sync():`, forward pass too."
        seen = said.get(calls, f"{calls} all-reduces were sent")
        judge.expect(calls == 1, f"{where} {seen}", "1 all-reduce", hint)
        own = _device_gradients([(index, step) for step in range(count)])
        every = "Every micro-batch needs a backward pass; zero no gradient between."
        add, alone = "Gradients add up; the batch's loss is a mean.", "that of the last micro-batch"
        likely = {
            f"{count} times too large": (right, count, add),
            f"{alone} alone": (last, 1, every),
            f"{alone} alone, divided": (last, 1 / count, every),
            OWN: (own, 1, ORDER_HINT),
        }
        _judge_gradients(where, sent["gradients"], right, likely)

    judge_on_pair(answer, judge=judge_rank, timeout_s=timeout_s, what="accumulate")
    return judge.passing_verdict(
        f"the gradients of one device with all {RANKS * count} micro-batches, sent once"
    )


@exercise
def handed_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 6: all-reduced bytes of a step, from (parameters, micro_batches, no_sync, bf16)."""
    every = "Without no_sync every backward pass sends all gradients."
    once = "With no_sync the gradients add up on the rank, and one message holds their sum."
    cases = [
        (1000, 1, False, False, "Count 4 bytes a number as handed over, not as a ring sends them."),
        (1000, 1, False, True, "The hook sends bfloat16, 2 bytes a number, instead of 4."),
        (1000, 4, False, False, every),
        (1000, 4, True, False, once),
        (1000, 8, True, True, once),
        (500, 3, False, True, every),
    ]

    def right_bytes(parameters: int, micro_batches: int, no_sync: bool, bf16: bool) -> int:
        return parameters * (1 if no_sync else micro_batches) * (2 if bf16 else 4)

    return judge.judge_cases(answer, right_bytes, cases)


@exercise
def half_hook(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 7: a communication hook that sends bfloat16, on 2 real ranks."""
    own = [_device_gradients([(rank, 0)]) for rank in range(RANKS)]
    right = [sum(each) / RANKS for each in zip(*own, strict=True)]
    whole = sum(gradient.nbytes for gradient in right)
    divide = "DDP divides only where no hook is registered: a hook divides itself."
    send = "Send a copy in bfloat16, and return what came of it, not the bucket as it was."

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        where, handed = f"on rank {index},", sent["handed"]
        likely = {
            SUM: (right, RANKS, divide),
            OWN: (own[index], 1, send),
            TWICE: (right, 1 / RANKS, divide),
        }
        # bfloat16 has 8 bits of precision.
        _judge_gradients(where, sent["gradients"], right, likely, rtol=0.02, atol=2e-3)
        hint = "Round before the all-reduce: bucket.buffer().to(torch.bfloat16)."
        said = f"{where} the gradients are right, and {handed:,} bytes were handed over"
        judge.expect(handed == whole // 2, said, f"{whole // 2:,}", hint)

    judge_on_pair(answer, judge=judge_rank, timeout_s=timeout_s, hints=HOOK_HINTS, what="half_hook")
    return judge.passing_verdict(
        f"the mean but for rounding, and {whole // 2:,} bytes handed over instead of {whole:,}"
    )


@exercise
def early_uses(answer: Callable[..., list[int]]) -> Verdict:
    """Exercise 9: the lines that use a buffer before its wait, from ``inductor.ProgramLine``s."""
    for program, (right, hint) in PROGRAM_CASES.items():
        lines = []
        for number, line in enumerate(program.split(", "), start=1):
            kind, *buffers = line.split()
            lines.append(ProgramLine(number, cast(Any, kind), kind, tuple(buffers), line))
        text = "; ".join(f"{line.number} {line.text}" for line in lines)
        asked = f"for the program [{text}] {judge.answer_name(answer)}"
        found = judge.call_answer(answer, lines, in_words=asked)
        is_right = isinstance(found, list) and found == right
        judge.expect(is_right, f"{asked} gave {judge.value_text(found)}", right, hint)
    return judge.passing_verdict(f"{len(PROGRAM_CASES)} programs agree")


@exercise
def smallest_bucket(answer: Callable[..., float]) -> Verdict:
    """Exercise 10: the bytes of a bucket, from the arguments of ``smallest_bucket_bytes``."""
    longer = "A longer backward pass has room for more messages, so buckets may be smaller."
    solve = "total_bytes / b * alpha + total_bytes * beta = backward_s; solve for b."
    never = "Where the bytes alone take longer than the backward pass, no bucket is right."
    cases = [
        (10**6, 2.0, 0.01, 1e-6, "What total_bytes * beta leaves of backward_s is for latencies."),
        (10**6, 3.0, 0.01, 1e-6, longer),
        (10**6, 2.0, 0.03, 1e-6, "Buckets of b bytes are total_bytes / b messages of alpha each."),
        (4 * 10**8, 0.05, 2e-5, 4e-11, solve),
        (10**6, 0.5, 0.01, 1e-6, never),
    ]
    return judge.judge_cases(answer, theory.smallest_bucket_bytes, cases)
