"""A rank program: lets FSDP2 gather with a learner's functions, and looks at values, bytes and memory.

The answer's first difference from what is right ends the run. See ``gather_trials`` for what is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from labkit import rank
from labkit.checks.gather_trials import try_codec, try_hook
from labkit.tensors import TwoTensor, refill


@dataclass
class Config:
    """Whose answer, and what it should do."""

    answer: str = ""
    """File with the source of the learner's functions."""
    names: tuple[str, ...] = ()
    """Names of the functions in it: one hook, or an encode and a decode."""
    what: Literal["two_tensor", "int8", "codec"] = "codec"
    """A post-all-gather hook of TwoTensor or of the int8 gather; or an encode and a decode."""
    most_bytes: float = 1.0
    """codec: what it may send, as a part of float32's bytes."""
    most_error: float = 0.0
    """codec: largest error of a gathered weight, over the largest weight of its parameter."""


def main(config: Config) -> None:
    """Try the answer; record what was measured."""
    with rank.session() as here:
        namespace: dict[str, Any] = {"torch": torch, "TwoTensor": TwoTensor, "refill": refill}
        exec(compile(Path(config.answer).read_text(), config.answer, "exec"), namespace)
        answers = [namespace[name] for name in config.names]
        mesh = here.mesh(data=here.world_size)
        if config.what == "codec":
            ratio, error = try_codec(mesh, *answers, most_bytes=config.most_bytes, most_error=config.most_error)
            here.scalar("bytes_ratio", ratio)
            here.scalar("weight_error", error)
        else:
            try_hook(mesh, config.what, *answers)
        dist.barrier()


if __name__ == "__main__":
    rank.start(main, Config)
