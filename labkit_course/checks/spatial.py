"""Checks of lab 1, sharding ConvNeXt's activations."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from labkit.theory import spatial
from labkit_course import strips_cost
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise, expect, passing_verdict
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks.spatial import HALO, rank_tasks
from labkit_course.checks.traffic import Totals, traffic_text

# Numbers of ranks on which an answer has to be right.
SIZES = 4, 3
FIRST, LAST, BETWEEN = slice(HALO), slice(-HALO, None), slice(HALO, -HALO)
WAIT_HINT = (
    "does every send have its receive on the other side, and do all start before anybody waits?"
)
PASSED_TEXT = "one device on 4 and 3 ranks, and no byte more than the halos was sent"
judge_on_group = partial(judge_on_ranks, "spatial", sizes=SIZES, waiting=WAIT_HINT, name_rank=True)
# Halos are copied, and two gradients are added in either order.
TOLERANCES = {"rtol": 1e-5, "atol": 1e-8}


@exercise
def extra_columns(answer: Callable[..., int]) -> Verdict:
    """Columns of the image that a strip needs on each side to send no halo, by depths, kernel."""

    def right_columns(depths: list[int], kernel: int) -> int:
        return sum(
            blocks * (kernel - 1) // 2 * spatial.total_stride(depths[: stage + 1])
            for stage, blocks in enumerate(depths)
        )

    cases = [
        ([1], 7, "The kernel looks at 3 columns on each side. How wide is one, in the image?"),
        ([2], 7, "What the second block needs at its edge, the first one must have computed."),
        ([1, 1], 7, "A column in the second stage stands for 8 columns of the image."),
        ([1, 2], 5, "The kernel decides how far a block looks."),
        ([3, 3, 27, 3], 7, "Add up all blocks, each with the columns that its stage has."),
    ]
    return judge.judge_cases(answer, right_columns, cases)


@exercise
def halo_exchange(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Pad a strip with its neighbours' columns, on real ranks."""

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        judge_padding(ranks, index, output["got"])
        _judge_traffic(ranks, index, output["sent"])

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="forward")
    return passing_verdict(f"equal to {PASSED_TEXT}")


@exercise
def halo_gradient(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Return the halo's gradients to the ranks that own the columns, on real ranks."""

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        _judge_gradient(ranks, index, output["got"])
        said = "the result is right, but the gradient that was given is changed"
        expect(output["kept"], said, hint="Clone before you add: autograd may still need it.")
        _judge_traffic(ranks, index, output["sent"])

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="backward")
    return passing_verdict(f"equal to {PASSED_TEXT}")


@exercise
def reduce_gradients(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Sum the gradients of what was cut, in place, in one collective; leave the head's."""

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        for name, hint in (
            ("cut", "Each rank has seen its own columns only: the parts add up."),
            ("head", "Every rank has computed the head's whole gradient already."),
        ):
            right, own = output["right"][name], output["own"][name]
            likely: dict[str, Any] = {}
            if not judge.is_close(own, right):
                likely["this rank's own part, not reduced"] = own
            for words, factor in (("divided", 1 / ranks), ("multiplied", ranks)):
                likely[f"{words} by the number of ranks"] = [each * factor for each in right]
            said, wanted = f"the gradients of {name} are", "one device's"
            judge.expect_close(output["got"][name], right, said, likely, "wrong", wanted, hint)
        out, least = outgoing(output["sent"]), sum(each.nbytes for each in output["own"]["cut"])
        calls, size = (sum(each) for each in zip(*out.values(), strict=True)) if out else (0, 0)
        said = f"the numbers are right, but the rank sends {traffic_text(out)}"
        expect(size <= least, said, f"at most {least} bytes", "What needs no reduction?")
        hint = "Copy the gradients into one flat tensor, reduce that, and copy its parts back."
        expect(calls <= 1, said, "one collective", hint)

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="reduce")
    said = "equal to one device on 4 and 3 ranks, in one collective that leaves the head out"
    return passing_verdict(said)


@exercise
def strips_seconds(answer: Callable[..., float]) -> Verdict:
    """Exercise 5: a step's time in strips, by the arguments of ``strips_cost.parts_s``."""

    @wraps(strips_cost.parts_s)
    def right_seconds(*case: Any) -> float:
        return sum(strips_cost.parts_s(*case).values())

    cases = [
        (6.0, 4, 0, 0, 0, 0.0, 1e6, "Without messages, each rank only computes its share."),
        (0.0, 4, 2, 500_000, 0, 0.0, 1e6, "To how many neighbours, and in how many passes?"),
        (0.0, 4, 0, 0, 1_000_000, 0.0, 1e6, "A rank sends a quarter in each of 2 · 3 steps."),
        (0.0, 4, 2, 0, 0, 0.1, 1e6, "8 halos, and two rings with 2 · 3 steps each."),
        (6.0, 3, 5, 1000, 3_000_000, 0.2, 1e6, "Add up all parts."),
    ]
    return judge.judge_cases(answer, right_seconds, cases)


def _judge_traffic(ranks: int, index: int, sent: Totals) -> None:
    # An answer that gathers the whole image has right numbers too, and no use.
    out = outgoing(sent)
    messages = (index > 0) + (index < ranks - 1)
    strip, _ = rank_tasks("forward", ranks)[index]
    halos = messages * strip[..., FIRST].nbytes
    calls, size = (sum(each) for each in zip(*out.values(), strict=True)) if out else (0, 0)
    said = f"the numbers are right, but the rank sends {traffic_text(out)}"
    hint = "Send the outermost columns alone, each to one neighbour, in one message."
    is_right = calls <= messages and size <= halos
    expect(is_right, said, traffic_text({"send": [messages, halos]}), hint)


def outgoing(sent: Totals) -> Totals:
    """Return what a rank sends, without what it receives."""
    return {name: total for name, total in sent.items() if name != "recv"}


def judge_padding(ranks: int, index: int, found: Tensor | str, what: str = "forward") -> None:
    """Raise WrongAnswer, with the origin of wrong columns, unless a padded strip is right."""
    _, expected = rank_tasks(what, ranks)[index]
    got, caught = _expect_strip(found, expected, expected[..., BETWEEN]), ""
    hint = "The halo is what lies next to this strip in the whole image; beyond it there are zeros."
    if what == "ones":
        caught = "the test of ones caught it: "
        hint = "Inside the image the test wants ones, at its border zeros. Who has a border?"
    for side, other, columns, owner in (
        ("first", "last", FIRST, index - 1),
        ("last", "first", LAST, index + 1),
    ):
        is_inside = 0 <= owner < ranks
        right = f"rank {owner}'s {other} {HALO}" if is_inside else "zeros, the image's border"
        part = got[..., columns]
        # All columns of an image of ones look alike: no origin can be told.
        seen = _column_origin(part, ranks) if what == "forward" else _halo_fault(part)
        said = f"{caught}the {side} {HALO} columns are {seen}"
        expect(judge.is_tensor_close(part, expected[..., columns]), said, right, hint)
    said = f"{caught}the columns between are not the strip's own"
    is_kept = judge.is_tensor_close(got[..., BETWEEN], expected[..., BETWEEN])
    expect(is_kept, said, hint="The strip itself is kept.")


def _column_origin(part: Tensor, ranks: int) -> str:
    # Each place in the whole image is compared, because any columns may have been sent.
    strips = [strip for strip, _ in rank_tasks("forward", ranks)]
    for turned, note in ((part, ""), (part.flip(-1), ", in reverse order")):
        for rank, strip in enumerate(strips):
            # Columns that begin in this strip may go on in the next.
            onward, columns = torch.cat(strips[rank:], dim=-1), strip.shape[-1]
            for column in range(columns):
                if judge.is_tensor_close(turned, onward[..., column : column + HALO]):
                    places = {0: f"first {HALO}", columns - HALO: f"last {HALO}"}
                    return f"rank {rank}'s {places.get(column, f'columns from {column} on')}{note}"
    return _halo_fault(part)


def _halo_fault(part: Tensor) -> str:
    # Zeros come of a halo that was never filled, ones of a copy of the strip's own edge.
    if not part.any():
        return "all zero"
    return "all one" if bool((part == 1).all()) else "wrong"


def _judge_gradient(ranks: int, index: int, found: Tensor | str) -> None:
    """Raise WrongAnswer, with the likely mistake, unless a rank's gradient is right."""
    work = rank_tasks("backward", ranks)
    padded, expected = work[index]
    # The halo's columns belong to the neighbours, and so do their gradients.
    got, own = _expect_strip(found, expected, expected), padded[..., BETWEEN]
    nothing = torch.zeros_like(own[..., FIRST])
    from_left = work[index - 1][0][..., LAST] if index else nothing
    from_right = work[index + 1][0][..., FIRST] if index < ranks - 1 else nothing
    hint = "A column that two ranks used gets the gradients of both."
    for side, columns, owner, arrived, swapped in (
        ("first", FIRST, index - 1, from_left, from_right),
        ("last", LAST, index + 1, from_right, from_left),
    ):
        part, own_part, kept = (each[..., columns] for each in (got, own, padded))
        likely, more = (
            {"this rank's own gradient alone": own_part},
            " alone, since no neighbour is there",
        )
        if 0 <= owner < ranks:
            likely[f"what rank {owner} sent, alone: assigned, not added"] = arrived
            more = f" plus what rank {owner} sends"
        likely |= {
            "this rank's own gradient plus that of the wrong neighbour": own_part + swapped,
            "with the halo's gradient added that should have been sent": own_part + kept,
        }
        right, said = f"this rank's own gradient{more}", f"the {side} {HALO} columns are"
        other = _halo_fault(part)
        how: dict[str, Any] = {"hint": hint, **TOLERANCES}
        judge.expect_close(part, expected[..., columns], said, likely, other, right, **how)
    said = "the columns between are wrong"
    expect(judge.is_tensor_close(got, expected), said, hint="Only the outer columns change.")


def _expect_strip(found: Tensor | str, expected: Tensor, strip: Tensor) -> Tensor:
    """Return a tensor of the expected shape and dtype, or raise WrongAnswer."""
    hint = f"The strip has {strip.shape[-1]} columns, the halo {HALO}."
    return judge.expect_tensor(found, expected, hint)
