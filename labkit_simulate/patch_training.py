"""What programs do around the training itself: they draw samples, scale losses, save, and start
their own ranks.

In a simulation samples are drawn with real numbers, in the process of the rank. Every scaled
gradient is finite. No file is written, since there is nothing to write. Of the ranks that a program
starts, one is already there.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from labkit.errors import ParameterError
from labkit.torch_private import replace, unset_fake_temporarily, wrap

DATALOADER_WORKER_ARGUMENTS = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "pin_memory",
)
"""Arguments of a DataLoader for processes that prepare samples: simulated tensors cannot go from
one to another.
"""


def patch_training_functions() -> None:
    """Replace it for the rest of this process."""
    for sampler in (
        "RandomSampler",
        "SubsetRandomSampler",
        "WeightedRandomSampler",
        "DistributedSampler",
    ):
        wrap(f"{sampler}.__iter__", use_real_order)
    wrap("DataLoader.__init__", lambda init: drop_arguments(init, *DATALOADER_WORKER_ARGUMENTS))
    wrap("BaseDataLoaderIter.__init__", use_real_tensors)
    wrap("data:random_split", use_real_tensors)
    wrap("dataset:random_split", use_real_tensors)
    replace(
        "maybe_opt_step",
        lambda scaler, optimizer, unused, *args, **kwargs: optimizer.step(*args, **kwargs),
    )
    replace(
        "GradScaler.get_scale", lambda scaler: scaler._init_scale if scaler.is_enabled() else 1.0
    )
    replace("get_growth_tracker", lambda scaler: scaler._init_growth_tracker)
    replace("amp_update_scale_cpu_", count_finite_step)
    replace("torch:save", skip_save)
    replace("multiprocessing:spawn", run_as_spawned_rank)


def count_finite_step(scaler: Any, unused: Any) -> None:
    """Of ShardedGradScaler, on a CPU: it takes a new tensor to count."""
    scaler._growth_tracker = scaler._growth_tracker + 1


def use_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, in which tensors have numbers."""

    @functools.wraps(function)
    def call_with_real_tensors(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call_with_real_tensors


def use_real_order(iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """A sampler's order, all at once: its indices are numbers in tensors at first."""

    def draw_order(sampler: Any) -> Iterator[Any]:
        with unset_fake_temporarily():
            order = list(iterate(sampler))
        return iter(order)

    return draw_order


def drop_arguments(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The same function, which is not told the arguments of these names."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call_without_arguments(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        for name in names:
            given.arguments.pop(name, None)
        return function(*given.args, **given.kwargs)

    return call_without_arguments


def skip_save(obj: Any, f: Any = None, *unused: Any, **others: Any) -> None:
    """In place of torch.save: a simulation has nothing to save, and overwrites nothing."""
    print(f"simulated: nothing is saved in {f}", flush=True)


def run_as_spawned_rank(
    function: Callable[..., None],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    *unused: Any,
    **others: Any,
) -> None:
    """In place of torch.multiprocessing.spawn: this process is one of those that the program
    starts.

    Raises:
        ParameterError: the program starts as many as are neither on a host nor in the world.
    """
    world_size, on_host = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if nprocs not in (world_size, on_host):
        raise ParameterError(
            f"the program starts {nprocs} ranks, and {world_size} are simulated, {on_host} on a"
            f" host: simulate with world_size={nprocs}"
        )
    function(int(os.environ["RANK" if nprocs == world_size else "LOCAL_RANK"]), *args)
