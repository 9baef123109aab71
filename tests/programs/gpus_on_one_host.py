"""Believe in GPUs on the first host, and in none on the others, and train together all the same."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labkit import rank, requirements


@dataclass
class Config:
    """No parameters."""


def main(config: Config) -> None:
    """Record how many ranks have come together."""
    requirements.usable_gpus = lambda: (8, "") if os.environ["GROUP_RANK"] == "0" else (0, "the driver is too old")
    with rank.session() as here:
        ones = torch.ones(1, device=here.device)
        dist.all_reduce(ones)
        here.record_scalar("ranks", ones)


if __name__ == "__main__":
    rank.run_main(main, Config)
