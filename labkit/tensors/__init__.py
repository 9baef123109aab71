"""Parameters that decide what FSDP2's all-gather sends.

``TwoTensor`` is a parameter type with its own hooks; ``extend_parameter`` adds hooks to plain
sharded parameters. ``inspection`` measures what they gather and leave in memory.
"""

from labkit.tensors.inspection import (
    gather_errors,
    gather_memory_bytes,
    gather_ms,
    leak_bytes,
    plain_shards,
    plain_tensors,
    refuse_leak,
    rounding_errors,
)
from labkit.tensors.quantisation import (
    EXTENSIONS,
    Extension,
    add_codec_hooks,
    extend_model,
    extend_parameter,
    gather_on_one_rank,
    hook_shards,
    make_quantised_extension,
)
from labkit.tensors.two_tensor import (
    TwoTensor,
    convert_parameters,
    make_two_tensor,
    pad_rows,
    refill,
)

__all__ = [
    "EXTENSIONS", "Extension", "TwoTensor", "add_codec_hooks", "convert_parameters",
    "extend_model", "extend_parameter", "gather_errors", "gather_memory_bytes", "gather_ms",
    "gather_on_one_rank", "hook_shards", "leak_bytes", "make_quantised_extension",
    "make_two_tensor", "pad_rows", "plain_shards", "plain_tensors", "refill", "refuse_leak",
    "rounding_errors",
]  # fmt: skip
