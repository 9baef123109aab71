"""Checks of lab 4, DDP with the compiler."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.buckets import assign_buckets
from labkit.theory import ddp as theory
from labkit_course import bucket_lines
from labkit_course.bucket_lines import BackwardLine
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks import ddp as ranks_ddp
from labkit_course.checks.traffic import expect_traffic

# Numbers of ranks on which an answer has to be right.
SIZES = 2, 3
SIZES_TEXT = "2 and 3"
MIB = 2**20
WAIT_HINT = "does every rank call the same collectives, in the same order?"
on_ranks = partial(judge_on_ranks, "ddp", sizes=SIZES, waiting=WAIT_HINT, name_rank=True)
SENDS = "the gradients are right, but the rank sends"
ORDER_HINT = "Wait for the bucket before you read it; cut it in the order of filling."


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
    """Exercise 1: positions of the gradients by bucket, from (sizes, bucket_bytes)."""
    closes = "A bucket closes once it holds its size, with the gradient that took it there inside."
    cases: list[tuple[list[int], int, str]] = [
        ([4], 10, "What is left when the backward pass ends is a bucket too."),
        ([4, 4, 4, 4], 8, f"{closes} The next one starts from 0."),
        ([2, 3, 2, 3], 5, closes),
        ([2, 5, 5], 5, closes),
        ([1, 9, 1, 9, 1], 10, closes),
        ([12, 3, 12], 10, "A gradient that is larger than the size fills a bucket by itself."),
        ([8000, 16_000_000] * 4, 25 * MIB, closes),
    ]
    for sizes, bucket_bytes, hint in cases:
        asked = f"{judge.answer_name(answer)}({sizes}, bucket_bytes={bucket_bytes})"
        # A copy, because the answer may change its list.
        found = judge.call_answer(answer, [*sizes], bucket_bytes, in_words=asked)
        right = assign_buckets(sizes, bucket_bytes)
        _expect_bucket_form(found, asked, sizes)
        judge.expect(found == right, f"{asked} gave {judge.value_text(found)}", right, hint)
    return judge.passing_verdict(f"{len(cases)} lists of gradients agree")


def _expect_bucket_form(found: Any, asked: str, sizes: Sequence[int]) -> None:
    """Expect a list of lists that holds each position once, in order."""
    said = f"{asked} gave {judge.value_text(found)}:"
    # A list of another class may raise whatever is done with it.
    is_list = type(found) is list and all(type(bucket) is list for bucket in found)
    flat: list[Any] = [*chain(*found)] if is_list else [None]
    are_whole = all(isinstance(position, Integral) for position in flat)
    hint = "A bucket is a list of positions, as enumerate(sizes) gives them; return all in a list."
    judge.expect(are_whole, f"{said} no list of lists of whole numbers", hint=hint)
    are_complete = sorted(flat) == [*range(len(sizes))]
    problem = f"{said} each of {len(sizes)} positions must be in one bucket"
    judge.expect(are_complete, problem, hint="Append positions, not sizes; lose none.")
    hint = "A gradient would wait for one that is ready later."
    judge.expect(flat == sorted(flat), f"{said} the order changed", hint=hint)
    hint = "It would be a message without bytes. Open a bucket when a gradient needs it."
    judge.expect(all(found), f"{said} a bucket is empty", hint=hint)


@exercise
def send_full_buckets(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 2: send each bucket once it is full, and finish at the end, on real ranks."""
    sizes = [each.nbytes for each in ranks_ddp.parameters_in_order()]
    buckets = [sum(sizes[place] for place in bucket) for bucket in ranks_ddp.bucket_places()]

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        for step, passage in enumerate(sent["passes"]):
            where = f"in the {('first', 'second')[step]} backward pass,"
            seen = passage["seen"]
            asked = [int(event.split()[1]) for event in seen if event.startswith("asked")]
            # Wrong buckets would explain whatever else is wrong, so they come first.
            _judge_all_reduces(where, asked, sizes, buckets)
            _judge_finish(where, seen, len(buckets))
            own = [device_gradients([(rank, step)]) for rank in range(ranks)]
            judge_gradients(passage["gradients"], own, index, where=f"{where} ")
            # Right gradients may still have been sent late, or waited for too early.
            last = len(seen) - 1 - seen[::-1].index("gradient")
            # The last gradient completes the last bucket; the first bucket can leave before it.
            hint = "Ask for the all-reduce in the hook of the gradient that completes the bucket."
            said = f"{where} the first bucket left after the last gradient was there"
            overlap = any(event.startswith("asked") for event in seen[:last])
            judge.expect(overlap, said, hint=hint)
            early = seen.index("waited") if "waited" in seen[:last] else last
            left = seen[early:].count("gradient")
            said = f"{where} the rank waited while {left} gradients were still to come"
            hint = "Ask with async_op=True, keep the handle, and leave the waiting to finish."
            judge.expect(early == last, said, hint=hint)
            said, hint = f"{where} all is right, but the rank sends", "The all-reduces are enough."
            right = {"all_reduce": [len(buckets), sum(buckets)]}
            expect_traffic(passage["sent"], right, said, hint)

    hints = {
        "'NoneType' object has no attribute 'flatten'": (
            "A row was made of gradients that are not there yet. Does each hook count down the "
            "bucket of its own parameter? A lambda in a loop needs index=index."
        )
    }
    on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, hints=hints, what="send")
    passed = f"{len(buckets)} buckets leave while gradients are still to come"
    return judge.passing_verdict(f"on {SIZES_TEXT} ranks {passed}, in each of two passes")


def _judge_finish(where: str, seen: Sequence[str], buckets: int) -> None:
    """Expect one call of ``finish`` with all buckets, once the last gradient is there."""
    finished = [int(event.split()[1]) for event in seen if event.startswith("finish")]
    hint = "When no bucket misses a gradient any more, call finish(in_flight)."
    judge.expect(bool(finished), f"{where} finish was never called", hint=hint)
    said = f"{where} finish was called {len(finished)} times"
    judge.expect(len(finished) == 1, said, "once", "Call it at the last gradient of all.")
    said, hint = f"{where} finish got {finished[0]} buckets", "After finish, empty the list."
    judge.expect(finished[0] == buckets, said, f"{buckets} buckets", hint)


def _judge_all_reduces(where: str, asked: list[int], sizes: list[int], buckets: list[int]) -> None:
    """Expect all-reduces of these buckets."""
    said = f"all-reduces of {', '.join(map(str, asked))} bytes were asked for"
    hint = "The row of a bucket holds the gradients of its parameters, one after another."
    if not asked:
        said = "no all-reduce was asked for"
        hint = "Register a hook with every parameter, and reset the counts after each pass."
    elif len(asked) == len(sizes):
        said = "each gradient had an all-reduce of its own"
        hint = "Count the gradients of a bucket that are still missing; ask when none is."
    elif asked == [sum(sizes)]:
        said, hint = "one all-reduce carried all gradients", "Each bucket has a row of its own."
    elif len(asked) < len(buckets):
        hint = "A bucket never filled. Does each hook count down the bucket of its own parameter?"
    elif asked[: len(buckets)] == buckets:
        hint = "After a backward pass, reset the counts of missing gradients."
    elif asked == [2 * size for size in buckets]:
        hint = "Send the gradients as they are: float32 has 4 bytes a number."
    expected = f"{len(buckets)} all-reduces, of {', '.join(map(str, buckets))} bytes"
    judge.expect(asked == buckets, f"{where} {said}", expected, hint)


def judge_gradients(
    got: Sequence[Tensor | None],
    own: Sequence[Tensor],
    index: int,
    more: Mapping[str, tuple[Tensor, str]] | None = None,
    where: str = "",
    own_hint: str = ORDER_HINT,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-7,
) -> None:
    """Expect the mean of the ranks' ``own`` gradients on rank ``index``.

    Gradients are vectors of all parameters; ``more`` holds other likely ones than those of a wrong
    division, each with a hint.
    """
    ranks, right = len(own), torch.stack([*own]).mean(0)
    divide = "An all-reduce adds up. The mean is the sum, divided by the ranks, once."
    count = "Divide by dist.get_world_size()."
    likely = {
        **(more or {}),
        "the sum over the ranks": (ranks * right, divide),
        "the sum, divided twice": (right / ranks, divide),
        "this rank's own": (own[index], own_hint),
        "this rank's own, divided": (own[index] / ranks, own_hint),
        "the sum, divided by 2": (ranks * right / 2, count),
    }
    how: dict[str, Any] = {"hint": ORDER_HINT, "rtol": rtol, "atol": atol}
    start = 0
    for place, parameter in enumerate(ranks_ddp.make_linear_model().parameters()):
        gradient, name = got[place], f"{where}the gradient of parameter {place}"
        if gradient is None:
            raise judge.WrongAnswer(f"{name} is None", hint="Leave the mean in parameter.grad.")
        shape, right_shape = (*gradient.shape,), (*parameter.shape,)
        hint = "Give each piece its own shape back."
        judge.expect(shape == right_shape, f"{name} has shape {shape}", right_shape, hint)
        part = slice(start, start + parameter.numel())
        mistakes = {words: (wrong[part], hint) for words, (wrong, hint) in likely.items()}
        flat, said, other = gradient.flatten(), f"{name} is", "not one device's"
        judge.expect_close(flat, right[part], said, mistakes, otherwise=other, **how)
        start += parameter.numel()


def device_gradients(batches: Sequence[tuple[int, ...]]) -> Tensor:
    """Return one device's gradients of the batches' mean loss; ``step_batch`` takes each batch."""
    model = ranks_ddp.make_linear_model()
    losses = [ranks_ddp.mean_squared_error(model, *ranks_ddp.step_batch(*each)) for each in batches]
    gradients = torch.autograd.grad(torch.stack(losses).mean(), [*model.parameters()])
    return nn.utils.parameters_to_vector(gradients)


@exercise
def put_into_row(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 3: gradients in their bucket's row before it is sent, on real ranks."""
    into = "The row is what is sent: it has to hold this step's gradients."
    home = "Afterwards the means are in the row, so `grad` has to be its piece of the row."

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        first = torch.stack([device_gradients([(rank, 0)]) for rank in range(ranks)]).mean(0)
        for step, passage in enumerate(sent["passes"]):
            where = f"in the {('first', 'second', 'third')[step]} step, "
            own = [device_gradients([(rank, step)]) for rank in range(ranks)]
            right = torch.stack(own).mean(0)
            likely = {
                "that of the first step": (first, into),
                "0 everywhere": (torch.zeros_like(first), into),
                "twice the mean": (
                    2 * right,
                    "Where the gradient is in the row already, add nothing.",
                ),
                "the mean, and what the row held before": (right + first, into),
            }
            judge_gradients(passage["gradients"], own, index, likely, where, own_hint=home)
            said = f"{where}the gradients are right, but not pieces of the row"
            judge.expect(passage["in_row"], said, hint=home)
            said, hint = f"{where}{SENDS}", "thrifty_ddp sends the row once you return."
            expect_traffic(passage["sent"], passage["asked"], said, hint)

    on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="row")
    return judge.passing_verdict(
        f"three steps are right on {SIZES_TEXT} ranks, with zero_grad() between"
    )


@exercise
def arrivals(answer: Callable[..., list[float]]) -> Verdict:
    """Exercise 4: when each bucket has arrived, from (buckets, sizes, ready, alpha, beta)."""
    idle = "A bucket starts when it is full, if nothing else is on its way."
    busy = "A bucket starts when the one before has arrived, if that is later than it is full."
    order = "Buckets leave in order: one that is full early waits for a late one before it."
    last = "A bucket is full when the last of its gradients is ready."
    cases: list[tuple[list[list[int]], list[float], list[float], float, float, str]] = [
        ([[0]], [100], [2], 3, 0.25, idle),
        ([[0], [1]], [4, 4], [1, 8], 1, 0.25, idle),
        ([[0], [1], [2]], [4, 8, 4], [1, 2, 3], 3, 0.25, busy),
        ([[0, 1], [2]], [100, 200, 300], [2, 4, 8], 3, 0.25, busy),
        ([[0], [1], [2]], [4, 4, 4], [9, 2, 4], 1, 0.25, order),
        ([[0, 1], [2, 3]], [4, 4, 4, 4], [6, 2, 40, 3], 1, 0.25, last),
    ]
    for buckets, sizes, ready, alpha, beta, hint in cases:
        named = f"{sizes}, {ready}, alpha={alpha}, beta={beta}"
        asked = f"{judge.answer_name(answer)}({buckets}, {named})"
        copies = [[*each] for each in buckets], [*sizes], [*ready]
        found = judge.call_answer(answer, *copies, alpha, beta, in_words=asked)
        given = _as_floats(found, len(buckets), asked, "One number a bucket.")
        full, takes = theory.bucket_times(buckets, sizes, ready, alpha, beta)
        each_alpha = [t + alpha * (len(b) - 1) for b, t in zip(buckets, takes, strict=True)]
        first_full = [min(ready[place] for place in bucket) for bucket in buckets]
        message = "One message for each bucket: alpha, and beta for each of its bytes."
        likely = {
            "without their latency": (theory.arrivals(full, [t - alpha for t in takes]), message),
            "with a latency for each gradient": (theory.arrivals(full, each_alpha), message),
            "as if full with their first gradient": (theory.arrivals(first_full, takes), last),
            "as if each travelled alone": ([f + t for f, t in zip(full, takes, strict=True)], busy),
        }
        right = theory.arrivals(full, takes)
        said = f"{asked}: the buckets arrive at {judge.value_text(given)},"
        judge.expect_close(given, right, said, likely, "which is wrong", right, hint)
    return judge.passing_verdict(f"{len(cases)} backward passes agree")


@exercise
def diagnose(answer: Callable[[], dict[str, tuple[int | None, float | None]]]) -> Verdict:
    """Exercise 5: the late bucket of each time line, and the size of buckets that mends it."""
    found, ends = judge.call_answer(answer), list[str]()
    said = f"{judge.answer_name(answer)}() gave {judge.value_text(found)}"
    form = f"a dict with a pair for each of {', '.join(bucket_lines.LINES)}"
    hint = "A pair is a bucket's number or None, and a size in MiB or None."
    with judge.expect_no_error(said, form, hint):
        given = {name: _as_diagnosis(*found[name]) for name in bucket_lines.LINES}
    for name, line in bucket_lines.LINES.items():
        late, cap_mib = given[name]
        said = f"{name}: {'no bucket' if late is None else f'bucket {late}'} is called late"
        hint = "When is the wire idle although a gradient is ready? Which bucket leaves next?"
        judge.expect(late == line.late_bucket, said, hint=hint)
        ends.append(_judge_cap(name, line, cap_mib))
    return judge.passing_verdict("; ".join(ends))


def _as_diagnosis(late: Any, cap_mib: Any) -> tuple[int | None, float | None]:
    """Return a bucket and a size as numbers; raise ValueError for a size that is none."""
    cap = None if cap_mib is None else float(cap_mib)
    if cap is not None and not cap > 0:
        raise ValueError(f"{cap} MiB")
    return None if late is None else int(late), cap


def _judge_cap(name: str, line: BackwardLine, cap_mib: float | None) -> str:
    """Expect a size that ends close to the best, or None where none gains; return what it does."""
    drawn_ms, best_ms = line.end_ms(), line.best_ms()
    can_gain = drawn_ms > bucket_lines.NEAR * best_ms
    if cap_mib is None:
        said = f"{name}: no size is named, but one ends the pass after {best_ms:.0f} ms"
        judge.expect(not can_gain, said, hint="Try some in your bucket_plan and arrivals.")
        return f"{name} needs another order"
    said = f"{name}: with {cap_mib:g} MiB the pass ends after {line.end_ms(cap_mib):.0f} ms"
    hint = "What leaves before the pass is over, and what takes the time then: alpha or bytes?"
    judge.expect(can_gain, f"{said}, {drawn_ms:.0f} as drawn", "no size that gains 2 %", hint)
    hint = "The last message should be short, and the ones before it keep up with the layers."
    is_near = line.end_ms(cap_mib) <= bucket_lines.NEAR * best_ms
    judge.expect(is_near, said, f"at most 2 % more than {best_ms:.0f} ms", hint)
    return f"{name} ends after {line.end_ms(cap_mib):.0f} ms instead of {drawn_ms:.0f}"


@exercise
def accumulate(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 6: gradients of micro-batches, averaged over the ranks once, on real ranks."""
    alone, add = "that of the last micro-batch alone", "Gradients add up; the loss is a mean."
    every = "Every micro-batch needs a backward pass; zero no gradient between."
    share = "Each sample should count the same, so a larger micro-batch counts more."
    inside = "All micro-batches but the last run in `with model.no_sync():`, forward pass too."

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        batches = [ranks_ddp.micro_batches(each, ranks) for each in range(ranks)]
        count, all_rows = len(batches[0]), sum(rows for *_, rows in batches[0])
        found = [device_gradients([batch]) for own in batches for batch in own]
        each = torch.stack(found).unflatten(0, (ranks, count))  # by rank and micro-batch
        shares = torch.tensor([[[rows / all_rows] for *_, rows in own] for own in batches])
        weighted, means, last = each * shares, each.mean((0, 1)), each[:, -1].mean(0)
        calls, _ = sent["sent"].get("all_reduce", (0, 0))
        said = {0: "nothing was sent", count: "every backward pass sent its gradients"}
        seen = said.get(calls, f"{calls} all-reduces were sent")
        judge.expect(calls == 1, seen, "1 all-reduce", inside)
        likely = {
            f"the sum over {count} micro-batches, not their mean": (count * means, add),
            "as if all micro-batches were of one size": (means, share),
            alone: (last, every),
            f"{alone}, divided": (last / count, every),
            f"{alone}, weighted": (weighted[:, -1].mean(0), every),
        }
        judge_gradients(sent["gradients"], [*weighted.sum(1)], index, likely)
        once = {"all_reduce": [1, last.nbytes]}
        expect_traffic(sent["sent"], once, SENDS, "DDP's own all-reduce is enough.")

    on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="accumulate")
    whose = "of one device with all micro-batches"
    return judge.passing_verdict(f"the gradients {whose}, sent once, on {SIZES_TEXT} ranks")
