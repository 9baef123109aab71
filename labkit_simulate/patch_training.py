"""Replace what programs do around training: draw samples, scale losses, save, start ranks.

In a simulation samples are drawn with real values, in the rank's process. Every scaled gradient is
finite. No file is written. Of the ranks that a program starts, this process is one.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from labkit.errors import ParameterError
from labkit.torch_private import replace, unset_fake_temporarily, wrap

# A DataLoader's arguments for worker processes, to which fake tensors cannot be sent.
DATALOADER_WORKER_ARGUMENTS = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "pin_memory",
)
SAMPLERS = (
    "RandomSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "DistributedSampler",
)


def patch_training_functions() -> None:
    """Replace these functions for the rest of this process."""
    for sampler in SAMPLERS:
        wrap(f"{sampler}.__iter__", use_real_order)
    wrap("DataLoader.__init__", lambda init: drop_arguments(init, *DATALOADER_WORKER_ARGUMENTS))
    wrap("BaseDataLoaderIter.__init__", use_real_tensors)
    wrap("data:random_split", use_real_tensors)
    wrap("dataset:random_split", use_real_tensors)
    replace("maybe_opt_step", step_without_check)
    replace("GradScaler.get_scale", initial_scale)
    replace("get_growth_tracker", lambda scaler: scaler._init_growth_tracker)
    replace("amp_update_scale_cpu_", count_finite_step)
    replace("torch:save", skip_save)
    replace("multiprocessing:spawn", run_as_spawned_rank)


def step_without_check(
    scaler: Any, optimizer: Any, found_inf: Any, *args: Any, **kwargs: Any
) -> Any:
    """Update parameters without asking whether gradients are finite."""
    return optimizer.step(*args, **kwargs)


def initial_scale(scaler: Any) -> float:
    """Return the scale that a GradScaler starts with, as it never changes."""
    return float(scaler._init_scale) if scaler.is_enabled() else 1.0


def count_finite_step(scaler: Any, found_inf: Any) -> None:
    """Count a step in ShardedGradScaler, out of place as fake tensors need it."""
    scaler._growth_tracker = scaler._growth_tracker + 1


def use_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its tensors have values."""

    @functools.wraps(function)
    def call_with_real_tensors(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call_with_real_tensors


def use_real_order(iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Wrap a sampler's iterator: draw the whole order with real tensors."""

    def draw_order(sampler: Any) -> Iterator[Any]:
        with unset_fake_temporarily():
            order = list(iterate(sampler))
        return iter(order)

    return draw_order


def drop_arguments(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Wrap a function so that it does not receive these arguments."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call_without_arguments(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        for name in names:
            given.arguments.pop(name, None)
        return function(*given.args, **given.kwargs)

    return call_without_arguments


def skip_save(obj: Any, f: Any = None, *unused: Any, **others: Any) -> None:
    """Replace torch.save: a simulation has no values to save, and overwrites nothing."""
    print(f"simulated: nothing is saved in {f}", flush=True)


def run_as_spawned_rank(
    function: Callable[..., None],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    *unused: Any,
    **others: Any,
) -> None:
    """Replace torch.multiprocessing.spawn: this process is one of the spawned ranks.

    Raises:
        ParameterError: ``nprocs`` is neither a host's number of ranks nor the world size.
    """
    world_size, on_host = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if nprocs not in (world_size, on_host):
        raise ParameterError(
            f"the program starts {nprocs} ranks, and {world_size} are simulated, {on_host} on a"
            f" host: simulate with world_size={nprocs}"
        )
    function(int(os.environ["RANK" if nprocs == world_size else "LOCAL_RANK"]), *args)
