"""Compile a model block by block, or as a whole.

Programs apply techniques in torchtitan's order: tensor parallelism, checkpointing, compiling, data
parallelism. A compiled block then contains its recomputation and its communication along ``tp``,
while FSDP, which gathers before a block and frees after it, stays outside. DDP is the exception:
the compiler can only fuse all-reduces that it sees, so a DDP model is compiled last, as a whole.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from labkit import torch_private
from labkit.parallel.checkpointing import checkpoint_wrappers, outer_blocks


def apply_compile(
    model: nn.Module,
    block_types: Collection[str] = (),
    *,
    inductor: bool = True,  # generate code; otherwise the traced graphs run as they are
    eager_random: bool = False,  # let dropout draw the same numbers as eager code
) -> int:
    """Compile every block of these classes in place, or the whole model; return the number."""
    # Static shapes: a DTensor's backward pass does not compile with dynamic ones (torch 2.13).
    how: dict[str, Any] = {"dynamic": False, "backend": "inductor" if inductor else "eager"}
    if inductor and eager_random:
        how["options"] = {"fallback_random": True}
    if not block_types:
        model.compile(**how)
        return 1
    blocks, wrappers = outer_blocks(model, block_types), checkpoint_wrappers(model)
    for block in blocks:
        outermost = wrappers.get(block, block)
        # Only forward: the module's hooks, where FSDP gathers and frees, stay outside of the graph.
        outermost.forward = torch.compile(outermost.forward, **how)
    return len(blocks)


def count_compiled_graphs() -> int:
    """Count the graphs that this process has compiled; 0 means that everything runs uncompiled."""
    # Looked up here, because that loads the compiler, which takes half a second.
    return int(torch_private.counters["stats"]["unique_graphs"])
