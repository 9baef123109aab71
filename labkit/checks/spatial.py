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
PASSED_TEXT = f"one device on {RANKS} ranks, and no byte more than the halos was sent"
judge_on_line = partial(judge_on_ranks, "spatial", ranks=RANKS, waiting=WAIT_HINT)
RIGHT_PLACEMENTS: Mapping[str, tuple[list[Placement], str]] = {
    "images": (
        [Shard(0), Shard(3)],
        "The ranks along data take different samples, dimension 0 of [N, C, H, W]; "
        "those along space share the width.",
    ),
    "weights": (
        [Replicate(), Replicate()],
        "A weight looks at every pixel of every sample: who can do without it?",
    ),
    "gradients": (
        [Partial(), Partial()],
        "Each rank adds up over its own samples and its own columns. "
        "What is the whole gradient, then?",
    ),
    "logits": (
        [Shard(0), Replicate()],
        "After the mean over the whole image the strips of a sample agree; "
        "other samples stay elsewhere.",
    ),
}
"""Placements of each tensor on a data x space mesh, and a hint."""


@exercise
def local_columns(answer: Callable[..., int]) -> Verdict:
    """Columns of a feature map on one rank in a stage, from (width, ranks, stage)."""

    def right_columns(width: int, ranks: int, stage: int) -> int:
        return width // 4 // 2**stage // ranks

    hint = "The stem divides by 4, each later stage by 2 more, and the ranks share what is left."
    cases = [(256, 1, 0), (256, 4, 0), (256, 4, 1), (1024, 4, 3)]
    verdict = judge_values(answer, right_columns, cases, hint)
    # judge_values compares by ==, which lets the float 8.0 pass.
    arguments: dict[str, Any] = {"width": 256, "ranks": 4, "stage": 1}
    found = call_answer(answer, **arguments)
    if not isinstance(found, Integral):
        asked = call_text(answer, **arguments)
        said = f"{asked} gave {value_text(found)}, a {type(found).__name__}"
        hint = "Columns are counted: // divides whole numbers."
        raise WrongAnswer(said, expected="8", hint=hint)
    return verdict


@exercise
def placements(answer: Callable[..., Any]) -> Verdict:
    """Two placements on a data x space mesh for each of images, weights, gradients and logits."""
    found = call_answer(answer)
    if not isinstance(found, Mapping):
        hint = "Return a dict: a list of two placements for each name."
        raise WrongAnswer(f"placements() gave {value_text(found)}", hint=hint)
    for name, (expected, hint) in RIGHT_PLACEMENTS.items():
        placed = found.get(name)
        right = f"[{', '.join(map(_placement_text, expected))}]"
        if not isinstance(placed, Sequence) or isinstance(placed, str) or len(placed) != 2:
            said = f"{name}: {value_text(placed)} is no list of two placements"
            raise WrongAnswer(said, expected=right, hint=hint)
        for axis, given, wanted in zip(("data", "space"), placed, expected, strict=True):
            if given != wanted:
                meaning = _placement_meaning(given, axis)
                said = f"{name}: along {axis} you say {_placement_text(given)}, {meaning}"
                raise WrongAnswer(said, expected=right, hint=hint)
    return passing_verdict(f"{len(RIGHT_PLACEMENTS)} tensors lie where you say")


def _placement_text(placement: object) -> str:
    # torch prints placements in other ways than learners write them.
    match placement:
        case Shard():
            return f"Shard({placement.dim})"
        case Replicate() | Partial():
            return f"{type(placement).__name__}()"
    return value_text(placement)


def _placement_meaning(placement: object, axis: str) -> str:
    match placement:
        case Shard():
            names = {0: "samples", 1: "channels", 2: "rows", 3: "columns"}
            parts = names.get(placement.dim, "parts of no dimension")
            return f"so the ranks along {axis} hold different {parts}"
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
    cases = [(1, 3, 1, 1), (32, 7, 32, 2), (16, 7, 64, 2), (16, 1, 64, 8)]
    return judge_values(answer, right_bytes, cases, hint)


@exercise
def halo_exchange(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Pad a strip with its neighbours' columns, on 4 real ranks."""

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        _judge_padding(index, sent["got"])
        _judge_sent_bytes(index, sent["moved"])

    judge_on_line(answer, judge=judge_rank, timeout_s=timeout_s, what="forward")
    return passing_verdict(f"equal to {PASSED_TEXT}")


@exercise
def halo_gradient(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Return the halo's gradients to the ranks that own the columns, on 4 real ranks."""

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        _judge_gradient(index, sent["got"])
        _judge_sent_bytes(index, sent["moved"])

    judge_on_line(answer, judge=judge_rank, timeout_s=timeout_s, what="backward")
    return passing_verdict(f"equal to {PASSED_TEXT}")


@exercise
def halo_function(answer: Any, timeout_s: float = 30) -> Verdict:
    """An autograd.Function that pads a strip and returns the halo's gradients, on 4 real ranks."""
    if not isinstance(answer, type) or not issubclass(answer, torch.autograd.Function):
        said = f"{value_text(answer)} is no torch.autograd.Function"
        raise WrongAnswer(said, hint="Hand over the class, by its name.")
    if "forward" not in vars(answer) and "backward" not in vars(answer):
        raise NotAttempted

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        _judge_padding(index, sent["got"])
        if sent["grad"] is None:
            raise WrongAnswer(
                f"on rank {index}, the strip got no gradient",
                hint="The first value that backward returns "
                "is the gradient of forward's first argument.",
            )
        _judge_gradient(index, sent["grad"], "the strip's gradient: ")
        _judge_sent_bytes(index, sent["moved"], passes=2)

    arguments = (
        "backward returns one value for each argument of forward, None for what has no gradient"
    )
    hints = {
        "incorrect number of gradients": arguments,
        "gradient for input": arguments,
        "does not require grad": "the padded strip has no backward pass: "
        "does forward return the padded strip?",
        "must implement either the backward": "backward is missing, or has another name",
        "non-static forward": "forward and backward are static: write @staticmethod above each",
    }
    judge_on_line(answer, judge=judge_rank, timeout_s=timeout_s, hints=hints, what="function")
    return passing_verdict(f"forward and backward equal {PASSED_TEXT}")


@exercise
def sends_nothing(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """A broken exchange, without any send, that passes a test with ones, on 4 real ranks."""

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        if sent["moved"]:
            raise WrongAnswer(
                f"on rank {index}, {sent['moved']} bytes were handed over, and none may be",
                hint="Nobody asks the neighbours: "
                "what is there on this rank that looks like their columns?",
            )
        try:
            _judge_padding(index, sent["got"], "ones")
        except WrongAnswer as caught:
            raise WrongAnswer(
                f"the test of ones caught it: {caught}",
                expected=caught.expected,
                hint="Inside the image the test wants ones, at its border zeros. "
                "Which ranks have a border?",
            ) from None

    judge_on_line(answer, judge=judge_rank, timeout_s=timeout_s, what="ones")
    return passing_verdict(
        "the test of ones passes, and nothing was exchanged: a test that cannot fail"
    )


@exercise
def activation_bytes(answer: Callable[..., int]) -> Verdict:
    """Bytes that one block keeps for backward, from (batch, channels, height, width)."""

    def right_bytes(batch: int, channels: int, height: int, width: int) -> int:
        return 48 * batch * channels * height * width

    hint = (
        "Go from left to right. "
        "Between the two 1 x 1 convolutions there are four times the channels."
    )
    cases = [(1, 1, 1, 1), (2, 32, 32, 64), (2, 64, 16, 8)]
    return judge_values(answer, right_bytes, cases, hint)


@exercise
def strip_step_s(answer: Callable[..., float]) -> Verdict:
    """Seconds of a step with strips, from the arguments of ``theory.spatial.strip_step_s``."""
    names = ("plain_s", "ranks", "messages", "message_bytes", "alpha_s", "beta_s_per_byte")
    latency = "Each message costs its latency alpha once."
    bandwidth = "Each message costs beta for each of its bytes, beside alpha."
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((1.0, 4, 0, 0, 0.0, 0.0), "The ranks share the arithmetic."),
        ((1.0, 2, 10, 0, 0.01, 0.0), latency),
        ((1.0, 2, 10, 1000, 0.01, 1e-5), bandwidth),
    ]
    for case, hint in cases:
        arguments: dict[str, Any] = dict(zip(names, case, strict=True))
        found, expected = call_answer(answer, **arguments), spatial.strip_step_s(**arguments)
        asked = call_text(answer, **arguments)
        if not isinstance(found, Real):
            said = f"{asked} gave {value_text(found)}, not a number"
            raise WrongAnswer(f"{said}: does every path return?")
        if not math.isclose(found, expected, rel_tol=1e-6):
            said, right = f"{asked} gave {found:.6g}", f"{expected:.6g}"
            raise WrongAnswer(said, expected=right, hint=hint)
    return passing_verdict(f"{len(cases)} cases agree")


def _judge_sent_bytes(index: int, moved: int, *, passes: int = 1) -> None:
    """Raise WrongAnswer if a rank sent more than its halos in each pass."""
    neighbours = (index > 0) + (index < RANKS - 1)
    strip, _ = rank_tasks("forward", RANKS)[index]
    halos = neighbours * strip[..., :HALO].nbytes * passes
    if moved > halos:
        raise WrongAnswer(
            f"on rank {index}, the numbers are right, "
            f"but {moved} bytes were handed over; its halos are {halos}",
            hint="Send the outermost columns alone, each to one neighbour.",
        )


def _judge_padding(index: int, got: Tensor | str, what: str = "forward") -> None:
    """Raise WrongAnswer, with the origin of wrong columns, unless a padded strip is right."""
    _, expected = rank_tasks(what, RANKS)[index]
    got = _check_form(index, got, expected)
    sides = [
        ("first", "last", slice(HALO), index - 1),
        ("last", "first", slice(-HALO, None), index + 1),
    ]
    for side, other, columns, owner in sides:
        part = got[..., columns]
        if is_tensor_close(part, expected[..., columns], atol=1e-5):
            continue
        right, hint = "zeros, the image's border", ""
        if 0 <= owner < RANKS:
            right = f"rank {owner}'s {other} {HALO}"
            hint = "The halo is what lies next to this strip in the whole image."
        # All columns of an image of ones look alike: no origin can be told.
        seen = _column_origin(part) if what == "forward" else _halo_fault(part)
        said = f"on rank {index}, the {side} {HALO} columns are {seen}"
        raise WrongAnswer(said, expected=right, hint=hint)
    if not is_tensor_close(got[..., HALO:-HALO], expected[..., HALO:-HALO], atol=1e-5):
        said = f"on rank {index}, the columns between are not the strip's own"
        raise WrongAnswer(said, hint="The strip itself is kept.")


def _column_origin(part: Tensor) -> str:
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
    """Raise WrongAnswer, with the likely mistake, unless a rank's gradient is right."""
    work = rank_tasks("backward", RANKS)
    gradients, expected = [given for given, _ in work], work[index][1]
    got = _check_form(index, got, expected)
    padded, nothing = gradients[index], torch.zeros_like(expected[..., :HALO])
    own = padded[..., HALO:-HALO]
    from_left = gradients[index - 1][..., -HALO:] if index else nothing
    from_right = gradients[index + 1][..., :HALO] if index < RANKS - 1 else nothing
    sides = {
        "first": (slice(HALO), from_left, from_right, padded[..., :HALO], index - 1),
        "last": (slice(-HALO, None), from_right, from_left, padded[..., -HALO:], index + 1),
    }
    for side, (columns, arrived, swapped, kept, owner) in sides.items():
        part, own_part = got[..., columns], own[..., columns]
        if is_tensor_close(part, expected[..., columns], atol=1e-5):
            continue
        likely = {
            "this rank's own gradient alone": own_part,
            f"what rank {owner} sent, alone: assigned, not added": arrived,
            "with the other neighbour's gradient added": own_part + swapped,
            "with the halo's gradient added that should have been sent": own_part + kept,
        }
        seen = _halo_fault(part)
        for mistake, wrong in likely.items():
            if is_tensor_close(part, wrong, atol=1e-5):
                seen = mistake
                break
        right = f"this rank's own gradient plus what rank {owner} sends"
        if not 0 <= owner < RANKS:
            right = "this rank's own gradient: nobody is beyond the image's border"
        said = f"on rank {index}, {what}the {side} {HALO} columns are {seen}"
        hint = "A column that two ranks used gets the gradients of both."
        raise WrongAnswer(said, expected=right, hint=hint)
    if not is_tensor_close(got, expected, atol=1e-5):
        said = f"on rank {index}, {what}the columns between are wrong"
        raise WrongAnswer(said, hint="Only the outer columns change.")


def _check_form(index: int, got: Tensor | str, expected: Tensor) -> Tensor:
    """Return ``got``; raise WrongAnswer unless its type, shape and dtype are right."""
    if isinstance(got, str):
        said = f"on rank {index}, the function returned {got}, not a tensor"
        raise WrongAnswer(said, hint="Does every path return the tensor?")
    if got.shape != expected.shape:
        said, right = f"the shape is {tuple(got.shape)}", f"{tuple(expected.shape)}"
        hint = f"The strip has {COLUMNS} columns, the halo {HALO}."
        raise WrongAnswer(f"on rank {index}, {said}", expected=right, hint=hint)
    if got.dtype != expected.dtype:
        said = f"on rank {index}, the numbers are {got.dtype}"
        raise WrongAnswer(said, expected=f"{expected.dtype}")
    return got
