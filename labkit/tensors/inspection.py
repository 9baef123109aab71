"""Look into a model with all-gather extensions: what its shards hold, what it gathers, what it leaves in memory.

The model comes after ``fully_shard``; its units are left sharded.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's numbers: itself, or the inner ones of a wrapper such as TwoTensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


def plain_shards(parameter: Tensor) -> list[Tensor]:
    """The plain tensors of this rank's shard of a parameter; they share its memory."""
    with torch.no_grad():
        return plain_tensors(parameter.to_local())  # type: ignore[attr-defined]


@torch.no_grad()
def gathered_error(model: nn.Module) -> float:
    """Largest error of a gathered weight, over the largest weight of its parameter; NaN where one is. A collective."""
    errors = [torch.zeros(())]
    for name, unit in _units(model).items():
        unit.reshard()
        sharded = [(key, each) for key, each in unit.named_parameters(name) if isinstance(each, DTensor)]  # type: ignore[attr-defined]
        # cloned, which waits for what may still be on its way
        exact = {key: plain_tensors(each.full_tensor().clone()) for key, each in sharded}
        for key, each in _gather(name, unit).items():
            for whole, expected in zip(plain_tensors(each), exact[key], strict=True):
                largest = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)  # of a parameter of zeros
                errors.append(((whole - expected).abs().max() / largest).cpu())
        unit.reshard()
    return float(torch.stack(errors).max())


def unfreed_bytes(model: nn.Module) -> dict[str, int]:
    """Gather and free every unit once: the bytes of full parameters that are still there, by name. A collective.

    None for hooks that are right. A ``fsdp_post_all_gather`` that makes new memory for the parameter, and does not
    name it to be freed, leaves a whole parameter on every rank.
    """
    left: dict[str, int] = {}
    for name, unit in _units(model).items():
        whole = _gather(name, unit)
        unit.reshard()
        for key, each in whole.items():
            size = sum(plain.untyped_storage().nbytes() for plain in plain_tensors(each))
            left |= {key: size} if size else {}
    return left


def refuse_leak(model: nn.Module) -> None:
    """Raises ValueError where ``unfreed_bytes`` finds some. A collective."""
    for name, size in unfreed_bytes(model).items():
        raise ValueError(
            f"{name}: {size} bytes of the full parameter are left after reshard, 0 should be: fsdp_post_all_gather "
            f"must also return the tensors that it allocated, for FSDP2 to free"
        )


def _units(model: nn.Module) -> dict[str, FSDPModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def _gather(name: str, unit: FSDPModule) -> dict[str, Tensor]:
    """Full parameters of a unit, without those of units within it."""
    unit.unshard()
    named = unit.named_parameters(name)  # type: ignore[attr-defined]
    return {key: each for key, each in named if not isinstance(each, DTensor)}
