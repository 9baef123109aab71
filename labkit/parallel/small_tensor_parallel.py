"""Tensor parallelism without DTensor, as a learner writes it: two functions and two layers.

                          forward pass        backward pass
    copy_to_ranks         identity            sum over the ranks          where a pair begins
    sum_over_ranks        sum over the ranks  identity                    where a pair ends

``ColumnParallel`` and ``RowParallel`` are one rank's share of a pair's two linear layers.
``share_pairs`` puts them into a stack of MLPs. Megatron-LM calls the two functions f and g (Shoeybi
et al., 2019, arXiv:1909.08053).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from labkit.models.mlp import MLPStack

ShareLayer = Callable[[nn.Linear, ProcessGroup], nn.Module]
"""Returns one rank's share of a linear layer, a module with ``weight`` and ``bias``."""
PAIR_PLACEMENTS: dict[str, dict[str, Placement]] = {
    "in_proj": {"weight": Shard(0), "bias": Shard(0)},
    "out_proj": {"weight": Shard(1), "bias": Replicate()},
}
"""How each layer of a pair is cut. ``weight`` is [out features, in features]."""


class CopyToRanks(torch.autograd.Function):
    """Identity; its backward pass sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        # A view, because autograd treats an input that is returned itself specially.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every rank computed a term of x's gradient, from its own features.
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumOverRanks(torch.autograd.Function):
    """Sum over the ranks; its backward pass is the identity."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        # A copy, because all_reduce writes into its argument.
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Begin a pair, of which every rank of the group uses all of x."""
    copied: Tensor = CopyToRanks.apply(x, group)
    return copied


def sum_over_ranks(part: Tensor, group: ProcessGroup) -> Tensor:
    """End a pair, of whose result each rank of the group has computed a term."""
    total: Tensor = SumOverRanks.apply(part, group)
    return total


class ColumnParallel(nn.Module):
    """One rank's share of a linear layer's outputs: rows of the weight and of the bias."""

    def __init__(self, layer: nn.Linear, group: ProcessGroup):
        super().__init__()
        self.group = group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        # [inner, D] -> [inner / ranks, D]
        self.weight = nn.Parameter(layer.weight.detach().chunk(ranks)[rank].clone())
        self.bias = nn.Parameter(layer.bias.detach().chunk(ranks)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map whole inputs [..., D] to this rank's features [..., inner / ranks]."""
        return functional.linear(copy_to_ranks(x, self.group), self.weight, self.bias)


class RowParallel(nn.Module):
    """One rank's share of a linear layer's inputs: columns of the weight, and the whole bias."""

    def __init__(self, layer: nn.Linear, group: ProcessGroup):
        super().__init__()
        self.group = group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        # [D, inner] -> [D, inner / ranks]
        self.weight = nn.Parameter(layer.weight.detach().chunk(ranks, dim=1)[rank].clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's features [..., inner / ranks] to whole outputs [..., D]."""
        # The bias is added after the sum, or it would count once per rank.
        return sum_over_ranks(functional.linear(x, self.weight), self.group) + self.bias


def share_pairs(model: MLPStack, line: DeviceMesh, column: ShareLayer, row: ShareLayer) -> MLPStack:
    """Replace each pair's first layer by ``column`` of it, and its second one by ``row``, in place;
    both get the ranks of ``line``, a mesh of one axis.
    """
    rules = (("in_proj", column, ColumnParallel), ("out_proj", row, RowParallel))
    for index, mlp in enumerate(model.layers):
        for name, share, example in rules:
            layer, group = getattr(mlp, name), line.get_group()
            # Made first, because a learner's function may change the layer.
            wants = _parameter_shapes(example(layer, group))
            own = share(layer, group)
            has = _parameter_shapes(own) if isinstance(own, nn.Module) else {}
            if has != wants:
                needs = f"one of {line.size()} ranks needs a module with parameters {wants}"
                raise ValueError(f"layers.{index}.{name}: {needs}, and got {has or own!r}")
            setattr(mlp, name, own)
    return model


def _parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


class TensorParallelPairs(nn.Module):
    """A stack from ``share_pairs``, with shares along ``tp`` or FSDP's shards of them."""

    def __init__(self, model: MLPStack, line: DeviceMesh):
        super().__init__()
        self.model, self.line = model, line

    def forward(self, x: Tensor) -> Any:
        """Run the stack."""
        return self.model(x)

    def as_dtensors(self, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parameters or gradients as DTensors, by name. A collective."""
        whole: dict[str, Tensor] = {}
        for name, share in shares.items():
            layer, own_name = name.split(".")[-2:]
            # Under FSDP a share is itself sharded over the axis ``data``.
            share = share.full_tensor() if isinstance(share, DTensor) else share
            placement = PAIR_PLACEMENTS[layer][own_name]
            whole[name] = DTensor.from_local(share, self.line, [placement], run_check=False)
        return whole
