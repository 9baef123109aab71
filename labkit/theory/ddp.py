"""Buckets of gradients: which ones DDP, or the compiler, sends together, and how many bytes each takes.

Gradients fill a bucket in the order in which the backward pass completes them. A bucket that has reached its size is
closed and sent, so it is never cut, and may be larger than its size by one gradient. The first bucket closes at 1 MiB,
so that the first message leaves early:

    dim 2000, 25 MiB       fc4.weight | fc4.bias fc3.weight fc3.bias fc2.weight | fc2.bias fc1.weight fc1.bias
    MB                     16.0         32.0                                      16.0

Sources: ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp for DDP's own reducer,
``_bucket_size_fusion`` in torch/_inductor/fx_passes/ddp_fusion.py for the compiler. They differ in three things:

- DDP sends everything in one bucket in its first backward pass, and follows the order of that pass from then on.
- DDP's first bucket closes at 1 MiB only where the bucket size is left at 25 MiB; the compiler's always does.
- The compiler's backward pass computes a layer's weight before its bias, autograd's the bias before the weight.

Everywhere ``dim`` is the width of a LinearChain, and a bucket is closed once it holds ``bucket_mb`` MiB. ``way`` is
``eager``, ``compiled`` (forward and backward) or ``backward_only``, which keeps autograd's order.
"""

from collections.abc import Sequence
from typing import Literal

MIB = 2**20
DEFAULT_MB = 25.0
FIRST_MB = 1.0
Way = Literal["eager", "compiled", "backward_only"]


def bucket_plan(
    sizes_bytes: Sequence[int], bucket_mb: float = DEFAULT_MB, first_mb: float = FIRST_MB
) -> list[list[int]]:
    """Which gradients share a bucket, as places in ``sizes_bytes``; the first bucket is closed at ``first_mb`` MiB.

    The sizes are in the order in which the gradients become ready, before any compression.
    """
    plan: list[list[int]] = []
    held, limit = 0.0, 0.0  # as if a bucket had just been closed
    for place, size in enumerate(sizes_bytes):
        if held >= limit:
            limit = MIB * (bucket_mb if plan else first_mb)
            held = 0
            plan.append([])
        plan[-1].append(place)
        held += size
    return plan


def chain_gradients(dim: int, way: Way = "eager") -> list[tuple[str, int]]:
    """Name and bytes of LinearChain's gradients in the order in which they become ready."""
    parts = [("bias", 4 * dim), ("weight", 4 * dim * dim)]
    order = parts[::-1] if way == "compiled" else parts
    return [(f"{layer}.{part}", size) for layer in ("fc4", "fc3", "fc2", "fc1") for part, size in order]


def chain_buckets(
    dim: int, bucket_mb: float = DEFAULT_MB, *, way: Way = "eager", fuse: bool = True, compressed: bool = False
) -> list[dict[str, int]]:
    """LinearChain's buckets in the order in which they are sent: bytes of each gradient, by name, as handed over.

    DDP's own after its first backward pass.

    ``fuse`` is False where the compiler sends each gradient alone. Where they are ``compressed``, gradients travel in
    16 bits, and the compiler fuses none of them.
    """
    ready = chain_gradients(dim, way)
    alone = way != "eager" and (compressed or not fuse)
    first_mb = FIRST_MB if way != "eager" or bucket_mb == DEFAULT_MB else bucket_mb
    sizes = [size for _, size in ready]
    plan = [[place] for place in range(len(sizes))] if alone else bucket_plan(sizes, bucket_mb, first_mb)
    shrink = 2 if compressed else 1
    return [{ready[place][0]: ready[place][1] // shrink for place in bucket} for bucket in plan]
