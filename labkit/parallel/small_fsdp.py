"""Fully sharded data parallelism in thirty lines, one unit at a time, as a learner writes it.

``shard_unit`` takes a module, a *unit*, and keeps this rank's flat share of its parameters. During
the unit's forward and backward pass a buffer holds the whole parameters; otherwise it is empty.
``FlatShards`` is a model made of such units. Unlike ``fully_shard``, it neither overlaps
communication with computation nor shares buffers between units.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ShardUnit = Callable[[nn.Module], nn.Parameter]
"""Shards a unit in place and returns this rank's share, a flat parameter.

All of the unit's parameters, in the order of ``unit.parameters()``, are concatenated, padded with
zeros to a multiple of the number of ranks and cut into equal parts, of which rank r keeps part r.
After a backward pass the share's gradient is the mean over the ranks.
"""


def shard_unit(unit: nn.Module) -> nn.Parameter:
    """Shard a unit over all ranks; see ``ShardUnit``."""
    shard, full = shard_parameters(unit)
    gather_and_free(unit, shard, full)
    reduce_and_free(unit, shard, full)
    return shard


def shard_parameters(unit: nn.Module) -> tuple[nn.Parameter, Tensor]:
    """Cut a unit's parameters, and return this rank's share [S] and the buffer [W * S] of W ranks.

    The unit's parameters become views of the buffer, whose memory has been given back.
    """
    parameters, ranks = list(unit.parameters()), dist.get_world_size()
    full = flatten_tensors([p.detach() for p in parameters], ranks)
    shard = nn.Parameter(full.chunk(ranks)[dist.get_rank()].clone())
    for parameter, piece in zip(parameters, split_flat(full, parameters), strict=True):
        # A view, which has values only while the buffer is filled.
        parameter.data = piece
    full.untyped_storage().resize_(0)
    return shard, full


def gather_and_free(unit: nn.Module, shard: nn.Parameter, full: Tensor) -> None:
    """Fill the buffer before both passes of a unit, and empty it after the forward pass."""
    buffer = full.untyped_storage()

    def gather(*_: Any) -> None:
        buffer.resize_(full.nbytes)
        dist.all_gather_into_tensor(full, shard.detach())

    def free_until_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        buffer.resize_(0)
        # The output's gradient arrives just before the unit's backward pass begins.
        if output.requires_grad:
            output.register_hook(gather)

    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free_until_backward)


def reduce_and_free(unit: nn.Module, shard: nn.Parameter, full: Tensor) -> None:
    """Empty the buffer once a unit's gradients are complete, and leave their mean in the share."""
    parameters, ranks = list(unit.parameters()), dist.get_world_size()
    ready: list[nn.Parameter] = []

    def reduce(parameter: nn.Parameter) -> None:
        ready.append(parameter)
        # The unit's last gradient: none of its parameters is needed any more.
        if len(ready) == len(parameters):
            ready.clear()
            full.untyped_storage().resize_(0)
            gradients = flatten_tensors([p.grad for p in parameters if p.grad is not None], ranks)
            for each in parameters:
                each.grad = None
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter_tensor(shard.grad, gradients)
            shard.grad /= ranks

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(reduce)


def flatten_tensors(tensors: Iterable[Tensor], ranks: int) -> Tensor:
    """Concatenate tensors, padded with zeros to a multiple of the number of ranks."""
    pieces = [tensor.flatten() for tensor in tensors]
    missing = -sum(map(len, pieces)) % ranks
    return torch.cat([*pieces, pieces[0].new_zeros(missing)])


def split_flat(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor with the shapes of these tensors, in order."""
    sizes = [tensor.numel() for tensor in like]
    pieces = row[: sum(sizes)].split(sizes)
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


class FlatShards(nn.Module):
    """A model whose units ``shard`` has sharded in place; its parameters are this rank's shares."""

    def __init__(
        self, model: nn.Module, units: Mapping[str, nn.Module], shard: ShardUnit = shard_unit
    ):
        super().__init__()
        # In a list, so that the model's parameters are not registered as this module's.
        self._model = [model]
        self._units = {name: list(unit.parameters()) for name, unit in units.items()}
        held = [p for parameters in self._units.values() for p in parameters]
        missing = [name for name, p in model.named_parameters() if p not in set(held)]
        if missing or len(set(held)) < len(held):
            what = f"{missing[0]} is in no unit" if missing else "two units share a parameter"
            raise ValueError(f"{what}, and only units gather: they must hold each parameter once")
        shares = [_make_share(shard, name, unit) for name, unit in units.items()]
        self.shards = nn.ParameterList(shares)

    def forward(self, *inputs: Tensor) -> Any:
        """Run the model."""
        return self._model[0](*inputs)

    def unshard_model(self) -> nn.Module:
        """Return the model with whole parameters and gradients. A collective."""
        for parameters, shard in zip(self._units.values(), self.shards, strict=True):
            values = split_flat(_all_gather_flat(shard.detach()), parameters)
            gradients: list[Tensor | None] = [None] * len(parameters)
            if shard.grad is not None:
                gradients = [*split_flat(_all_gather_flat(shard.grad), parameters)]
            for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
                parameter.data, parameter.grad = value, gradient
        return self._model[0]


def _make_share(shard: ShardUnit, name: str, unit: nn.Module) -> nn.Parameter:
    # Counted before the call, which changes the unit's parameters.
    whole, ranks = sum(p.numel() for p in unit.parameters()), dist.get_world_size()
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
