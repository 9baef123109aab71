"""Which gradients travel together? Watch a backward pass from below, where every all-reduce passes, fused or not.

A bucket is a flat tensor, or a list of tensors, without names. But what comes back in it is, number for number, what
the backward pass leaves in the gradients: so each gradient is found in the bucket that brought it. Gradients that are
equal, such as zeros of one size, cannot be told apart: they may get each other's names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from labkit.meter import CommunicationCounter


class Wire(CommunicationCounter):
    """Counts like its parent, and keeps the all-reduces of the backward pass that runs in here."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: list[list[Tensor]] = []
        self._in_flight: dict[int, tuple[list[Tensor], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        namespace, _, name = func.name().split(".")[0].partition("::")
        if namespace in ("c10d", "_c10d_functional") and name.startswith(("all_reduce", "allreduce")):
            # a functional all-reduce that is not in place returns the tensor in which the sum arrives
            bucket = tree_leaves(result if namespace == "_c10d_functional" else args[0])
            self._in_flight |= {tensor.data_ptr(): (bucket, place) for place, tensor in enumerate(bucket)}
            self._sent.append(bucket)
        elif name == "wait_tensor" and result.data_ptr() in self._in_flight:
            bucket, place = self._in_flight.pop(result.data_ptr())
            bucket[place] = result.clone()  # what was waited for is used, and then its memory may be used again
        return result

    def buckets(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, int]]:
        """The buckets in the order in which they were sent: the bytes of each gradient, by name, as they lie in it.

        Args:
            parameters: by name, with the gradients that the backward pass left.

        Raises:
            ValueError: a bucket brought something that is in no gradient.
        """
        left = {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
        return [gradients_in(bucket, left, f"bucket {index}") for index, bucket in enumerate(self._sent)]


def gradients_in(bucket: Iterable[Tensor], left: dict[str, Tensor], what: str) -> dict[str, int]:
    """Bytes of the gradients in a bucket, by name; they are taken out of ``left``."""
    found: dict[str, int] = {}
    for tensor in bucket:
        flat = tensor.reshape(-1)
        while flat.numel():
            name = next((name for name, gradient in left.items() if _starts_with(flat, gradient)), None)
            if name is None:
                size = flat.numel() * flat.element_size()
                raise ValueError(f"{what} brought {size} bytes that are in no gradient of {', '.join(left) or 'any'}")
            count = left.pop(name).numel()
            found[name] = count * flat.element_size()
            flat = flat[count:]
    return found


def _starts_with(flat: Tensor, gradient: Tensor) -> bool:
    start = flat[: gradient.numel()]
    if start.numel() != gradient.numel():
        return False
    return start.to(gradient.dtype).allclose(gradient.reshape(-1), rtol=0, atol=0, equal_nan=True)
