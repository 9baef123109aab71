"""What FSDP2's hooks for int8 cost: time and memory of a decode, and the parts of a gather."""

import functools
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

from labkit.models.tile_network import tile_network
from labkit.session.timeline import silence_stderr
from labkit.tensors import hook_shards

GATHER_ROUNDS = 15
"""Timed rounds; of each part the fastest counts, because every disturbance makes it slower."""
DECODE_ROUNDS = 7
Shape = tuple[int, int]


def decode_costs(
    hooks: Mapping[str, Callable[..., Any]], shape: Shape, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """Return by post-all-gather hook the ms to fill a matrix, and its own bytes a number."""
    rows = {}
    for name, hook in hooks.items():
        gathered, out = sample_int8(shape), torch.empty(shape, dtype=dtype)
        taken = []
        for _ in range(DECODE_ROUNDS):
            start = time.perf_counter()
            hook(gathered, None, dtype, out=out)
            taken.append(time.perf_counter() - start)
        own = own_bytes(hook, dtype, shape)
        rows[name] = {"ms": 1e3 * statistics.median(taken), "bytes a number of its own": own}
    return rows


def sample_int8(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return the int8 numbers of a gathered matrix, and the scales of its rows."""
    return torch.ones(shape, dtype=torch.int8), torch.ones(shape[0], 1)


def own_bytes(hook: Callable[..., Any], dtype: torch.dtype, shape: Shape) -> float:
    """Return the bytes a number that a hook for int8 allocates at most, without the parameter."""
    gathered = sample_int8(shape)
    # The last rank's shard is shorter, as FSDP cuts the padding off.
    out = torch.empty(shape[0] - 1, shape[1], dtype=dtype)
    peaks = []
    for given in ({}, {"out": out}):
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with silence_stderr():
            profiler.start()
        answer = hook(gathered, None, dtype, **given)
        with silence_stderr():
            profiler.stop()
        made = 0 if given else answer[0].nbytes
        peaks.append((peak_allocated(profiler) - made) / gathered[0].numel())
    return max(peaks)


def peak_allocated(profiler: profile) -> int:
    """Return the most bytes that a profiled part has allocated at once, also inside operators."""
    recorded: Any = profiler.profiler
    events = recorded.kineto_results.events()
    memory = [each for each in events if each.name() == "[memory]"]
    changes = [each.nbytes() for each in sorted(memory, key=lambda each: each.start_ns())]
    return max(itertools.accumulate(changes, initial=0))


def gather_parts(
    hooks: Mapping[str, Callable[[Any, int], None] | None], dim: int
) -> dict[str, dict[str, float]]:
    """Return the parts of one gather of lab 3's network in ms, by the hooks put onto its shards.

    Without hooks FSDP2 sends float32. The part "all-gather" is FSDP2's call, with the wait for the
    other ranks. A collective; each rank returns its own times.
    """
    return {name: _time_gather(add_hooks, dim) for name, add_hooks in hooks.items()}


def _time_gather(add_hooks: Callable[[Any, int], None] | None, dim: int) -> dict[str, float]:
    model: Any = tile_network(dim)
    units = [layer for layer in model if list(layer.parameters())]
    for unit in units:
        fully_shard(unit, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def add_named_hooks(shard: Any, rows: int) -> None:
        assert add_hooks
        add_hooks(shard, rows)
        # The profiler's names for them; FSDP2 chooses its arguments by the hook's signature.
        for name, part in (("fsdp_pre_all_gather", "encode"), ("fsdp_post_all_gather", "decode")):
            hook = getattr(shard, name)
            setattr(shard, name, functools.wraps(hook)(record_function(part)(hook)))

    if add_hooks:
        hook_shards(model, add_named_hooks)
    profiler = profile(activities=[ProfilerActivity.CPU])
    with silence_stderr():
        profiler.start()
    for _ in range(GATHER_ROUNDS):
        # All ranks start together, or one would measure its wait for another.
        dist.barrier()
        with record_function("gather"):
            for unit in units:
                unit.unshard()
                unit.reshard()
    with silence_stderr():
        profiler.stop()
    events = profiler.events() or []
    rounds = [_split_gather(each, events) for each in events if each.name == "gather"]
    return {part: min(taken[part] for taken in rounds) for part in rounds[0]}


def _split_gather(gather: Any, events: Sequence[Any]) -> dict[str, float]:
    """Return the ms by part of one gather, from the events of a profile."""
    taken = defaultdict[str, float](float)
    for event in events:
        span, within = event.time_range, gather.time_range
        if within.start <= span.start and span.end <= within.end:
            # FSDP2 appends the unit's name.
            taken[event.name.partition(" (")[0]] += event.cpu_time_total / 1e3
    parts = {name: taken[name] for name in ("encode", "decode")}
    parts["copy in"] = taken["fsdp::all_gather_copy_in"]
    parts["all-gather"] = taken["FSDP::all_gather"] - parts["copy in"] - parts["encode"]
    parts["copy out"] = taken["FSDP::all_gather_copy_out"]
    return parts | {"the rest": taken["gather"] - sum(parts.values())}
