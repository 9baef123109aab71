"""Let tensors without memory look up faster what an operator returns for them.

FakeTensorMode remembers the shape that an operator returned, by everything that it was given. To
read that from tensors takes a fifth of a simulation. Here it is read without what simulated tensors
never have: symbolic sizes, sparse layouts, constants.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from labkit.torch_private import FakeTensor, wrap

PLAIN_TYPES = {
    *(bool, int, float, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}


def patch_fake_tensors() -> None:
    """Replace the reading of arguments for the rest of this process."""
    wrap("FakeTensorMode._prep_args_for_hash", read_faster)


def read_faster(read: Callable[..., None]) -> Callable[..., None]:
    """Wrap torch's reading of arguments, which stays in charge of all that is unusual."""

    def read_usual_arguments(mode: Any, found: list[Any], args: Any, *others: Any) -> None:
        if mode.shape_env is None:
            known = describe_arguments(mode, args)
            if known is not None:
                found.append(known)
                return
        read(mode, found, args, *others)

    return read_usual_arguments


def describe_arguments(mode: Any, args: Any) -> tuple[Any, ...] | None:
    """Return what tells these arguments from others; None if one of them is unusual."""
    if isinstance(args, dict):
        names, values = tuple(args), describe_values(mode, args.values())
        return None if values is None else (dict, names, values)
    values = describe_values(mode, args)
    return None if values is None else (type(args), values)


def describe_values(mode: Any, values: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return types and values, and of tensors what torch itself would tell them apart by."""
    found: list[Any] = []
    for each in values:
        kind = type(each)
        if kind is FakeTensor:
            if (
                each.fake_mode is not mode
                or each.constant is not None
                or each.layout is not torch.strided
            ):
                return None
            found += (
                *(each.dtype, each.shape, each.stride(), each.fake_device, each.storage_offset()),
                *(each.untyped_storage().nbytes(), each.requires_grad, each.is_quantized),
                *(each.is_conj(), each.is_neg(), each.is_inference()),
            )
        elif kind in PLAIN_TYPES:
            found += (kind, each)
        elif kind in (list, tuple, torch.Size):
            inner = describe_values(mode, each)
            if inner is None:
                return None
            found += (kind, inner)
        else:
            return None
    return tuple(found)
