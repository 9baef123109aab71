"""The clock that lab 4 holds to a step and to a collective."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist


def median_ms(act: Callable[..., Any], *values: Any, calls: int = 5) -> tuple[float, float]:
    """Return the median milliseconds and CPU milliseconds of a call on this rank.

    All ranks begin each call together, so all have to call this function.
    """
    took = []
    for _ in range(calls):
        dist.barrier()
        _wait_for_gpu()
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        act(*values)
        _wait_for_gpu()
        took.append((time.perf_counter() - begun_s, time.process_time() - cpu_s))
    whole_s, computing_s = map(statistics.median, zip(*took, strict=True))
    return 1e3 * whole_s, 1e3 * computing_s


def _wait_for_gpu() -> None:
    # A GPU works through a queue, and a clock read before its end measures how fast it was filled.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
