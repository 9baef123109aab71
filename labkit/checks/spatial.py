"""Checks of lab 1, sharding ConvNeXt's activations."""

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from labkit.checks import judge
from labkit.checks.judge import Verdict, exercise, expect, passing_verdict, value_text
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks.spatial import HALO, rank_tasks
from labkit.checks.traffic import Totals, traffic_text
from labkit.theory import spatial

# Numbers of ranks on which an answer has to be right.
SIZES = 4, 3
FIRST, LAST, BETWEEN = slice(HALO), slice(-HALO, None), slice(HALO, -HALO)
WAIT_HINT = "does every send have its receive on the other side?"
PASSED_TEXT = "one device on 4 and 3 ranks, and no byte more than the halos was sent"
_on_ranks = partial(judge_on_ranks, "spatial", sizes=SIZES, waiting=WAIT_HINT, name_rank=True)
# Halos are copied, and two gradients are added in either order.
TOLERANCES = {"rtol": 1e-5, "atol": 1e-8}
DIMENSIONS = {0: "samples", 1: "channels", 2: "rows", 3: "columns"}
# Placements of each tensor on a data x space mesh, and a hint.
RIGHT_PLACEMENTS: Mapping[str, tuple[list[Placement], str]] = {
    "images": ([Shard(0), Shard(3)], "[N, C, H, W]: data shares the samples N, space the width W."),
    "weights": ([Replicate(), Replicate()], "All pixels need it: which rank can do without?"),
    "gradients": ([Partial(), Partial()], "Each rank adds its part. What is the whole gradient?"),
    "logits": ([Shard(0), Replicate()], "After the mean over an image its strips agree."),
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
def halo_bytes(answer: Callable[..., int]) -> Verdict:
    """Bytes to one neighbour before one convolution, from (rows, kernel, channels, batch)."""

    def right_bytes(rows: int, kernel: int, channels: int, batch: int) -> int:
        return spatial.halo_bytes(rows=rows, halo=(kernel - 1) // 2, channels=channels, batch=batch)

    hint = "A k x k kernel reaches (k - 1) / 2 columns over the cut; a float32 number has 4 bytes."
    cases = [(1, 3, 1, 1), (32, 7, 32, 2), (16, 7, 64, 2), (16, 1, 64, 8)]
    return judge.judge_cases(answer, right_bytes, [(*case, hint) for case in cases])


@exercise
def halo_exchange(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Pad a strip with its neighbours' columns, on real ranks."""

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        _judge_padding(ranks, index, output["got"])
        _judge_traffic(ranks, index, output["sent"])

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="forward")
    return passing_verdict(f"equal to {PASSED_TEXT}")


@exercise
def halo_gradient(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Return the halo's gradients to the ranks that own the columns, on real ranks."""

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        _judge_gradient(ranks, index, output["got"])
        _judge_traffic(ranks, index, output["sent"])

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="backward")
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
        _judge_padding(ranks, index, output["got"])
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
    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, hints=hints, what="function")
    return passing_verdict(f"forward and backward equal {PASSED_TEXT}")


@exercise
def sends_nothing(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """A broken exchange, without any send, that passes a test with ones, on real ranks."""

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        hint = "Ask no neighbour: what is there on this rank that looks like their columns?"
        out = _outgoing(output["sent"])
        expect(not out, f"the rank sends {traffic_text(out)}", "nothing", hint)
        _judge_padding(ranks, index, output["got"], "ones")

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="ones")
    seen = "the test of ones passes, and nothing was exchanged: a test that cannot fail"
    return passing_verdict(seen)


@exercise
def activation_bytes(answer: Callable[..., int]) -> Verdict:
    """Bytes that one block keeps for backward, from (batch, channels, height, width)."""

    def right_bytes(batch: int, channels: int, height: int, width: int) -> int:
        return 48 * batch * channels * height * width

    hint = "Go from left to right. Between the 1 x 1 convolutions channels are fourfold."
    cases = [(1, 1, 1, 1, hint), (2, 32, 32, 64, hint), (2, 64, 16, 8, hint)]
    return judge.judge_cases(answer, right_bytes, cases)


@exercise
def strip_step_s(answer: Callable[..., float]) -> Verdict:
    """Seconds of a step with strips, from the arguments of ``theory.spatial.strip_step_s``."""
    per_byte = "Each message costs beta for each of its bytes, beside alpha."
    cases = [
        (1.0, 4, 0, 0, 0.0, 0.0, "The ranks share the arithmetic."),
        (1.0, 2, 10, 0, 0.01, 0.0, "Each message costs its latency alpha once."),
        (1.0, 2, 10, 1000, 0.01, 1e-5, per_byte),
    ]
    return judge.judge_cases(answer, spatial.strip_step_s, cases)


def _judge_traffic(ranks: int, index: int, sent: Totals, *, passes: int = 1) -> None:
    # An answer that gathers the whole image has right numbers too, and no use.
    out = _outgoing(sent)
    messages = passes * ((index > 0) + (index < ranks - 1))
    strip, _ = rank_tasks("forward", ranks)[index]
    halos = messages * strip[..., FIRST].nbytes
    calls, size = (sum(each) for each in zip(*out.values(), strict=True)) if out else (0, 0)
    said = f"the numbers are right, but the rank sends {traffic_text(out)}"
    hint = "Send the outermost columns alone, each to one neighbour, in one message."
    is_right = calls <= messages and size <= halos
    expect(is_right, said, traffic_text({"send": [messages, halos]}), hint)


def _outgoing(sent: Totals) -> Totals:
    return {name: total for name, total in sent.items() if name != "recv"}


def _judge_padding(ranks: int, index: int, found: Tensor | str, what: str = "forward") -> None:
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
        likely, more = {"this rank's own gradient alone": own_part}, ": no rank is beyond"
        if 0 <= owner < ranks:
            likely[f"what rank {owner} sent, alone: assigned, not added"] = arrived
            more = f" plus what rank {owner} sends"
        likely |= {
            "with the other neighbour's gradient added": own_part + swapped,
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
