"""Tensor parallelism: the ranks along the mesh axis ``tp`` share each GEMM.

The two linear layers of an MLP make a pair. The first is cut by columns, so each rank computes some
of the inner features and can apply ReLU to them alone. The second is cut by rows, so the ranks'
results only need to be added, with one all-reduce per MLP:

                      in_proj (columns)       out_proj (rows)
    rank 0    x   ->   inner features 0   ->   term of y   ->   y = sum of the terms
    rank 1    x   ->   inner features 1   ->   term of y   ->   y = sum of the terms

With sequence parallelism each rank keeps only its part of the sequence between the pairs. The sum
is reduce-scattered over the sequence, and all-gathered before the next pair: the same bytes, but
the ranks share the activations and the work between the pairs.

Shapes: N samples, S sequence length, D width. Sources: Shoeybi et al., "Megatron-LM", 2019
(arXiv:1909.08053); Korthikanti et al., 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.func import functional_call

from labkit.models.blocks import BlockStack
from labkit.models.chain import LinearChain
from labkit.models.mlp import MULTIPLIERS, MLPStack
from labkit.theory import sizes

Plan = dict[str, parallel.ParallelStyle]
"""How layers are cut, by name; names may hold wildcards."""
SEQUENCE_LAYOUT = Shard(1)
CHAIN_PAIRS: Plan = {"fc[13]": parallel.ColwiseParallel(), "fc[24]": parallel.RowwiseParallel()}
"""The two pairs of a LinearChain."""


def apply_tensor_parallel(
    model: MLPStack,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,  # cut the sequence between the MLPs (evenly, before torch 2.13)
    plan: Mapping[str, parallel.ParallelStyle] | None = None,  # by default pairs of layers
) -> MLPStack:
    """Share a stack's matrices over the axis ``tp`` of a mesh (data, tp), in place.

    Ranks of one ``tp`` line take and return the same plain tensors, [N, S, D]. Parameters become
    DTensors, unless ``tp`` has one rank.
    """
    # Both axes, because FSDP cuts each rank's share of a matrix once more.
    _check_widths(mesh, ("data", "tp"), *(multiplier * model.dim for multiplier in MULTIPLIERS))
    # Sliced once: inductor cannot compile two slices of a mesh (pytorch/pytorch#179080).
    line = mesh["tp"]
    if line.size() == 1:
        return model
    parallel.parallelize_module(model, line, dict(plan or mlp_stack_plan(model, sequence_parallel)))
    if sequence_parallel:
        # The stack takes and returns [N, S, D]; between its MLPs a rank has [N, S / ranks, D].
        whole, cut = Replicate(), SEQUENCE_LAYOUT
        enter = parallel.PrepareModuleInput(input_layouts=whole, desired_input_layouts=cut)
        leave = parallel.PrepareModuleOutput(output_layouts=cut, desired_output_layouts=whole)
        parallel.parallelize_module(model, line, enter)
        parallel.parallelize_module(model, line, leave)
    return model


def apply_block_tensor_parallel(
    model: BlockStack,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, parallel.ParallelStyle] | None = None,  # by default heads and inner features
) -> BlockStack:
    """Share a transformer's matrices over the axis ``tp`` of a mesh (data, tp), in place.

    Ranks of one ``tp`` line take and return the same plain tensors, [N, S, D].
    """
    line = mesh["tp"]
    if line.size() > 1:
        parallel.parallelize_module(model, line, dict(plan or transformer_plan()))
    return model


def apply_plain_tensor_parallel(model: LinearChain, mesh: DeviceMesh) -> PlainParameters:
    """Share a chain's matrices over ``tp`` of a mesh (data, tp), with plain parameters for DDP.

    The result, to call and to train, takes and returns plain tensors [..., D].
    """
    _check_widths(mesh, ("tp",), model.fc1.out_features, model.fc3.out_features)
    line = mesh["tp"]
    return PlainParameters(parallel.parallelize_module(model, line, CHAIN_PAIRS), line)


class PlainParameters(nn.Module):
    """A tensor-parallel model on one mesh whose parameters are plain tensors, as DDP needs them.

    Each forward pass makes DTensors of them. With DTensor parameters ``replicate`` would leave
    ``parameters()`` empty after the first step, and the second step of a compiled model would fail
    (pytorch/pytorch#152712).
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
        """Run the model."""
        parameters = self.as_dtensors(dict(self.model.named_parameters()))
        return functional_call(self.model, parameters, inputs)

    def as_dtensors(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards of parameters or gradients as DTensors, by parameter name."""
        return {
            name: DTensor.from_local(shard, self.mesh, self.placements[name], run_check=False)
            for name, shard in shards.items()
        }


def mlp_stack_plan(model: MLPStack, sequence_parallel: bool) -> Plan:
    """Plan every MLP of a stack as a pair."""
    # By default a pair's input is whole on every rank, and its result is all-reduced.
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    if sequence_parallel:
        columns = parallel.ColwiseParallel(input_layouts=SEQUENCE_LAYOUT)
        # A DTensor between the pairs, because it knows the length of an unevenly cut sequence.
        rows = parallel.RowwiseParallel(output_layouts=SEQUENCE_LAYOUT, use_local_output=False)
    plan: Plan = {"layers.*.in_proj": columns, "layers.*.out_proj": rows}
    if sequence_parallel and model.norm is not None:
        plan["norm"] = parallel.SequenceParallel(sequence_dim=1)
    return plan


def transformer_plan() -> Plan:
    """Plan every block of a BlockStack: heads and inner features by columns, and back by rows."""
    columns = {
        f"blocks.*.{name}": parallel.ColwiseParallel()
        for name in ("query", "key", "value", "gate", "up")
    }
    return columns | {f"blocks.*.{name}": parallel.RowwiseParallel() for name in ("out", "down")}


def _check_widths(mesh: DeviceMesh, sharing: Sequence[str], *widths: int) -> None:
    names = mesh.mesh_dim_names or ()
    if not {"data", "tp"} <= set(names):
        has = ", ".join(names) or "without names"
        raise ValueError(f"the mesh has axes {has}: it needs data and tp")
    ranks = math.prod(mesh[axis].size() for axis in sharing)
    for width in widths:
        sizes.even_share(width, ranks, "the inner width")
