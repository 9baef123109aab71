"""Plan the gradient buckets of DDP and of the compiler, and when each bucket is sent.

Gradients fill a bucket in the order in which the backward pass completes them. A bucket is sent
once it has reached its size, so it may exceed that size by one gradient. The first bucket closes at
1 MiB, so that communication starts early:

    dim 2000, 25 MiB   fc4.weight | fc4.bias fc3.weight fc3.bias fc2.weight | fc2.bias …
    MB                 16.0         32.0                                      16.0

DDP's first backward pass sends everything in one bucket; later ones follow its order. Sources:
``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp,
``_bucket_size_fusion`` in torch/_inductor/fx_passes/ddp_fusion.py.

In all functions ``dim`` is the width of a LinearChain of ``layers`` layers, ``bucket_mb`` the size
of a bucket in MiB, and ``way`` is ``eager``, ``compiled`` (forward and backward) or
``backward_only``, which keeps autograd's order.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from labkit.theory.collectives import AlphaBeta

MIB = 2**20
DEFAULT_BUCKET_MB = 25.0
FIRST_BUCKET_MB = 1.0
CompileMode = Literal["eager", "compiled", "backward_only"]


def bucket_plan(
    sizes_bytes: Sequence[int],
    bucket_mb: float = DEFAULT_BUCKET_MB,
    first_mb: float = FIRST_BUCKET_MB,
) -> list[list[int]]:
    """Return the indices of the gradients in each bucket, in the order in which they become ready.

    The first bucket closes once it holds ``first_mb`` MiB, the others at ``bucket_mb``.
    """
    plan: list[list[int]] = []
    held, limit = 0.0, 0.0
    for index, size in enumerate(sizes_bytes):
        if held >= limit:
            limit = MIB * (bucket_mb if plan else first_mb)
            held = 0
            plan.append([])
        plan[-1].append(index)
        held += size
    return plan


def chain_gradients(dim: int, way: CompileMode = "eager", layers: int = 4) -> list[tuple[str, int]]:
    """Return name and bytes of LinearChain's gradients in the order in which they become ready."""
    parts = [("bias", 4 * dim), ("weight", 4 * dim * dim)]
    order = parts[::-1] if way == "compiled" else parts
    return [(f"fc{layer}.{part}", size) for layer in range(layers, 0, -1) for part, size in order]


def chain_buckets(
    dim: int,
    bucket_mb: float = DEFAULT_BUCKET_MB,
    *,
    way: CompileMode = "eager",
    layers: int = 4,
    fuse: bool = True,
    compressed: bool = False,
) -> list[dict[str, int]]:
    """Return LinearChain's buckets in the order sent: bytes handed to the call, by gradient.

    Without ``fuse`` the compiler sends each gradient alone; ``compressed`` sends 16 bits a number.
    """
    ready = chain_gradients(dim, way, layers)
    # The compiler fuses no compressed gradients.
    if way != "eager" and (compressed or not fuse):
        plan = [[index] for index in range(len(ready))]
    else:
        # DDP's buckets are those from its second backward pass on.
        starts_early = way != "eager" or bucket_mb == DEFAULT_BUCKET_MB
        first_mb = FIRST_BUCKET_MB if starts_early else bucket_mb
        plan = bucket_plan([size for _, size in ready], bucket_mb, first_mb)
    shrink = 2 if compressed else 1
    return [{ready[index][0]: ready[index][1] // shrink for index in bucket} for bucket in plan]


def arrivals(ready_s: Sequence[float], takes_s: Sequence[float]) -> list[float]:
    """Return when each bucket has arrived; they are sent in order, one at a time, once ready."""
    arrived_s: list[float] = []
    for ready, takes in zip(ready_s, takes_s, strict=True):
        arrived_s.append(max([ready, *arrived_s[-1:]]) + takes)
    return arrived_s


def bucket_times(
    buckets: Sequence[Sequence[int]],
    sizes: Sequence[float],
    ready: Sequence[float],
    alpha: float,
    beta: float,
) -> tuple[list[float], list[float]]:
    """Return when each bucket is full, and how long it travels, in the unit of the arguments.

    ``buckets`` hold positions in ``sizes``, the bytes of gradients, and in ``ready``.
    """
    full = [max(ready[place] for place in bucket) for bucket in buckets]
    takes = [alpha + beta * sum(sizes[place] for place in bucket) for bucket in buckets]
    return full, takes


def bucket_ready_times(
    buckets: Sequence[Mapping[str, int]], layers: int, backward_s: float
) -> list[float]:
    """Return when each of ``chain_buckets`` is full, in seconds, if all layers take equal time."""
    last_layers = [int(list(bucket)[-1].partition(".")[0].removeprefix("fc")) for bucket in buckets]
    return [(layers - layer + 1) / layers * backward_s for layer in last_layers]


def bucket_transfer_times(
    ready_s: Sequence[float], takes_s: Sequence[float]
) -> list[tuple[float, float]]:
    """Return when each bucket leaves and when it arrives, in the unit of the arguments."""
    arrived_s = arrivals(ready_s, takes_s)
    return [(arrived - takes, arrived) for arrived, takes in zip(arrived_s, takes_s, strict=True)]


def smallest_bucket_bytes(
    total_bytes: float, backward_s: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    """Return the smallest bucket size whose all-reduces all fit into the backward pass, or inf.

    Buckets of b bytes take total / b messages: total / b * alpha + total * beta = backward. Larger
    buckets leave a larger last bucket, which nothing hides.
    """
    room_s = backward_s - total_bytes * beta_s_per_byte
    return total_bytes * alpha_s / room_s if room_s > 0 else math.inf


def backward_transfer_times(
    dim: int, layers: int, bucket_mb: float, *, backward_s: float, network: AlphaBeta
) -> list[tuple[float, float]]:
    """Return start and end of each all-reduce of DDP, in seconds; beta is per byte handed over."""
    buckets = chain_buckets(dim, bucket_mb, layers=layers)
    takes_s = [network.seconds(sum(bucket.values())) for bucket in buckets]
    ready_s = bucket_ready_times(buckets, layers, backward_s)
    return bucket_transfer_times(ready_s, takes_s)
