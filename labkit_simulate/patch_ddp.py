"""Replace DistributedDataParallel's reducer, which is written in C++ and works on memory.

The replacement sends and keeps the same: flat buckets, filled as gradients arrive and sent when
full; in the first step in the order of the parameters, from the second on in the order of arrival.
It has no communication hooks, mixed precision or joining of uneven inputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.errors import LabError
from labkit.torch_private import compute_bucket_assignment_by_size, queue_callback, replace


def patch_reducer() -> None:
    """Replace the reducer for the rest of this process."""
    replace("distributed:Reducer", PlaceholderReducer)
    replace("distributed:Logger", NullLogger)
    replace("verify_params_across_processes", lambda *unused: True)
    replace("register_comm_hook", refuse_hook)
    replace("register_builtin_comm_hook", refuse_hook)


class NullLogger:
    """Replace DDP's logger; every method does nothing."""

    def __init__(self, *unused: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *unused, **others: None


class PlaceholderReducer(NullLogger):
    """Average gradients over the ranks in buckets; takes the arguments of torch's reducer."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: list[list[int]],
        limits: Any,
        group: dist.ProcessGroup,
        sparse: Any,
        bucket_bytes: int,
        find_unused: bool,
        views: bool,
        names: Any,
        first_bucket_bytes: int,
        *others: Any,
    ):
        super().__init__()
        self._parameters, self._group = list(parameters), group
        self._find_unused, self._views = find_unused, views
        self._limits = [first_bucket_bytes, bucket_bytes]
        self._arrived: list[int] = []
        self._rebuilt, self._expects = False, False
        self._used, self._used_anywhere = (
            torch.zeros(len(parameters), dtype=torch.int32) for _ in range(2)
        )
        self._make_buckets(buckets)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(
                lambda _, index=index: self._add_gradient(index)
            )

    def _make_buckets(self, buckets: list[list[int]]) -> None:
        self._buckets = buckets
        self._flat = [
            self._empty_bucket([self._parameters[index] for index in bucket]) for bucket in buckets
        ]
        self._place = {index: number for number, bucket in enumerate(buckets) for index in bucket}

    @staticmethod
    def _empty_bucket(parameters: list[nn.Parameter]) -> Tensor:
        return parameters[0].new_empty(sum(parameter.numel() for parameter in parameters)).detach()

    def _rebuild_buckets(self) -> bool:
        """Make buckets in the order of arrival after the first backward pass; tell if done now."""
        if self._rebuilt or self._find_unused or not self._arrived:
            return False
        arrived: list[Tensor] = [self._parameters[index] for index in self._arrived]
        buckets, _ = compute_bucket_assignment_by_size(arrived, self._limits, [], self._arrived)
        self._make_buckets(buckets)
        self._rebuilt = True
        return True

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Start a backward pass that averages gradients."""
        self._missing = [set(bucket) for bucket in self._buckets]
        self._works: list[dist.Work] = []
        self._next, self._expects, self._arrived = 0, True, []

    def _add_gradient(self, index: int) -> None:
        """Copy an arrived gradient into its bucket, and send full buckets in order."""
        if not self._expects:
            return
        if not self._arrived:
            queue_callback(self._finish_backward)
        self._arrived.append(index)
        view, gradient = self._gradient_view(index), self._parameters[index].grad
        assert gradient is not None
        view.copy_(gradient)
        view.div_(self._group.size())
        if self._views:
            self._parameters[index].grad = view
        self._missing[self._place[index]].discard(index)
        self._send_full_buckets()

    def _send_full_buckets(self) -> None:
        while self._next < len(self._buckets) and not self._missing[self._next]:
            work = dist.all_reduce(self._flat[self._next], group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)
            self._next += 1

    def _gradient_view(self, index: int) -> Tensor:
        """Return the part of its bucket that holds a gradient."""
        number, parameter = self._place[index], self._parameters[index]
        bucket = self._buckets[number]
        start = sum(self._parameters[each].numel() for each in bucket[: bucket.index(index)])
        return self._flat[number].narrow(0, start, parameter.numel()).view_as(parameter)

    def _finish_backward(self) -> None:
        """Wait for all buckets, and copy the means back into the gradients."""
        if self._find_unused:
            self._used_anywhere.copy_(self._used)
            dist.all_reduce(self._used_anywhere, group=self._group)
            self._used.zero_()
            self._missing = [set() for _ in self._buckets]
        if any(self._missing):
            raise LabError(
                "some parameters got no gradient, so DDP would wait: set find_unused_parameters, or"
                " freeze them"
            )
        self._send_full_buckets()
        for work in self._works:
            work.wait()
        for index in [] if self._views else self._arrived:
            gradient = self._parameters[index].grad
            assert gradient is not None
            gradient.copy_(self._gradient_view(index))
        self._expects = False


def refuse_hook(*unused: Any) -> None:
    """Raise LabError in place of registering a communication hook."""
    raise LabError(
        "communication hooks of DDP cannot be simulated: leave the hook out, or average gradients"
        " yourself"
    )
