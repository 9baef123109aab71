"""Time the all-gathers of a sharded model's parameters, and the share that their own hooks take.

Apply ``fully_shard`` before; the units are left sharded.
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
"""Timed rounds; the fastest counts, because every disturbance makes a round slower."""
HOOK_NAMES = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def gather_ms(model: nn.Module) -> tuple[float, float]:
    """Return the milliseconds to gather and free every unit in turn, and those spent in hooks.

    A collective.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    within: list[float] = []
    for parameter in model.parameters():
        _time_hooks(parameter._local_tensor, within)  # type: ignore[attr-defined]
    taken = []
    for _ in range(REPEATS):
        # All ranks start together, or one would measure its wait for another.
        _synchronize_gpu()
        dist.barrier()
        within.clear()
        start = time.perf_counter()
        for unit in units:
            unit.unshard()
            unit.reshard()
        _synchronize_gpu()
        taken.append((1e3 * (time.perf_counter() - start), 1e3 * sum(within)))
    return min(taken)


def _time_hooks(shard: Tensor, within: list[float]) -> None:
    for name in HOOK_NAMES:
        if hasattr(shard, name):
            setattr(shard, name, _time_hook(getattr(shard, name), within))


def _time_hook(hook: Callable[..., Any], within: list[float]) -> Callable[..., Any]:
    # FSDP2 chooses its arguments by the hook's signature.
    @functools.wraps(hook)
    def call_and_time(*args: Any, **kwargs: Any) -> Any:
        _synchronize_gpu()
        start = time.perf_counter()
        answer = hook(*args, **kwargs)
        _synchronize_gpu()
        within.append(time.perf_counter() - start)
        return answer

    return call_and_time


def _synchronize_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
