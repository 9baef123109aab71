r"""Tensor parallelism: ranks along the mesh axis ``tp`` share each matrix product.

The two linear layers of an MLP make a pair. The first is cut by columns, so that each rank computes
some of the inner features and applies ReLU to them alone; the second is cut by rows, so that the
ranks' results only need to be added.

                      in_proj (columns)       out_proj (rows)
    rank 0    x   ->   inner features 0   ->   part of y   \
    rank 1    x   ->   inner features 1   ->   part of y   -+->  y = their sum: one all-reduce

With sequence parallelism each rank keeps only its places of the sequence between the pairs: the sum
is reduce-scattered over the sequence, which is all-gathered before the next pair. The bytes sent
are the same; activations between the pairs, and what is computed there, are shared.

Shapes: N samples, S places of a sequence, D width. Sources: Shoeybi et al., "Megatron-LM", 2019
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
from labkit.models.decoder import DecoderModel
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

    Ranks of one ``tp`` line take the same samples and return the same result. A line of one rank
    shares nothing. Checkpointing, compiling and FSDP over ``data``, if any, come after.

    Args:
        model: equal on all ranks, on this rank's device.
        mesh: with axes named ``data`` and ``tp``.
        sequence_parallel: cut the sequence, dim 1, between the MLPs and in the norm; evenly, or
            with torch 2.13 or later also unevenly.
        plan: ways to cut by names of modules, instead of pairs of column- and row-parallel layers.

    Returns:
        ``model``; it takes and returns plain tensors [N, S, D]. Parameters are DTensors, plain on
        one rank.

    Raises:
        ValueError: the mesh lacks an axis; the ranks of both axes, since FSDP cuts what is left,
            cannot share an inner width evenly.
    """
    _check_widths(mesh, ("data", "tp"), *(multiplier * model.dim for multiplier in MULTIPLIERS))
    line = mesh[
        "tp"
        # inductor cannot compile a graph with two slices of a mesh (pytorch/pytorch#179080)
    ]
    if line.size() > 1:
        parallelize_module(model, line, dict(plan or mlp_stack_plan(model, sequence_parallel)))
        if sequence_parallel:
            whole = Replicate()
            parallelize_module(
                model,
                line,
                PrepareModuleInput(input_layouts=whole, desired_input_layouts=SEQUENCE_LAYOUT),
            )
            parallelize_module(
                model,
                line,
                PrepareModuleOutput(output_layouts=SEQUENCE_LAYOUT, desired_output_layouts=whole),
            )
    return model


def apply_decoder_tensor_parallel(
    model: DecoderModel, mesh: DeviceMesh, *, sequence_parallel: bool
) -> None:
    """Share a decoder's matrices over the axis ``tp``, in place: pairs in every block, the
    embedding, the output layer.

    Ranks of one ``tp`` line take the same tokens. Logits stay cut over words, a DTensor: compute
    the loss and its backward pass in ``loss_parallel()`` of torch, which sends three numbers a
    token and never has the logits whole. Checkpointing, compiling and FSDP over ``data``, if any,
    come after.

    Args:
        model: equal on all ranks, on this rank's device.
        mesh: with axes named ``data`` and ``tp``.
        sequence_parallel: cut the sequence, dim 1, between the pairs and in the norms; evenly.

    Raises:
        ValueError: the mesh lacks an axis; the ranks of ``tp`` cannot share the heads, an inner
            width or the words.
    """
    _check_widths(mesh, ("tp",), model.kv_heads, model.feedforward, model.vocab)
    parallelize_module(model, mesh["tp"], decoder_plan(sequence_parallel))


def apply_plain_tensor_parallel(model: LinearChain, mesh: DeviceMesh) -> PlainParameters:
    """Share a chain's matrices over the axis ``tp``, in pairs, and leave it plain parameters for
    DDP to replicate.

    The model, which is changed, and the mesh are as for ``apply_tensor_parallel``.

    Returns:
        What to call and to train: it takes and returns plain tensors [..., D].

    Raises:
        ValueError: the mesh lacks an axis; the ranks of ``tp`` cannot share the width evenly.
    """
    _check_widths(mesh, ("tp",), model.fc1.out_features, model.fc3.out_features)
    line = mesh["tp"]
    return PlainParameters(parallelize_module(model, line, CHAIN_PAIRS), line)


class PlainParameters(nn.Module):
    """A tensor-parallel model whose parameters are plain tensors, this rank's shards, as DDP needs
    them.

    Each forward pass makes DTensors of them again. torch's own way, ``replicate(model,
    device_mesh=mesh["data"])`` on a model with DTensor parameters, leaves the DTensors of the first
    step where the parameters were: ``parameters()`` is empty from then on (pytorch/pytorch#152712),
    and the second step of a compiled model fails.

    Args:
        model: with DTensor parameters on one mesh, cut evenly. It is changed: its parameters become
            plain.
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
    """Plan every MLP as a pair.

    With sequence parallelism the activations between pairs are DTensors, which know uneven lengths.
    """
    columns, rows = ColwiseParallel(), RowwiseParallel()
    if sequence_parallel:
        columns = ColwiseParallel(input_layouts=SEQUENCE_LAYOUT)
        rows = RowwiseParallel(output_layouts=SEQUENCE_LAYOUT, use_local_output=False)
    plan: dict[str, ParallelStyle] = {"layers.*.in_proj": columns, "layers.*.out_proj": rows}
    if sequence_parallel and model.norm is not None:
        plan["norm"] = SequenceParallel(sequence_dim=1)
    return plan


def decoder_plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Pairs: query, key and value with output; gate and up with down. What begins a pair is
    prepared once for all.

    The embedding is cut by its width, and so needs no sum.
    """
    between = SEQUENCE_LAYOUT if sequence_parallel else Replicate()
    whole, columns, rows = Replicate(), ColwiseParallel(), RowwiseParallel(output_layouts=between)
    taken = {name: columns for name in ("attention.query", "attention.key", "attention.value")}
    taken |= {name: columns for name in ("feedforward.gate", "feedforward.up")}
    block: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(whole, None)
        ),
        "feedforward": PrepareModuleInput(input_layouts=between, desired_input_layouts=whole),
        **taken,
        "attention.output": rows,
        "feedforward.down": rows,
    }
    plan: dict[str, ParallelStyle] = {f"blocks.*.{name}": style for name, style in block.items()}
    plan["embedding"] = ColwiseParallel(output_layouts=between)
    plan["output"] = ColwiseParallel(input_layouts=between, use_local_output=False)
    if sequence_parallel:
        norms = ("norm", "blocks.*.attention_norm", "blocks.*.feedforward_norm")
        plan |= {name: SequenceParallel(sequence_dim=1) for name in norms}
    return plan


def _check_widths(mesh: DeviceMesh, sharing: Sequence[str], *widths: int) -> None:
    """Raise ValueError for a mesh without the two axes, or inner widths that its ranks cannot
    share.
    """
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
