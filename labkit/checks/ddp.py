"""Checks of lab 4, DDP with the compiler."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor, nn

from labkit.checks import judge
from labkit.checks.judge import Verdict, exercise
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks import ddp as ranks_ddp
from labkit.checks.traffic import expect_traffic
from labkit.inductor import ProgramLine
from labkit.parallel.buckets import assign_buckets
from labkit.theory import ddp as theory
from labkit.theory.collectives import AlphaBeta

# Numbers of ranks on which an answer has to be right.
SIZES = 2, 3
SIZES_TEXT = "2 and 3"
MIB = 2**20
WAIT_HINT = "does every rank call the same collectives, in the same order?"
FUTURE_HINT = "return a future of a tensor: handle.get_future().then(…)"
HOOK_HINTS = dict.fromkeys(["register_comm_hook", "Future", "communication hook"], FUTURE_HINT)
_on_ranks = partial(judge_on_ranks, "ddp", sizes=SIZES, waiting=WAIT_HINT, name_rank=True)
SENDS = "the gradients are right, but the rank sends"
ORDER_HINT = "Wait for the bucket before you read it; cut it in the order of filling."
# Programs, as kind and buffers of each line: the lines that use a buffer too early; a hint.
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


@exercise
def fitted(answer: Callable[..., tuple[float, float]]) -> Verdict:
    """Exercise 1: (alpha, beta) from (rounds, total_bytes), seconds of rounds by message count."""
    asked = f"{judge.answer_name(answer)} of a network with known alpha and beta"
    for network, total, counts in (
        (AlphaBeta(1e-4, 1e-9), 10**6, (1, 20, 200)),
        (AlphaBeta(5e-6, 3e-8), 4096, (2, 8)),
    ):
        times = {count: network.seconds(total, messages=count) for count in counts}
        # The median of these rounds is right, their mean and their fastest are not.
        rounds = {count: [2.7 * each, each, 0.9 * each] for count, each in times.items()}
        # In falling order of counts, because an answer may not rely on the order of a dict.
        found = judge.call_answer(answer, dict(reversed(rounds.items())), total, in_words=asked)
        alpha, beta = _as_floats(found, 2, asked, "Return alpha, beta.")
        right = torch.tensor([network.alpha_s, network.beta_s_per_byte]).double()
        few, many = min(counts), max(counts)
        # A difference of times leaves out the bytes; of one time, they are inside.
        with_bytes = right.new_tensor([times[many] / many, beta])
        with_latency = right.new_tensor([alpha, times[few] / total])
        median, rest = "Take each count's median round.", "beta = (time - messages * alpha) / bytes"
        likely = {
            "beta first": (right.flip(0), "Return alpha, then beta."),
            "the numbers of the fastest round": (0.9 * right, median),
            "the numbers of the mean round": (4.6 / 3 * right, median),
            "an alpha that has bytes inside": (with_bytes, "A difference has no bytes."),
            "a beta that has latency inside": (with_latency, rest),
            "the right alpha and another beta": (right.new_tensor([right[0], beta]), rest),
        }
        pair, wants = right.new_tensor([alpha, beta]), f"({right[0]:.3g}, {right[1]:.3g})"
        said, wrong = f"{asked} gave ({alpha:.3g}, {beta:.3g}),", "which is wrong"
        hint = "Alpha is what additional messages cost; beta is what is left, for each byte."
        tolerances = {"rtol": 1e-3, "atol": 0.0}
        judge.expect_close(
            pair, right, said, likely, otherwise=wrong, expected=wants, hint=hint, **tolerances
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
        # A copy, because the answer may change its list.
        found = judge.call_answer(answer, [*sizes], bucket_mb, first_mb, in_words=asked)
        right = theory.bucket_plan(sizes, bucket_mb, first_mb)
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
def bounded_buckets(answer: Callable[..., list[list[int]]]) -> Verdict:
    """Exercise 8: the fewest buckets of at most ``limit`` bytes, in order, from (sizes, limit)."""
    # Sizes, the limit, and the fewest buckets; a gradient above the limit has one of its own.
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
    """Exercise 3: average gradients in buckets while the backward pass runs, on real ranks."""
    # Gradients are ready from the last parameter to the first.
    sizes = [each.nbytes for each in reversed([*ranks_ddp.make_linear_model().parameters()])]
    plan = assign_buckets(sizes, ranks_ddp.LIMIT_BYTES)
    buckets = [sum(sizes[position] for position in bucket) for bucket in plan]

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        first_waits = sent["passes"][0]["seen"].count("waited")
        for step, passage in enumerate(sent["passes"]):
            where, seen = f"in backward pass {step},", passage["seen"]
            asked = [int(event.split()[1]) for event in seen if event.startswith("asked")]
            # Wrong buckets would explain wrong gradients, so they come first.
            _judge_all_reduces(where, asked, sizes, buckets)
            own = [_device_gradients([(rank, step)]) for rank in range(ranks)]
            _judge_gradients(passage["gradients"], own, index, where=f"{where} ")
            # Right gradients may still have been sent late, or waited for too early.
            last = len(seen) - 1 - seen[::-1].index("gradient")
            # The last gradient completes the last bucket; the first bucket can leave before it.
            hint = "Ask for the all-reduce in the hook of the gradient that completes the bucket."
            said = f"{where} the first bucket left after the last gradient was there"
            overlap = any(event.startswith("asked") for event in seen[:last])
            judge.expect(overlap, said, hint=hint)
            early = seen.index("waited") if "waited" in seen[:last] else last
            hint = "Ask with async_op=True, keep the handle, and wait after the last gradient."
            left = seen[early:].count("gradient")
            said = f"{where} the rank waited while {left} gradients were still to come"
            judge.expect(early == last, said, hint=hint)
            # A handle that was kept is waited for again in the next pass.
            waits, hint = seen.count("waited"), "Forget buckets that have arrived."
            said = f"{where} the rank waited {waits} times, before {first_waits}"
            judge.expect(waits <= first_waits, said, hint=hint)
            said, hint = f"{where} all is right, but the rank sends", "The all-reduces are enough."
            right = {"all_reduce": [len(buckets), sum(buckets)]}
            expect_traffic(passage["sent"], right, said, hint)

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="small_ddp")
    passed = f"in {len(buckets)} buckets that leave while gradients are still to come"
    return judge.passing_verdict(f"the mean on {SIZES_TEXT} ranks, {passed}")


def _judge_all_reduces(where: str, asked: list[int], sizes: list[int], buckets: list[int]) -> None:
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
    elif asked == [2 * size for size in buckets]:
        hint = "Send the gradients as they are: float32 has 4 bytes a number."
    expected = f"{len(buckets)} all-reduces, of {', '.join(map(str, buckets))} bytes"
    judge.expect(asked == buckets, f"{where} {said}", expected, hint)


def _judge_gradients(
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
        flat, said, other = gradient.flatten(), f"{name} is", "another than one device gives"
        judge.expect_close(flat, right[part], said, mistakes, otherwise=other, **how)
        start += parameter.numel()


def _device_gradients(batches: Sequence[tuple[int, int]]) -> Tensor:
    """Return one device's gradients of the mean loss over batches, given by rank and step."""
    model = ranks_ddp.make_linear_model()
    losses = [ranks_ddp.mean_squared_error(model, *ranks_ddp.step_batch(*each)) for each in batches]
    gradients = torch.autograd.grad(torch.stack(losses).mean(), [*model.parameters()])
    return nn.utils.parameters_to_vector(gradients)


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
    """Exercise 5: gradients of micro-batches, averaged over the ranks once, on real ranks."""
    alone, add = "that of the last micro-batch alone", "Gradients add up; the loss is a mean."
    every = "Every micro-batch needs a backward pass; zero no gradient between."
    inside = "All micro-batches but the last run in `with model.no_sync():`, forward pass too."

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        count = ranks_ddp.micro_batches(ranks)
        own = [_device_gradients([(each, step) for step in range(count)]) for each in range(ranks)]
        last = _device_gradients([(each, count - 1) for each in range(ranks)])
        calls, _ = sent["sent"].get("all_reduce", (0, 0))
        said = {0: "nothing was sent", count: "every backward pass sent its gradients"}
        seen = said.get(calls, f"{calls} all-reduces were sent")
        judge.expect(calls == 1, seen, "1 all-reduce", inside)
        likely = {
            f"{count} times too large": (count * torch.stack(own).mean(0), add),
            alone: (last, every),
            f"{alone}, divided": (last / count, every),
        }
        _judge_gradients(sent["gradients"], own, index, likely)
        once = {"all_reduce": [1, last.nbytes]}
        expect_traffic(sent["sent"], once, SENDS, "DDP's own all-reduce is enough.")

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="accumulate")
    whose = "of one device with all micro-batches"
    return judge.passing_verdict(f"the gradients {whose}, sent once, on {SIZES_TEXT} ranks")


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
    """Exercise 7: a communication hook that sends bfloat16, on real ranks."""
    whole = _device_gradients([(0, 0)]).nbytes
    send = "Send a copy in bfloat16, and return what came of it, not the bucket as it was."

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        own = [_device_gradients([(each, 0)]) for each in range(ranks)]
        # bfloat16 has 8 bits of precision.
        _judge_gradients(sent["gradients"], own, index, own_hint=send, rtol=0.02, atol=2e-3)
        half = {"all_reduce": [1, whole // 2]}
        hint = "One all-reduce of the bucket: bucket.buffer().to(torch.bfloat16)."
        expect_traffic(sent["sent"], half, SENDS, hint)
        said = f"{SENDS} {' and '.join(sent['dtypes'])}"
        hint = "float16 has as few bytes, but a smaller range: a large gradient would overflow."
        judge.expect(sent["dtypes"] == ["bfloat16"], said, "bfloat16", hint)
        said = f"the gradients are right, but the future holds {' and '.join(sent['gave'])}"
        hint = "The bucket is in float32, so what comes back is, too: .to(torch.float32)."
        judge.expect(sent["gave"] == ["torch.float32"], said, "torch.float32", hint)

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, hints=HOOK_HINTS, what="half_hook")
    rounded = f"the mean on {SIZES_TEXT} ranks but for rounding"
    return judge.passing_verdict(f"{rounded}, and {whole // 2:,} bytes sent instead of {whole:,}")


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
        is_right = type(found) is list and found == right
        judge.expect(is_right, f"{asked} gave {judge.value_text(found)}", right, hint)
    return judge.passing_verdict(f"{len(PROGRAM_CASES)} programs agree")


@exercise
def smallest_bucket(answer: Callable[..., float]) -> Verdict:
    """Exercise 10: the bytes of a bucket, from the arguments of ``smallest_bucket_bytes``."""
    longer = "A longer backward pass has room for more messages, so buckets may be smaller."
    solve = "total_bytes / b * alpha + total_bytes * beta = backward_s; solve for b."
    # The last case has no right bucket: the answer is infinite.
    never = "Where the bytes alone take longer than the backward pass, no bucket is right."
    cases = [
        (10**6, 2.0, 0.01, 1e-6, "What total_bytes * beta leaves of backward_s is for latencies."),
        (10**6, 3.0, 0.01, 1e-6, longer),
        (10**6, 2.0, 0.03, 1e-6, "Buckets of b bytes are total_bytes / b messages of alpha each."),
        (4 * 10**8, 0.05, 2e-5, 4e-11, solve),
        (10**6, 0.5, 0.01, 1e-6, never),
    ]
    return judge.judge_cases(answer, theory.smallest_bucket_bytes, cases)
