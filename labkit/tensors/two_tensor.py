"""A tensor that is two tensors: the smallest parameter type that changes what FSDP sends.

To PyTorch a ``TwoTensor`` is one tensor with the shape of its halves and no memory of its own.
Every operation on it arrives in ``__torch_dispatch__``, which runs it once for each half:

    two @ x     ->     TwoTensor(two.a @ x, two.b @ x)

FSDP2 asks a parameter type what to send (``fsdp_pre_all_gather``), and how to build the parameter
from what was gathered (``fsdp_post_all_gather``). These are the tensors and their memory:

    shard        TwoTensor of this rank's rows                   always kept
    sent         a's rows, b's rows
    gathered     all rows of a, all rows of b                    freed by FSDP2
    parameter    TwoTensor around the two gathered tensors       freed too, if a cast allocated it

Shapes: R rows on this rank, P rows on every rank after padding, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from labkit.torch_private import (
    return_and_correct_aliasing,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    unsafe_preserve_version_counter,
)

# They change a tensor without reading its old value.
_OVERWRITE_OPS = (torch.ops.aten.copy_.default,)


class TwoTensor(Tensor):
    """Two tensors of equal shape, strides, offset, dtype and device that share every operation.

    Autograd follows the TwoTensor; its halves ``a`` and ``b``, whose memory is shared, have no
    gradient. An operation that writes into a plain tensor (``out=``) leaves the result of ``a``
    there. FSDP2 reduces gradients in this way, so both halves are updated with the gradient of
    ``a``.
    """

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> TwoTensor:
        layout, other = _describe_layout(a), _describe_layout(b)
        for name, value in layout.items():
            if value != other[name]:
                differ = f"differ in {name}, {value} and {other[name]}"
                raise ValueError(f"the halves of a TwoTensor {differ}: make equal ones")
        # A tensor without memory of its own.
        two: TwoTensor = Tensor._make_wrapper_subclass(cls, layout.pop("shape"), **layout)
        two.a, two.b = a.detach(), b.detach()
        return two

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TwoTensor({self.a!r}, {self.b!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the inner tensors, and the other data of the object: none."""
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], metadata: None, size: Any, stride: Any
    ) -> TwoTensor:
        """Invert ``__tensor_flatten__``."""
        return TwoTensor(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_to_accumulate(func, args)
        # b first, so that a plain out= keeps the result of a.
        b = func(*_pick_half("b", args), **_pick_half("b", kwargs))
        a = func(*_pick_half("a", args), **_pick_half("a", kwargs))
        flat, structure = tree_flatten(a)
        pairs = zip(flat, tree_leaves(b), strict=True)
        both = [cls(x, y) if isinstance(x, Tensor) else x for x, y in pairs]
        result = tree_unflatten(both, structure)
        # An in-place operation must return its own argument, and a view must share its storage.
        return return_and_correct_aliasing(func, args, kwargs, result)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return what FSDP2 sends of this rank's shard: both halves [P, ...], and no ``metadata``.

        FSDP2 counts the parameters of this method. ``(self, mesh)`` is enough for shards of equal
        length; with all five it also gets the whole parameter's shape, which a shorter last shard
        needs for its padding.
        """
        # P: FSDP2 cuts like torch.chunk, so no rank has more rows.
        rows = -(-outer_size[0] // mesh.size())
        return (pad_rows(self.a, rows), pad_rows(self.b, rows)), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Sequence[Tensor],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: TwoTensor | None = None,
    ) -> tuple[TwoTensor, tuple[Tensor, ...]] | None:
        """Build the whole parameter on the first call, and name what to free; then only refill it.

        All rows of a and of b have arrived, [W * P, ...] each, with padding. Autograd may have
        saved the first call's parameter, so later calls must reuse its memory: FSDP2 allocates the
        gathered and the returned tensors again, and passes the parameter as ``out``.
        """
        count = len(all_gather_outputs)
        if count != 2:
            raise ValueError(f"a TwoTensor is gathered as 2 tensors, got {count}: send a and b")
        a, b = all_gather_outputs
        if a.shape != b.shape:
            differ = f"differ in shape, {tuple(a.shape)} and {tuple(b.shape)}"
            raise ValueError(f"the gathered halves {differ}: send equal sizes")
        if out is None:
            whole = TwoTensor(a.to(param_dtype), b.to(param_dtype))
            # Without a cast these are the gathered tensors, which FSDP2 frees anyway.
            return whole, (whole.a, whole.b)
        for name, gathered, half in (("a", a, out.a), ("b", b, out.b)):
            # In the parameter's own dtype the gathered tensors are its memory: nothing to copy.
            if gathered.dtype != half.dtype:
                refill(half, gathered)
            elif gathered.untyped_storage()._cdata != half.untyped_storage()._cdata:
                raise ValueError(
                    f"the parameter's half {name} does not lie in the gathered tensor's memory and"
                    " would keep its old value: return a TwoTensor around the gathered tensors on"
                    " the first call"
                )
        return None


def make_two_tensor(weight: Tensor) -> TwoTensor:
    """Make a TwoTensor of a weight and a copy of it."""
    return TwoTensor(weight, weight.detach().clone())


def convert_parameters(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter by ``convert`` of it, in place; call it before ``fully_shard``."""
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            converted = convert(each.detach())
            if not isinstance(converted, Tensor) or converted.shape != each.shape:
                became = type(converted).__name__
                if isinstance(converted, Tensor):
                    became += f" of shape {tuple(converted.shape)}"
                was = f"a parameter of shape {tuple(each.shape)}"
                raise ValueError(f"{was} became a {became}: give a tensor of the same shape")
            module.register_parameter(name, nn.Parameter(converted, each.requires_grad))


def _describe_layout(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": tuple(tensor.shape),
        "strides": tensor.stride(),
        "storage_offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "device": tensor.device,
    }


def pad_rows(shard: Tensor, rows: int) -> Tensor:
    """Pad a shard [R, ...] with zeros to [rows, ...], since an all-gather needs equal sizes."""
    missing = rows - shard.shape[0]
    return functional.pad(shard, [0, 0] * (shard.ndim - 1) + [0, missing]) if missing else shard


def refill(out: Tensor, gathered: Tensor) -> None:
    """Copy the gathered rows, without padding, into an unsharded parameter."""
    # Autograd may have saved ``out``. It gets its old value back, so this is no change; without the
    # guard the backward pass would refuse with "modified by an inplace operation".
    with torch.no_grad(), unsafe_preserve_version_counter(out):
        out.copy_(gathered[: out.shape[0]])


def _pick_half(name: str, given: Any) -> Any:
    return tree_map_only(TwoTensor, lambda two: getattr(two, name), given)


def _refuse_to_accumulate(func: Any, args: Sequence[Any]) -> None:
    """Raise TypeError for ``plain.add_(two)``, which would add both halves."""
    if func in _OVERWRITE_OPS:
        return
    for argument, value in zip(func._schema.arguments, args, strict=False):
        writes = argument.alias_info and argument.alias_info.is_write and not argument.is_out
        if writes and not all(isinstance(leaf, TwoTensor) for leaf in tree_leaves(value)):
            rule = f"{func.name()} would change a plain tensor by both halves of a TwoTensor"
            raise TypeError(f"{rule}: pass one half")
