"""Write down which kind of process asks whether there are GPUs."""

import json
from dataclasses import dataclass

import torch

from labkit import rank


@dataclass
class Config:
    """No parameters."""


def main(config: Config) -> None:
    """Report whether torch sees GPUs here, and whether CUDA would refuse to work in this fork."""
    is_available, is_spoilt = torch.cuda.is_available(), torch.cuda._is_in_bad_fork()
    with rank.session() as here:
        here.save_artifact("gpus", json.dumps([is_available, here.device.type, is_spoilt]))


if __name__ == "__main__":
    rank.run_main(main, Config)
