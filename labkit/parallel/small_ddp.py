"""Data-parallel training in thirty lines, as a learner of the DDP lab writes it.

When the last gradient of a bucket arrives, its all-reduce starts while the backward pass goes on;
when the last gradient of all arrives, the rank waits. ``buckets.GradientBuckets`` also takes a mesh
and refuses a backward pass that leaves a gradient out.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.buckets import assign_buckets


def small_ddp(model: nn.Module, bucket_bytes: int) -> None:
    """Average every ``grad`` over all ranks by the end of each backward pass, which must give one
    to every parameter. A bucket closes once it holds ``bucket_bytes``.
    """
    # The last layer's gradients come first; DDP too starts with this order.
    parameters = list(model.parameters())[::-1]
    plan = assign_buckets([parameter.nbytes for parameter in parameters], bucket_bytes)
    buckets = [[parameters[position] for position in bucket] for bucket in plan]
    missing = [len(bucket) for bucket in buckets]
    on_their_way: list[tuple[list[nn.Parameter], Tensor, dist.Work]] = []

    def arrived(index: int) -> None:
        missing[index] -= 1
        if missing[index] == 0:
            row = torch.cat([p.grad.flatten() for p in buckets[index] if p.grad is not None])
            handle = dist.all_reduce(row, async_op=True)
            assert handle is not None, "every rank of the world is in its own group"
            on_their_way.append((buckets[index], row, handle))
        if not any(missing):
            finish()

    def finish() -> None:
        for bucket, row, handle in on_their_way:
            handle.wait()
            row /= dist.get_world_size()
            means = row.split([p.numel() for p in bucket])
            for parameter, mean in zip(bucket, means, strict=True):
                # A view of the bucket, so that nothing is copied back.
                parameter.grad = mean.view_as(parameter)
        on_their_way.clear()
        missing[:] = [len(bucket) for bucket in buckets]

    for index, bucket in enumerate(buckets):
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived(index))
