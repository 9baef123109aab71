"""Data-parallel training in forty lines, as a learner of the DDP lab writes it in steps.

When the last gradient of a bucket arrives, its all-reduce starts while the backward pass goes on;
when the last gradient of all arrives, the rank waits. ``buckets.GradientBuckets`` also takes a mesh
and refuses a backward pass that leaves a gradient out.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.buckets import assign_buckets

InFlight = list[tuple[list[nn.Parameter], Tensor, dist.Work]]
"""Buckets on their way: the parameters, the flat row of their gradients, and what to wait for."""


def averaging_with(all_reduce: Callable[..., Tensor | None]) -> Callable[..., None]:
    """Return a ``small_ddp`` without buckets, for an all-reduce of your own.

    ``all_reduce`` gets one gradient as a vector, this rank's number, and the number of ranks.
    """

    def data_parallel(model: nn.Module, bucket_bytes: int) -> None:
        def average(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            ranks = dist.get_world_size()
            total = all_reduce(parameter.grad.flatten(), dist.get_rank(), ranks)
            if total is None:
                raise NotImplementedError("the all-reduce returned None: its body is still empty")
            parameter.grad.copy_(total.view_as(parameter.grad) / ranks)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(average)

    return data_parallel


def average_buckets(in_flight: InFlight) -> None:
    """Wait for each bucket, and leave the means in its parameters' ``grad``."""
    for bucket, row, handle in in_flight:
        handle.wait()
        row /= dist.get_world_size()
        means = row.split([p.numel() for p in bucket])
        for parameter, mean in zip(bucket, means, strict=True):
            # A view of the bucket, so that nothing is copied back.
            parameter.grad = mean.view_as(parameter)


def send_full_buckets(
    buckets: list[list[nn.Parameter]], finish: Callable[[InFlight], None]
) -> None:
    """Start each bucket's all-reduce when its last gradient arrives; call ``finish`` at the last of
    all, in every backward pass.
    """
    missing = [len(bucket) for bucket in buckets]
    in_flight: InFlight = []

    def arrived(index: int) -> None:
        missing[index] -= 1
        if missing[index] == 0:
            row = torch.cat([p.grad.flatten() for p in buckets[index] if p.grad is not None])
            handle = dist.all_reduce(row, async_op=True)
            assert handle is not None, "every rank of the world is in its own group"
            in_flight.append((buckets[index], row, handle))
        if not any(missing):
            finish(in_flight)
            in_flight.clear()
            missing[:] = [len(bucket) for bucket in buckets]

    for index, bucket in enumerate(buckets):
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived(index))


def small_ddp(model: nn.Module, bucket_bytes: int) -> None:
    """Average every ``grad`` over all ranks by the end of each backward pass, which must give one
    to every parameter. A bucket closes once it holds ``bucket_bytes``.
    """
    # The last layer's gradients come first; DDP too starts with this order.
    parameters = list(model.parameters())[::-1]
    plan = assign_buckets([parameter.nbytes for parameter in parameters], bucket_bytes)
    send_full_buckets([[parameters[place] for place in bucket] for bucket in plan], average_buckets)
