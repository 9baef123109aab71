"""Checks of lab 1, sharding ConvNeXt's activations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.theory import spatial
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise, expect, passing_verdict, value_text
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
def halo_bytes(answer: Callable[..., int]) -> Verdict:
    """Bytes to one neighbour before a convolution, by rows, kernel, channels, batch, dilation."""

    def right_bytes(rows: int, kernel: int, channels: int, batch: int, dilation: int) -> int:
        halo = dilation * (kernel - 1) // 2
        return spatial.halo_bytes(rows=rows, halo=halo, channels=channels, batch=batch)

    hint = "How far from the kernel's centre is its last column? A float32 number has 4 bytes."
    cases = [
        (1, 3, 1, 1, 1),
        (32, 7, 32, 2, 1),
        (16, 1, 64, 8, 1),
        (1, 3, 1, 1, 2),
        (16, 5, 64, 2, 3),
    ]
    return judge.judge_cases(answer, right_bytes, [(*case, hint) for case in cases])


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
def halo_function(answer: Any, timeout_s: float = 30) -> Verdict:
    """An autograd.Function that pads a strip and returns the halo's gradients, on real ranks."""
    is_function = isinstance(answer, type) and issubclass(answer, torch.autograd.Function)
    said = f"{value_text(answer)} is no torch.autograd.Function"
    expect(is_function, said, hint="Hand over the class, by its name.")
    # A class has no body that could be empty as a function's is.
    if not {"forward", "backward"} & vars(answer).keys():
        raise judge.NotAttempted

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        judge_padding(ranks, index, output["got"])
        hint = "The first value of backward is the gradient of forward's first argument."
        expect(output["grad"] is not None, "the strip got no gradient", hint=hint)
        _judge_gradient(ranks, index, output["grad"], "the strip's gradient: ")
        _judge_traffic(ranks, index, output["sent"], passes=2)

    each = "backward returns one value for each argument of forward, None for what has no gradient"
    no_backward = "the padded strip has no backward pass: does forward return the padded strip?"
    hints = {
        "incorrect number of gradients": each,
        "gradient for input": each,
        "does not require grad": no_backward,
        "must implement either the backward": "backward is missing, or has another name",
        "non-static forward": "forward and backward are static: write @staticmethod above each",
    }
    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, hints=hints, what="function")
    return passing_verdict(f"forward and backward equal {PASSED_TEXT}")


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


def _judge_traffic(ranks: int, index: int, sent: Totals, *, passes: int = 1) -> None:
    # An answer that gathers the whole image has right numbers too, and no use.
    out = outgoing(sent)
    messages = passes * ((index > 0) + (index < ranks - 1))
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


def _judge_gradient(ranks: int, index: int, found: Tensor | str, what: str = "") -> None:
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
        right, said = f"this rank's own gradient{more}", f"{what}the {side} {HALO} columns are"
        other = _halo_fault(part)
        how: dict[str, Any] = {"hint": hint, **TOLERANCES}
        judge.expect_close(part, expected[..., columns], said, likely, other, right, **how)
    said = f"{what}the columns between are wrong"
    expect(judge.is_tensor_close(got, expected), said, hint="Only the outer columns change.")


def _expect_strip(found: Tensor | str, expected: Tensor, strip: Tensor) -> Tensor:
    """Return a tensor of the expected shape and dtype, or raise WrongAnswer."""
    hint = f"The strip has {strip.shape[-1]} columns, the halo {HALO}."
    return judge.expect_tensor(found, expected, hint)
