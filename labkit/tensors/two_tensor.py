"""A tensor that is two tensors: the smallest parameter type that changes what FSDP sends.

To PyTorch a ``TwoTensor`` looks like one tensor of the shape of its halves, without memory of its
own. Every operation on it arrives in ``__torch_dispatch__`` and is done twice, once with each half:

    two @ x     ->     TwoTensor(two.a @ x, two.b @ x)

FSDP2 asks a parameter type two questions: what to send (``fsdp_pre_all_gather``), and how the
parameter is built from what arrived (``fsdp_post_all_gather``). Who holds which memory:

    sharded            sent                gathered               the parameter that computes
    TwoTensor          a's rows, b's rows  all rows of a, of b    TwoTensor of the two gathered
    always kept                            freed by FSDP          freed too if casting copied

Shapes: R rows on this rank, P rows on every rank once padded, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

from labkit.torch_private import (
    return_and_correct_aliasing,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    unsafe_preserve_version_counter,
)

_OVERWRITE_OPS = (torch.ops.aten.copy_.default,)  # change a tensor without reading what it held


class TwoTensor(Tensor):
    """Two tensors of equal shape, strides, dtype and device that go through every operation side by
    side.

    An operation that writes its result into a plain tensor (``out=``) leaves that of ``a`` there.
    FSDP2 reduces gradients so: of two halves that differ, both are updated with the gradient of
    ``a``.

    Args:
        a: the first half; its memory is shared, not copied, and autograd follows the wrapper
            instead of it. The attribute of this name is a tensor without gradient.
        b: the second, likewise.

    Raises:
        ValueError: the halves differ in shape, strides, offset, dtype or device.
    """

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> TwoTensor:
        for name, of in _MUST_AGREE.items():
            if of(a) != of(b):
                raise ValueError(
                    f"the halves of a TwoTensor differ in {name}: {of(a)} and {of(b)}; make them"
                    " equal"
                )
        two: TwoTensor = Tensor._make_wrapper_subclass(
            cls,
            a.size(),
            strides=a.stride(),
            storage_offset=a.storage_offset(),
            dtype=a.dtype,
            device=a.device,
        )
        two.a, two.b = a.detach(), b.detach()
        return two

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TwoTensor({self.a!r}, {self.b!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """The names of the inner tensors, and what else is needed to build this again: nothing."""
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], metadata: None, size: Any, stride: Any
    ) -> TwoTensor:
        """The inverse of ``__tensor_flatten__``; size and strides are those of the inner
        tensors.
        """
        return TwoTensor(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        _refuse_to_accumulate(func, args)
        b = func(
            *_pick_half("b", args), **_pick_half("b", kwargs)
        )  # first, so that a plain out= keeps the result of a
        a = func(*_pick_half("a", args), **_pick_half("a", kwargs))
        flat, structure = tree_flatten(a)
        pairs = zip(flat, tree_leaves(b), strict=True)
        both = [cls(x, y) if isinstance(x, Tensor) else x for x, y in pairs]
        # an in-place operation returns the wrapper that it was given, and a view shares its storage
        return return_and_correct_aliasing(func, args, kwargs, tree_unflatten(both, structure))

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], None]:
        """What FSDP2 sends of this rank's shard: both halves, padded to the length of the longest
        shard.

        FSDP2 counts the parameters of this method. With ``(self, mesh)`` alone it is told only who
        shares the parameter, the W ranks of ``mesh``: enough for shards of equal length. With five
        it also learns the whole parameter's shape and strides, which a shorter last shard needs for
        its padding, the module that holds it, and the dtypes that its unit asks for. Any other
        number is refused.

        Returns:
            Two tensors of shape [P, ...], and what ``fsdp_post_all_gather`` shall be told about
            them: nothing.
        """
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
        """Build the whole parameter from what was gathered, once; later only refill it.

        Autograd may have saved the first call's parameter, so later calls must bring the same
        memory to life: FSDP2 allocates that of the gathered tensors and of the named ones, and
        passes the parameter as ``out``. In the parameter's own dtype the gathered tensors are its
        memory, and there is nothing to copy.

        Args:
            all_gather_outputs: all rows of a and of b, [W * P, ...] each, padding included.
            metadata: from ``fsdp_pre_all_gather``.
            param_dtype: to compute in.
            out: from the second call on, the parameter that the first one returned.

        Returns:
            On the first call the parameter, and the tensors whose memory FSDP2 must free after use;
            else nothing.

        Raises:
            ValueError: not two tensors of one shape were gathered, or ``out`` does not hold their
                memory.
        """
        _check_gathered(all_gather_outputs)
        a, b = all_gather_outputs
        if out is None:
            whole = TwoTensor(a.to(param_dtype), b.to(param_dtype))
            return whole, (whole.a, whole.b)
        for name, gathered, half in (("a", a, out.a), ("b", b, out.b)):
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
    """A TwoTensor of a weight and a copy."""
    return TwoTensor(weight, weight.detach().clone())


def convert_parameters(
    model: nn.Module, convert: Callable[[Tensor], Tensor] = make_two_tensor
) -> None:
    """Give every parameter the type that ``convert`` makes of it, in place; before ``fully_shard``.

    Raises:
        ValueError: what ``convert`` made is no tensor of the parameter's shape.
    """
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            converted = convert(each.detach())
            if not isinstance(converted, Tensor) or converted.shape != each.shape:
                shape = (
                    f" of shape {tuple(converted.shape)}" if isinstance(converted, Tensor) else ""
                )
                was = f"a parameter of shape {tuple(each.shape)}"
                raise ValueError(
                    f"{was} became a {type(converted).__name__}{shape}: give a tensor of the same"
                    " shape"
                )
            module.register_parameter(name, nn.Parameter(converted, each.requires_grad))


_MUST_AGREE: dict[str, Any] = {
    "shape": lambda tensor: tuple(tensor.shape),
    "strides": lambda tensor: tensor.stride(),
    "storage offset": lambda tensor: tensor.storage_offset(),
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
}


def pad_rows(shard: Tensor, rows: int) -> Tensor:
    """A shard [R, ...] with zeros below, [rows, ...]: an all-gather wants as much from every
    rank.
    """
    missing = rows - shard.shape[0]
    return functional.pad(shard, [0, 0] * (shard.ndim - 1) + [0, missing]) if missing else shard


def refill(out: Tensor, gathered: Tensor) -> None:
    """Put the gathered rows, without padding, into an unsharded parameter that autograd may have
    saved.

    To autograd this is the value that it saved, back again, and no change: without the guard the
    backward pass refuses with "modified by an inplace operation".
    """
    with torch.no_grad(), unsafe_preserve_version_counter(out):
        out.copy_(gathered[: out.shape[0]])


def _pick_half(name: str, given: Any) -> Any:
    return tree_map_only(TwoTensor, lambda two: getattr(two, name), given)


def _refuse_to_accumulate(func: Any, args: Sequence[Any]) -> None:
    """Raises TypeError for ``plain.add_(two)``: done once for each half it would add both."""
    if func in _OVERWRITE_OPS:
        return
    for argument, value in zip(func._schema.arguments, args, strict=False):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if (
            writes
            and not argument.is_out
            and not all(isinstance(leaf, TwoTensor) for leaf in tree_leaves(value))
        ):
            raise TypeError(
                f"{func.name()} would change a plain tensor by both halves of a TwoTensor: pass one"
                " half"
            )


def _check_gathered(outputs: Sequence[Tensor]) -> None:
    if len(outputs) != 2:
        raise ValueError(
            f"a TwoTensor is gathered as 2 tensors, got {len(outputs)}: send both (a, b) before"
        )
    shapes = [tuple(tensor.shape) for tensor in outputs]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"the gathered halves differ in shape, {shapes[0]} and {shapes[1]}: send equal sizes"
        )
