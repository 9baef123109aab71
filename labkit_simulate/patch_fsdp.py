"""Replace parts of FSDP2 and DTensor that read memory or take long with a thousand ranks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from labkit.torch_private import disable_current_modes, replace, wrap


def patch_sharding() -> None:
    """Replace these functions for the rest of this process."""
    replace("chunk_with_empty", LazyChunks)
    wrap("FSDPParam.reset_sharded_param", skip_needless_reset)
    wrap("propagate_tensor_meta_non_cached", hide_from_trackers)


class LazyChunks:
    """The equal chunks of a parameter, cut on access.

    FSDP2 keeps one; cutting all would take most of the time of a simulation of a thousand ranks.
    """

    def __init__(self, tensor: Tensor, count: int, dim: int):
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.shape[dim] // count)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._size
        left = self._tensor.shape[self._dim] - start
        if left <= 0 and index:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, left))


def skip_needless_reset(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap FSDP2's reset of a shard: it compares addresses, which are all 0 in a simulation."""

    def reset_if_changed(shard: Any) -> None:
        found = getattr(shard._module_info.module, shard._module_info.param_name)
        if found is not shard.sharded_param or not has_same_storage(
            found._local_tensor, shard._sharded_param_data
        ):
            reset(shard)

    return reset_if_changed


def has_same_storage(one: Tensor, other: Tensor) -> bool:
    """Tell whether two simulated tensors share a storage."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def hide_from_trackers(shape_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap DTensor's inference of shapes, so that no tracker counts its temporary tensors."""

    def call_without_modes(*args: Any) -> Any:
        with disable_current_modes():
            return shape_of(*args)

    return call_without_modes
