"""How long a model's parameters take to gather, and how much of that is encoding and decoding.

The model comes after ``fully_shard``; its units are left sharded. All functions are collectives.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from labkit.tensors.quantised import Extension
from labkit.tensors.two_tensor import pad_rows

REPEATS = 15
"""Times that each is done; the middle one counts."""


def gather_ms(model: nn.Module) -> float:
    """Milliseconds to gather and free every unit once, one after another."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def gather() -> None:
        for unit in units:
            unit.unshard()
            unit.reshard()

    return _milliseconds(gather)


@torch.no_grad()
def coding_ms(model: nn.Module, extension: Extension, dtype: torch.dtype) -> float:
    """Milliseconds to encode this rank's rows of every parameter, and to decode those of all ranks; nothing is sent."""
    steps: list[Callable[[], object]] = []
    for parameter in model.parameters():
        ranks = parameter.device_mesh.size()  # type: ignore[attr-defined]
        rows = pad_rows(parameter.to_local(), -(-len(parameter) // ranks))  # type: ignore[attr-defined]
        arrived = [sent.repeat(ranks, *[1] * (sent.ndim - 1)) for sent in extension.encode(rows)]
        steps += [partial(extension.encode, rows), partial(extension.decode, arrived, dtype)]

    def code() -> None:
        for step in steps:
            step()

    return _milliseconds(code)


def _milliseconds(action: Callable[[], None]) -> float:
    """How long an action takes that all ranks begin together."""
    taken = []
    for _ in range(REPEATS):
        _finished()
        dist.barrier()
        start = time.perf_counter()
        action()
        _finished()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def _finished() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
