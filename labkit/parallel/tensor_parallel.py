r"""Tensor parallelism: the ranks along the mesh axis ``tp`` share each GEMM.

The two linear layers of an MLP make a pair. The first is cut by columns, so each rank computes some
of the inner features and can apply ReLU to them alone. The second is cut by rows, so the ranks'
results only need to be added, with one all-reduce per MLP:

                      in_proj (columns)       out_proj (rows)
    rank 0    x   ->   inner features 0   ->   term of y   \
    rank 1    x   ->   inner features 1   ->   term of y   -+->  y = sum of the terms

With sequence parallelism each rank keeps only its part of the sequence between the pairs. The sum
is reduce-scattered over the sequence, and all-gathered before the next pair. This sends the same
bytes, but the ranks share the activations between the pairs, and the work there.

Shapes: N samples, S sequence length, D width. Sources: Shoeybi et al., "Megatron-LM", 2019
(arXiv:1909.08053); Korthikanti et al., "Reducing Activation Recomputation", 2022
(arXiv:2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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

SEQUENCE_LAYOUT = Shard(1)
CHAIN_PAIRS: dict[str, ParallelStyle] = {"fc[13]": ColwiseParallel(), "fc[24]": RowwiseParallel()}
"""The two pairs of a LinearChain."""


def apply_tensor_parallel(
    model: MLPStack,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    plan: Mapping[str, ParallelStyle] | None = None,
) -> MLPStack:
    """Share a stack's matrices over the axis ``tp``, in place.

    Ranks of one ``tp`` line take the same samples and return the same result. Apply checkpointing,
    compiling and FSDP over ``data`` afterwards.

    Args:
        model: equal on all ranks, on this rank's device.
        mesh: with axes named ``data`` and ``tp``.
        sequence_parallel: cut the sequence, dim 1, between the MLPs and in the norm. Before torch
            2.13 the cut must be even.
        plan: parallel styles by module name; by default pairs of column- and row-parallel layers.

    Returns:
        ``model``, which takes and returns plain tensors [N, S, D]. Its parameters are DTensors, or
        plain if ``tp`` has one rank.

    Raises:
        ValueError: the mesh lacks an axis; its ranks cannot share an inner width evenly.
    """
    # Both axes, because FSDP cuts each rank's share of a matrix once more.
    _check_widths(mesh, ("data", "tp"), *(multiplier * model.dim for multiplier in MULTIPLIERS))
    # Sliced once: inductor cannot compile two slices of a mesh (pytorch/pytorch#179080).
    line = mesh["tp"]
    if line.size() == 1:
        return model
    parallelize_module(model, line, dict(plan or mlp_stack_plan(model, sequence_parallel)))
    if sequence_parallel:
        # The stack takes and returns [N, S, D]; between its MLPs a rank has [N, S / ranks, D].
        whole, cut = Replicate(), SEQUENCE_LAYOUT
        enter = PrepareModuleInput(input_layouts=whole, desired_input_layouts=cut)
        leave = PrepareModuleOutput(output_layouts=cut, desired_output_layouts=whole)
        parallelize_module(model, line, enter)
        parallelize_module(model, line, leave)
    return model


def apply_plain_tensor_parallel(model: LinearChain, mesh: DeviceMesh) -> PlainParameters:
    """Share a chain's matrices over the axis ``tp``, with plain parameters that DDP can use.

    The model, which is changed, and the mesh are as for ``apply_tensor_parallel``.

    Returns:
        The module to call and to train; it takes and returns plain tensors [..., D].

    Raises:
        ValueError: the mesh lacks an axis; the ranks of ``tp`` cannot share the width evenly.
    """
    _check_widths(mesh, ("tp",), model.fc1.out_features, model.fc3.out_features)
    line = mesh["tp"]
    return PlainParameters(parallelize_module(model, line, CHAIN_PAIRS), line)


class PlainParameters(nn.Module):
    """A tensor-parallel model whose parameters are plain tensors, as DDP needs them.

    Each forward pass makes DTensors of them. With DTensor parameters ``replicate`` would leave
    ``parameters()`` empty after the first step, and the second step of a compiled model would fail
    (pytorch/pytorch#152712).

    Args:
        model: with DTensor parameters on one mesh, cut evenly; its parameters become plain.
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
        """Run the model."""
        return functional_call(
            self.model, self.as_dtensors(dict(self.model.named_parameters())), inputs
        )

    def as_dtensors(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards of parameters or gradients as DTensors, by parameter name."""
        return {
            name: DTensor.from_local(shard, self.mesh, self.placements[name], run_check=False)
            for name, shard in shards.items()
        }


def mlp_stack_plan(model: MLPStack, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Plan every MLP of a stack as a pair."""
    # By default a pair's input is whole on every rank, and its result is all-reduced.
    columns, rows = ColwiseParallel(), RowwiseParallel()
    if sequence_parallel:
        columns = ColwiseParallel(input_layouts=SEQUENCE_LAYOUT)
        # A DTensor between the pairs, because it knows the length of an unevenly cut sequence.
        rows = RowwiseParallel(output_layouts=SEQUENCE_LAYOUT, use_local_output=False)
    plan: dict[str, ParallelStyle] = {"layers.*.in_proj": columns, "layers.*.out_proj": rows}
    if sequence_parallel and model.norm is not None:
        plan["norm"] = SequenceParallel(sequence_dim=1)
    return plan


def _check_widths(mesh: DeviceMesh, sharing: Sequence[str], *widths: int) -> None:
    names = mesh.mesh_dim_names or ()
    if not {"data", "tp"} <= set(names):
        raise ValueError(
            f"the mesh has axes {', '.join(names) or 'without names'}: it needs data and tp"
        )
    ranks = math.prod(mesh[axis].size() for axis in sharing)
    for width in widths:
        if width % ranks:
            raise ValueError(
                f"{ranks} ranks cannot share the inner width {width}: {width} % {ranks} ="
                f" {width % ranks}"
            )
