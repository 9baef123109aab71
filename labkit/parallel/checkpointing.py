"""Find the blocks of a model, freeze them, or recompute their activations.

A checkpointed block keeps only its input in the forward pass and recomputes its activations in the
backward pass. If every block does it, a step computes about a third more (Chen et al., "Training
Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174). Selective checkpointing also keeps
what is expensive to recompute: attention and every other GEMM, torchtitan's choice (Korthikanti et
al., "Reducing Activation Recomputation", 2022, arXiv:2205.05198).
"""

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from labkit import torch_private
from labkit.torch_private import checkpoint_wrapper as wrapper

BlockTypes = Collection[str] | Callable[[nn.Module], bool]
"""Which modules are blocks: class names, or a function that decides for each module."""
GEMM_OPS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
OPS_TO_SAVE = tuple(
    torch_private.get(f"{name}.default")
    for name in (
        "scaled_dot_product_flash_attention",
        "scaled_dot_product_flash_attention_for_cpu",
        "scaled_dot_product_efficient_attention",
        "scaled_dot_product_cudnn_attention",
        "reduce_scatter_tensor",
    )
)
"""Results that selective checkpointing always keeps: of attention and of communication."""


def apply_activation_checkpointing(
    model: nn.Module, block_types: Collection[str], *, selective: bool = False
) -> int:
    """Checkpoint every block of these types in place, and return their number.

    A block inside a checkpointed block is not checkpointed again. Parameter names do not change.

    Args:
        model: any module.
        block_types: class names of the blocks, such as ``("T5Block",)``.
        selective: keep some results, as ``SelectiveCheckpointPolicy`` chooses.

    Raises:
        ValueError: the model has no block of these types.
    """
    chosen = outer_blocks(model, block_types)
    non_reentrant = partial(
        wrapper.checkpoint_wrapper, checkpoint_impl=wrapper.CheckpointImpl.NO_REENTRANT
    )
    if selective:
        # The policy counts GEMMs, so every block needs one of its own in every forward pass.
        non_reentrant.keywords["context_fn"] = lambda: create_selective_checkpoint_contexts(
            SelectiveCheckpointPolicy()
        )
    wrapper.apply_activation_checkpointing(model, non_reentrant, lambda module: module in chosen)
    return len(chosen)


class SelectiveCheckpointPolicy:
    """Keep a block's attention results and its GEMMs 1, 3, 5, ...; recompute everything else."""

    def __init__(self) -> None:
        # Counted separately for the forward pass and the recomputation, which must choose alike.
        self._gemms: Counter[bool] = Counter()

    def __call__(
        self, context: Any, operator: Any, *unused: Any, **others: Any
    ) -> CheckpointPolicy:
        keep = operator in OPS_TO_SAVE
        if operator in GEMM_OPS:
            self._gemms[context.is_recompute] += 1
            keep = self._gemms[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def find_blocks(model: nn.Module, block_types: BlockTypes) -> list[nn.Module]:
    """Return the blocks inside ``model``, outer ones first, checkpointed ones included."""
    inner = [module for module in model.modules() if module is not model]
    if callable(block_types):
        return [module for module in inner if block_types(module)]
    return [module for module in inner if type(module).__name__ in block_types]


def outer_blocks(model: nn.Module, block_types: Collection[str]) -> list[nn.Module]:
    """Return the blocks that are in no other block; raise ValueError if there is none."""
    blocks = find_blocks(model, block_types)
    # Of a block's modules the first is the block itself.
    inside = {id(part) for block in blocks for part in list(block.modules())[1:]}
    if not blocks:
        raise ValueError(
            f"no block of type {', '.join(block_types) or '(none given)'} in {type(model).__name__}"
        )
    return [block for block in blocks if id(block) not in inside]


def freeze_blocks(model: nn.Module, block_types: Collection[str], chosen: Collection[int]) -> None:
    """Freeze these blocks, counted from 0; raise ValueError for an index beyond the last."""
    blocks = find_blocks(model, block_types)
    if not set(chosen) <= set(range(len(blocks))):
        raise ValueError(
            f"freeze {sorted(chosen)} counts blocks that are not there: there are {len(blocks)},"
            " from 0"
        )
    for index in chosen:
        blocks[index].requires_grad_(False)


def checkpoint_wrappers(model: nn.Module) -> dict[nn.Module, wrapper.CheckpointWrapper]:
    """Return the wrapper of every checkpointed block, by block."""
    wrappers = [m for m in model.modules() if isinstance(m, wrapper.CheckpointWrapper)]
    return {each._checkpoint_wrapped_module: each for each in wrappers}


def plain_name(name: str) -> str:
    """Remove from a name what checkpointing, FSDP1 and the compiler have inserted."""
    # Checkpointing, FSDP1 and the compiler, in this order.
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in wrappers)
