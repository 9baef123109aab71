"""Trains a small sharded model, saves it after every step, and goes on from the newest save that is whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from labkit import rank
from labkit.config import NonNegativeInt, PositiveInt
from labkit.parallel.saving import load_training, save_training


@dataclass
class Config:
    steps: PositiveInt = 6
    """How many, all attempts together."""
    hang_at: NonNegativeInt | None = None
    """The step before which a run that has not gone on from a save hangs, until somebody pulls its plug."""
    checkpoints: str = ""
    """A folder for a save a step; "" saves nothing."""


def newest(folder: Path) -> Path | None:
    whole = [path.parent for path in folder.glob("step_*/.metadata")]  # which is written last
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def main(config: Config) -> None:
    with rank.session() as here:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        fully_shard(model, mesh=here.mesh(data=here.world_size))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        folder = Path(config.checkpoints) if config.checkpoints else None
        save = newest(folder) if folder else None
        done = load_training(save, model, optimizer) if save else 0
        for step in range(done, config.steps):
            while step == config.hang_at and not save:
                dist.barrier()
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + here.rank))
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            here.record_scalar(f"loss_{step}", loss.item())
            if folder:
                save_training(folder / f"step_{step + 1}", model, optimizer, step + 1)


if __name__ == "__main__":
    rank.run_main(main, Config)
