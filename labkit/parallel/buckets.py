"""Average gradients over ranks in buckets, while the backward pass still computes other gradients.

An all-reduce per parameter would pay the latency of a message for every bias. So parameters share
flat buckets, filled in the order in which the backward pass produces gradients (last layer first),
and a bucket is sent as soon as it is full.
Source: Li et al., "PyTorch Distributed", 2020 (arXiv:2006.15704).
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.models.protocol import LabModel
from labkit.torch_private import queue_callback

BucketRule = Callable[[list[int], int], list[list[int]]]
"""Maps gradient sizes (bytes, in order of arrival) and a limit to the indices of each bucket."""


def assign_buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Fill buckets in order; close each once it holds ``limit`` bytes or more, as DDP does."""
    buckets: list[list[int]] = []
    held = limit
    for index, size in enumerate(sizes):
        if held >= limit:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += size
    return buckets


def apply_gradient_buckets(
    model: LabModel, mesh: DeviceMesh, ignored: Iterable[nn.Module] = ()
) -> None:
    """Average a model's gradients over a mesh, except those of local and ignored modules."""
    skipped = [*model.local_modules(), *ignored]
    local = {parameter for module in skipped for parameter in module.parameters()}
    GradientBuckets([p for p in model.parameters() if p not in local], mesh)


class GradientBuckets:
    """Average every ``parameter.grad`` over all ranks of a mesh by the end of the backward pass.

    Parameters come in the order of the forward pass. Every backward pass must produce a gradient
    for each, because the last one completes the exchange. If one is missing, every rank raises
    ValueError and no rank hangs.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        mesh: DeviceMesh,
        bucket_bytes: int = 25 * 2**20,
        rule: BucketRule = assign_buckets,
    ):
        self.groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self.ranks = mesh.size()
        trained = [p for p in parameters if p.requires_grad]
        self.buckets = bucket_parameters(trained, bucket_bytes, rule)
        self._missing = [len(bucket) for bucket in self.buckets]
        self._flights: list[tuple[list[nn.Parameter], Tensor, dist.Work | None]] = []
        for index, bucket in enumerate(self.buckets):
            count = partial(self._count_gradient, index)
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(count)

    def _count_gradient(self, index: int, parameter: Tensor) -> None:
        # At the first gradient: autograd runs a queued callback when the backward pass ends.
        if self._is_idle():
            queue_callback(self._refuse_unused)
        self._missing[index] -= 1
        if self._missing[index] == 0:
            self._start_all_reduce(self.buckets[index])
        if not any(self._missing):
            self._wait_and_copy()

    def _is_idle(self) -> bool:
        return self._missing == [len(bucket) for bucket in self.buckets]

    def _refuse_unused(self) -> None:
        if not self._is_idle():
            unused = [tuple(p.shape) for bucket in self.buckets for p in bucket if p.grad is None]
            shapes = ", ".join(map(str, unused)) or "some that older batches had used"
            raise ValueError(
                f"the backward pass gave no gradient to parameters of shape {shapes}, so their"
                " bucket never left: freeze what the model does not use (requires_grad_(False)),"
                " or wrap the model with FSDP"
            )

    def _start_all_reduce(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None])
        flat.div_(self.ranks)
        # Only the last axis runs in the background: each axis needs the result of the one before.
        for group in self.groups[:-1]:
            dist.all_reduce(flat, group=group)
        work = dist.all_reduce(flat, group=self.groups[-1], async_op=True) if self.groups else None
        self._flights.append((bucket, flat, work))

    def _wait_and_copy(self) -> None:
        for bucket, flat, work in self._flights:
            if work is not None:
                work.wait()
            means = flat.split([p.numel() for p in bucket])
            for parameter, mean in zip(bucket, means, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(mean.view_as(parameter.grad))
        self._flights.clear()
        self._missing = [len(bucket) for bucket in self.buckets]


def bucket_parameters(
    parameters: list[nn.Parameter], bucket_bytes: int, rule: BucketRule
) -> list[list[nn.Parameter]]:
    """Return the parameters, last first, in a rule's buckets; each must be in exactly one."""
    # Autograd reaches the last layer first.
    coming = parameters[::-1]
    buckets = rule([parameter.nbytes for parameter in coming], bucket_bytes)
    placed = sorted(index for bucket in buckets for index in bucket)
    if placed != list(range(len(coming))):
        rule_broken = f"do not hold each of the gradients 0 to {len(coming) - 1} once"
        raise ValueError(f"the buckets {buckets} {rule_broken}")
    return [[coming[index] for index in bucket] for bucket in buckets if bucket]
