"""What programs do around the training itself: they draw samples, scale losses, save, and start their own ranks.

In a simulation samples are drawn with real numbers, in the process of the rank. Every scaled gradient is finite. No
file is written, since there is nothing to write. Of the ranks that a program starts, one is already there.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import device_mesh as older
from torch.utils import data
from torch.utils.data import dataloader

from labkit.errors import ParameterError

DATALOADER_WORKER_ARGUMENTS = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "pin_memory",
)
"""Arguments of a DataLoader for processes that prepare samples: simulated tensors cannot go from one to another."""
MESH_FACTORY_MODULES: list[Any] = [device_mesh, torch.distributed, torch.distributed.tensor, older, _fsdp_init]
"""Modules in which a program, or FSDP2 where the program gives no mesh, finds torch's function that makes one."""


def patch_training_functions() -> None:
    """Replace it for the rest of this process."""
    samplers: list[Any] = [data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler]
    for sampler in [*samplers, data.DistributedSampler]:
        sampler.__iter__ = use_real_order(sampler.__iter__)
    loader: Any = dataloader
    loader.DataLoader.__init__ = drop_arguments(loader.DataLoader.__init__, *DATALOADER_WORKER_ARGUMENTS)
    loader._BaseDataLoaderIter.__init__ = use_real_tensors(loader._BaseDataLoaderIter.__init__)
    data.random_split = data.dataset.random_split = use_real_tensors(data.random_split)
    scaler: Any = torch.amp.GradScaler
    scaler._maybe_opt_step = lambda scaler, optimizer, unused, *args, **kwargs: optimizer.step(*args, **kwargs)
    scaler.get_scale = lambda scaler: scaler._init_scale if scaler.is_enabled() else 1.0
    scaler._get_growth_tracker = lambda scaler: scaler._init_growth_tracker
    sharded: Any = ShardedGradScaler
    sharded._amp_update_scale_cpu_ = count_finite_step
    torch.save = skip_save
    processes: Any = torch.multiprocessing
    processes.spawn = run_as_spawned_rank


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
    function: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 1, *unused: Any, **others: Any
) -> None:
    """In place of torch.multiprocessing.spawn: this process is one of those that the program starts.

    Raises:
        ParameterError: the program starts as many as are neither on a host nor in the world.
    """
    world_size, on_host = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if nprocs not in (world_size, on_host):
        raise ParameterError(
            f"the program starts {nprocs} ranks, and {world_size} are simulated, {on_host} on a host: "
            f"simulate with world_size={nprocs}"
        )
    function(int(os.environ["RANK" if nprocs == world_size else "LOCAL_RANK"]), *args)
