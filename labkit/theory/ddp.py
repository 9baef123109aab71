"""Buckets of gradients: which ones DDP, or the compiler, sends together, and how many bytes each
takes.

Gradients fill a bucket in the order in which the backward pass completes them. A bucket that has
reached its size is closed and sent, so it is never cut, and may be larger than its size by one
gradient. The first bucket closes at 1 MiB, so that the first message leaves early:

    dim 2000, 25 MiB       fc4.weight | fc4.bias fc3.weight fc3.bias fc2.weight | fc2.bias
    fc1.weight fc1.bias MB                     16.0         32.0
    16.0

Sources: ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp for DDP's
    own reducer,
``_bucket_size_fusion`` in torch/_inductor/fx_passes/ddp_fusion.py for the compiler. They differ in
three things:

- DDP sends everything in one bucket in its first backward pass, and follows the order of that pass
  from then on.
- DDP's first bucket closes at 1 MiB only where the bucket size is left at 25 MiB; the compiler's
  always does.
- The compiler's backward pass computes a layer's weight before its bias, autograd's the bias before
  the weight.

Everywhere ``dim`` is the width of a LinearChain of so many ``layers``, and a bucket is closed once
it holds ``bucket_mb`` MiB. ``way`` is ``eager``, ``compiled`` (forward and backward) or
``backward_only``, which keeps autograd's order.
"""

import math
import statistics
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
    """Which gradients share a bucket, as places in ``sizes_bytes``; the first bucket is closed at
    ``first_mb`` MiB.

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


def chain_gradients(dim: int, way: CompileMode = "eager", layers: int = 4) -> list[tuple[str, int]]:
    """Name and bytes of LinearChain's gradients in the order in which they become ready."""
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
    """LinearChain's buckets in the order in which they are sent: bytes of each gradient, by name,
    as handed over.

    DDP's own after its first backward pass.

    ``fuse`` is False where the compiler sends each gradient alone. Where they are ``compressed``,
    gradients travel in 16 bits, and the compiler fuses none of them.
    """
    ready = chain_gradients(dim, way, layers)
    alone = way != "eager" and (compressed or not fuse)
    first_mb = FIRST_BUCKET_MB if way != "eager" or bucket_mb == DEFAULT_BUCKET_MB else bucket_mb
    sizes = [size for _, size in ready]
    plan = (
        [[place] for place in range(len(sizes))]
        if alone
        else bucket_plan(sizes, bucket_mb, first_mb)
    )
    shrink = 2 if compressed else 1
    return [{ready[place][0]: ready[place][1] // shrink for place in bucket} for bucket in plan]


def arrivals(ready_s: Sequence[float], takes_s: Sequence[float]) -> list[float]:
    """When each bucket has arrived: they leave in their order, one at a time, each no sooner than
    it is ready.

    So one late gradient holds up its bucket, and all buckets after it. Any unit of time.
    """
    found: list[float] = []
    for ready, takes in zip(ready_s, takes_s, strict=True):
        found.append(max([ready, *found[-1:]]) + takes)
    return found


def bucket_ready_times(
    buckets: Sequence[Mapping[str, int]], layers: int, backward_s: float
) -> list[float]:
    """When each of ``chain_buckets`` is full, in seconds: every layer takes an equal part of the
    backward pass.
    """
    last_layers = [int(list(bucket)[-1].partition(".")[0].removeprefix("fc")) for bucket in buckets]
    return [(layers - layer + 1) / layers * backward_s for layer in last_layers]


def bucket_transfer_times(
    ready_s: Sequence[float], takes_s: Sequence[float], *, hidden: bool
) -> list[tuple[float, float]]:
    """When each bucket leaves and arrives, any unit of time.

    Hidden, messages travel beside the arithmetic, as with a network card: those of ``arrivals``.
    Otherwise the processor that computes carries them, too: the arithmetic, and with it all later
    buckets, waits for each message.
    """
    if not hidden:
        ready_s = [ready + sum(takes_s[:place]) for place, ready in enumerate(ready_s)]
    return [
        (arrived - takes, arrived)
        for arrived, takes in zip(arrivals(ready_s, takes_s), takes_s, strict=True)
    ]


def smallest_bucket_bytes(
    total_bytes: float, backward_s: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    """The smallest bucket whose messages all fit into the backward pass; infinite where the bytes
    alone do not.

    Buckets of b bytes are total / b messages: total / b * alpha + total * beta = backward. Smaller
    ones pay more latency than there is time to hide; larger ones leave a larger last bucket, which
    nothing hides.
    """
    room_s = backward_s - total_bytes * beta_s_per_byte
    return total_bytes * alpha_s / room_s if room_s > 0 else math.inf


def backward_transfer_times(
    dim: int, layers: int, bucket_mb: float, *, backward_s: float, network: AlphaBeta, hidden: bool
) -> list[tuple[float, float]]:
    """``journeys`` of a LinearChain's gradients in DDP's own buckets, in seconds since its backward
    pass began.

    Args:
        dim: width of the layers.
        layers: how many.
        bucket_mb: a bucket is sent once it holds so many MiB.
        backward_s: what the arithmetic of the backward pass takes by itself.
        network: alpha of a message, beta of a byte handed to the all-reduce.
        hidden: whether messages travel beside the arithmetic.
    """
    buckets = chain_buckets(dim, bucket_mb, layers=layers)
    takes_s = [network.seconds(sum(bucket.values())) for bucket in buckets]
    return bucket_transfer_times(
        bucket_ready_times(buckets, layers, backward_s), takes_s, hidden=hidden
    )


def fit_from_message_counts(rounds_s: Mapping[int, Sequence[float]], total_bytes: int) -> AlphaBeta:
    """Alpha and beta from seconds of several rounds by number of messages, all of the same bytes.

    By the median rounds of the fewest and the most messages: what more of them cost is latency.
    """
    few, many = min(rounds_s), max(rounds_s)
    few_s, many_s = (statistics.median(rounds_s[count]) for count in (few, many))
    alpha_s = (many_s - few_s) / (many - few)
    return AlphaBeta(alpha_s, (few_s - few * alpha_s) / total_bytes)
