"""Write down which kind of process asks whether there are GPUs."""

import json
from dataclasses import dataclass

import torch

from labkit import rank


@dataclass
class Config:
    """No parameters."""


def main(config: Config) -> None:
    """Report whether torch sees GPUs here."""
    with rank.session() as here:
        here.save_artifact("gpus", json.dumps([torch.cuda.is_available(), here.device.type]))


if __name__ == "__main__":
    rank.run_main(main, Config)
