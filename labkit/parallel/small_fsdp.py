"""Fully sharded data parallelism in thirty lines, one unit at a time: what a learner of the FSDP
lab writes.

``shard_unit`` takes a module, a *unit*, and leaves this rank a flat share of its parameters. Around
the unit's forward and backward pass the whole parameters are put together in a buffer that is empty
otherwise. ``FlatShards`` is the model made of such units. Nothing travels while something computes,
and buffers are not shared: ``fully_shard`` does both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ShardUnit = Callable[[nn.Module], nn.Parameter]
"""Shards a unit in place, and returns this rank's share.

The share is a flat parameter: all of the unit's, in the order of ``unit.parameters()``, one after
another, with zeros at the end so that the ranks divide them, cut into equal parts of which rank r
keeps part r. After a backward pass its gradient is the mean over the ranks.
"""


def shard_unit(unit: nn.Module) -> nn.Parameter:
    """Shard a unit over all ranks; see ``ShardUnit``."""
    parameters, ranks = list(unit.parameters()), dist.get_world_size()
    full = flatten_tensors([p.detach() for p in parameters], ranks)
    shard = nn.Parameter(full.chunk(ranks)[dist.get_rank()].clone())
    for parameter, piece in zip(parameters, split_flat(full, parameters), strict=True):
        parameter.data = piece  # a view: its numbers are there while the buffer is
    buffer, size = full.untyped_storage(), full.untyped_storage().nbytes()
    ready: list[nn.Parameter] = []

    def gather(*_: Any) -> None:
        buffer.resize_(size)
        dist.all_gather_into_tensor(full, shard.detach())

    def free_until_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        buffer.resize_(0)
        if output.requires_grad:
            output.register_hook(gather)

    def reduce(parameter: nn.Parameter) -> None:
        ready.append(parameter)
        if len(ready) == len(parameters):
            ready.clear()
            buffer.resize_(0)
            gradients = flatten_tensors([p.grad for p in parameters if p.grad is not None], ranks)
            for each in parameters:
                each.grad = None
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter_tensor(shard.grad, gradients)
            shard.grad /= ranks

    buffer.resize_(0)
    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free_until_backward)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(reduce)
    return shard


def flatten_tensors(tensors: Iterable[Tensor], ranks: int) -> Tensor:
    """Concatenate tensors, padded with zeros to a multiple of the number of ranks."""
    pieces = [tensor.flatten() for tensor in tensors]
    missing = -sum(map(len, pieces)) % ranks
    return torch.cat([*pieces, pieces[0].new_zeros(missing)])


def split_flat(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor with the shapes of these tensors, in order."""
    sizes = [tensor.numel() for tensor in like]
    return [
        piece.view(each.shape)
        for piece, each in zip(row[: sum(sizes)].split(sizes), like, strict=True)
    ]


class FlatShards(nn.Module):
    """A model whose units are sharded, flat. Its parameters are this rank's shares.

    Args:
        model: equal on all ranks; changed in place.
        units: its units by name, which together hold all of its parameters.
        shard: called with each of them.

    Raises:
        ValueError: units overlap or leave parameters out, or what ``shard`` returned is no share of
            its unit.
    """

    def __init__(
        self, model: nn.Module, units: Mapping[str, nn.Module], shard: ShardUnit = shard_unit
    ):
        super().__init__()
        self._model = [model]  # in a list, so that its parameters are not this module's
        self._units = {name: list(unit.parameters()) for name, unit in units.items()}
        held = [id(parameter) for parameters in self._units.values() for parameter in parameters]
        missing = [
            name for name, parameter in model.named_parameters() if id(parameter) not in held
        ]
        if missing or len(set(held)) < len(held):
            what = f"{missing[0]} is in no unit" if missing else "two units share a parameter"
            raise ValueError(
                f"{what}, and nobody but a unit gathers it: choose units that hold each parameter"
                " once"
            )
        self.shards = nn.ParameterList(
            _make_share(shard, name, unit) for name, unit in units.items()
        )

    def forward(self, *inputs: Tensor) -> Any:
        """Run the model."""
        return self._model[0](*inputs)

    def unshard_model(self) -> nn.Module:
        """Return the model with whole parameters and gradients. A collective."""
        for parameters, shard in zip(self._units.values(), self.shards, strict=True):
            values = split_flat(_all_gather_flat(shard.detach()), parameters)
            gradients = (
                values
                if shard.grad is None
                else split_flat(_all_gather_flat(shard.grad), parameters)
            )
            for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
                parameter.data, parameter.grad = value, None if shard.grad is None else gradient
        return self._model[0]


def _make_share(shard: ShardUnit, name: str, unit: nn.Module) -> nn.Parameter:
    whole, ranks = sum(parameter.numel() for parameter in unit.parameters()), dist.get_world_size()
    share, wanted = shard(unit), -(-whole // ranks)
    if not isinstance(share, nn.Parameter) or share.shape != (wanted,):
        shape = f" of shape {tuple(share.shape)}" if isinstance(share, Tensor) else ""
        raise ValueError(
            f"unit {name or 'root'} has {whole} numbers, so each of {ranks} ranks keeps {wanted} in"
            f" a flat nn.Parameter; the function gave a {type(share).__name__}{shape}"
        )
    return share


def _all_gather_flat(share: Tensor) -> Tensor:
    whole = share.new_empty(len(share) * dist.get_world_size())
    dist.all_gather_into_tensor(whole, share)
    return whole
