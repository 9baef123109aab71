"""Checks of lab 1, sharding ConvNeXt's activations."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from labkit.checks.judge import (
    NotAttempted,
    Verdict,
    WrongAnswer,
    call_answer,
    call_text,
    exercise,
    is_tensor_close,
    judge_values,
    passing_verdict,
    value_text,
)
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks.spatial import COLUMNS, HALO, rank_tasks
from labkit.theory import spatial

RANKS = 4
WAIT_HINT = "does every send have its receive on the other side?"
judge_on_line = partial(judge_on_ranks, "spatial", ranks=RANKS, waiting=WAIT_HINT)
RIGHT_PLACEMENTS: Mapping[str, tuple[list[Placement], str]] = {
    "images": (
        [Shard(0), Shard(3)],
        "The ranks along data take different samples, dimension 0 of [N, C, H, W]; those along space share the width.",
    ),
    "weights": (
        [Replicate(), Replicate()],
        "A weight looks at every pixel of every sample: who can do without it?",
    ),
    "gradients": (
        [Partial(), Partial()],
        "Each rank adds up over its own samples and its own columns. What is the whole gradient, then?",
    ),
    "logits": (
        [Shard(0), Replicate()],
        "After the mean over the whole image the strips of a sample agree; other samples stay elsewhere.",
    ),
}
"""Of a data x space mesh: where each tensor lies, and a hint."""


@exercise
def local_columns(answer: Callable[..., int]) -> Verdict:
    """Columns of a feature map that a rank holds in a stage, from (width, ranks, stage)."""
    hint = "The stem divides by 4, each later stage by 2 more, and the ranks share what is left."
    cases = [(256, 1, 0), (256, 4, 0), (256, 4, 1), (1024, 4, 3)]
    verdict = judge_values(
        answer, lambda width, ranks, stage: width // 4 // 2**stage // ranks, cases, hint
    )
    found = call_answer(answer, width=256, ranks=4, stage=1)
    if not isinstance(found, Integral):
        said = f"{call_text(answer, width=256, ranks=4, stage=1)} gave {value_text(found)}, a {type(found).__name__}"
        raise WrongAnswer(
            said, expected="expected 8", hint="Columns are counted: // divides whole numbers."
        )
    return verdict


@exercise
def placements(answer: Callable[..., Any]) -> Verdict:
    """Placements on a data x space mesh: a dict with two for each of images, weights, gradients and
    logits."""
    found = call_answer(answer)
    if not isinstance(found, Mapping):
        raise WrongAnswer(
            f"placements() gave {value_text(found)}",
            hint="Return a dict: a list of two placements for each name.",
        )
    for name, (expected, hint) in RIGHT_PLACEMENTS.items():
        placed = found.get(name)
        right = f"expected [{', '.join(map(_placement_text, expected))}]"
        if not isinstance(placed, Sequence) or isinstance(placed, str) or len(placed) != 2:
            raise WrongAnswer(
                f"{name}: {value_text(placed)} is no list of two placements",
                expected=right,
                hint=hint,
            )
        for axis, said, wanted in zip(("data", "space"), placed, expected, strict=True):
            if said != wanted:
                said_so = f"{name}: along {axis} you say {_placement_text(said)}, {_placement_meaning(said, axis)}"
                raise WrongAnswer(said_so, expected=right, hint=hint)
    return passing_verdict(f"{len(RIGHT_PLACEMENTS)} tensors lie where you say")


def _placement_text(placement: object) -> str:
    """A placement as a learner writes it."""
    match placement:
        case Shard():
            return f"Shard({placement.dim})"
        case Replicate() | Partial():
            return f"{type(placement).__name__}()"
    return value_text(placement)


def _placement_meaning(placement: object, axis: str) -> str:
    """What a placement of [N, C, H, W], or [N, classes], says of the ranks along an axis."""
    match placement:
        case Shard():
            names = {0: "samples", 1: "channels", 2: "rows", 3: "columns"}
            return f"so the ranks along {axis} hold different {names.get(placement.dim, 'parts of no dimension')}"
        case Replicate():
            return f"so the ranks along {axis} hold the same numbers"
        case Partial():
            return f"so the tensor is the sum of what the ranks along {axis} hold"
    return "which is no placement"


@exercise
def halo_bytes(answer: Callable[..., int]) -> Verdict:
    """Bytes to one neighbour before one convolution, from (rows, kernel, channels, batch)."""

    def right_bytes(rows: int, kernel: int, channels: int, batch: int) -> int:
        return spatial.halo_bytes(rows=rows, halo=(kernel - 1) // 2, channels=channels, batch=batch)

    hint = "A k x k kernel reaches (k - 1) / 2 columns over the cut; a float32 number has 4 bytes."
    return judge_values(
        answer, right_bytes, [(1, 3, 1, 1), (32, 7, 32, 2), (16, 7, 64, 2), (16, 1, 64, 8)], hint
    )


@exercise
def halo_exchange(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Pad a strip with its neighbours' columns, on 4 real ranks."""

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        _judge_padding(index, sent["got"])
        _judge_sent_bytes(index, sent["moved"])

    judge_on_line(answer, judge=judge_rank, timeout_s=timeout_s, what="forward")
    return passing_verdict(
        f"equal to one device on {RANKS} ranks, and no byte more than the halos was sent"
    )


@exercise
def halo_gradient(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Bring the gradients of the halo back to the ranks that own the columns, on 4 real ranks."""

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        _judge_gradient(index, sent["got"])
        _judge_sent_bytes(index, sent["moved"])

    judge_on_line(answer, judge=judge_rank, timeout_s=timeout_s, what="backward")
    return passing_verdict(
        f"equal to one device on {RANKS} ranks, and no byte more than the halos was sent"
    )


@exercise
def halo_function(answer: Any, timeout_s: float = 30) -> Verdict:
    """An autograd.Function whose forward pads a strip and whose backward returns gradients, on 4
    real ranks."""
    if not isinstance(answer, type) or not issubclass(answer, torch.autograd.Function):
        raise WrongAnswer(
            f"{value_text(answer)} is no torch.autograd.Function",
            hint="Hand over the class, by its name.",
        )
    if "forward" not in vars(answer) and "backward" not in vars(answer):
        raise NotAttempted

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        _judge_padding(index, sent["got"])
        if sent["grad"] is None:
            hint = (
                "The first value that backward returns is the gradient of forward's first argument."
            )
            raise WrongAnswer(f"on rank {index}, the strip got no gradient", hint=hint)
        _judge_gradient(index, sent["grad"], "the strip's gradient: ")
        _judge_sent_bytes(index, sent["moved"], both_ways=True)

    arguments = (
        "backward returns one value for each argument of forward, None for what has no gradient"
    )
    judge_on_line(
        answer,
        judge=judge_rank,
        timeout_s=timeout_s,
        hints={
            "incorrect number of gradients": arguments,
            "gradient for input": arguments,
            "does not require grad": "the padded strip has no backward pass: does forward return the padded strip?",
            "must implement either the backward": "backward is missing, or has another name",
            "non-static forward": "forward and backward are static: write @staticmethod above each",
        },
        what="function",
    )
    return passing_verdict(
        f"forward and backward equal one device on {RANKS} ranks, and no byte more than the halos was sent"
    )


@exercise
def sends_nothing(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """An exchange that sends nothing, and passes the test with an image of ones, on 4 real
    ranks."""

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        if sent["moved"]:
            hint = "Nobody asks the neighbours: what is there on this rank that looks like their columns?"
            raise WrongAnswer(
                f"on rank {index}, {sent['moved']} bytes were handed over, and none may be",
                hint=hint,
            )
        try:
            _judge_padding(index, sent["got"], "ones")
        except WrongAnswer as caught:
            hint = "Inside the image the test wants ones, at its border zeros. Which ranks have a border?"
            raise WrongAnswer(
                f"the test of ones caught it: {caught}", expected=caught.expected, hint=hint
            ) from None

    judge_on_line(answer, judge=judge_rank, timeout_s=timeout_s, what="ones")
    return passing_verdict(
        "the test of ones passes, and nothing was exchanged: a test that cannot fail"
    )


@exercise
def activation_bytes(answer: Callable[..., int]) -> Verdict:
    """Bytes that one block keeps for the backward pass, from (batch, channels, height, width)."""
    hint = "Go from left to right. Between the two 1 x 1 convolutions there are four times the channels."
    cases = [(1, 1, 1, 1), (2, 32, 32, 64), (2, 64, 16, 8)]
    return judge_values(
        answer,
        lambda batch, channels, height, width: 48 * batch * channels * height * width,
        cases,
        hint,
    )


@exercise
def strip_step_s(answer: Callable[..., float]) -> Verdict:
    """Seconds of a step with strips, from (plain_s, ranks, messages, message_bytes, alpha_s,
    beta_s_per_byte)."""
    names = ("plain_s", "ranks", "messages", "message_bytes", "alpha_s", "beta_s_per_byte")
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((1.0, 4, 0, 0, 0.0, 0.0), "The ranks share the arithmetic."),
        ((1.0, 2, 10, 0, 0.01, 0.0), "Each message costs its latency alpha once."),
        (
            (1.0, 2, 10, 1000, 0.01, 1e-5),
            "Each message costs beta for each of its bytes, beside alpha.",
        ),
    ]
    for case, hint in cases:
        arguments: dict[str, Any] = dict(zip(names, case, strict=True))
        found, expected = call_answer(answer, **arguments), spatial.strip_step_s(**arguments)
        in_words = call_text(answer, **arguments)
        if not isinstance(found, Real):
            raise WrongAnswer(
                f"{in_words} gave {value_text(found)}, not a number: does every path return?"
            )
        if not math.isclose(found, expected, rel_tol=1e-6):
            raise WrongAnswer(
                f"{in_words} gave {found:.6g}", expected=f"expected {expected:.6g}", hint=hint
            )
    return passing_verdict(f"{len(cases)} cases agree")


def _judge_sent_bytes(index: int, moved: int, *, both_ways: bool = False) -> None:
    """Raise Wrong if a rank handed over more than its halos, once or in both passes."""
    neighbours = (index > 0) + (index < RANKS - 1)
    halos = (
        neighbours
        * rank_tasks("forward", RANKS)[index][0][..., :HALO].nbytes
        * (2 if both_ways else 1)
    )
    if moved > halos:
        said = f"on rank {index}, the numbers are right, but {moved} bytes were handed over; its halos are {halos}"
        raise WrongAnswer(said, hint="Send the outermost columns alone, each to one neighbour.")


def _judge_padding(index: int, got: Tensor | str, what: str = "forward") -> None:
    """Raise Wrong unless a rank's padded strip is right; what is wrong is looked for in the whole
    image."""
    _, expected = rank_tasks(what, RANKS)[index]
    _judge_form(index, got, expected)
    assert isinstance(got, Tensor)
    sides = {"first": (slice(HALO), index - 1), "last": (slice(-HALO, None), index + 1)}
    for side, (columns, owner) in sides.items():
        if not is_tensor_close(got[..., columns], expected[..., columns], atol=1e-5):
            inside = 0 <= owner < RANKS
            other = "last" if side == "first" else "first"
            right = (
                f"expected rank {owner}'s {other} {HALO}"
                if inside
                else "expected zeros, the image's border"
            )
            seen = (
                _column_origin(got[..., columns])
                if what == "forward"
                else _halo_fault(got[..., columns])
            )
            hint = "The halo is what lies next to this strip in the whole image." if inside else ""
            raise WrongAnswer(
                f"on rank {index}, the {side} {HALO} columns are {seen}", expected=right, hint=hint
            )
    if not is_tensor_close(got[..., HALO:-HALO], expected[..., HALO:-HALO], atol=1e-5):
        raise WrongAnswer(
            f"on rank {index}, the columns between are not the strip's own",
            hint="The strip itself is kept.",
        )


def _column_origin(part: Tensor) -> str:
    """Where in the whole image these columns come from, in words."""
    image = torch.cat([strip for strip, _ in rank_tasks("forward", RANKS)], dim=-1)
    for turned, note in ((part, ""), (part.flip(-1), ", in reverse order")):
        for start in range(image.shape[-1] - HALO + 1):
            if is_tensor_close(turned, image[..., start : start + HALO], atol=1e-5):
                rank, column = divmod(start, COLUMNS)
                places = {0: f"first {HALO}", COLUMNS - HALO: f"last {HALO}"}
                return f"rank {rank}'s {places.get(column, f'columns from {column} on')}{note}"
    return _halo_fault(part)


def _halo_fault(part: Tensor) -> str:
    if not part.any():
        return "all zero"
    return "all one" if bool((part == 1).all()) else "wrong"


def _judge_gradient(index: int, got: Tensor | str, what: str = "") -> None:
    """Raise Wrong unless a rank's gradient is right; what is wrong is compared with likely
    mistakes."""
    work = rank_tasks("backward", RANKS)
    gradients, expected = [given for given, _ in work], work[index][1]
    _judge_form(index, got, expected)
    assert isinstance(got, Tensor)
    padded, nothing = gradients[index], torch.zeros_like(expected[..., :HALO])
    own = padded[..., HALO:-HALO]
    from_left = gradients[index - 1][..., -HALO:] if index else nothing
    from_right = gradients[index + 1][..., :HALO] if index < RANKS - 1 else nothing
    sides = {
        "first": (slice(HALO), from_left, from_right, padded[..., :HALO], index - 1),
        "last": (slice(-HALO, None), from_right, from_left, padded[..., -HALO:], index + 1),
    }
    for side, (columns, arrived, swapped, kept, owner) in sides.items():
        if is_tensor_close(got[..., columns], expected[..., columns], atol=1e-5):
            continue
        likely = {
            "this rank's own gradient alone": own[..., columns],
            f"what rank {owner} sent, alone: assigned, not added": arrived,
            "with the other neighbour's gradient added": own[..., columns] + swapped,
            "with the halo's gradient added that should have been sent": own[..., columns] + kept,
        }
        guess = next(
            (
                name
                for name, wrong in likely.items()
                if is_tensor_close(got[..., columns], wrong, atol=1e-5)
            ),
            None,
        )
        right = f"expected this rank's own gradient plus what rank {owner} sends"
        if not 0 <= owner < RANKS:
            right = "expected this rank's own gradient: nobody is beyond the image's border"
        said = f"on rank {index}, {what}the {side} {HALO} columns are {guess or _halo_fault(got[..., columns])}"
        raise WrongAnswer(
            said, expected=right, hint="A column that two ranks used gets the gradients of both."
        )
    if not is_tensor_close(got, expected, atol=1e-5):
        raise WrongAnswer(
            f"on rank {index}, {what}the columns between are wrong",
            hint="Only the outer columns change.",
        )


def _judge_form(index: int, got: Tensor | str, expected: Tensor) -> None:
    """Raise Wrong unless this is a tensor of the right shape and type; ``got`` is the type of what
    is no tensor."""
    if isinstance(got, str):
        raise WrongAnswer(
            f"on rank {index}, the function returned {got}, not a tensor",
            hint="Does every path return the tensor?",
        )
    if got.shape != expected.shape:
        right, widths = (
            f"expected {tuple(expected.shape)}",
            f"the strip has {COLUMNS} columns, the halo {HALO}",
        )
        raise WrongAnswer(
            f"on rank {index}, the shape is {tuple(got.shape)}",
            expected=right,
            hint=widths.capitalize() + ".",
        )
    if got.dtype != expected.dtype:
        raise WrongAnswer(
            f"on rank {index}, the numbers are {got.dtype}", expected=f"expected {expected.dtype}"
        )
