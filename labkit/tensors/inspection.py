"""Look into a model with all-gather extensions: what its shards hold, what it gathers, what it
leaves in memory.

The model comes after ``fully_shard``; its units are left sharded.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's numbers: itself, or the inner ones of a wrapper such
    as TwoTensor.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


def plain_shards(parameter: Tensor) -> list[Tensor]:
    """The plain tensors of this rank's shard of a parameter; they share its memory."""
    with torch.no_grad():
        return plain_tensors(parameter.to_local())  # type: ignore[attr-defined]


class GatherErrors(NamedTuple):
    """How far gathered weights are from exact ones, of the parameter that is worst; NaN where a
    weight is.

    Attributes:
        largest: the largest error, over the largest weight of its parameter.
        rms: the root of the mean squared error, over that of the parameter's weights.
    """

    largest: float
    rms: float


@torch.no_grad()
def gather_errors(model: nn.Module) -> GatherErrors:
    """The errors of what a model gathers. A collective."""
    largest, rms = [torch.zeros(())], [torch.zeros(())]
    for name, unit in _fsdp_modules(model).items():
        unit.reshard()
        named = unit.named_parameters(name)  # type: ignore[attr-defined]
        sharded = [(key, each) for key, each in named if isinstance(each, DTensor)]
        # cloned, which waits for what may still be on its way
        exact = {key: plain_tensors(each.full_tensor().clone()) for key, each in sharded}
        for key, each in _unshard_unit(name, unit).items():
            for whole, expected in zip(plain_tensors(each), exact[key], strict=True):
                found = rounding_errors(whole.float(), expected)
                largest.append(found[0].cpu())
                rms.append(found[1].cpu())
        unit.reshard()
    return GatherErrors(float(torch.stack(largest).max()), float(torch.stack(rms).max()))


def rounding_errors(rounded: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """The two of ``Errors`` for one parameter."""
    off, tiny = rounded - exact, torch.finfo(exact.dtype).tiny  # for a parameter of zeros
    largest = off.abs().max() / exact.abs().max().clamp(min=tiny)
    return largest, _rms(off) / _rms(exact).clamp(min=tiny)


def _rms(numbers: Tensor) -> Tensor:
    """The root of the mean of the squares."""
    return numbers.square().mean().sqrt()


def gather_memory_bytes(model: nn.Module) -> int:
    """Bytes that a rank holds of gathered parameters while their unit computes, summed over the
    units. A collective.

    They are the parameter, and what was gathered for it; each piece of memory counts once.
    """
    total = 0
    for unit in _fsdp_modules(model).values():
        unit.reshard()  # what a forward pass has kept would count for its own unit and for the root
    for name, unit in _fsdp_modules(model).items():
        held = [
            plain for each in _unshard_unit(name, unit).values() for plain in plain_tensors(each)
        ]
        memory = [each.untyped_storage() for each in (*held, *_all_gather_outputs(unit))]
        total += sum({each._cdata: each.nbytes() for each in memory}.values())
        unit.reshard()
    return total


def _all_gather_outputs(unit: FSDPModule) -> list[Tensor]:
    """What FSDP2 gathered for a unit's parameters and keeps until they are resharded; private to it
    (2.11 to 2.13).
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    return [
        tensor
        for each in (group.fsdp_params if group else ())
        for tensor in each.all_gather_outputs
    ]


def leak_bytes(model: nn.Module) -> dict[str, int]:
    """Gather and free every unit once: the bytes of full parameters that are still there, by name.
    A collective.

    None for hooks that are right. A ``fsdp_post_all_gather`` that makes new memory for the
    parameter, and does not name it to be freed, leaves a whole parameter on every rank.
    """
    left: dict[str, int] = {}
    for name, unit in _fsdp_modules(model).items():
        whole = _unshard_unit(name, unit)
        unit.reshard()
        for key, each in whole.items():
            size = sum(plain.untyped_storage().nbytes() for plain in plain_tensors(each))
            left |= {key: size} if size else {}
    return left


def refuse_leak(model: nn.Module) -> None:
    """Raises ValueError where ``unfreed_bytes`` finds some. A collective."""
    for name, size in leak_bytes(model).items():
        raise ValueError(
            f"{name}: {size} bytes of the full parameter are left after reshard, 0 should be:"
            " fsdp_post_all_gather must also return the tensors that it allocated, for FSDP2 to"
            " free"
        )


def _fsdp_modules(model: nn.Module) -> dict[str, FSDPModule]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
    }


def _unshard_unit(name: str, unit: FSDPModule) -> dict[str, Tensor]:
    """Full parameters of a unit, without those of units within it."""
    unit.unshard()
    named = unit.named_parameters(name)  # type: ignore[attr-defined]
    return {key: each for key, each in named if not isinstance(each, DTensor)}
