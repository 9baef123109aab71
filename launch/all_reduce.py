"""Time all-reduces of many sizes, and the same bytes in one message and in many.

    torchrun --standalone --nproc-per-node 2 -m launch.all_reduce                  # times of each
    torchrun --standalone --nproc-per-node 2 -m launch.all_reduce --check parity   # are sums right?

A message costs a latency, whatever its size, plus time for its bytes. For small messages latency
dominates, which is why gradients travel in buckets. ``fit_alpha_beta`` of theory fits both numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist

from labkit import rank
from labkit.config import PositiveInt

FLOAT32_BYTES = 4
TensorsByName = Mapping[str, Sequence[torch.Tensor]]


@dataclass
class Config:
    """Which messages are sent, and how often."""

    message_bytes: tuple[PositiveInt, ...] = (1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
    """Sizes of single messages in bytes, at least two; none, to time pieces alone."""
    total_bytes: PositiveInt = 4194304
    """Bytes that are also sent in pieces."""
    pieces: tuple[PositiveInt, ...] = (1, 4, 16, 64)
    """How many equal messages these bytes are cut into, sent one after another."""
    at_once: bool = False
    """Start all pieces before waiting for the first, as DDP does with its buckets."""
    repeats: PositiveInt = 15
    """Timed rounds, each over all messages, after one to warm up."""
    check: Literal["none", "parity"] = "none"
    """parity: compare every sum with one device's, instead of measuring."""

    def validate(self, world_size: int) -> None:
        if world_size < 2:
            raise ValueError("an all-reduce needs at least 2 ranks: with 1 nothing is sent")
        if len(set(self.message_bytes)) == 1:
            raise ValueError(f"message_bytes {self.message_bytes}: take at least 2 sizes, or none")
        for size in (*self.message_bytes, self.total_bytes):
            if size % FLOAT32_BYTES:
                rule = f"{size} bytes are no whole number of float32"
                raise ValueError(f"{rule}: take a multiple of {FLOAT32_BYTES}")
        for count in self.pieces:
            if self.total_bytes % (FLOAT32_BYTES * count):
                rule = f"{self.total_bytes} bytes cannot be cut into {count} equal float32 messages"
                elements = self.total_bytes // FLOAT32_BYTES
                raise ValueError(f"{rule}: take pieces that divide {elements}")


def main(config: Config) -> None:
    """Send every message in every round."""
    with rank.session() as here:
        cuts = [(f"message_{size}", size, 1) for size in config.message_bytes]
        cuts += [(f"pieces_{count}", config.total_bytes, count) for count in config.pieces]
        # Zeros, because they stay zeros in every round.
        messages = {
            name: torch.zeros(size // FLOAT32_BYTES, device=here.device).chunk(count)
            for name, size, count in cuts
        }
        if config.check == "parity":
            check_sums(here, messages)
        else:
            time_collectives(config, here, messages)


def time_collectives(config: Config, here: rank.Session, messages: TensorsByName) -> None:
    """Time each entry as one span per round."""
    for step in here.steps(config.repeats):
        for name, tensors in messages.items():
            # Otherwise a rank that arrives early would measure its wait for the others.
            dist.barrier()
            with step.span(name):
                handles = [dist.all_reduce(each, async_op=config.at_once) for each in tensors]
                for handle in filter(None, handles):
                    handle.wait()


def check_sums(here: rank.Session, messages: TensorsByName) -> None:
    """All-reduce r + 1 in every element of rank r, and compare with the sum on one device."""
    # Another value on every rank, so that a rank left out or counted twice shows.
    expected, wrong, compared = here.world_size * (here.world_size + 1) // 2, 0, 0
    for tensor in chain.from_iterable(messages.values()):
        tensor.fill_(here.rank + 1)
        dist.all_reduce(tensor)
        wrong += int((tensor != expected).sum())
        compared += tensor.numel()
    here.finish_check(check="parity", compared=compared, wrong=wrong, ok=wrong == 0)


if __name__ == "__main__":
    rank.run_main(main, Config)
