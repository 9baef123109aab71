"""Every cell of the FSDP test bench in one launch: each is compared with one device, and its verdict is recorded."""

import itertools
import json
from dataclasses import dataclass
from unittest import mock

from labkit import rank
from labkit.models.catalog import MODELS
from launch import fsdp_wrap


@dataclass
class Config:
    """Which half of the grid."""

    fsdp: int = 2
    """1 or 2."""


def cells(fsdp):
    """Parameters of fsdp_wrap: model x {wrap, none} x checkpointing x mixed precision x CPU offload, for FSDP2."""
    names = ("model", "wrap", "checkpointing", "precision", "offload")
    choices = (MODELS, ("block", "root"), (False, True), ("fp32", "bf16"), (False, True) if fsdp == 2 else (False,))
    grid = [dict(zip(names, values, strict=True)) for values in itertools.product(*choices)]
    layers = [{"model": model, "wrap": "layer"} for model in MODELS]
    return [cell | {"fsdp": fsdp} for cell in [*grid, *layers, {"model": "toy", "scaler": True}]]


def main(config):
    with rank.session() as here:
        for cell in cells(config.fsdp):
            with mock.patch.object(here, "verdict") as verdict:
                fsdp_wrap.run(fsdp_wrap.Config(check="parity", steps=2, **cell), here)
            here.print(json.dumps(cell | verdict.call_args.kwargs))


if __name__ == "__main__":
    rank.start(main, Config)
