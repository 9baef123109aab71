"""Run a published bug on real ranks: gradients beside one device's, and the loss that looks normal.

    torchrun --standalone --nproc-per-node 2 -m launch.silent_bugs --room norm
    torchrun --standalone --nproc-per-node 2 -m launch.silent_bugs --room norm --check parity

The second command fails, because the gradients are wrong.

The rooms are in launch/museum, each with the thread in which its bug was published.
"""

from dataclasses import dataclass
from typing import Literal

from labkit import rank
from labkit.config import PositiveInt
from launch.museum import (  # noqa: F401  # a warm launch has imported them
    bfloat,
    clip,
    counts,
    experts,
    extra,
    gathered,
    norm,
    router,
    scale,
    smoothing,
    tied,
    tokens,
    unwaited,
    visit,
)
from launch.museum.parts import Weights


@dataclass
class Config:
    """Which room, and how long it trains."""

    room: Literal[
        "norm",
        "counts",
        "experts",
        "tokens",
        "router",
        "gathered",
        "smoothing",
        "extra",
        "clip",
        "tied",
        "unwaited",
        "bfloat",
        "scale",
    ] = "norm"
    """The bug; scale has none."""
    steps: PositiveInt = 20
    """Steps that are trained twice: on the ranks with the bug, and on one device without it."""
    check: Literal["none", "parity"] = "none"
    """parity: only compare the gradients of a step; where the bug is, that fails."""

    def validate(self, world_size: int) -> None:
        if self.room == "tied" and world_size != 2:
            raise ValueError(f"the room tied has two stages: {world_size} ranks, take 2")
        if world_size not in (2, 3, 4):
            raise ValueError(
                f"a room's tensors are cut evenly by 2, 3 or 4 ranks, not {world_size}"
            )


@rank.replaceable
def parity(got: Weights, whole: Weights, cut: dict[str, int]) -> visit.Found:
    """Compare this rank's gradients with one device's; use= takes a comparison of your own."""
    return visit.parity(got, whole, cut)


def main(config: Config) -> None:
    """Compare a step, then train."""
    with rank.session() as here:
        if config.check == "parity":
            found = visit.merge_ranks(visit.compare_gradients(config.room, parity))
            worst = max(found["errors"].values())
            is_right, count = not found["wrong"], len(found["errors"])
            here.finish_check(check="parity", compared=count, max_rel_error=worst, ok=is_right)
        else:
            rank.report(**visit.visit_room(config.room, config.steps, parity))


if __name__ == "__main__":
    rank.run_main(main, Config)
