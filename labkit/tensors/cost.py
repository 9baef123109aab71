"""How long a model's parameters take to gather, and how much of that their own hooks take.

The model comes after ``fully_shard``; its units are left sharded.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

REPEATS = 15
"""Times that all is gathered; the fastest counts, since whatever disturbs makes it slower."""
HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def gather_ms(model: nn.Module) -> tuple[float, float]:
    """Milliseconds to gather and free every unit once, one after another; and those within hooks. A collective."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    within: list[float] = []
    for parameter in model.parameters():
        _watch(parameter._local_tensor, within)  # type: ignore[attr-defined]
    taken = []
    for _ in range(REPEATS):
        _finished()
        dist.barrier()
        within.clear()
        start = time.perf_counter()
        for unit in units:
            unit.unshard()
            unit.reshard()
        _finished()
        taken.append((1e3 * (time.perf_counter() - start), 1e3 * sum(within)))
    return min(taken)


def _watch(shard: Tensor, within: list[float]) -> None:
    """Let a shard's hooks add the seconds that they take to a list."""
    for name in HOOKS:
        if hasattr(shard, name):
            setattr(shard, name, _timed(getattr(shard, name), within))


def _timed(hook: Callable[..., Any], within: list[float]) -> Callable[..., Any]:
    @functools.wraps(hook)  # FSDP2 counts its arguments
    def timed(*args: Any, **kwargs: Any) -> Any:
        _finished()
        start = time.perf_counter()
        answer = hook(*args, **kwargs)
        _finished()
        within.append(time.perf_counter() - start)
        return answer

    return timed


def _finished() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
