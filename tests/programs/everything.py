"""Leaves every file that a run can leave, and fails at its end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labkit import rank


@dataclass
class Config:
    steps: int = 1
    """Timed steps."""


@rank.replaceable
def number() -> int:
    """What is given back."""
    return 1


def main(config: Config) -> None:
    with rank.session() as here:
        layer = nn.Linear(2, 2)
        for step in here.steps(config.steps, units={"layer": [layer]}):
            with step.span("forward"):
                dist.all_reduce(layer(torch.ones(2)).detach())
        here.save_artifact("note", "a text")
        rank.report(number=number())
    raise ValueError("the end")


if __name__ == "__main__":
    rank.run_main(main, Config)
