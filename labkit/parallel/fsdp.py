"""Fully sharded data parallelism: every rank keeps a part of each parameter, gradient and optimizer
state.

The model is cut into *units*. Before a unit computes, its parameters are all-gathered; afterwards
the full copy is freed. In the backward pass they are gathered once more, and the unit's gradients
are reduce-scattered: each rank receives the mean of its part. What is a unit decides everything:
one large unit holds the whole model at once, many small ones send many small messages.

    rank 0 keeps  a0 b0 c0        all-gather b        rank 0 computes with b0 b1, then frees b1
    rank 1 keeps  a1 b1 c1       ------------->       rank 1 computes with b0 b1, then frees b0

Sources: Rajbhandari et al., "ZeRO", 2020 (arXiv:1910.02054); Zhao et al., "PyTorch FSDP", 2023
    (arXiv:2304.11277).
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
"""What FSDP rounds parameters to; ``pure_fp16`` and ``autocast`` are not its business."""


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
    """Distribute a model over the ranks of a mesh as the FSDP lab's command line says.

    Checkpointing and compiling, if any, must be applied before.

    Args:
        model: with the same shared parameters on all ranks, on this rank's device.
        mesh: axes ``data``, over which parameters are sharded, and ``alone`` of length 1, for local
            modules. With an axis ``replicate`` before them, every line of ``data`` holds all
            parameters (hybrid sharding).
        wrap: ``none`` leaves every rank all parameters and averages gradients in buckets (as DDP
            does); ``root`` makes one unit, ``block`` one a block, ``layer`` one a module that holds
            parameters itself, ``every`` one a module that holds any, ``size`` one a module with
            ``min_numbers`` of them, ``yours`` what ``is_unit`` says.
        fsdp: 1 is FullyShardedDataParallel, 2 is fully_shard.
        blocks: class names of the blocks; the model's own by default.
        skip: blocks to forget when wrapping, counted from 0 in the order of the forward pass.
        precision: bf16 and fp16 gather and compute in that type and reduce in float32; the others
            change nothing here.
        offload: keep the shards in host memory.
        reshard_after_forward: gather parameters twice a step instead of keeping them.
        prefetch: see ``gather_ahead``; FSDP2 only.
        is_unit: for ``yours``, whether a module becomes a unit.
        min_numbers: for ``size``.
        ignore: class names of modules that stay whole and whose gradients nobody averages.
        **fsdp1_options: of ``apply_fsdp1``, for ``fsdp=1`` alone.

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
        apply_gradient_buckets(model, mesh["data"], find_blocks(model, ignore))
        return model, {}
    types: BlockTypes = tuple(blocks) or model.block_types
    if wrap in ("every", "size"):
        chosen = set(
            modules_with_parameters(model) if wrap == "every" else large_modules(model, min_numbers)
        )
        types = chosen.__contains__ if chosen else ()  # a model that is too small is one unit
    elif wrap != "block":
        types = (
            is_unit
            if wrap == "yours" and is_unit
            else {"root": (), "layer": layer_types(model)}[wrap]
        )
    compute = GATHER_DTYPES.get(precision)
    reduce = torch.float32 if compute else None
    shared: dict[str, Any] = {
        "block_types": types,
        "skip": skip,
        "local_modules": model.local_modules(),
    }
    shared |= {
        "ignored_modules": find_blocks(model, ignore),
        "reshard_after_forward": reshard_after_forward,
    }
    if fsdp == 1:
        mixed = MixedPrecision(compute, reduce) if compute else None
        device = next(model.parameters()).device
        how = shared | fsdp1_options
        wrapped = apply_fsdp1(
            model, mixed_precision=mixed, cpu_offload=offload, device=device, mesh=mesh, **how
        )
        shards = {
            n: m for n, m in wrapped.named_modules() if isinstance(m, FullyShardedDataParallel)
        }
        return wrapped, {plain_name(name) or ROOT: [module] for name, module in shards.items()}
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    to_host = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else None
    units = apply_fsdp2(model, mesh, mp_policy=policy, offload_policy=to_host, **shared)
    if prefetch:
        enable_prefetch(model, units)
    return model, units


def random_block_index(seed: int, blocks: int) -> int:
    """The block, counted from 0, that a seed draws: so a notebook can ask which it is without
    having named it.
    """
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
    """Wrap a model or not, and move it to the device before, after or never: what a test of
    wrapping has to vary.

    Without FSDP it stays plain, and only gradients are averaged. FSDP2 moves what it shards to the
    mesh's device in any case. ``how`` is passed on to ``apply_fsdp``.
    """
    if cuda_init is CUDAInitMode.BEFORE:
        model.to(device)
    wrap: WrapMode = "none" if fsdp_init is FSDPInitMode.NO_FSDP else "block"
    wrapped, units = apply_fsdp(model, mesh, wrap=wrap, **how)
    if cuda_init is CUDAInitMode.AFTER:
        wrapped.to(device)
    return wrapped, units


def enable_prefetch(model: nn.Module, units: Units) -> None:
    """Let each unit's parameters arrive while the unit before it computes, in both directions.

    On a GPU FSDP2 does so by itself, since its streams run side by side. Gloo has no streams: there
    FSDP2 waits for each all-gather where it starts it, unless it is told not to. Reduce-scatters
    are waited for in any case. The units are those that ``apply_fsdp2`` gave for this model, in the
    order of the forward pass.
    """
    model._set_unshard_async_op(True)  # type: ignore[operator]  # has no public name, in 2.13 either
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
    """Shard a model with ``fully_shard``, blocks first and then the root, in place.

    Parameters become DTensors, ``Shard(0)``. Activation checkpointing, if any, must be applied
    before.

    Args:
        model: equal on all ranks, on this rank's device or on the meta device.
        mesh: as for ``apply_fsdp``; one axis ``data`` is enough without local modules.
        block_types: class names of the modules that become units; none for one unit, the root.
        skip: see ``fsdp_units``.
        reshard_after_forward: free a unit's full parameters after its forward pass and gather them
            again in the backward pass. The root's stay, since its backward pass comes next.
        mp_policy: dtypes of compute, reduction and outputs; float32 by default.
        offload_policy: CPUOffloadPolicy() keeps the shards in host memory.
        local_modules: modules that differ from rank to rank: not sharded, not averaged; DTensors on
            a mesh of one.
        ignored_modules: modules that FSDP does not touch: whole plain tensors on every rank, not
            averaged.

    Returns:
        The units by name, the root as ``root`` last if it holds parameters of its own.

    Raises:
        ValueError: the model has no block of these types.
    """
    outside = [*local_modules, *ignored_modules]
    units = fsdp_units(model, block_types, outside, skip)
    apart = [*outside, *(module for modules in units.values() for module in modules)]
    own = set(model.parameters()) - {
        parameter for module in apart for parameter in module.parameters()
    }
    precision, offload = mp_policy or MixedPrecisionPolicy(), offload_policy or OffloadPolicy()
    ignored = {parameter for module in ignored_modules for parameter in module.parameters()}
    shard = partial(fully_shard, offload_policy=offload, ignored_params=ignored or None)
    for module in local_modules:
        shard(module, mesh=mesh["alone"], mp_policy=precision)
    lines, norms = sharding_mesh(mesh), set[nn.Module]()
    if (
        precision.param_dtype
    ):  # statistics of a batch norm stay in float32, and so must it; FSDP1 does so by itself
        norms = {module for module in model.modules() if isinstance(module, BatchNorm)}
        norms -= {part for module in outside for part in module.modules()}
    own_units = {modules[0] for modules in units.values() if len(modules) == 1}
    for modules in [*([norm] for norm in norms - own_units), *inner_first(units)]:
        together = modules if len(modules) > 1 else modules[0]
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.float32) if modules[0] in norms else precision
        )
        shard(together, mesh=lines, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    shard(
        model,
        mesh=lines,
        mp_policy=precision,
        reshard_after_forward=None if reshard_after_forward else False,
    )
    return units | ({ROOT: [model]} if own else {})


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that FSDP works on: ``data``, and before it ``replicate`` where there is one."""
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
    """Wrap a model with FullyShardedDataParallel, the older API, for comparison with
    ``apply_fsdp2``.

    A block that is tied to a module outside of it stays with the root: FSDP1 cannot put two modules
    into one unit. Arguments with a name that is used there mean the same; ``reshard_after_forward``
    is FULL_SHARD, else SHARD_GRAD_OP. With ``use_checkpointing`` blocks are checkpointed inside
    their units; without ``use_wrap_policy`` the whole model is one unit. By default the mesh is all
    ranks, and the device of this rank the CPU. The last four are FSDP1's own:

        backward_prefetch: gather the next unit before this one's gradients are computed (pre),
            after (post), or not.
        forward_prefetch: gather the next unit before this one computes, in the order of the first
            step.
        limit_all_gathers: let the CPU run ahead by two gathers at most; it shows on a GPU alone.
        use_orig_params: show parameters by their names; else one flat parameter a unit.

    Returns:
        The wrapped model.

    Raises:
        ValueError: the model has no block of these types; offload without a GPU, for which FSDP1
            pins memory.
    """
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
    single = {modules[0] for modules in units.values() if len(modules) == 1}
    full, kept = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
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
