"""The blocks of a model: find them, freeze them, and keep fewer of their activations.

A checkpointed block throws its activations away in the forward pass and computes them again in the
backward pass. It keeps its input only. That costs about a third of a step's arithmetic if every
block does it. Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016
(arXiv:1604.06174). A selectively checkpointed block keeps what is dear to compute as well:
attention, and every other matrix product (Korthikanti et al., "Reducing Activation Recomputation",
2022, arXiv:2205.05198; the choice is torchtitan's).
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
"""Which modules are blocks: those whose class has one of these names, or those for which a function
says so.
"""
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
"""What a selectively checkpointed block keeps each result of: attention, and what took
communication.
"""


def apply_activation_checkpointing(
    model: nn.Module, block_types: Collection[str], *, selective: bool = False
) -> int:
    """Checkpoint every block of these types in place: non-reentrant, activations stay on their
    device.

    Names of parameters do not change. A block inside a checkpointed block is not checkpointed
    again.

    Args:
        model: any module.
        block_types: class names of the blocks, such as ``("T5Block",)``.
        selective: keep what is dear to compute: see ``KeepDear``.

    Returns:
        How many blocks are checkpointed.

    Raises:
        ValueError: the model has no block of these types.
    """
    chosen = outer_blocks(model, block_types)
    how: dict[str, Any] = (
        {"context_fn": lambda: create_selective_checkpoint_contexts(SelectiveCheckpointPolicy())}
        if selective
        else {}
    )
    non_reentrant = partial(
        wrapper.checkpoint_wrapper, checkpoint_impl=wrapper.CheckpointImpl.NO_REENTRANT, **how
    )
    wrapper.apply_activation_checkpointing(model, non_reentrant, lambda module: module in chosen)
    return len(chosen)


class SelectiveCheckpointPolicy:
    """Choose what selective checkpointing keeps of a block: attention, and matrix products 1, 3, 5,
    ...
    """

    def __init__(self) -> None:
        self._products: Counter[bool] = Counter()

    def __call__(
        self, context: Any, operator: Any, *unused: Any, **others: Any
    ) -> CheckpointPolicy:
        """Decide whether to keep the operator's result or to recompute it."""
        keep = operator in OPS_TO_SAVE
        if operator in GEMM_OPS:
            self._products[context.is_recompute] += 1
            keep = self._products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def find_blocks(model: nn.Module, block_types: BlockTypes) -> list[nn.Module]:
    """Return the modules of ``model`` that are blocks, outer ones first, checkpointed ones
    included.
    """
    inner = [module for module in model.modules() if module is not model]
    if callable(block_types):
        return [module for module in inner if block_types(module)]
    return [module for module in inner if type(module).__name__ in block_types]


def outer_blocks(model: nn.Module, block_types: Collection[str]) -> list[nn.Module]:
    """Return the blocks that are in no other block; raise ValueError if there is none."""
    blocks = find_blocks(model, block_types)
    inside = {id(part) for block in blocks for part in list(block.modules())[1:]}
    if not blocks:
        raise ValueError(
            f"no block of type {', '.join(block_types) or '(none given)'} in {type(model).__name__}"
        )
    return [block for block in blocks if id(block) not in inside]


def freeze_blocks(model: nn.Module, block_types: Collection[str], chosen: Collection[int]) -> None:
    """Stop training the parameters of these blocks, counted from 0 in the order of the model.

    Raises:
        ValueError: an index beyond the last block.
    """
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
    wrappers = [
        module for module in model.modules() if isinstance(module, wrapper.CheckpointWrapper)
    ]
    return {each._checkpoint_wrapped_module: each for each in wrappers}


def plain_name(name: str) -> str:
    """Remove from a name what checkpointing, FSDP1 and the compiler have inserted."""
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in wrappers)
