"""Rank 1 raises while the others wait for it; taking the group down waits for all ranks, as NCCL's does."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labkit import rank


@dataclass
class Config:
    """No parameters."""


def main(config: Config) -> None:
    """Fail on rank 1."""
    dist.destroy_process_group = lambda group=None: time.sleep(600)
    with rank.session() as here:
        if here.rank == 1:
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    rank.run_main(main, Config)
