"""Count what a rank sends, and find out which gradients share a bucket.

A bucket of gradients is sent as a flat tensor, or a list of tensors, without names. But its numbers
come back as the gradients that the backward pass leaves: so ``BucketRecorder`` finds each gradient
in its bucket by value. Equal gradients, such as zeros of the same size, may be swapped.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from labkit import torch_private
from labkit.torch_private import TorchDispatchMode, tree_leaves

COMMUNICATION_NAMESPACES = ("c10d", "_c10d_functional")
NON_TRAFFIC_OPS = {
    *("wait_tensor", "barrier", "monitored_barrier_"),
    *("check_for_nan", "_wrap_tensor_autograd"),
}
# An emulated wire sends the time of arrival behind each message, with the message's tag plus this.
STAMP_TAG = 1 << 20
_VARIANT_PATTERN = re.compile("_(coalesced|into_tensor|tensor|out|base|single|any_source)(?=_|$)")
_CANONICAL_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
_IN_PLACE_COLLECTIVES = {"all_reduce", "broadcast", "reduce", "send", "recv"}
# The name of a call, the size of its group, and the number of hosts that the group spans.
CallKey = tuple[str, int, int]


def collective_inputs(namespace: str, name: str, args: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the label of a communication operator, and the tensors that this rank passes to it."""
    if name == "batch_p2p_ops":
        kinds, _, _, tensors = args[:4]
        return [(_CANONICAL_NAMES[kind], each) for kind, each in zip(kinds, tensors, strict=True)]
    # For example, allgather_into_tensor_coalesced_ is an allgather.
    plain = _VARIANT_PATTERN.sub("", name).strip("_")
    label = _CANONICAL_NAMES.get(plain, plain)
    # c10d takes the output first where it is another tensor than the input.
    output_first = namespace == "c10d" and label not in _IN_PLACE_COLLECTIVES
    return [(label, args[1 if output_first else 0])]


def group_name_and_ranks(args: Sequence[Any]) -> tuple[str, list[int]]:
    """Return the name and the ranks of the process group among an operator's arguments."""
    groups = {str(name): group for group, name in torch_private.world.pg_names.items()}
    for each in args:
        # c10d takes the group itself, a functional collective its name.
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            each = str(ProcessGroup.unbox(each).group_name)
        if isinstance(each, str) and each in groups:
            return each, distributed_c10d.get_process_group_ranks(groups[each])
    return "", []


def count_hosts(ranks: Iterable[int]) -> int:
    """Return on how many hosts these ranks are; torchrun starts equally many ranks on each."""
    on_each = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or distributed_c10d.get_world_size()
    return len({rank // on_each for rank in ranks})


@dataclass
class TrafficCounts:
    """The calls of each collective or message, and the bytes that this rank passed to them."""

    counts: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    # The same for each size of the group, too.
    calls: Counter[CallKey] = field(default_factory=Counter)
    input_bytes: Counter[CallKey] = field(default_factory=Counter)

    def add_call(self, key: CallKey, size: int) -> None:
        """Count one call, to which this rank passed ``size`` bytes."""
        self.counts[key[0]] += 1
        self.bytes[key[0]] += size
        self.calls[key] += 1
        self.input_bytes[key] += size


class CommunicationCounter(TorchDispatchMode):
    """Counts calls and bytes of every collective and point-to-point message of this rank, by name.

    Bytes are those of the tensor that this rank passes to the call, or receives with ``recv``; for
    those that leave the rank see ``theory.collectives.wire_bytes``. Collectives along an axis
    ``tp`` of ``mesh`` are also counted in ``along["tp"]``; ``along[""]`` is the total.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self._axes: dict[str, str] = {}
        self.reset()
        if mesh:
            self.add_mesh(mesh)

    def reset(self) -> None:
        """Set all counts to zero."""
        self.along = {axis: TrafficCounts() for axis in ("", *self._axes.values())}
        self.counts, self.bytes = self.along[""].counts, self.along[""].bytes

    def add_mesh(self, mesh: DeviceMesh) -> None:
        """Count collectives along the axes of this mesh for these axes too, from now on."""
        for axis in mesh.mesh_dim_names or ():
            self._axes[str(mesh.get_group(axis).group_name)] = axis
            self.along.setdefault(axis, TrafficCounts())

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code stay compiled inside this mode; torch would run it eagerly."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
            # Let DTensor turn the operation into local ones and collectives first.
            return NotImplemented
        # This operator sends nothing, and is half of what autograd does with fake tensors.
        if func is torch.ops.prim.device.default:
            return args[0].device
        namespace, _, name = func.name().split(".")[0].partition("::")
        is_traffic = namespace in COMMUNICATION_NAMESPACES and name not in NON_TRAFFIC_OPS
        if is_traffic and not _is_time_stamp(name, args):
            group, ranks = group_name_and_ranks(args)
            spans = len(ranks), count_hosts(ranks)
            for label, given in collective_inputs(namespace, name, args):
                size = sum(each.nbytes for each in tree_leaves(given) if isinstance(each, Tensor))
                for axis in {"", self._axes.get(group, "")}:
                    self.along[axis].add_call((label, *spans), size)
        return func(*args, **(kwargs or {}))


def _is_time_stamp(name: str, args: Sequence[Any]) -> bool:
    return name in ("send", "recv_") and args[-1] >= STAMP_TAG


class BucketRecorder(CommunicationCounter):
    """Counts communication, and keeps the all-reduced tensors of the backward pass inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: list[list[Tensor]] = []
        self._in_flight: dict[int, tuple[list[Tensor], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        namespace, _, name = func.name().split(".")[0].partition("::")
        reduces = name.startswith(("all_reduce", "allreduce"))
        if namespace in COMMUNICATION_NAMESPACES and reduces:
            # A functional all-reduce that is not in place returns the tensor in which the sum
            # arrives.
            bucket = tree_leaves(result if namespace == "_c10d_functional" else args[0])
            for place, tensor in enumerate(bucket):
                self._in_flight[tensor.data_ptr()] = bucket, place
            self._sent.append(bucket)
        elif name == "wait_tensor" and result.data_ptr() in self._in_flight:
            bucket, place = self._in_flight.pop(result.data_ptr())
            # Memory that was waited for has been used, and may be used again.
            bucket[place] = result.clone()
        return result

    def gradients_by_bucket(
        self, parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> list[dict[str, int]]:
        """Return each bucket as sent: its gradients' bytes by parameter name, in their order."""
        left = {name: each.grad for name, each in parameters if each.grad is not None}
        return [match_gradients(each, left, f"bucket {i}") for i, each in enumerate(self._sent)]


def match_gradients(bucket: Iterable[Tensor], left: dict[str, Tensor], what: str) -> dict[str, int]:
    """Return the bytes of the gradients in a bucket, by name, and remove these from ``left``."""
    found: dict[str, int] = {}
    for tensor in bucket:
        flat = tensor.reshape(-1)
        while flat.numel():
            name = next((name for name, each in left.items() if _starts_with(flat, each)), None)
            if name is None:
                brought = f"{what} brought {flat.nbytes} bytes that are in no gradient"
                raise ValueError(f"{brought} of {', '.join(left) or 'any'}")
            count = left.pop(name).numel()
            found[name] = count * flat.element_size()
            flat = flat[count:]
    return found


def _starts_with(flat: Tensor, gradient: Tensor) -> bool:
    whole = gradient.reshape(-1)
    start = flat[: whole.numel()].to(whole.dtype)
    return start.shape == whole.shape and start.allclose(whole, rtol=0, atol=0, equal_nan=True)
