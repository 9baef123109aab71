"""Checks of lab 1, sharding ConvNeXt's activations."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import labkit
from labkit import theory
from labkit.checks.verdict import Verdict, check_values, is_empty, passed, source_of, wrong

RANKS = 4
PROGRAM = Path(__file__).with_name("halo_ranks.py")


def local_columns(answer: Callable[..., int]) -> Verdict:
    """Exercise 1: columns of a feature map that a rank holds in a stage, from (width, ranks, stage)."""
    hint = "The stem divides by 4, each later stage by 2 more, and the ranks share what is left."
    cases = [
        ({"width": width, "ranks": ranks, "stage": stage}, width // 4 // 2**stage // ranks, hint)
        for width, ranks, stage in ((256, 1, 0), (256, 4, 0), (256, 4, 1), (1024, 4, 3))
    ]
    return check_values(answer, cases)


def halo_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: bytes to one neighbour before one convolution, from (rows, kernel, channels, batch)."""
    hint = "A k x k kernel reaches (k - 1) / 2 columns over the cut; a float32 number has 4 bytes."
    cases = [
        (
            {"rows": rows, "kernel": kernel, "channels": channels, "batch": batch},
            theory.halo_bytes(rows=rows, halo=(kernel - 1) // 2, channels=channels, batch=batch),
            hint,
        )
        for rows, kernel, channels, batch in ((1, 3, 1, 1), (32, 7, 32, 2), (16, 7, 64, 2), (16, 1, 64, 8))
    ]
    return check_values(answer, cases)


def halo_exchange(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: pad a strip with its neighbours' columns, on 4 real ranks."""
    return _on_ranks(answer, "forward")


def halo_gradient(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: bring the gradients of the halo back to the ranks that own the columns, on 4 real ranks."""
    return _on_ranks(answer, "backward")


def activation_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 5: bytes that one block keeps for the backward pass, from (batch, channels, height, width)."""
    hint = "Count what each layer's backward needs: 1 + 1 + 1 + 4 + 4 + 1 feature maps of 4-byte numbers."
    cases = [
        (
            dict(zip(("batch", "channels", "height", "width"), sizes, strict=True)),
            48 * sizes[0] * sizes[1] * sizes[2] * sizes[3],
            hint,
        )
        for sizes in ((1, 1, 1, 1), (2, 32, 32, 64), (2, 64, 16, 8))
    ]
    return check_values(answer, cases)


def _on_ranks(answer: Callable[..., Any], what: str) -> Verdict:
    """Run the answer on RANKS ranks; what a rank finds wrong becomes the verdict."""
    if is_empty(answer):
        return Verdict("not attempted")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.py"
        file.write_text(source_of(answer))
        try:
            labkit.run(
                PROGRAM, nproc=RANKS, device="cpu", timeout_s=30, answer=str(file), name=answer.__name__, what=what
            )
        except labkit.RankFailed as failure:
            reason = failure.message if failure.exc_type == "Wrong" else f"{failure.exc_type}: {failure.message}"
            return wrong(f"on rank {failure.rank}, {reason}")
        except labkit.RunTimedOut:
            return wrong(
                "the ranks waited for each other for 30 s: does every send have its receive on the other side?"
            )
    return passed(f"equal to one device on {RANKS} ranks, and no byte more than the halos was sent")
