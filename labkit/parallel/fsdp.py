"""Fully sharded data parallelism: each rank keeps a part of every parameter and of its state.

The model is cut into *units*. Before a unit computes, its parameters are all-gathered; afterwards
the full copy is freed. In the backward pass they are gathered again, and the unit's gradients are
reduce-scattered, so that each rank receives the mean of its part. The choice of units decides
memory and speed: one large unit holds the whole model at once, many small ones send many messages.

    rank 0 keeps  a0 b0 c0        all-gather b        rank 0 computes with b0 b1, then frees b1
    rank 1 keeps  a1 b1 c1       ------------->       rank 1 computes with b0 b1, then frees b0

Sources: Rajbhandari et al., "ZeRO", 2020 (arXiv:1910.02054);
Zhao et al., "PyTorch FSDP", 2023 (arXiv:2304.11277).
"""

import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from labkit.models.protocol import CUDAInitMode, FSDPInitMode, LabModel
from labkit.parallel.buckets import apply_gradient_buckets
from labkit.parallel.checkpointing import (
    BlockTypes,
    apply_activation_checkpointing,
    find_blocks,
    plain_name,
)
from labkit.parallel.units import (
    ROOT,
    Units,
    fsdp_units,
    inner_first,
    large_modules,
    layer_types,
    modules_with_parameters,
)

WrapMode = Literal["none", "root", "block", "layer", "every", "size", "yours"]
Precision = Literal["fp32", "bf16", "fp16", "pure_fp16", "autocast"]
GATHER_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype in which FSDP gathers parameters and computes; float32 for other precisions."""


def apply_fsdp(
    model: LabModel,
    mesh: DeviceMesh,
    *,
    wrap: WrapMode = "block",
    fsdp: Literal[1, 2] = 2,
    blocks: Sequence[str] = (),
    skip: Collection[int] = (),
    precision: Precision = "fp32",
    offload: bool = False,
    reshard_after_forward: bool = True,
    prefetch: bool = False,
    is_unit: Callable[[nn.Module], bool] | None = None,
    min_numbers: int = 1,
    ignore: Collection[str] = (),
    **fsdp1_options: Any,
) -> tuple[nn.Module, Units]:
    """Distribute a model over a mesh, with the options that ``launch.fsdp_matrix`` explains.

    Apply checkpointing and compiling before. The model has the same shared parameters on all ranks,
    and is on this rank's device. The mesh has axes ``data``, over which parameters are sharded, and
    ``alone`` of length 1, for local modules. A first axis ``replicate`` makes hybrid sharding: each
    ``data`` line holds a whole model.

    ``wrap`` says what becomes a unit. ``none`` replicates all parameters and averages gradients in
    buckets, as DDP does; ``root`` makes one unit; ``block`` one per block; ``layer`` one per module
    that owns parameters; ``every`` one per module that contains any; ``size`` one per module with
    ``min_numbers`` of them; ``yours`` asks ``is_unit``. ``skip`` leaves out blocks, counted from 0
    in the order of the forward pass.

    Returns:
        The model to call, and its units by name (see ``apply_fsdp2``).

    Raises:
        ValueError: block types that the model does not have; bf16 or offload with nothing wrapped.
    """
    if wrap == "none":
        if precision in GATHER_DTYPES or offload:
            raise ValueError(
                f"wrap none has no unit that could gather in {precision} or be offloaded: use wrap"
                " root or block"
            )
        # Whole parameters on every rank, as with DDP.
        apply_gradient_buckets(model, mesh["data"], find_blocks(model, ignore))
        return model, {}
    compute = GATHER_DTYPES.get(precision)
    reduce = torch.float32 if compute else None
    shared: dict[str, Any] = {
        "block_types": _unit_types(model, wrap, blocks, is_unit, min_numbers),
        "skip": skip,
        "local_modules": model.local_modules(),
        "ignored_modules": find_blocks(model, ignore),
        "reshard_after_forward": reshard_after_forward,
    }
    if fsdp == 1:
        # FSDP1 returns a wrapper, which holds the units; FSDP2 changes the model in place.
        shared |= fsdp1_options
        mixed = MixedPrecision(compute, reduce) if compute else None
        device = next(model.parameters()).device
        wrapped = apply_fsdp1(
            model, mixed_precision=mixed, cpu_offload=offload, device=device, mesh=mesh, **shared
        )
        found: Units = {}
        for name, module in wrapped.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                found[plain_name(name) or ROOT] = [module]
        return wrapped, found
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    to_host = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else None
    units = apply_fsdp2(model, mesh, mp_policy=policy, offload_policy=to_host, **shared)
    if prefetch:
        enable_prefetch(model, units)
    return model, units


def _unit_types(
    model: LabModel,
    wrap: WrapMode,
    blocks: Sequence[str],
    is_unit: Callable[[nn.Module], bool] | None,
    min_numbers: int,
) -> BlockTypes:
    if wrap == "block":
        return tuple(blocks) or model.block_types
    if wrap == "layer":
        return layer_types(model)
    if wrap == "yours":
        assert is_unit, "wrap yours needs is_unit"
        return is_unit
    chosen: set[nn.Module] = set()
    if wrap == "every":
        chosen.update(modules_with_parameters(model))
    elif wrap == "size":
        chosen.update(large_modules(model, min_numbers))
    # With nothing chosen, as for root or a model that is too small, the model is one unit.
    return chosen.__contains__ if chosen else ()


def random_block_index(seed: int, blocks: int) -> int:
    """Draw a block, counted from 0, so that a notebook can ask for it without naming it."""
    return random.Random(seed).randrange(blocks)


def init_model(
    model: LabModel,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    fsdp_init: FSDPInitMode,
    cuda_init: CUDAInitMode,
    **how: Any,
) -> tuple[nn.Module, Units]:
    """Wrap a model or not, and move it to the device before, after or never, for tests of wrapping.

    FSDP2 moves what it shards to the mesh's device in any case. ``how`` goes to ``apply_fsdp``.
    """
    if cuda_init is CUDAInitMode.BEFORE:
        model.to(device)
    wrap: WrapMode = "none" if fsdp_init is FSDPInitMode.NO_FSDP else "block"
    wrapped, units = apply_fsdp(model, mesh, wrap=wrap, **how)
    if cuda_init is CUDAInitMode.AFTER:
        wrapped.to(device)
    return wrapped, units


def enable_prefetch(model: nn.Module, units: Units) -> None:
    """Gather each unit's parameters while the unit before it computes, in both directions.

    ``units`` are those that ``apply_fsdp2`` returned for this model.
    """
    # NCCL's streams overlap anyway. Gloo has none, so FSDP2 waits for an all-gather right after it
    # starts, unless told not to (no public name, up to 2.13). It still waits for reduce-scatters.
    model._set_unshard_async_op(True)  # type: ignore[operator]
    blocks = [modules[0] for name, modules in units.items() if name != ROOT]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def apply_fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    block_types: BlockTypes,
    skip: Collection[int] = (),
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    local_modules: Collection[nn.Module] = (),
    ignored_modules: Collection[nn.Module] = (),
) -> Units:
    """Shard a model in place with ``fully_shard``, blocks first and then the root.

    Parameters become DTensors, ``Shard(0)``. Apply activation checkpointing before.

    Args:
        model: equal on all ranks, on this rank's device or on the meta device.
        mesh: as for ``apply_fsdp``; one axis ``data`` is enough without local modules.
        block_types: class names of the modules that become units; none for one unit, the root.
        skip: see ``fsdp_units``.
        reshard_after_forward: free a unit's full parameters after its forward pass and gather them
            again in the backward pass.
        mp_policy: dtypes of compute, reduction and outputs; float32 by default.
        offload_policy: CPUOffloadPolicy() keeps the shards in host memory.
        local_modules: modules that differ from rank to rank: DTensors on a mesh of one rank, with
            gradients that are not averaged.
        ignored_modules: modules that FSDP does not touch: plain tensors on every rank, with
            gradients that are not averaged.

    Returns:
        The units by name; the root, if it has parameters of its own, last as ``root``.

    Raises:
        ValueError: the model has no block of these types.
    """
    outside = [*local_modules, *ignored_modules]
    units = fsdp_units(model, block_types, outside, skip)
    wrapped = [module for modules in units.values() for module in modules]
    of_root = set(model.parameters()) - _parameters_of([*outside, *wrapped])
    precision = mp_policy or MixedPrecisionPolicy()
    shard = partial(
        fully_shard,
        offload_policy=offload_policy or OffloadPolicy(),
        ignored_params=_parameters_of(ignored_modules) or None,
    )
    # Sharded over one rank: DTensors like the others, but nothing is averaged.
    for module in local_modules:
        shard(module, mesh=mesh["alone"], mp_policy=precision)
    norms = set[nn.Module]()
    # The statistics of a batch norm stay in float32, so its parameters must too. FSDP1 sees to this
    # by itself.
    if precision.param_dtype:
        norms = {module for module in model.modules() if isinstance(module, BatchNorm)}
        norms -= {part for module in outside for part in module.modules()}
    # A batch norm that is a unit already needs no second one; inner units come before outer ones.
    own_units = {modules[0] for modules in units.values() if len(modules) == 1}
    shard = partial(shard, mesh=sharding_mesh(mesh))
    for modules in [*([norm] for norm in norms - own_units), *inner_first(units)]:
        together = modules if len(modules) > 1 else modules[0]
        policy = precision
        if modules[0] in norms:
            policy = MixedPrecisionPolicy(param_dtype=torch.float32)
        shard(together, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # None keeps the root's parameters gathered, because its backward pass comes next.
    reshard_root = None if reshard_after_forward else False
    shard(model, mp_policy=precision, reshard_after_forward=reshard_root)
    return units | ({ROOT: [model]} if of_root else {})


def _parameters_of(modules: Collection[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return FSDP's axes: ``data``, preceded by ``replicate`` if the mesh has it."""
    return mesh["replicate", "data"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["data"]


def apply_fsdp1(
    model: nn.Module,
    *,
    block_types: BlockTypes,
    use_checkpointing: bool = False,
    use_wrap_policy: bool = True,
    skip: Collection[int] = (),
    reshard_after_forward: bool = True,
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: bool = False,
    local_modules: Collection[nn.Module] = (),
    ignored_modules: Collection[nn.Module] = (),
    mesh: DeviceMesh | None = None,
    device: torch.device | None = None,
    backward_prefetch: Literal["pre", "post", "none"] = "pre",
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    use_orig_params: bool = True,
) -> FullyShardedDataParallel:
    """Wrap a model with FullyShardedDataParallel, the older API, to compare with ``apply_fsdp2``.

    Other names mean the same as there. A block that is tied to a module outside of it
    stays with the root, because FSDP1 cannot put two modules into one unit.

    Options that ``apply_fsdp2`` does not have:

        use_checkpointing: checkpoint the blocks inside their units.
        use_wrap_policy: make units of blocks; otherwise the whole model is one unit.
        reshard_after_forward: FULL_SHARD, otherwise SHARD_GRAD_OP.
        mesh: by default all ranks.
        device: of this rank; by default the CPU.
        backward_prefetch: gather the next unit before this one's gradients are computed (pre),
            after (post), or not.
        forward_prefetch: gather the next unit before this one computes, as in the first step.
        limit_all_gathers: let the CPU run ahead of a GPU by at most two gathers.
        use_orig_params: keep the parameters' names; otherwise each unit is one flat parameter.

    Raises:
        ValueError: the model has no block of these types; offload without a GPU.
    """
    # FSDP1 pins offloaded memory, which torch can only do with a GPU.
    if cpu_offload and not torch.cuda.is_available():
        raise ValueError(
            "FSDP1 pins the memory that it offloads to, which needs a GPU: use fsdp 2, or no"
            " offload"
        )
    if use_checkpointing:
        assert not callable(block_types)
        apply_activation_checkpointing(model, block_types)
    apart = [*local_modules, *ignored_modules]
    units = fsdp_units(model, block_types, apart, skip) if use_wrap_policy else {}
    # Several modules in a unit are tied to each other.
    single = {modules[0] for modules in units.values() if len(modules) == 1}
    full, kept = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
    # A policy may return arguments of the wrapper: local modules are sharded over this rank alone.
    to_itself: dict[str, Any] = {}
    if local_modules and mesh:
        to_itself = {"process_group": mesh["alone"].get_group(), "sharding_strategy": full}
    group: Any = mesh["data"].get_group() if mesh else None
    if mesh and "replicate" in (mesh.mesh_dim_names or ()):
        group = (group, mesh["replicate"].get_group())
        full, kept = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2

    def wrap_rule(module: nn.Module) -> bool | dict[str, Any]:
        return to_itself if module in local_modules else module in single

    prefetch = {
        "pre": BackwardPrefetch.BACKWARD_PRE,
        "post": BackwardPrefetch.BACKWARD_POST,
        "none": None,
    }
    return FullyShardedDataParallel(
        model,
        sharding_strategy=full if reshard_after_forward else kept,
        process_group=group,
        auto_wrap_policy=CustomPolicy(wrap_rule) if single or local_modules else None,
        ignored_modules=ignored_modules or None,
        backward_prefetch=prefetch[backward_prefetch],
        forward_prefetch=forward_prefetch,
        limit_all_gathers=limit_all_gathers,
        mixed_precision=mixed_precision,
        cpu_offload=CPUOffload(offload_params=True) if cpu_offload else None,
        device_id=device or torch.device("cpu"),
        use_orig_params=use_orig_params,
    )
