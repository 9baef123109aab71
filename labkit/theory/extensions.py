"""What FSDP's all-gather sends when the parameter decides how: bytes as formulas, without torch.

A rank hands in its rows of every parameter, padded to the length of the longest shard: ceil(rows /
ranks). Next to numbers of one byte travel their scales, float32: one a shard for float8, one a row
for int8. Everywhere an ``extension`` is a key of ``BYTES``, or int4, and a parameter's ``shape`` is
the whole one, of which ``ranks`` share the rows. ``scales`` says which numbers share a scale
instead: those of a "shard", of a "row", or a "group" of 32 in a row.
"""

import math
from collections.abc import Sequence

EXTENSION_BYTES = {"fp32": 4, "bf16": 2, "float8": 1, "int8": 1, "two_tensor": 8}
"""Bytes handed to an all-gather for each number of a parameter."""
ELEMENT_BYTES = EXTENSION_BYTES | {"int4": 0.5}
SCALE_BYTES = 4
"""Bytes of a scale."""
SCALE_GRANULARITY = {"float8": "shard", "int8": "row", "int4": "row"}
"""Which numbers share a scale, where nothing else is said."""
GROUP_SIZE = 32
"""Numbers that share a scale in a group."""
LOSS_LIMITS = {"fp32": 0.0, "bf16": 0.02, "float8": 0.10, "int8": 0.10}
"""How far an extension's final loss may be from that of fp32, as a part of it."""
FINAL_STEPS = 10
"""Whose mean is the final loss: that of a single batch says little."""


def gather_bytes(shape: Sequence[int], ranks: int, extension: str, scales: str = "") -> int:
    """Bytes that one rank hands to one all-gather of a float32 parameter.

    Raises:
        ValueError: an extension that is none, or scales for one that has none.
    """
    if extension not in ELEMENT_BYTES:
        raise ValueError(f"extension {extension!r} is none of {', '.join(ELEMENT_BYTES)}")
    numbers = -(-shape[0] // ranks) * math.prod(shape[1:])
    return int(numbers * ELEMENT_BYTES[extension]) + scale_bytes(shape, ranks, extension, scales)


def scale_bytes(shape: Sequence[int], ranks: int, extension: str, scales: str = "") -> int:
    """Bytes of the scales among these."""
    if scales and extension not in SCALE_GRANULARITY:
        raise ValueError(
            f"extension {extension} has no scales to share in a {scales}: take"
            f" {' or '.join(SCALE_GRANULARITY)}"
        )
    rows = -(-shape[0] // ranks)
    counts = {
        "": 0,
        "shard": 1,
        "row": rows,
        "group": rows * -(-math.prod(shape[1:]) // GROUP_SIZE),
    }
    return SCALE_BYTES * counts[scales or SCALE_GRANULARITY.get(extension, "")]


def step_gather_bytes(
    shapes: Sequence[Sequence[int]],
    ranks: int,
    extension: str,
    *,
    reshard: bool = True,
    scales: str = "",
) -> int:
    """Bytes that one rank hands to the all-gathers of a training step, of parameters outside the
    root's own unit.

    With ``reshard`` they are freed after the forward pass and gathered again in the backward pass.
    """
    return (1 + reshard) * sum(gather_bytes(shape, ranks, extension, scales) for shape in shapes)


def held_bytes(
    shape: Sequence[int], ranks: int, extension: str, *, compute_bytes: int = 4, scales: str = ""
) -> int:
    """Bytes that a rank holds of a parameter while it computes with so many bytes a number, padding
    included.

    What was gathered is the parameter itself where it has the right dtype. Otherwise both are
    there.
    """
    gathered = ranks * gather_bytes(shape, ranks, extension, scales)
    own = {"fp32": 4, "bf16": 2, "two_tensor": 4}.get(extension) == compute_bytes
    halves = 2 if extension == "two_tensor" else 1
    decoded = halves * ranks * -(-shape[0] // ranks) * math.prod(shape[1:]) * compute_bytes
    return gathered if own else gathered + decoded


def pays_below(bytes_saved: float, coding_s: float, ranks: int) -> float:
    """Bandwidth, in bytes a second on the wire of a rank, below which a gather of fewer bytes is
    faster.

    ``bytes_saved`` are those of the whole parameters, of which a ring sends (ranks - 1) / ranks
    from each rank; ``coding_s`` is the time to encode a rank's rows and to decode all. Nothing is
    hidden behind arithmetic.
    """
    return bytes_saved * (ranks - 1) / ranks / coding_s


def rounding_error(extension: str) -> float:
    """Largest error of a gathered weight, over the largest absolute value that shares its scale.

    A float with m bits of mantissa rounds a number by up to 2 ** -(m + 1) of it: bfloat16 has 7,
    float8 e4m3fn has 3. Of int8, 127 steps reach the largest value, of 4 bits 7, and rounding
    misses by up to half a step. Sources: Micikevicius et al., "FP8 Formats for Deep Learning", 2022
    (arXiv:2209.05433); Dettmers et al., "LLM.int8()", 2022 (arXiv:2208.07339).
    """
    exact = {"fp32": 0.0, "two_tensor": 0.0}
    return (exact | {"bf16": 2**-8, "float8": 2**-4, "int8": 0.5 / 127, "int4": 0.5 / 7})[extension]
