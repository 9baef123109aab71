"""Checks of lab 4b, DDP at work."""

from collections.abc import Callable
from typing import Any, cast

from labkit.inductor import ProgramLine
from labkit.theory import ddp as theory
from labkit_course.checks import judge
from labkit_course.checks.ddp import SENDS, SIZES_TEXT, device_gradients, judge_gradients, on_ranks
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.traffic import expect_traffic

FUTURE_HINT = "return a future of a tensor: handle.get_future().then(…)"
HOOK_HINTS = dict.fromkeys(["register_comm_hook", "Future", "communication hook"], FUTURE_HINT)
OWN_HINT = "Other buffers may be used all the time, and a again after its wait."
# Programs, as kind and buffers of each line: the lines that use a buffer too early; a hint.
PROGRAM_CASES: dict[str, tuple[list[int], str]] = {
    "collective a, wait a, other a": ([], "A wait is no use, and after its wait a may be used."),
    "extern a x, collective a, extern b x, wait a, other a b": ([], OWN_HINT),
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
def half_hook(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 1: a communication hook that sends bfloat16, on real ranks."""
    whole = device_gradients([(0, 0)]).nbytes
    send = "Send a copy in bfloat16, and return what came of it, not the bucket as it was."

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        own = [device_gradients([(each, 0)]) for each in range(ranks)]
        # bfloat16 has 8 bits of precision.
        judge_gradients(sent["gradients"], own, index, own_hint=send, rtol=0.02, atol=2e-3)
        half = {"all_reduce": [1, whole // 2]}
        hint = "One all-reduce of the bucket: bucket.buffer().to(torch.bfloat16)."
        expect_traffic(sent["sent"], half, SENDS, hint)
        said = f"{SENDS} {' and '.join(sent['dtypes'])}"
        hint = "float16 has as few bytes, but a smaller range: a large gradient would overflow."
        judge.expect(sent["dtypes"] == ["bfloat16"], said, "bfloat16", hint)
        said = f"the gradients are right, but the future holds {' and '.join(sent['gave'])}"
        hint = "The bucket is in float32, so what comes back is, too: .to(torch.float32)."
        judge.expect(sent["gave"] == ["torch.float32"], said, "torch.float32", hint)
        said = "the gradients are right, but the hook waits for its all-reduce before it returns"
        hint = "Then nothing hides it. Ask with async_op=True, and finish in .then(…)."
        judge.expect(not sent["waits"], said, "a hook that returns at once", hint)

    on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, hints=HOOK_HINTS, what="half_hook")
    rounded = f"the mean on {SIZES_TEXT} ranks but for rounding"
    return judge.passing_verdict(f"{rounded}, and {whole // 2:,} bytes sent instead of {whole:,}")


@exercise
def smallest_bucket(answer: Callable[..., float]) -> Verdict:
    """Exercise 2: the bytes of a bucket, from the arguments of ``smallest_bucket_bytes``."""
    longer = "A longer backward pass has room for more messages, so buckets may be smaller."
    solve = "total_bytes / b * alpha + total_bytes * beta = backward_s; solve for b."
    # The last two cases have no right bucket: the answer is infinite.
    never = "Where the bytes alone take longer than the backward pass, no bucket is right."
    cases = [
        (10**6, 2.0, 0.01, 1e-6, "What total_bytes * beta leaves of backward_s is for latencies."),
        (10**6, 3.0, 0.01, 1e-6, longer),
        (10**6, 2.0, 0.03, 1e-6, "Buckets of b bytes are total_bytes / b messages of alpha each."),
        (4 * 10**8, 0.05, 2e-5, 4e-11, solve),
        (10**6, 0.5, 0.01, 1e-6, never),
        (10**6, 1.0, 0.01, 1e-6, "Where the bytes take all the time, none is left for latencies."),
    ]
    return judge.judge_cases(answer, theory.smallest_bucket_bytes, cases)


@exercise
def early_uses(answer: Callable[..., list[int]]) -> Verdict:
    """Exercise 3: the lines that use a buffer before its wait, from ``inductor.ProgramLine``s."""
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
