"""FSDP1: FullyShardedDataParallel, the older API, which wraps a model instead of changing it.

It is here to be compared with ``fully_shard``. Source: Zhao et al., 2023 (arXiv:2304.11277).
"""

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy

from labkit.parallel.checkpointing import BlockTypes, apply_activation_checkpointing, plain_name
from labkit.parallel.units import ROOT, Units, fsdp_units


def apply_fsdp1(
    model: nn.Module,
    *,
    block_types: BlockTypes,
    use_checkpointing: bool = False,  # checkpoint the blocks inside their units
    use_wrap_policy: bool = True,  # make units of blocks; otherwise the model is one unit
    skip: Collection[int] = (),
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    local_modules: Collection[nn.Module] = (),
    ignored_modules: Collection[nn.Module] = (),
    mesh: DeviceMesh | None = None,  # by default one axis of all ranks
    # Gather the next unit before this one's gradients are computed, after, or when it is needed.
    backward_prefetch: Literal["pre", "post", "none"] = "pre",
    use_orig_params: bool = True,  # keep the parameters' names; otherwise each unit is flat
    **options: Any,  # FullyShardedDataParallel's own: forward_prefetch, mixed_precision, ...
) -> FullyShardedDataParallel:
    """Wrap a model with FullyShardedDataParallel; a first mesh axis ``replicate`` means hybrid."""
    if cpu_offload and not torch.cuda.is_available():
        raise ValueError("FSDP1 pins the memory for offload, which needs a GPU: use fsdp 2")
    if use_checkpointing:
        assert not callable(block_types)
        apply_activation_checkpointing(model, block_types)
    apart = [*local_modules, *ignored_modules]
    units = fsdp_units(model, block_types, apart, skip) if use_wrap_policy else {}
    # A tied block stays with the root: FSDP1 cannot put two modules into one unit.
    single = {modules[0] for modules in units.values() if len(modules) == 1}
    # Each unit is freed after its forward pass, or kept until its backward pass.
    strategy = fsdp.ShardingStrategy
    freed, kept = strategy.FULL_SHARD, strategy.SHARD_GRAD_OP
    group: Any = mesh["data"].get_group() if mesh else None
    if mesh and "replicate" in (mesh.mesh_dim_names or ()):
        freed, kept = strategy.HYBRID_SHARD, strategy._HYBRID_SHARD_ZERO2
        group = (group, mesh["replicate"].get_group())

    def wrap_rule(module: nn.Module) -> bool | dict[str, Any]:
        if mesh and module in local_modules:
            # Sharded over this rank alone, which averages nothing.
            alone = mesh["alone"].get_group()
            return {"process_group": alone, "sharding_strategy": strategy.FULL_SHARD}
        return module in single

    moments = fsdp.BackwardPrefetch
    prefetch = {"pre": moments.BACKWARD_PRE, "post": moments.BACKWARD_POST}.get(backward_prefetch)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=freed if reshard_after_forward else kept,
        process_group=group,
        auto_wrap_policy=CustomPolicy(wrap_rule) if single or local_modules else None,
        ignored_modules=ignored_modules or None,
        backward_prefetch=prefetch,
        cpu_offload=fsdp.CPUOffload(offload_params=True) if cpu_offload else None,
        device_id=next(model.parameters()).device,
        use_orig_params=use_orig_params,
        **options,
    )


def fsdp1_units(wrapper: nn.Module) -> Units:
    """Return the units of a wrapped model by name, each a wrapper."""
    modules = wrapper.named_modules()
    found = [(name, each) for name, each in modules if isinstance(each, FullyShardedDataParallel)]
    return {plain_name(name) or ROOT: [module] for name, module in found}
