"""Parameters that decide what FSDP2's all-gather sends.

``TwoTensor`` is a type of parameter with hooks of its own; ``extend`` puts hooks onto plain sharded parameters.
``inspection`` looks at what these leave in memory.
"""

from labkit.tensors.inspection import gathered_error, plain_shards, plain_tensors, refuse_leak, unfreed_bytes
from labkit.tensors.quantised import EXTENSIONS, Extension, extend, extend_all
from labkit.tensors.two_tensor import TwoTensor, pad_rows, refill, to_two_tensors

__all__ = [
    "EXTENSIONS", "Extension", "TwoTensor", "extend", "extend_all", "gathered_error", "pad_rows",
    "plain_shards", "plain_tensors", "refill", "refuse_leak", "to_two_tensors", "unfreed_bytes",
]  # fmt: skip
