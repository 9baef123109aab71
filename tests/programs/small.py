"""Two ranks add numbers: the smallest run with a process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Config:
    steps: int = 3
    """How many all-reduces."""


def main(config: Config) -> None:
    dist.init_process_group("gloo")
    total = torch.ones(4)
    for _ in range(config.steps):
        dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {total[0].item():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    from labkit.session.payload import load_config

    main(load_config(Config))
