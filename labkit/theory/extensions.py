"""Compute what FSDP's all-gather sends when the parameter itself chooses the format.

A rank sends its rows of every parameter, padded to the longest shard: ceil(rows / ranks). In all
functions ``extension`` is a key of ``ELEMENT_BYTES``, ``shape`` that of the whole parameter, whose
rows the ``ranks`` share, and ``scales`` overrides which elements share a float32 scale: those of a
"shard", a "row", or a "group" of 32 in a row.
"""

import math
from collections.abc import Sequence

from labkit.theory.sizes import shard_elements

# Bytes per element that a rank hands to the all-gather.
EXTENSION_BYTES = {"fp32": 4, "bf16": 2, "float8": 1, "int8": 1, "two_tensor": 8}
ELEMENT_BYTES = EXTENSION_BYTES | {"int4": 0.5}
SCALE_BYTES = 4
# Which elements share a scale by default.
SCALE_GRANULARITY = {"float8": "shard", "int8": "row", "int4": "row"}
GROUP_SIZE = 32
# Largest relative difference between an extension's final loss and that of fp32.
LOSS_LIMITS = {"fp32": 0.0, "bf16": 0.02, "float8": 0.10, "int8": 0.10}
# The final loss is the mean over this many steps, because a single batch is noisy.
FINAL_STEPS = 10


def gather_bytes(shape: Sequence[int], ranks: int, extension: str, scales: str = "") -> int:
    """Return the bytes that one rank hands to one all-gather of a float32 parameter."""
    if extension not in ELEMENT_BYTES:
        raise ValueError(f"extension {extension!r} is none of {', '.join(ELEMENT_BYTES)}")
    elements = shard_elements(shape, ranks)
    return int(elements * ELEMENT_BYTES[extension]) + scale_bytes(shape, ranks, extension, scales)


def scale_bytes(shape: Sequence[int], ranks: int, extension: str, scales: str = "") -> int:
    """Return the bytes of the scales that are a part of ``gather_bytes``."""
    if scales and extension not in SCALE_GRANULARITY:
        known = " or ".join(SCALE_GRANULARITY)
        rule = f"extension {extension} has no scales to share in a {scales}"
        raise ValueError(f"{rule}: take {known}")
    rows = -(-shape[0] // ranks)
    groups = rows * -(-math.prod(shape[1:]) // GROUP_SIZE)
    counts = {"": 0, "shard": 1, "row": rows, "group": groups}
    return SCALE_BYTES * counts[scales or SCALE_GRANULARITY.get(extension, "")]


def step_gather_bytes(
    shapes: Sequence[Sequence[int]],
    ranks: int,
    extension: str,
    *,
    reshard: bool = True,
    scales: str = "",
) -> int:
    """Return the bytes that one rank hands to the all-gathers of a step, outside the root unit."""
    # Parameters that are freed after the forward pass are gathered again in the backward pass.
    return (1 + reshard) * sum(gather_bytes(shape, ranks, extension, scales) for shape in shapes)


def held_bytes(
    shape: Sequence[int], ranks: int, extension: str, *, compute_bytes: int = 4, scales: str = ""
) -> int:
    """Return the bytes that a rank holds of a parameter while computing with it, with padding.

    If the gathered buffer does not have the dtype of the computation, of ``compute_bytes`` per
    element, the rank also holds a decoded copy.
    """
    gathered = ranks * gather_bytes(shape, ranks, extension, scales)
    own = {"fp32": 4, "bf16": 2, "two_tensor": 4}.get(extension) == compute_bytes
    copies = 2 if extension == "two_tensor" else 1
    decoded = copies * ranks * shard_elements(shape, ranks) * compute_bytes
    return gathered if own else gathered + decoded


def pays_below(bytes_saved: float, coding_s: float, ranks: int) -> float:
    """Return the bandwidth in bytes/s below which a smaller all-gather saves time."""
    # Each rank of a ring sends (ranks - 1) / ranks of what is saved. Nothing hides the coding.
    return bytes_saved * (ranks - 1) / ranks / coding_s


def rounding_error(extension: str) -> float:
    """Return the largest error of a gathered weight, relative to the largest that shares its scale.

    A float with m bits of mantissa is off by up to 2 ** -(m + 1) of its value: m is 7 for bfloat16
    and 3 for float8 e4m3fn. An int8 takes 127 steps to reach the largest value, an int4 takes 7,
    and rounding misses by up to half a step. Sources: Micikevicius et al., "FP8 Formats for Deep
    Learning", 2022 (arXiv:2209.05433); Dettmers et al., "LLM.int8()", 2022 (arXiv:2208.07339).
    """
    exact = {"fp32": 0.0, "two_tensor": 0.0}
    return (exact | {"bf16": 2**-8, "float8": 2**-4, "int8": 0.5 / 127, "int4": 0.5 / 7})[extension]
