r"""Tensor parallelism: ranks share each matrix product, alone or together with data parallelism on a second mesh axis.

The two linear layers of an MLP make a pair. The first is cut by columns, so that each rank computes some of the inner
features and applies ReLU to them alone; the second is cut by rows, so that the ranks' results only need to be added.

                      in_proj (columns)       out_proj (rows)
    rank 0    x   ->   inner features 0   ->   part of y   \
    rank 1    x   ->   inner features 1   ->   part of y   -+->  y = sum of the parts: one all-reduce an MLP

With sequence parallelism each rank keeps only its places of the sequence between the pairs: the sum is
reduce-scattered over the sequence, which is all-gathered before the next pair. The bytes sent are the same; activations
between the pairs, and what is computed there, are shared.

Shapes: N samples, S places of a sequence, D width. Sources: Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053);
Korthikanti et al., "Reducing Activation Recomputation", 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call

from labkit.models.chain import LinearChain
from labkit.models.mlp import MULTIPLIERS, MLPStack
from labkit.parallel.checkpointing import apply_activation_checkpointing
from labkit.parallel.ddp import apply_replicate

SEQUENCE = Shard(1)
CHAIN_PAIRS: dict[str, ParallelStyle] = {
    "fc1": ColwiseParallel(), "fc2": RowwiseParallel(), "fc3": ColwiseParallel(), "fc4": RowwiseParallel(),
}  # fmt: skip
"""The two pairs of a LinearChain."""


def apply_tensor_parallel(
    model: MLPStack,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    use_checkpointing: bool = False,
    reshard_after_forward: bool = True,
) -> MLPStack:
    """Share a stack's matrices over the axis ``tp``, then shard what each rank has over ``dp``, in place.

    Ranks of one ``tp`` line take the same samples and return the same result; ranks along ``dp`` take their own. An
    axis of length 1 does nothing: what is left is FSDP or tensor parallelism alone.

    Args:
        model: equal on all ranks, on this rank's device.
        mesh: with axes named ``dp`` and ``tp``.
        sequence_parallel: cut the sequence, dim 1, between the MLPs and in the norm; evenly, or with torch 2.12 or
            later also unevenly.
        use_checkpointing: recompute each MLP in the backward pass, its communication over ``tp`` included.
        reshard_after_forward: free an MLP's parameters gathered over ``dp`` after its forward pass.

    Returns:
        ``model``; it takes and returns plain tensors [N, S, D]. Parameters are DTensors, plain on one rank.

    Raises:
        ValueError: the mesh lacks an axis; the ranks cannot share an inner width evenly.
    """
    _check(mesh, ("dp", "tp"), *(multiplier * model.dim for multiplier in MULTIPLIERS))
    line = mesh["tp"]  # taken once: inductor cannot compile a graph with two slices of a mesh (pytorch/pytorch#179080)
    if line.size() > 1:
        parallelize_module(model, line, _sequence_plan(model) if sequence_parallel else _plan(model))
        if sequence_parallel:
            parallelize_module(model, line, _cut_the_input())
            parallelize_module(model, line, _join_the_output())
    if use_checkpointing:
        apply_activation_checkpointing(model, model.block_types)
    if mesh["dp"].size() > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)
    return model


def apply_replicated_tensor_parallel(model: LinearChain, mesh: DeviceMesh) -> PlainParameters:
    """Share a chain's matrices over the axis ``tp``, in pairs, and average their gradients over ``dp`` as DDP does.

    Args:
        model: equal on all ranks, on this rank's device. It is changed.
        mesh: with axes named ``dp`` and ``tp``.

    Returns:
        What to call and to train: it takes and returns plain tensors [..., D].

    Raises:
        ValueError: the mesh lacks an axis; the ranks of ``tp`` cannot share the width evenly.
    """
    _check(mesh, ("tp",), model.fc1.out_features, model.fc3.out_features)
    line = mesh["tp"]
    plain = PlainParameters(parallelize_module(model, line, CHAIN_PAIRS), line)
    apply_replicate(plain, mesh["dp"])
    return plain


class PlainParameters(nn.Module):
    """A tensor-parallel model whose parameters are plain tensors, this rank's shards, as DDP needs them.

    Each forward pass makes DTensors of them again. torch's own way, ``replicate(model, device_mesh=mesh["dp"])`` on a
    model with DTensor parameters, leaves the DTensors of the first step where the parameters were: ``parameters()`` is
    empty from then on (pytorch/pytorch#152712), and the second step of a compiled model fails.

    Args:
        model: with DTensor parameters on one mesh, cut evenly. It is changed: its parameters become plain.
        mesh: that mesh.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh):
        super().__init__()
        self.model, self.mesh = model, mesh
        self.placements: dict[str, Any] = {}
        for name, parameter in list(model.named_parameters()):
            assert isinstance(parameter, DTensor), name
            self.placements[name] = parameter.placements
            module, _, own_name = name.rpartition(".")
            shard = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
            setattr(model.get_submodule(module), own_name, shard)

    def forward(self, *inputs: Tensor) -> Any:
        """The model's result."""
        return functional_call(self.model, self.as_dtensors(dict(self.model.named_parameters())), inputs)

    def as_dtensors(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's shards of parameters or gradients, by the names of the model's parameters, as DTensors."""
        return {
            name: DTensor.from_local(shard, self.mesh, self.placements[name], run_check=False)
            for name, shard in shards.items()
        }


def _plan(model: MLPStack) -> dict[str, ParallelStyle]:
    """Every MLP as a pair; what lies between is computed by every rank."""
    plan: dict[str, ParallelStyle] = {}
    for index in range(len(model.layers)):
        plan |= {f"layers.{index}.in_proj": ColwiseParallel(), f"layers.{index}.out_proj": RowwiseParallel()}
    return plan


def _sequence_plan(model: MLPStack) -> dict[str, ParallelStyle]:
    """The same with the sequence cut between the pairs, as DTensors, which know how long an uneven sequence is."""
    plan: dict[str, ParallelStyle] = {}
    for index in range(len(model.layers)):
        plan[f"layers.{index}.in_proj"] = ColwiseParallel(input_layouts=SEQUENCE)
        plan[f"layers.{index}.out_proj"] = RowwiseParallel(output_layouts=SEQUENCE, use_local_output=False)
    if model.norm is not None:
        plan["norm"] = SequenceParallel(sequence_dim=1)
    return plan


def _cut_the_input() -> ParallelStyle:
    return PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=SEQUENCE)


def _join_the_output() -> ParallelStyle:
    return PrepareModuleOutput(output_layouts=SEQUENCE, desired_output_layouts=Replicate())


def _check(mesh: DeviceMesh, sharing: Sequence[str], *widths: int) -> None:
    """Refuse a mesh without the two axes, and inner widths that the ranks of the sharing ones cannot share."""
    names = mesh.mesh_dim_names or ()
    if not {"dp", "tp"} <= set(names):
        raise ValueError(f"the mesh has axes {', '.join(names) or 'without names'}: it needs dp and tp")
    ranks = math.prod(mesh[axis].size() for axis in sharing)
    for width in widths:
        if width % ranks:
            raise ValueError(f"{ranks} ranks cannot share the inner width {width}: {width} % {ranks} = {width % ranks}")
