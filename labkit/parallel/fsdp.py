"""Fully sharded data parallelism: each rank keeps a part of every parameter and of its state.

    for block in model.layers:
        fully_shard(block, mesh=mesh["data"])     # a unit: gathered, used and freed together
    fully_shard(model, mesh=mesh["data"])         # the root: everything that no block holds
    optimizer = Adam(model.parameters())          # DTensors: this rank's rows of every parameter

These lines are all of FSDP; ``apply_fsdp2`` adds what some models need. Before a unit computes, its
parameters are all-gathered; afterwards the full copy is freed. In the backward pass they are
gathered again, and the unit's gradients are reduce-scattered, so that each rank receives the mean
of its part. One large unit would hold the whole model at once; many small ones send many messages.

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
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from labkit.models.protocol import CUDAInitMode, FSDPInitMode, LabModel
from labkit.parallel.buckets import apply_gradient_buckets
from labkit.parallel.checkpointing import BlockTypes, UnitRule, find_blocks
from labkit.parallel.fsdp1 import apply_fsdp1, fsdp1_units
from labkit.parallel.units import ROOT, Units, choose_block_types, fsdp_units, inner_first

Prefetch = Callable[[Sequence[nn.Module]], None]
WrapMode = Literal["none", "root", "block", "layer", "every", "size", "yours"]
Precision = Literal["fp32", "bf16", "fp16", "pure_fp16", "autocast"]
GATHER_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype in which FSDP gathers parameters and computes; float32 for other precisions."""


def apply_fsdp2(
    model: nn.Module,  # equal on all ranks, or on the meta device
    mesh: DeviceMesh,  # axes as for apply_fsdp
    *,
    block_types: BlockTypes,  # what becomes a unit
    skip: Collection[int] = (),  # blocks to leave to the root, counted from 0
    reshard_after_forward: bool = True,  # free a unit's full parameters after its forward pass
    mp_policy: MixedPrecisionPolicy | None = None,  # dtypes of compute and of reduction
    offload_policy: torch_fsdp.OffloadPolicy | None = None,  # whether shards stay on the host
    local_modules: Collection[nn.Module] = (),  # differ from rank to rank
    ignored_modules: Collection[nn.Module] = (),  # stay plain and whole, and are not averaged
) -> Units:
    """Shard a model in place, blocks first and then the root, and return its units by name."""
    outside = [*local_modules, *ignored_modules]
    units = fsdp_units(model, block_types, outside, skip)
    wrapped = [module for modules in units.values() for module in modules]
    root_parameters = set(model.parameters()) - _parameter_set([*outside, *wrapped])
    shard: Callable[..., Any] = partial(
        fully_shard,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=offload_policy or torch_fsdp.OffloadPolicy(),
        ignored_params=_parameter_set(ignored_modules) or None,
    )
    # Sharded over this rank alone: DTensors like the others, but nothing is averaged.
    for module in local_modules:
        shard(module, mesh=mesh["alone"])
    shard = partial(shard, mesh=sharding_mesh(mesh), reshard_after_forward=reshard_after_forward)
    norms: list[nn.Module] = []
    # The statistics of a batch norm stay in float32, so its parameters must too.
    if mp_policy and mp_policy.param_dtype:
        apart = {part for module in outside for part in module.modules()}
        inside = [module for module in model.modules() if module not in apart]
        norms = [module for module in inside if isinstance(module, BatchNorm)]
    for norm in norms:
        shard(norm, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    # Inner units first: an outer one takes the parameters that are left.
    for modules in inner_first(units):
        if modules[0] not in norms:
            shard(modules)
    # None keeps the root's parameters gathered, because its backward pass comes next.
    shard(model, reshard_after_forward=None if reshard_after_forward else False)
    # The root is a unit of its own only if the others leave it something to gather.
    return units | ({ROOT: [model]} if root_parameters else {})


def _parameter_set(modules: Collection[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return FSDP's axes: ``data``, preceded by ``replicate`` if the mesh has it."""
    return mesh["replicate", "data"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["data"]


def prefetch_in_order(blocks: Sequence[nn.Module]) -> None:
    """Let each block start the gather of the next one, in the order of this list."""
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def enable_prefetch(model: nn.Module, units: Units, prefetch: Prefetch = prefetch_in_order) -> None:
    """Gather each unit's parameters while the unit before it computes, in both directions."""
    # NCCL's streams overlap anyway. Gloo has none, so FSDP2 waits for an all-gather right after it
    # starts, unless told not to (no public name, up to 2.13). It still waits for reduce-scatters.
    model._set_unshard_async_op(True)  # type: ignore[operator]
    prefetch([modules[0] for name, modules in units.items() if name != ROOT])


def apply_fsdp(
    model: LabModel,  # checkpointed and compiled before
    mesh: DeviceMesh,  # data: shares parameters; alone: one rank, for local modules
    *,
    wrap: WrapMode = "block",  # what becomes a unit; none: gradients are averaged, as in DDP
    fsdp: Literal[1, 2] = 2,
    blocks: Sequence[str] = (),  # class names, by default the model's own
    skip: Collection[int] = (),
    precision: Precision = "fp32",
    offload: bool = False,
    reshard_after_forward: bool = True,
    prefetch: bool | Prefetch = False,  # a function chooses which unit each one asks for
    is_unit: UnitRule | None = None,
    min_numbers: int = 1,  # parameters that make a unit if wrap is size
    ignore: Collection[str] = (),
    **fsdp1_options: Any,
) -> tuple[nn.Module, Units]:
    """Distribute a model as a rank program asks; return what to call, and its units.

    A first axis ``replicate`` of the mesh makes hybrid sharding: each ``data`` line holds a whole
    model.
    """
    ignored = find_blocks(model, ignore)
    # Every rank holds all parameters, as with DDP.
    if wrap == "none":
        apply_gradient_buckets(model, mesh["data"], ignored)
        return model, {}
    shared: dict[str, Any] = {
        "block_types": choose_block_types(model, wrap, blocks, is_unit, min_numbers),
        "skip": skip,
        "local_modules": model.local_modules(),
        "ignored_modules": ignored,
        "reshard_after_forward": reshard_after_forward,
    }
    # Gradients are summed in float32, where many small terms do not vanish beside a large one.
    compute = GATHER_DTYPES.get(precision)
    reduce = torch.float32 if compute else None
    if fsdp == 1:
        mixed = torch_fsdp.MixedPrecision(compute, reduce) if compute else None
        shared |= {"mixed_precision": mixed, "cpu_offload": offload, "mesh": mesh}
        wrapper = apply_fsdp1(model, **shared, **fsdp1_options)
        return wrapper, fsdp1_units(wrapper)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    pinned = torch_fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    shared |= {"mp_policy": policy, "offload_policy": pinned if offload else None}
    units = apply_fsdp2(model, mesh, **shared)
    if prefetch:
        enable_prefetch(model, units, prefetch_in_order if prefetch is True else prefetch)
    return model, units


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
    """Apply FSDP or not, and move the model to the device before that, after it, or never."""
    if cuda_init is CUDAInitMode.BEFORE:
        model.to(device)
    wrap: WrapMode = "none" if fsdp_init is FSDPInitMode.NO_FSDP else "block"
    wrapped, units = apply_fsdp(model, mesh, wrap=wrap, **how)
    if cuda_init is CUDAInitMode.AFTER:
        wrapped.to(device)
    return wrapped, units
