"""Watch, replace or forbid the collectives of sharded training and the events of FSDP2's units.

This module is for tests, the kit's and your own; no lab uses it.

    gathered = []

    def counted(output, shard, **options):
        gathered.append(output.numel())
        return original(output, shard, **options)

    with instrument.patch_all_gather(counted) as original:
        model(x).sum().backward()                    # len(gathered): how often a unit was gathered

Each ``patch_…`` is a context manager that replaces one function with ``new`` and yields the
original, which is restored on any exit. All ranks must enter and leave it together, because it has
a barrier on both sides. A rank that leaves with an exception skips the barrier, which the others
may never reach.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import torch_private

Function = Callable[..., Any]


def reduce_scatter_with_assert(
    original: Function, assert_fn: Callable[[Tensor], None], *args: Any, **kwargs: Any
) -> Any:
    """Call ``assert_fn`` with a reduce-scatter's output, still without values, then run it."""
    output = args[0] if args else kwargs.get("output")
    if output is None:
        rule = "a reduce-scatter needs output first or by name"
        raise ValueError(f"{rule}; it was called with {sorted(kwargs)} alone")
    assert_fn(output)
    return original(*args, **kwargs)


class DummyProcessGroup:
    """A process group that counts all-reduces in ``all_reduces`` and communicates nothing."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self.all_reduces = 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, *args: Any, **kwargs: Any) -> DummyWork:
        self.all_reduces += 1
        return DummyWork()


class DummyWork:
    """The handle of a collective that never runs and counts as finished."""

    def wait(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(1)
        return future


class DummyDDP(nn.Module):
    """DistributedDataParallel with one dummy all-reduce for each gradient, and no buckets."""

    def __init__(self, module: nn.Module, process_group: DummyProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = process_group or DummyProcessGroup(0, 1)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._count_all_reduce)

    @property
    def all_reduces(self) -> int:
        """Number of all-reduces started."""
        return self.process_group.all_reduces

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _count_all_reduce(self, parameter: Tensor) -> None:
        self.process_group.allreduce([parameter.grad])


@contextlib.contextmanager
def _patch_functions(owner_name: str, names: str, new: Function) -> Iterator[Function]:
    """Replace ``names`` of a class of FSDP2, or of torch.distributed; yield the first original."""
    owner = torch_private.get(owner_name) if owner_name else dist
    # getattr would unwrap a staticmethod, so keep what the class stores.
    originals = {name: vars(owner)[name] for name in names.split() if name in vars(owner)}
    if not originals:
        missing = f"none of {names} in {owner.__name__}"
        raise RuntimeError(f"torch {torch_private.TORCH_VERSION} has {missing}")
    original: Function = getattr(owner, next(iter(originals)))
    # Without this barrier, a rank that is a thread could take another's replacement for the
    # original.
    _barrier_if_distributed()
    for name, stored in originals.items():
        setattr(owner, name, staticmethod(new) if isinstance(stored, staticmethod) else new)
    try:
        yield original
        _barrier_if_distributed()
    finally:
        for name, stored in originals.items():
            setattr(owner, name, stored)


def _barrier_if_distributed() -> None:
    if dist.is_initialized():
        dist.barrier()


# FSDP2's collectives; of two names, the first is that in torch 2.13, the second that in 2.11.
# new(output, shard, group=…, async_op=…)
patch_all_gather = partial(_patch_functions, "", "all_gather_single all_gather_into_tensor")
# new(output=…, input=…, op=…, group=…, async_op=…)
patch_reduce_scatter = partial(_patch_functions, "", "reduce_scatter_single reduce_scatter_tensor")
# new(tensor, op, group, async_op)
patch_all_reduce = partial(_patch_functions, "", "all_reduce")

# Methods of a unit of FSDP2, which gather it, free it, and reduce its gradients.
# new(unit, async_op=False)
patch_unshard = partial(_patch_functions, "FSDPParamGroup", "unshard")
# new(unit)
patch_reshard = partial(_patch_functions, "FSDPParamGroup", "reshard")
# new(unit, *unused)
patch_post_backward = partial(_patch_functions, "FSDPParamGroup", "post_backward")

# The autograd node that calls post_backward: new(ctx, *gradients), with ctx.param_group. A unit
# whose inputs need no gradient, such as the first, has no such node.
patch_register_post_backward_hook_backward = partial(
    _patch_functions, "RegisterPostBackwardFunction", "backward"
)
