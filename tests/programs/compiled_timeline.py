"""One profiled step of data parallelism whose backward pass inductor wrote, in buckets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from labkit import rank
from labkit.models.chain import LinearChain
from labkit.parallel import ddp
from labkit.session import timeline


@dataclass
class Config:
    dim: int = 600
    """The first weight, of 1.44 MB, closes the first bucket; all else fits into the second."""
    traces: str | None = None
    """Folder for the raw traces."""


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
        path = Path(config.traces) / f"trace_{here.rank}.json.gz" if config.traces else None
        with timeline.profile_step(path, units={"chain": [model]}, device=here.device.type) as recording:
            step()
        timeline.write_profile(recording, here._writer, 2)


if __name__ == "__main__":
    rank.run_main(main, Config)
