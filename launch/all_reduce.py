"""Time all-reduces of many sizes, and the same bytes in one message and in many.

    torchrun --standalone --nproc-per-node 2 -m launch.all_reduce                  # times of each
    torchrun --standalone --nproc-per-node 2 -m launch.all_reduce --check parity   # are the sums right?

A message costs a latency, whatever its size, and its bytes. Small messages pay mostly latency: that is why gradients
travel in buckets. ``labkit.theory.alpha_beta`` fits both numbers to what this measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from labkit import rank

FLOAT = 4
"""Bytes of a float32."""


@dataclass
class Config:
    """Which messages, and how often."""

    message_bytes: tuple[int, ...] = (1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
    """Sizes of single messages, in bytes."""
    total_bytes: int = 4194304
    """What is also sent in pieces, in bytes."""
    pieces: tuple[int, ...] = (1, 4, 16, 64)
    """Into how many equal messages it is cut; they are sent one after another."""
    repeats: int = 15
    """Timed rounds, each over all messages, after one to warm up."""
    check: Literal["none", "parity"] = "none"
    """parity: hold every sum against one device's, instead of measuring."""

    def validate(self, world_size: int) -> None:
        """Refuse what cannot work, before anything is launched."""
        if world_size < 2:
            raise ValueError("an all-reduce needs at least 2 ranks: with 1 nothing is sent")
        if self.repeats < 1:
            raise ValueError(f"repeats {self.repeats} measures nothing: take at least 1")
        if len(set(self.message_bytes)) < 2:
            raise ValueError(f"message_bytes {self.message_bytes}: take at least 2 sizes")
        for size in (*self.message_bytes, self.total_bytes):
            if size < FLOAT or size % FLOAT:
                raise ValueError(f"{size} bytes are no whole number of float32: take a positive multiple of {FLOAT}")
        for count in self.pieces:
            if count < 1 or self.total_bytes % (FLOAT * count):
                raise ValueError(
                    f"{self.total_bytes} bytes cannot be cut into {count} equal messages of float32: "
                    f"take pieces that divide {self.total_bytes // FLOAT}"
                )


def main(config: Config) -> None:
    """Send every message in every round."""
    with rank.session() as here:
        single = {f"message_{size}": [floats(here, size)] for size in config.message_bytes}
        cut = {f"pieces_{count}": list(floats(here, config.total_bytes).chunk(count)) for count in config.pieces}
        if config.check == "parity":
            check_sums(here, single | cut)
        else:
            measure(config, here, single | cut)


def floats(here: rank.Here, size: int) -> torch.Tensor:
    """So many bytes: zeros, so that adding up over and over changes nothing."""
    return torch.zeros(size // FLOAT, device=here.device)


def measure(config: Config, here: rank.Here, messages: dict[str, list[torch.Tensor]]) -> None:
    """Time each entry as one span a round."""
    for step in here.steps(config.repeats):
        for name, tensors in messages.items():
            dist.barrier()
            with step.span(name):
                for tensor in tensors:
                    dist.all_reduce(tensor)


def check_sums(here: rank.Here, messages: dict[str, list[torch.Tensor]]) -> None:
    """Rank r sends r + 1 in every place of every message; one device adds them up."""
    expected, wrong, compared = here.world_size * (here.world_size + 1) // 2, 0, 0
    for tensors in messages.values():
        for tensor in tensors:
            tensor.fill_(here.rank + 1)
            dist.all_reduce(tensor)
            wrong += int((tensor != expected).sum())
            compared += tensor.numel()
    here.verdict(check="parity", compared=compared, wrong=wrong, ok=compared > 0 and wrong == 0)


if __name__ == "__main__":
    rank.start(main, Config)
