"""Checks of lab 3, changing what FSDP gathers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import labkit
from labkit.checks.verdict import Verdict, check_values, is_empty, passed, source_of, wrong
from labkit.theory import extensions as theory

RANKS = 2
HINTS = {
    "modified by an inplace operation": "autograd has saved this parameter: fill it with refill",
    "cannot be 0 to view": "what is sent needs a first dimension: send one scale as scale.reshape(1)",
    "Invalid scalar type": "gloo sends no float8 tensor by itself: send it as .view(torch.uint8), or with its scale",
}
"""What to do about an error of torch, by a part of its message."""
PROGRAM = Path(__file__).with_name("extension_ranks.py")
LIMITS = {"bf16": (0.5, theory.rounding_error("bf16")), "8 bits": (0.26, theory.rounding_error("float8"))}
"""Of a gather: the part of float32's bytes that it may send, and the error that it may make."""


def uneven_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise: bytes that one rank hands to one all-gather, from (rows, columns, ranks, bytes_per_number)."""
    hint = "Every rank sends as many rows as the rank with most of them: rows / ranks, rounded up."
    cases = [
        (
            {"rows": rows, "columns": columns, "ranks": ranks, "bytes_per_number": size},
            theory.gather_bytes((rows, columns), ranks, {4: "fp32", 2: "bf16"}[size]),
            hint if rows % ranks else "A rank sends its own rows, not the whole parameter: rows / ranks x columns.",
        )
        for rows, columns, ranks, size in ((8, 4, 2, 4), (8, 4, 4, 2), (5, 6, 2, 4), (10, 128, 4, 2), (2, 8, 4, 4))
    ]
    return check_values(answer, cases)


def post_all_gather(answer: Callable[..., Any]) -> Verdict:
    """Exercise: the post-all-gather hook of TwoTensor, without ``self``, on 2 real ranks."""
    verdict = _on_ranks([answer], what="two_tensor")
    if isinstance(verdict, Verdict):
        return verdict
    return passed(f"trained on {RANKS} ranks, in float32 and cast to bfloat16: right losses, and all memory freed")


def mended(answer: Callable[..., Any]) -> Verdict:
    """Exercise: a post-all-gather hook for int8 numbers and a scale for each row, which leaks nothing."""
    verdict = _on_ranks([answer], what="int8")
    if isinstance(verdict, Verdict):
        return verdict
    return passed(f"trained on {RANKS} ranks: right losses, and nothing is left after reshard")


def bf16_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise: a gather with half the bytes of float32 and the error of bfloat16."""
    return _codec(encode, decode, "bf16")


def eight_bit_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise: a gather with at most 0.26 of the bytes of float32 and at most the error of float8."""
    return _codec(encode, decode, "8 bits")


def _codec(encode: Callable[..., Any], decode: Callable[..., Any], limits: str) -> Verdict:
    most_bytes, most_error = LIMITS[limits]
    result = _on_ranks([encode, decode], what="codec", most_bytes=most_bytes, most_error=most_error)
    if isinstance(result, Verdict):
        return result
    ratio, error = result.value("bytes_ratio"), result.value("weight_error")
    return passed(f"{ratio:.3f} of the bytes of float32, and no weight is off by more than {error:.4f} of the largest")


def _on_ranks(answers: list[Callable[..., Any]], **parameters: Any) -> Verdict | labkit.RunResult:
    """Run the answers on RANKS ranks; what is wrong with them becomes a verdict."""
    if any(map(is_empty, answers)):
        return Verdict("not attempted")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.py"
        file.write_text("\n\n".join(map(source_of, answers)))
        names = tuple(answer.__name__ for answer in answers)
        try:
            return labkit.run(
                PROGRAM, nproc=RANKS, device="cpu", timeout_s=60, answer=str(file), names=names, **parameters
            )
        except labkit.RankFailed as failure:
            return wrong(_reason(failure))
        except labkit.RunTimedOut:
            return wrong("the ranks waited for each other for 60 s: does every rank send tensors of the same size?")


def _reason(failure: labkit.RankFailed) -> str:
    if failure.exc_type == "Wrong":  # so on every rank
        return failure.message
    error = f"{failure.exc_type}: {failure.message}"
    hint = next((hint for part, hint in HINTS.items() if part in failure.message), "")
    return f"{hint} ({error})" if hint else f"on rank {failure.rank}, {error}"
