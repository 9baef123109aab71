"""A rank program: runs a learner's halo exchange on every rank and holds it against one device.

Rank r gets strip r of an image that every rank can make whole. What the answer returns, forward or backward, is
compared with what the whole image says, and the bytes that it moved with what a halo takes. The first difference ends
the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from labkit import rank
from labkit.meter import CommunicationCounter

HALO, COLUMNS = 3, 8


@dataclass
class Config:
    """Whose answer, and what it should do."""

    answer: str = ""
    """File with the source of the learner's function."""
    name: str = "exchange_halo"
    """Name of the function in it."""
    what: Literal["forward", "backward"] = "forward"
    """forward: pad a strip with its neighbours' columns. backward: bring the gradients of those columns home."""


class Wrong(Exception):
    """The answer is wrong; the message is for the learner."""


def main(config: Config) -> None:
    """Call the answer once and compare."""
    with rank.session() as here:
        namespace: dict[str, Any] = {"torch": torch, "dist": dist}
        exec(compile(Path(config.answer).read_text(), config.answer, "exec"), namespace)
        torch.manual_seed(0)
        image = torch.randn(2, 3, 5, COLUMNS * here.world_size)
        given, expected = (forward_case if config.what == "forward" else backward_case)(
            image, here.rank, here.world_size
        )
        with CommunicationCounter() as traffic:
            got = namespace[config.name](given.clone(), HALO, here.rank, here.world_size)
        compare(got, expected, config.what)
        neighbours = (here.rank > 0) + (here.rank < here.world_size - 1)
        halo_bytes = neighbours * image[..., :HALO].numel() * image.element_size()
        moved = sum(amount for name, amount in traffic.bytes.items() if name != "recv")
        if moved > halo_bytes:
            raise Wrong(
                f"the numbers are right, but this rank handed over {moved} bytes; its halos are {halo_bytes} bytes"
            )
        dist.barrier()


def forward_case(image: torch.Tensor, index: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A strip, and the same strip with its neighbours' columns, zeros at the border of the image."""
    padded = torch.nn.functional.pad(image, (HALO, HALO))
    return strip_of(image, index), padded[..., index * COLUMNS : (index + 1) * COLUMNS + 2 * HALO]


def backward_case(image: torch.Tensor, index: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient of each rank's padded strip, and the gradient of its own strip when all of them are added up."""
    padded_size = COLUMNS + 2 * HALO
    gradients = [torch.randn(*image.shape[:3], padded_size) for _ in range(ranks)]
    total = torch.zeros(*image.shape[:3], image.shape[3] + 2 * HALO)
    for other, gradient in enumerate(gradients):
        total[..., other * COLUMNS : other * COLUMNS + padded_size] += gradient
    return gradients[index], strip_of(total[..., HALO:-HALO], index)


def strip_of(image: torch.Tensor, index: int) -> torch.Tensor:
    """Columns of one rank."""
    return image[..., index * COLUMNS : (index + 1) * COLUMNS]


def compare(got: object, expected: torch.Tensor, what: str) -> None:
    """Raise Wrong, naming the columns, where the answer differs."""
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"the function returned {type(got).__name__}, not a tensor")
    if got.shape != expected.shape:
        raise Wrong(f"the shape is {tuple(got.shape)}, expected {tuple(expected.shape)}")
    width = expected.shape[-1]
    parts = {"left": slice(0, HALO), "middle": slice(HALO, width - HALO), "right": slice(width - HALO, width)}
    names = {"left": f"the first {HALO} columns", "middle": "the columns between", "right": f"the last {HALO} columns"}
    for part, columns in parts.items():
        if not torch.allclose(got[..., columns], expected[..., columns], atol=1e-5):
            seen = "are all zero" if not got[..., columns].any() else "are wrong"
            raise Wrong(f"{names[part]} {seen}")


if __name__ == "__main__":
    rank.start(main, Config)
