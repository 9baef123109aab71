"""Call collectives and messages once each, and note how long each took and what it left."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from labkit import rank


@dataclass
class Config:
    elements: int = 1000


def both_ways(here: rank.Session, x: Tensor) -> Tensor:
    """Pass a tensor once around the ring."""
    got = torch.zeros_like(x)
    after, before = (here.rank + 1) % here.world_size, (here.rank - 1) % here.world_size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, got, before)]):
        work.wait()
    return got


def one_way(here: rank.Session, x: Tensor) -> Tensor:
    """Send a tensor from rank 0 to rank 1, which only receives."""
    if here.rank == 0:
        dist.send(x, 1)
    elif here.rank == 1:
        dist.recv(x, 0)
    return x


def in_background(x: Tensor) -> Tensor:
    """All-reduce while this rank sleeps for as long as a message takes."""
    work = dist.all_reduce(x, async_op=True)
    time.sleep(0.1)
    work.wait()
    return x


def two_at_once(x: Tensor) -> Tensor:
    """Start two all-reduces, of which the second waits for the first."""
    for work in [dist.all_reduce(each, async_op=True) for each in (x, x.clone())]:
        work.wait()
    return x


def by_future(x: Tensor) -> Tensor:
    """Wait for the future, as DDP does."""
    (got,) = dist.all_reduce(x, async_op=True).get_future().wait()
    return got


def main(config: Config) -> None:
    with rank.session() as here:
        world, group = here.world_size, dist.group.WORLD

        def own() -> Tensor:
            return torch.full((config.elements,), float(here.rank + 1))

        def reduced(call: Callable[[Tensor], Any]) -> Tensor:
            x = own()
            call(x)
            return x

        def gathered() -> Tensor:
            parts = [torch.zeros(config.elements) for _ in range(world)]
            dist.all_gather(parts, own())
            return torch.stack(parts).sum(0)

        def scattered() -> Tensor:
            share = torch.zeros(config.elements)
            dist.reduce_scatter(share, [own() for _ in range(world)])
            return share

        calls: dict[str, Callable[[], Tensor]] = {
            "all_reduce": partial(reduced, dist.all_reduce),
            "all_gather": gathered,
            "reduce_scatter": scattered,
            "broadcast": partial(reduced, partial(dist.broadcast, src=0)),
            "functional": lambda: functional.all_reduce(own(), "sum", group) + 0,
            "around": lambda: both_ways(here, own()),
            "one_way": lambda: one_way(here, own()),
            "in_background": lambda: in_background(own()),
            "two_at_once": lambda: two_at_once(own()),
            "by_future": lambda: by_future(own()),
        }
        for call in calls.values():
            # The first time, torch imports what it needs.
            call()
        found = {}
        for name, call in calls.items():
            dist.barrier()
            begun = time.monotonic()
            value = call()
            found[name] = [time.monotonic() - begun, float(value[0])]
        rank.report(calls=found)


if __name__ == "__main__":
    rank.run_main(main, Config)
