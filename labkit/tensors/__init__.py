"""Parameters that decide what FSDP2's all-gather sends.

``TwoTensor`` is a type of parameter with hooks of its own; ``extend`` puts hooks onto plain sharded parameters.
``inspection`` looks at what these leave in memory.
"""

from labkit.tensors.inspection import (
    Errors,
    errors_of,
    gathered_errors,
    held_bytes,
    plain_shards,
    plain_tensors,
    refuse_leak,
    unfreed_bytes,
)
from labkit.tensors.quantised import EXTENSIONS, Extension, extend, extend_all, gathered_alone, quantised
from labkit.tensors.two_tensor import TwoTensor, convert_parameters, pad_rows, refill, twice

__all__ = [
    "EXTENSIONS", "Errors", "Extension", "TwoTensor", "convert_parameters", "errors_of", "extend", "extend_all",
    "gathered_alone", "gathered_errors", "held_bytes", "pad_rows", "plain_shards", "plain_tensors", "quantised",
    "refill", "refuse_leak", "twice", "unfreed_bytes",
]  # fmt: skip
