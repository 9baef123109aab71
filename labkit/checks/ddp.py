"""Checks of lab 4, DDP with the compiler."""

from collections.abc import Callable, Mapping, Sequence
from math import isclose
from numbers import Integral
from typing import Any, cast

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
from labkit.checks.ranks.ddp import (
    LIMIT_BYTES,
    MICRO_BATCHES,
    make_linear_model,
    mean_squared_error,
    step_batch,
)
from labkit.inductor import ProgramLine
from labkit.parallel.buckets import assign_buckets
from labkit.theory import ddp as theory
from labkit.theory.collectives import AlphaBeta

RANKS = 2
MIB = 2**20
TOLERANCES = {"rtol": 1e-4, "atol": 1e-7}
WAIT_HINT = "does every rank call the same collectives, in the same order?"
FUTURE_HINT = "return a future of a tensor: handle.get_future().then(…)"
HOOK_HINTS = {
    "register_comm_hook": FUTURE_HINT,
    "Future": FUTURE_HINT,
    "communication hook": FUTURE_HINT,
}
PROGRAM_CASES: tuple[tuple[str, list[int], str], ...] = (
    (
        "extern a x, collective a, extern b x, wait a, other a b",
        [],
        "What touches other buffers may run meanwhile.",
    ),
    ("extern a x, collective a, other a", [3], "Nothing waits for a before it is returned."),
    ("collective a, kernel a y, wait a, other a", [2], "The wait comes too late for the kernel."),
    (
        "collective a b, wait b, kernel b y, kernel a y, other",
        [4],
        "A wait is for the buffer that it names alone.",
    ),
    (
        "collective a, wait a, kernel a, collective a, other a",
        [5],
        "A second request puts the buffer in flight again.",
    ),
    (
        "kernel a, collective a, collective b, wait b, wait a, other a b",
        [],
        "Waits may come in another order.",
    ),
    (
        "collective a, kernel a b, extern b a, wait a, other b",
        [2, 3],
        "Each line that uses it too early counts.",
    ),
    (
        "collective a, collective a, wait a, other a",
        [2],
        "A second request uses the buffer while it is in flight.",
    ),
    (
        "collective a b, kernel a b, wait a, wait b, other",
        [2],
        "Name a line once, even if it uses two such buffers.",
    ),
)
"""Programs as kind and buffers of each line; the lines that use a buffer too early; a hint."""


@exercise
def fitted(answer: Callable[..., tuple[float, float]]) -> Verdict:
    """Exercise 1: (alpha, beta) from (rounds, total_bytes); each round has its seconds by number of
    messages.
    """
    for network, total, counts in (
        (AlphaBeta(1e-4, 1e-9), 10**6, (1, 20, 200)),
        (AlphaBeta(5e-6, 3e-8), 4096, (2, 8)),
    ):
        times = {count: network.seconds(total, messages=count) for count in counts}
        rounds = {
            count: [each * late for late in (2.7, 1.0, 0.9)]
            for count, each in reversed(times.items())
        }
        asked = f"{answer_name(answer)} of a network with known alpha and beta"
        found = call_answer(
            answer, {count: list(each) for count, each in rounds.items()}, total, in_words=asked
        )
        try:
            alpha, beta = map(float, found)
        except Exception:
            # Even float() refuses an integer of hundreds of digits.
            raise WrongAnswer(
                f"{asked} gave {value_text(found)}, not two numbers", hint="Return alpha, beta."
            ) from None
        right = (network.alpha_s, network.beta_s_per_byte)
        if not _is_fit_close((alpha, beta), right):
            said, hint = _fit_mistake(alpha, beta, right, times, total)
            raise WrongAnswer(
                f"{asked} gave {said}({alpha:.3g}, {beta:.3g})",
                expected=f"({right[0]:.3g}, {right[1]:.3g})",
                hint=hint,
            )
    return passing_verdict("2 networks agree, though some rounds were disturbed")


def _fit_mistake(
    alpha: float, beta: float, right: tuple[float, float], times: dict[int, float], total: int
) -> tuple[str, str]:
    """Return what a wrong fit seems to have done, in words that precede its numbers, and a hint."""
    few, many = min(times), max(times)
    if _is_fit_close((beta, alpha), right):
        return "beta first, then alpha: ", "Return alpha, then beta."
    for late, which in ((0.9, "fastest"), (4.6 / 3, "mean")):
        if _is_fit_close((alpha, beta), (right[0] * late, right[1] * late)):
            return (
                f"the numbers of the {which} round: ",
                "Take the median round of each number of messages.",
            )
    if isclose(alpha, times[many] / many, rel_tol=1e-3):
        return (
            "an alpha that has bytes inside: ",
            "The bytes are the same in both: they drop out of a difference.",
        )
    if isclose(beta, times[few] / total, rel_tol=1e-3):
        return (
            "a beta that has latency inside: ",
            "Take the latency of its messages from the time, then divide.",
        )
    if isclose(alpha, right[0], rel_tol=1e-3):
        return (
            "the right alpha and another beta: ",
            "beta = (time - messages * alpha) / total_bytes",
        )
    return "", "Alpha is what additional messages cost; beta is what is left, for each byte."


def _is_fit_close(found: Sequence[float], right: Sequence[float]) -> bool:
    return all(isclose(each, value, rel_tol=1e-3) for each, value in zip(found, right, strict=True))


@exercise
def bucket_plan(answer: Callable[..., list[list[int]]]) -> Verdict:
    """Exercise 2: the positions of the gradients in each bucket, from (sizes, bucket_mb, first_mb);
    sizes in bytes.
    """
    first = "The first bucket closes once it holds first_mb MiB, the others at bucket_mb."
    closes = "A bucket closes once it holds its size, with the gradient that took it there inside."
    last = "What is left when the backward pass ends is a bucket too."
    mib = "A MiB has 2**20 bytes."
    larger = "first_mb is the limit of the first bucket even where bucket_mb is smaller."
    cases: list[tuple[list[int], float, float, str]] = [
        ([MIB // 2], 25, 1, last),
        ([MIB // 2, MIB, MIB], 25, 1, first),
        ([2 * MIB, 3 * MIB, 2 * MIB, 3 * MIB], 5, 5, closes),
        ([2 * MIB, 5 * MIB, 5 * MIB], 5, 1, closes),
        ([1_000_000, 100_000, 1_000_000, 100_000], 1, 1, mib),
        ([MIB // 2] * 4, 0.5, 1, larger),
        ([8000, 16_000_000] * 4, 25, 1, closes),
    ]
    for sizes, bucket_mb, first_mb, hint in cases:
        asked = f"{answer_name(answer)}({sizes}, bucket_mb={bucket_mb}, first_mb={first_mb})"
        found = call_answer(answer, list(sizes), bucket_mb, first_mb, in_words=asked)
        right = theory.bucket_plan(sizes, bucket_mb, first_mb)
        _judge_bucket_form(found, asked, sizes)
        if found != right:
            raise WrongAnswer(f"{asked} gave {value_text(found)}", expected=f"{right}", hint=hint)
    return passing_verdict(f"{len(cases)} lists of gradients agree")


def _judge_bucket_form(found: object, asked: str, sizes: Sequence[int]) -> None:
    """Raise WrongAnswer for anything but a list of lists that holds each position once, in
    order.
    """

    def bucket_error(why: str, hint: str) -> WrongAnswer:
        return WrongAnswer(f"{asked} gave {value_text(found)}: {why}", hint=hint)

    if not isinstance(found, list) or not all(isinstance(bucket, list) for bucket in found):
        raise bucket_error(
            "no list of lists", "Return a list of buckets, and a bucket is a list of positions."
        )
    if not all(isinstance(position, Integral) for bucket in found for position in bucket):
        raise bucket_error("positions are whole numbers", "Use enumerate(sizes).")
    flat = [int(position) for bucket in found for position in bucket]
    if sorted(flat) != list(range(len(sizes))):
        raise bucket_error(
            f"each of {len(sizes)} positions must be in one bucket",
            "Append positions, not sizes; lose none.",
        )
    if flat != sorted(flat):
        raise bucket_error(
            "the order changed", "A gradient would wait for one that is ready later."
        )
    if not all(found):
        raise bucket_error(
            "a bucket is empty",
            "It would be a message without bytes. Open a bucket when a gradient needs it.",
        )


@exercise
def bounded_buckets(answer: Callable[..., list[list[int]]]) -> Verdict:
    """Exercise 8: the fewest buckets of at most ``limit`` bytes, from (sizes, limit); each a list
    of positions.

    Positions count from 0 and stay in order. A gradient larger than the limit has a bucket of its
    own.
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
        asked = f"{answer_name(answer)}({sizes}, limit={limit})"
        found = call_answer(answer, list(sizes), limit, in_words=asked)
        _judge_bucket_form(found, asked, sizes)
        for bucket in found:
            held = sum(sizes[position] for position in bucket)
            if held > limit and len(bucket) > 1:
                hint = (
                    "Look before you put a gradient in: would the bucket hold more than the limit?"
                )
                raise WrongAnswer(
                    f"{asked} gave {found}: bucket {bucket} holds {held} bytes", hint=hint
                )
        if len(found) > fewest:
            hint = "A bucket that holds exactly the limit keeps it; put in as much as fits."
            raise WrongAnswer(f"{asked} gave {len(found)} buckets", expected=f"{fewest}", hint=hint)
    return passing_verdict(
        f"{len(cases)} lists of gradients: order kept, bound met, no bucket too many"
    )


@exercise
def small_ddp(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 3: average gradients in buckets while the backward pass runs, on 2 real ranks."""
    own = [[_gradients_on_one_device([(rank, step)]) for rank in range(RANKS)] for step in range(2)]
    mean = [[sum(each) / RANKS for each in zip(*ranks, strict=True)] for ranks in own]
    sizes = [gradient.nbytes for gradient in mean[0]][::-1]
    buckets = [sum(sizes[each] for each in bucket) for bucket in assign_buckets(sizes, LIMIT_BYTES)]

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        for step, (passage, right) in enumerate(zip(sent["passes"], mean, strict=True)):
            which = f"on rank {index}, in backward pass {step},"
            seen = passage["seen"]
            _judge_all_reduces(
                which,
                [int(each.split()[1]) for each in seen if each.startswith("asked")],
                sizes,
                buckets,
            )
            likely = {
                "the sum over the ranks": [RANKS * each for each in right],
                "the sum, divided twice": [each / RANKS for each in right],
                "this rank's own": own[step][index],
                "this rank's own, divided": [each / RANKS for each in own[step][index]],
            }
            hint = {
                "the sum over the ranks": (
                    "An all-reduce adds up. The mean is the sum, divided by the ranks."
                ),
                "the sum, divided twice": "Divide once: before the all-reduce, or after it.",
            }
            _judge_gradients(which, passage["gradients"], right, likely, hint)
            last = len(seen) - 1 - seen[::-1].index("gradient")
            asked = [place for place, each in enumerate(seen) if each.startswith("asked")]
            if asked[0] > last:
                hint_text = (
                    "Ask for the all-reduce in the hook of the gradient that completes the bucket."
                )
                raise WrongAnswer(
                    f"{which} the first bucket left after the last gradient was there",
                    hint=hint_text,
                )
            early = [place for place, each in enumerate(seen) if each == "waited" and place < last]
            if early:
                left = seen[early[0] :].count("gradient")
                hint_text = (
                    "Ask with async_op=True, keep the handle, and wait once the last gradient is"
                    " there."
                )
                raise WrongAnswer(
                    f"{which} the rank waited while {left} gradients were still to come",
                    hint=hint_text,
                )
            waits = [each["seen"].count("waited") for each in sent["passes"]]
            if waits[step] > waits[0]:
                hint_text = (
                    "Forget the buckets on their way once they have arrived: their rows stay in"
                    " memory."
                )
                raise WrongAnswer(
                    f"{which} the rank waited {waits[step]} times, before {waits[0]}",
                    hint=hint_text,
                )

    judge_on_ranks(
        "ddp",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        what="small_ddp",
    )
    return passing_verdict(
        f"the mean on {RANKS} ranks, in {len(buckets)} buckets that leave while gradients are still"
        " to come"
    )


def _judge_all_reduces(
    which: str, asked: Sequence[int], sizes: Sequence[int], buckets: Sequence[int]
) -> None:
    """Judge whether these buckets were all-reduced."""
    if list(asked) == list(buckets):
        return
    expected = f"{len(buckets)} all-reduces, of {', '.join(map(str, buckets))} bytes"
    if not asked:
        hint = "Register a hook with every parameter: register_post_accumulate_grad_hook."
        raise WrongAnswer(f"{which} no all-reduce was asked for", expected=expected, hint=hint)
    if len(asked) == len(sizes):
        hint = "Count the gradients of a bucket that are still missing; ask when none is."
        raise WrongAnswer(
            f"{which} each gradient had an all-reduce of its own", expected=expected, hint=hint
        )
    if len(asked) == 1 and sum(asked) == sum(sizes):
        raise WrongAnswer(
            f"{which} one all-reduce carried all gradients",
            expected=expected,
            hint="Close a bucket when full.",
        )
    said = f"{which} all-reduces of {', '.join(map(str, asked))} bytes were asked for"
    hint = (
        "Go from the last parameter to the first; a bucket closes once it holds bucket_bytes, or"
        " more."
    )
    if len(asked) > len(buckets) and list(asked[: len(buckets)]) == list(buckets):
        hint = "After a backward pass, set the counts of missing gradients anew."
    if len(asked) < len(buckets):
        hint = (
            "What is left at the end is a bucket, too. After a backward pass, set the counts anew."
        )
    raise WrongAnswer(said, expected=expected, hint=hint)


def _judge_gradients(
    which: str,
    got: Sequence[Tensor | None],
    right: Sequence[Tensor],
    likely: Mapping[str, Sequence[Tensor]],
    hints: Mapping[str, str],
    **close: float,
) -> None:
    """Judge whether each gradient is right; if not, say what it seems to be."""
    tolerance = close or TOLERANCES
    for place, (gradient, expected) in enumerate(zip(got, right, strict=True)):
        if is_tensor_close(gradient, expected, **tolerance):
            continue
        name = f"the gradient of parameter {place}"
        if gradient is None:
            raise WrongAnswer(f"{which} {name} is None", hint="Leave the mean in parameter.grad.")
        if gradient.shape != expected.shape:
            said = f"{which} {name} has shape {tuple(gradient.shape)}"
            raise WrongAnswer(
                said,
                expected=f"{tuple(expected.shape)}",
                hint="Give each piece its own shape back.",
            )
        seen = next(
            (
                words
                for words, each in likely.items()
                if is_tensor_close(gradient, each[place], **tolerance)
            ),
            "",
        )
        hint = hints.get(
            seen,
            "Wait for the bucket before you read it; cut it in the order in which you filled it.",
        )
        raise WrongAnswer(f"{which} {name} is {seen or 'another than one device gives'}", hint=hint)


def _gradients_on_one_device(batches: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the gradients of the mean loss over some batches, each given by its rank and step."""
    model = make_linear_model()
    torch.stack(
        [mean_squared_error(model, *step_batch(*each)) for each in batches]
    ).mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@exercise
def arrivals(answer: Callable[..., list[float]]) -> Verdict:
    """Exercise 4: when each bucket has arrived, from (ready, takes), lists of numbers; one at a
    time, in order.
    """
    idle = "A bucket starts when it is ready, if nothing else is on its way."
    busy = (
        "A bucket starts when the one before has arrived, if that is later than the moment when it"
        " is ready."
    )
    order = (
        "Buckets leave in their order: a bucket that is ready early waits for a late one before it."
    )
    cases = [
        ([2.0], [3.0], idle),
        ([1.0, 8.0], [2.0, 2.0], idle),
        ([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], busy),
        ([9.0, 2.0, 4.0], [1.0, 1.0, 1.0], order),
        ([1.0, 2.0, 20.0, 4.0], [3.0, 3.0, 1.0, 2.0], order),
    ]
    for ready, takes, hint in cases:
        asked = f"{answer_name(answer)}({ready}, {takes})"
        found, right = (
            call_answer(answer, list(ready), list(takes), in_words=asked),
            theory.arrivals(ready, takes),
        )
        try:
            given = [float(each) for each in found]
        except Exception:
            raise WrongAnswer(
                f"{asked} gave {value_text(found)}, not a list of numbers",
                hint="One number a bucket.",
            ) from None
        if given != right:
            raise WrongAnswer(f"{asked} gave {value_text(found)}", expected=f"{right}", hint=hint)
    return passing_verdict(f"{len(cases)} backward passes agree")


@exercise
def accumulate(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 5: gradients of several micro-batches, averaged over the ranks once, on 2 real
    ranks.
    """
    steps = range(MICRO_BATCHES)
    right = _gradients_on_one_device([(rank, step) for rank in range(RANKS) for step in steps])
    last = _gradients_on_one_device([(rank, MICRO_BATCHES - 1) for rank in range(RANKS)])

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        own = _gradients_on_one_device([(index, step) for step in steps])
        which = f"on rank {index},"
        calls = {0: "nothing was sent", MICRO_BATCHES: "every backward pass sent its gradients"}
        if sent["calls"] != 1:
            said = calls.get(sent["calls"], f"{sent['calls']} all-reduces were sent")
            hint = (
                "Forward and backward pass of all micro-batches but the last stand in `with"
                " model.no_sync():`."
            )
            raise WrongAnswer(f"{which} {said}", expected="1 all-reduce", hint=hint)
        likely = {
            f"{MICRO_BATCHES} times too large": [MICRO_BATCHES * each for each in right],
            "that of the last micro-batch alone": last,
            "that of the last micro-batch alone, divided": [each / MICRO_BATCHES for each in last],
            "this rank's own": own,
        }
        hints = {
            f"{MICRO_BATCHES} times too large": (
                "Gradients add up; the loss of the whole batch is a mean."
            ),
            "that of the last micro-batch alone": (
                "Every micro-batch needs a backward pass; zero no gradient between."
            ),
        }
        _judge_gradients(which, sent["gradients"], right, likely, hints)

    judge_on_ranks(
        "ddp",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        what="accumulate",
    )
    return passing_verdict(
        f"the gradients of one device with all {RANKS * MICRO_BATCHES} micro-batches, sent once"
    )


@exercise
def handed_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 6: the bytes that a rank passes to all-reduces before an optimizer step.

    The answer's arguments are (parameters, micro_batches, no_sync, bf16): with ``no_sync`` only the
    last micro-batch sends.
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

    handed = (
        "A gradient has 4 bytes a number. Count what is handed to the call, not what a ring puts on"
        " the wire."
    )
    hints = [handed, half, every, once, once, every]

    def right_bytes(parameters: int, micro_batches: int, no_sync: bool, bf16: bool) -> int:
        return parameters * (1 if no_sync else micro_batches) * (2 if bf16 else 4)

    return judge_values(answer, right_bytes, cases, hints)


@exercise
def half_hook(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 7: a communication hook that sends bfloat16, on 2 real ranks."""
    own = [_gradients_on_one_device([(rank, 0)]) for rank in range(RANKS)]
    right = [sum(each) / RANKS for each in zip(*own, strict=True)]
    whole = sum(gradient.nbytes for gradient in right)

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        which = f"on rank {index},"
        likely = {
            "the sum over the ranks": [RANKS * each for each in right],
            "this rank's own": own[index],
        }
        likely["the mean, divided once more"] = [each / RANKS for each in right]
        hints = {
            "the sum over the ranks": (
                "DDP divides only where no hook is registered: a hook divides itself."
            )
        }
        hints["this rank's own"] = (
            "Send a copy in bfloat16, and return what came of it, not the bucket as it was."
        )
        _judge_gradients(which, sent["gradients"], right, likely, hints, rtol=0.02, atol=2e-3)
        if sent["handed"] != whole // 2:
            hint = "Round before the all-reduce: bucket.buffer().to(torch.bfloat16)."
            said = f"{which} the gradients are right, and {sent['handed']:,} bytes were handed over"
            raise WrongAnswer(said, expected=f"{whole // 2:,}", hint=hint)

    judge_on_ranks(
        "ddp",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        hints=HOOK_HINTS,
        what="half_hook",
    )
    return passing_verdict(
        f"the mean but for rounding, and {whole // 2:,} bytes handed over instead of {whole:,}"
    )


@exercise
def early_uses(answer: Callable[..., list[int]]) -> Verdict:
    """Exercise 9: the numbers of the lines that use a buffer between its collective and its wait,
    from (lines).

    Each line is an ``inductor.ProgramLine``, of which ``number``, ``kind`` and ``buffers`` are
    needed.
    """
    for program, expected, hint in PROGRAM_CASES:
        lines = []
        for number, line in enumerate(program.split(", "), start=1):
            kind, *buffers = line.split()
            lines.append(ProgramLine(number, cast(Any, kind), kind, tuple(buffers), line))
        text = "; ".join(f"{line.number} {line.text}" for line in lines)
        asked = f"for the program [{text}] {answer_name(answer)}"
        found = call_answer(answer, lines, in_words=asked)
        if not isinstance(found, list) or found != expected:
            raise WrongAnswer(
                f"{asked} gave {value_text(found)}", expected=f"{expected}", hint=hint
            )
    return passing_verdict(f"{len(PROGRAM_CASES)} programs agree")


@exercise
def smallest_bucket(answer: Callable[..., float]) -> Verdict:
    """Exercise 10: the bytes of a bucket, from (total_bytes, backward_s, alpha_s,
    beta_s_per_byte).
    """
    cases = [
        (
            (10**6, 2.0, 0.01, 1e-6),
            "The bytes take total_bytes * beta; what is left of backward_s is for latencies.",
        ),
        (
            (10**6, 3.0, 0.01, 1e-6),
            "A longer backward pass has room for more messages, so buckets may be smaller.",
        ),
        (
            (10**6, 2.0, 0.03, 1e-6),
            "Buckets of b bytes are total_bytes / b messages, and each takes alpha.",
        ),
        (
            (4 * 10**8, 0.05, 2e-5, 4e-11),
            "total_bytes / b * alpha + total_bytes * beta = backward_s; solve for b.",
        ),
        (
            (10**6, 0.5, 0.01, 1e-6),
            "Where the bytes alone take longer than the backward pass, no bucket is right.",
        ),
    ]
    for case, hint in cases:
        right = theory.smallest_bucket_bytes(*case)
        names = ("total_bytes", "backward_s", "alpha_s", "beta_s_per_byte")
        arguments = [f"{name}={value:g}" for name, value in zip(names, case, strict=True)]
        asked = f"{answer_name(answer)}({', '.join(arguments)})"
        found = call_answer(answer, *case, in_words=asked)
        try:
            given = float(found)
        except Exception:
            raise WrongAnswer(
                f"{asked} gave {value_text(found)}, not a number", hint="Does every path return?"
            ) from None
        if not isclose(given, right, rel_tol=1e-6):
            raise WrongAnswer(f"{asked} gave {given:,.6g}", expected=f"{right:,.6g}", hint=hint)
    return passing_verdict(f"{len(cases)} cases agree")
