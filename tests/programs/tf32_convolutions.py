"""launch/convnext_spatial.py on a device whose convolutions round to TF32 where torch allows it, as cuDNN's do."""

from dataclasses import dataclass

import torch

from labkit import rank
from labkit.torch_private import TorchDispatchMode
from launch import convnext_spatial

TF32_DROPPED_BITS = 13  # of the 23 bits of a float32 after the first


@dataclass
class Config(convnext_spatial.Config):
    """The program's own."""

    force: bool = False
    """Allow TF32 whatever the session has set."""


class Rounding(TorchDispatchMode):
    """Rounds what goes into convolutions."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.backends.cudnn.allow_tf32 and "convolution" in func.__name__:
            args = [tf32(each) if isinstance(each, torch.Tensor) else each for each in args]
        return func(*args, **(kwargs or {}))


def tf32(x: torch.Tensor) -> torch.Tensor:
    half = 1 << (TF32_DROPPED_BITS - 1)
    return ((x.contiguous().view(torch.int32) + half) & -(1 << TF32_DROPPED_BITS)).view(torch.float32)


def main(config: Config) -> None:
    """Train or check as the program does."""
    if config.force:
        torch.backends.cudnn.allow_tf32 = True
    with Rounding():
        convnext_spatial.main(config)


if __name__ == "__main__":
    rank.run_main(main, Config)
