"""One profiled step of data parallelism whose backward pass inductor wrote, in buckets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit import rank
from labkit.models.chain import LinearChain
from labkit.parallel import ddp
from labkit.session import timeline


@dataclass
class Config:
    dim: int = 600
    """The first weight, of 1.44 MB, closes the first bucket; all else fits into the second."""


def main(config: Config) -> None:
    with rank.session() as here, ddp.fuse_all_reduces("coalesced"), ddp.compile_backward():
        torch.manual_seed(0)
        model = ddp.apply_replicate(LinearChain(config.dim), here.mesh(replica=here.world_size))
        x = torch.randn(8, config.dim)

        def step() -> None:
            model.zero_grad()
            model(x).sum().backward()

        step()
        step()
        with timeline.profile_step(here._writer, 2, units={"chain": [model]}, device=here.device.type):
            step()


if __name__ == "__main__":
    rank.run_main(main, Config)
