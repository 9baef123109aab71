"""Checks of lab 1b, spatial sharding at work."""

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from labkit_course.checks import judge
from labkit_course.checks.judge import (
    Verdict,
    WrongAnswer,
    exercise,
    expect,
    passing_verdict,
    value_text,
)
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks.spatial_at_work import BROKEN_EXCHANGES, RIGHT
from labkit_course.checks.spatial import SIZES, judge_on_group, judge_padding, outgoing
from labkit_course.checks.traffic import traffic_text

DIMENSIONS = {0: "samples", 1: "channels", 2: "rows", 3: "columns"}
# Placements of each tensor on a data x space mesh, and a hint.
RIGHT_PLACEMENTS: Mapping[str, tuple[list[Placement], str]] = {
    "images": ([Shard(0), Shard(3)], "[N, C, H, W]: data shares the samples N, space the width W."),
    "weights": ([Replicate(), Replicate()], "All pixels need it: which rank can do without?"),
    "gradients": ([Partial(), Partial()], "Each rank adds its part. What is the whole gradient?"),
    "logits": (
        [Shard(0), Replicate()],
        "After that mean all ranks along space hold the same logits.",
    ),
}


@exercise
def local_columns(answer: Callable[..., int]) -> Verdict:
    """Columns of a feature map on one rank in a stage, from (width, ranks, stage)."""

    def right_columns(width: int, ranks: int, stage: int) -> int:
        return width // 4 // 2**stage // ranks

    hint = "The stem divides by 4, each later stage by 2 more, and the ranks share what is left."
    cases = [(256, 1, 0, hint), (256, 4, 0, hint), (256, 4, 1, hint), (1024, 4, 3, hint)]
    verdict = judge.judge_cases(answer, right_columns, cases)
    # The float 8.0 equals 8, and so passes until here.
    arguments: dict[str, Any] = {"width": 256, "ranks": 4, "stage": 1}
    found, asked = judge.call_answer(answer, **arguments), judge.call_text(answer, **arguments)
    said = f"{asked} gave {value_text(found)}, a {type(found).__name__}"
    expect(isinstance(found, Integral), said, 8, "Columns are counted: // divides whole numbers.")
    return verdict


@exercise
def placements(answer: Callable[..., Any]) -> Verdict:
    """Two placements on a data x space mesh for each of images, weights, gradients and logits."""
    found = judge.call_answer(answer)
    hint = "Return a dict: a list of two placements for each name."
    expect(isinstance(found, Mapping), f"placements() gave {value_text(found)}", hint=hint)
    for name, (wanted, hint) in RIGHT_PLACEMENTS.items():
        placed = found.get(name)
        right = f"[{', '.join(_placement_words(each, '')[0] for each in wanted)}]"
        is_pair = isinstance(placed, list | tuple) and len(placed) == 2
        expect(is_pair, f"{name}: {value_text(placed)} is no list of two placements", right, hint)
        for axis, given, each in zip(("data", "space"), placed, wanted, strict=True):
            text, meaning = _placement_words(given, axis)
            expect(given == each, f"{name}: along {axis} you say {text}, {meaning}", right, hint)
    return passing_verdict(f"{len(RIGHT_PLACEMENTS)} tensors lie where you say")


def _placement_words(placement: object, axis: str) -> tuple[str, str]:
    """Return a placement as learners write it, and its meaning."""
    match placement:
        case Shard():
            parts = DIMENSIONS.get(placement.dim, "parts of no dimension")
            return f"Shard({placement.dim})", f"so the ranks along {axis} hold different {parts}"
        case Replicate():
            return "Replicate()", f"so the ranks along {axis} hold the same numbers"
        case Partial():
            return "Partial()", f"so the tensor is the sum of what the ranks along {axis} hold"
    return value_text(placement), "which is no placement"


@exercise
def activation_bytes(answer: Callable[..., int]) -> Verdict:
    """Bytes that one block keeps for backward, from (batch, channels, height, width)."""

    def right_bytes(batch: int, channels: int, height: int, width: int) -> int:
        return 48 * batch * channels * height * width

    hint = "Go from left to right. Between the 1 x 1 convolutions channels are fourfold."
    cases = [(1, 1, 1, 1, hint), (2, 32, 32, 64, hint), (2, 64, 16, 8, hint)]
    return judge.judge_cases(answer, right_bytes, cases)


@exercise
def sends_nothing(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """A broken exchange, without any send, that passes a test with ones, on real ranks."""

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        hint = "Ask no neighbour: what is there on this rank that looks like their columns?"
        out = outgoing(output["sent"])
        expect(not out, f"the rank sends {traffic_text(out)}", "nothing", hint)
        judge_padding(ranks, index, output["got"], "ones")

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="ones")
    seen = "the test of ones passes, and nothing was exchanged: a test that cannot fail"
    return passing_verdict(seen)


@exercise
def exchange_test(answer: Callable[..., Any], timeout_s: float = 60) -> Verdict:
    """A test that passes a right halo exchange and fails each broken one, on real ranks."""
    count = len(BROKEN_EXCHANGES)

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        for said in output["said"].values():
            is_answer = isinstance(said, bool)
            expect(is_answer, f"the test returned {said}, not True or False", hint="Return a bool.")
        hint = "Is the image the same on every rank, with zeros beyond its border?"
        expect(output["said"][RIGHT], "your test fails the right exchange", "True", hint)

    def judge_all(ranks: int, outputs: list[dict[str, Any]]) -> None:
        slipped = [
            words for words in BROKEN_EXCHANGES if all(each["said"][words] for each in outputs)
        ]
        if slipped:
            which = "all" if len(slipped) == count else f"{len(slipped)} of"
            said = f"your test passes the right exchange, and {which} {count} broken ones"
            ones = "; one that ".join(slipped)
            raise WrongAnswer(f"{said}: one that {ones}", hint=BROKEN_EXCHANGES[slipped[0]].hint)

    judge_on_ranks(
        "spatial_at_work",
        answer,
        judge=judge_rank,
        judge_all=judge_all,
        sizes=SIZES,
        timeout_s=timeout_s,
        waiting="does each rank go forward and backward once?",
        name_rank=True,
    )
    seen = f"your test passes the right exchange and fails {count} broken ones"
    return passing_verdict(f"{seen}, on 4 and 3 ranks")
