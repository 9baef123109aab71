"""Parameters that decide what FSDP2's all-gather sends.

``TwoTensor`` is a type of parameter with hooks of its own; ``extend`` puts hooks onto plain sharded parameters.
``inspection`` looks at what these leave in memory.
"""

from labkit.tensors.inspection import (
    GatherErrors,
    gather_errors,
    gather_memory_bytes,
    leak_bytes,
    plain_shards,
    plain_tensors,
    refuse_leak,
    rounding_errors,
)
from labkit.tensors.quantisation import (
    EXTENSIONS,
    Extension,
    extend_model,
    extend_parameter,
    gather_on_one_rank,
    make_quantised_extension,
)
from labkit.tensors.two_tensor import TwoTensor, convert_parameters, make_two_tensor, pad_rows, refill

__all__ = [
    "EXTENSIONS", "GatherErrors", "Extension", "TwoTensor", "convert_parameters", "rounding_errors", "extend_parameter", "extend_model",
    "gather_on_one_rank", "gather_errors", "gather_memory_bytes", "pad_rows", "plain_shards", "plain_tensors", "make_quantised_extension",
    "refill", "refuse_leak", "make_two_tensor", "leak_bytes",
]  # fmt: skip
