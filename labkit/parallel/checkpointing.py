"""Find a model's blocks, and recompute their activations.

A checkpointed block keeps only its input in the forward pass, and recomputes its activations in the
backward pass. If every block does it, a step computes about a third more (Chen et al., "Training
Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174). Selective checkpointing also keeps
what is expensive to recompute, attention and every other GEMM, as torchtitan does (Korthikanti et
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

UnitRule = Callable[[nn.Module], bool]
BlockTypes = Collection[str] | UnitRule
"""Which modules are blocks: class names, or a function that decides for each module."""
GEMM_OPS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_NAMES_TO_SAVE = (
    "scaled_dot_product_flash_attention",
    "scaled_dot_product_flash_attention_for_cpu",
    "scaled_dot_product_efficient_attention",
    "scaled_dot_product_cudnn_attention",
    "reduce_scatter_tensor",
)
OPS_TO_SAVE = tuple(torch_private.get(f"{name}.default") for name in _NAMES_TO_SAVE)
"""Results that selective checkpointing always keeps: of attention and of communication."""


def apply_activation_checkpointing(
    model: nn.Module, block_types: Collection[str], *, selective: bool = False
) -> int:
    """Checkpoint the outermost blocks of these classes in place, and return how many there are.

    ``selective`` keeps some results, as ``SelectiveCheckpointPolicy`` chooses.
    """
    chosen = outer_blocks(model, block_types)
    wrap = partial(wrapper.checkpoint_wrapper, checkpoint_impl=wrapper.CheckpointImpl.NO_REENTRANT)
    if selective:
        # The policy counts GEMMs, so every block needs one of its own in every forward pass.
        make_contexts = create_selective_checkpoint_contexts
        wrap = partial(wrap, context_fn=lambda: make_contexts(SelectiveCheckpointPolicy()))
    wrapper.apply_activation_checkpointing(model, wrap, lambda module: module in chosen)
    return len(chosen)


class SelectiveCheckpointPolicy:
    """Keep a block's attention results and its GEMMs 1, 3, 5, ...; recompute everything else."""

    def __init__(self) -> None:
        # Counted separately for the forward pass and the recomputation, which must choose alike.
        self._gemms: Counter[bool] = Counter()

    def __call__(self, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
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
    if not blocks:
        raise missing_blocks_error(model, block_types)
    # The first of a block's modules is the block itself.
    inside = {part for block in blocks for part in list(block.modules())[1:]}
    return [block for block in blocks if block not in inside]


def missing_blocks_error(
    model: nn.Module, block_types: BlockTypes, apart: Collection[nn.Module] = ()
) -> ValueError:
    """Make the error for a model without blocks, or with only these, which others have taken."""
    kind = type(model).__name__
    if apart:
        kinds = ", ".join(sorted({type(block).__name__ for block in apart}))
        return ValueError(f"all blocks of {kind} ({kinds}) are ignored or local: wrap others")
    if callable(block_types):
        return ValueError(f"is_unit chose no module of {kind} that has parameters: choose one")
    has = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
    return ValueError(f"no block of type {', '.join(sorted(block_types))} in {kind}: it has {has}")


def checkpoint_wrappers(model: nn.Module) -> dict[nn.Module, wrapper.CheckpointWrapper]:
    """Return the wrapper of every checkpointed block, by block."""
    wrappers = [m for m in model.modules() if isinstance(m, wrapper.CheckpointWrapper)]
    return {each._checkpoint_wrapped_module: each for each in wrappers}


def plain_name(name: str) -> str:
    """Remove from a name what checkpointing, FSDP1 and the compiler have inserted."""
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in wrappers)
