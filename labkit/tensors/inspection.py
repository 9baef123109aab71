"""Inspect a model with all-gather extensions: what it holds, gathers, and leaves in memory.

Apply ``fully_shard`` before; the units are left sharded.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold a tensor's elements, such as a TwoTensor's halves."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


def plain_shards(parameter: Tensor) -> list[Tensor]:
    """Return the plain tensors of this rank's shard of a parameter, sharing its memory."""
    with torch.no_grad():
        return plain_tensors(parameter.to_local())  # type: ignore[attr-defined]


class GatherErrors(NamedTuple):
    """Errors of gathered weights, of the worst parameter; NaN if a weight is NaN.

    Attributes:
        largest: the largest error, divided by the parameter's largest weight.
        rms: the root mean square error, divided by the root mean square of the weights.
    """

    largest: float
    rms: float


@torch.no_grad()
def gather_errors(model: nn.Module) -> GatherErrors:
    """Compare what a model gathers with its exact weights. A collective."""
    largest, rms = [torch.zeros(())], [torch.zeros(())]
    for name, unit in _fsdp_modules(model).items():
        unit.reshard()
        named = unit.named_parameters(name)  # type: ignore[attr-defined]
        sharded = [(key, each) for key, each in named if isinstance(each, DTensor)]
        # clone waits for a gather that may still be on its way.
        exact = {key: plain_tensors(each.full_tensor().clone()) for key, each in sharded}
        for key, each in _unshard_unit(name, unit).items():
            for whole, expected in zip(plain_tensors(each), exact[key], strict=True):
                found = rounding_errors(whole.float(), expected)
                largest.append(found[0].cpu())
                rms.append(found[1].cpu())
        unit.reshard()
    return GatherErrors(float(torch.stack(largest).max()), float(torch.stack(rms).max()))


def rounding_errors(rounded: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two fields of ``GatherErrors`` for one parameter."""
    # A parameter of zeros must not divide by 0.
    off, tiny = rounded - exact, torch.finfo(exact.dtype).tiny
    largest = off.abs().max() / exact.abs().max().clamp(min=tiny)
    return largest, _rms(off) / _rms(exact).clamp(min=tiny)


def _rms(numbers: Tensor) -> Tensor:
    return numbers.square().mean().sqrt()


def gather_memory_bytes(model: nn.Module) -> int:
    """Return the bytes of gathered parameters while their unit computes, summed over units.

    A collective. They are the parameters and what was gathered for them; shared memory counts once.
    """
    total = 0
    units = _fsdp_modules(model)
    # A unit that a forward pass left gathered would count again for the root.
    for unit in units.values():
        unit.reshard()
    for name, unit in units.items():
        whole = _unshard_unit(name, unit)
        held = _all_gather_outputs(unit)
        for parameter in whole.values():
            held += plain_tensors(parameter)
        memory = [tensor.untyped_storage() for tensor in held]
        total += sum({storage._cdata: storage.nbytes() for storage in memory}.values())
        unit.reshard()
    return total


def _all_gather_outputs(unit: FSDPModule) -> list[Tensor]:
    """Return what FSDP2 gathered and keeps until a reshard; private to it (2.11 to 2.13)."""
    group = unit._get_fsdp_state()._fsdp_param_group
    parameters = group.fsdp_params if group else ()
    return [tensor for parameter in parameters for tensor in parameter.all_gather_outputs]


def leak_bytes(model: nn.Module) -> dict[str, int]:
    """Gather and free every unit once; return the bytes of full parameters that are left, by name.

    A collective. Correct hooks leave none. A ``fsdp_post_all_gather`` that allocates the
    parameter's memory, and does not return it to be freed, leaves a whole parameter on every rank.
    """
    left: dict[str, int] = {}
    for name, unit in _fsdp_modules(model).items():
        whole = _unshard_unit(name, unit)
        unit.reshard()
        for key, each in whole.items():
            # A freed tensor keeps its shape, but its storage is empty.
            size = sum(plain.untyped_storage().nbytes() for plain in plain_tensors(each))
            if size:
                left[key] = size
    return left


def refuse_leak(model: nn.Module) -> None:
    """Raise ValueError if ``leak_bytes`` finds any. A collective."""
    for name, size in leak_bytes(model).items():
        raise ValueError(
            f"{name}: {size} bytes of the full parameter are left after reshard, 0 should be:"
            " fsdp_post_all_gather must also return the tensors that it allocated, for FSDP2 to"
            " free"
        )


def _fsdp_modules(model: nn.Module) -> dict[str, FSDPModule]:
    return {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}


def _unshard_unit(name: str, unit: FSDPModule) -> dict[str, Tensor]:
    """Gather a unit, and return its full parameters without those of nested units."""
    unit.unshard()
    named = unit.named_parameters(name)  # type: ignore[attr-defined]
    return {key: each for key, each in named if not isinstance(each, DTensor)}
