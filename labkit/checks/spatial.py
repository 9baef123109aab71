"""Checks of lab 1, sharding ConvNeXt's activations."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from labkit.checks.ask import Verdict, Wrong, check_values, exercise, passed, same
from labkit.checks.on_ranks import on_ranks
from labkit.checks.ranks.spatial import HALO, tasks
from labkit.theory import spatial

RANKS = 4
WAITING = "does every send have its receive on the other side?"


@exercise
def local_columns(answer: Callable[..., int]) -> Verdict:
    """Exercise 1: columns of a feature map that a rank holds in a stage, from (width, ranks, stage)."""
    hint = "The stem divides by 4, each later stage by 2 more, and the ranks share what is left."
    cases = [(256, 1, 0), (256, 4, 0), (256, 4, 1), (1024, 4, 3)]
    return check_values(answer, lambda width, ranks, stage: width // 4 // 2**stage // ranks, cases, hint)


@exercise
def halo_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: bytes to one neighbour before one convolution, from (rows, kernel, channels, batch)."""

    def right(rows: int, kernel: int, channels: int, batch: int) -> int:
        return spatial.halo_bytes(rows=rows, halo=(kernel - 1) // 2, channels=channels, batch=batch)

    hint = "A k x k kernel reaches (k - 1) / 2 columns over the cut; a float32 number has 4 bytes."
    return check_values(answer, right, [(1, 3, 1, 1), (32, 7, 32, 2), (16, 7, 64, 2), (16, 1, 64, 8)], hint)


@exercise
def halo_exchange(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 3: pad a strip with its neighbours' columns, on 4 real ranks."""
    return _judge(answer, "forward", timeout_s)


@exercise
def halo_gradient(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 4: bring the gradients of the halo back to the ranks that own the columns, on 4 real ranks."""
    return _judge(answer, "backward", timeout_s)


@exercise
def activation_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 5: bytes that one block keeps for the backward pass, from (batch, channels, height, width)."""
    hint = "Count what each layer's backward needs: 1 + 1 + 1 + 4 + 4 + 1 feature maps of 4-byte numbers."
    cases = [(1, 1, 1, 1), (2, 32, 32, 64), (2, 64, 16, 8)]
    return check_values(
        answer, lambda batch, channels, height, width: 48 * batch * channels * height * width, cases, hint
    )


def _judge(answer: Callable[..., Any], what: str, timeout_s: float) -> Verdict:
    """Run the answer on RANKS ranks and hold what they give back against the whole image."""

    def judge(index: int, sent: dict[str, Any]) -> None:
        _, expected = tasks(what, RANKS)[index]
        neighbours = (index > 0) + (index < RANKS - 1)
        problem, halos = _problem(sent["got"], expected), neighbours * expected[..., :HALO].nbytes
        if not problem and sent["moved"] > halos:
            handed = f"this rank handed over {sent['moved']} bytes; its halos are {halos} bytes"
            problem = f"the numbers are right, but {handed}"
        if problem:
            raise Wrong(f"on rank {index}, {problem}")

    on_ranks("spatial", answer, judge=judge, ranks=RANKS, timeout_s=timeout_s, waiting=WAITING, what=what)
    return passed(f"equal to one device on {RANKS} ranks, and no byte more than the halos was sent")


def _problem(got: Tensor | str, expected: Tensor) -> str:
    """What is wrong with a rank's columns, "" for nothing; ``got`` is the type of what is no tensor."""
    if isinstance(got, str):
        return f"the function returned {got}, not a tensor"
    if got.shape != expected.shape:
        return f"the shape is {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"the numbers are {got.dtype}, expected {expected.dtype}"
    parts = {
        f"the first {HALO} columns": slice(HALO),
        "the columns between": slice(HALO, -HALO),
        f"the last {HALO} columns": slice(-HALO, None),
    }
    for part, columns in parts.items():
        if not same(got[..., columns], expected[..., columns], atol=1e-5):
            return f"{part} are wrong" if got[..., columns].any() else f"{part} are all zero"
    return ""
