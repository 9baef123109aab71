"""One profiled step of small models on two ranks, under techniques that communicate at different moments.

The blocks sleep, so that there is something to hide communication behind even where ranks share a core.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from labkit import rank
from labkit.session import timeline

BLOCKS = 3


@dataclass
class Config:
    technique: Literal["fsdp2", "fsdp2_async", "fsdp1", "ddp"] = "fsdp2"
    """fsdp2_async prefetches one block ahead and does not wait for it."""
    width: int = 512
    """Of the linear layers."""
    delay_ms: float = 10.0
    """Sleep in each block's forward and backward pass."""


class Sleep(torch.autograd.Function):
    """The identity, slowly in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """Sleeps, then multiplies."""

    def __init__(self, width: int, seconds: float):
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(Sleep.apply(x, self.seconds)))


class Model(nn.Module):
    """A first layer outside of the blocks, and the blocks."""

    def __init__(self, config: Config):
        super().__init__()
        self.first = nn.Linear(config.width, config.width)
        self.layers = nn.ModuleList(Block(config.width, config.delay_ms / 1000) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def distribute(model: Model, config: Config, here: rank.Session) -> tuple[nn.Module, dict[str, list[nn.Module]]]:
    """The model to call and its units."""
    blocks: list[Any] = list(model.layers)
    units = {f"layers.{index}": [block] for index, block in enumerate(blocks)}
    if config.technique == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=1.2), units
    if config.technique == "fsdp1":
        for index in range(BLOCKS):
            model.layers[index] = FullyShardedDataParallel(model.layers[index], device_id=here.device)
        units = {f"layers.{index}": [block] for index, block in enumerate(model.layers)}
        return FullyShardedDataParallel(model, device_id=here.device), units
    mesh = here.mesh(shard=here.world_size)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    root: Any = fully_shard(model, mesh=mesh)
    if config.technique == "fsdp2_async":
        root._set_unshard_async_op(True)
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
    return model, units


def step_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def main(config: Config) -> None:
    with rank.session() as here:
        torch.manual_seed(0)
        model, units = distribute(Model(config), config, here)
        step = step_of(model, torch.randn(8, config.width))
        step()
        step()
        with timeline.profile_step(here._writer, 2, units=units, device=here.device.type):
            step()


if __name__ == "__main__":
    rank.run_main(main, Config)
