"""DistributedDataParallel in a labkit session: what the simulated reducer must equal."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import rank


@dataclass
class Config:
    views: bool = False
    unused: bool = False
    bucket_mb: float = 25.0


def main(config):
    with rank.session() as here:
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(300, 300), nn.ReLU())))
        model.append(nn.BatchNorm1d(300))
        ddp = DistributedDataParallel(
            model,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=config.views,
            find_unused_parameters=config.unused,
        )
        optimizer = torch.optim.Adam(ddp.parameters())
        for step in here.steps(2, warmup=2, track=[ddp, optimizer]):
            optimizer.zero_grad()
            loss = ddp(torch.randn(16, 300)).square().mean()
            loss.backward()
            optimizer.step()
            step.record_scalar("loss", loss)


if __name__ == "__main__":
    rank.run_main(main, Config)
