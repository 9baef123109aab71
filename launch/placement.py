"""Place a photo on a mesh of ranks as a DTensor, say what each rank holds, and put it together
again.

    torchrun --standalone --nproc-per-node 4 -m launch.placement                     # four strips
    torchrun --nproc-per-node 4 -m launch.placement --mesh 2x2 --placements "Shard(0)" "Partial()"
    torchrun --standalone --nproc-per-node 4 -m launch.placement --check parity

A placement says for each axis of the mesh what its ranks hold: different parts, the same, or terms
of a sum. It decides about the bytes that a rank holds, and about the collectives that make the
whole of it again.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from labkit import rank
from labkit.config import PositiveInt
from labkit.models import photo
from labkit.theory.placements import local_piece
from labkit.theory.sizes import parse_mesh_axes

PLACEMENT_BY_NAME: dict[str, Placement] = {
    "Shard(0)": Shard(0),
    "Shard(1)": Shard(1),
    "Replicate()": Replicate(),
    "Partial()": Partial(),
}


@dataclass
class Config:
    """Which photo, on which mesh, placed how."""

    every: PositiveInt = 2
    """Take every so manyth row and column of the photo, of its 600 × 512."""
    mesh: str = ""
    """Ranks as 4 (in a line) or 2x2 (two axes); empty: in a line."""
    placements: tuple[Literal["Shard(0)", "Shard(1)", "Replicate()", "Partial()"], ...] = (
        "Shard(1)",
    )
    """One for each axis of the mesh. Rows are dimension 0, columns dimension 1; Partial() is a
    sum.
    """
    check: Literal["none", "parity"] = "none"
    """parity: hold the photo that was put together against the photo, instead of measuring."""

    def validate(self, world_size: int) -> None:
        """Refuse what cannot work, before anything is launched."""
        local_piece(
            (1, 1), list(parse_mesh_axes(self.mesh, world_size).values()), self.placements, rank=0
        )


def main(config: Config) -> None:
    """Place the photo, and make the whole of it again."""
    with rank.session() as here:
        axes = parse_mesh_axes(config.mesh, here.world_size)
        mesh = here.mesh(**axes)
        picture = photo.load_photo()[:: config.every, :: config.every].astype(
            "float32"
        )  # [rows, columns, 3]
        whole = torch.from_numpy(picture).to(here.device)
        piece = local_piece(picture.shape, list(axes.values()), config.placements, here.rank)
        mine = torch.from_numpy(photo.brightness_term(picture, piece.term, piece.terms)).to(
            here.device
        )
        placements = [PLACEMENT_BY_NAME[name] for name in config.placements]
        cut = [Replicate() if placement.is_partial() else placement for placement in placements]
        local = distribute_tensor(
            mine, mesh, cut, src_data_rank=None
        ).to_local()  # all ranks have the photo: no message
        placed = DTensor.from_local(
            local, mesh, placements, shape=whole.shape, stride=whole.stride()
        )
        if config.check == "parity":
            wrong = int((placed.full_tensor() != whole).sum())
            here.finish_check(check="parity", compared=whole.numel(), wrong=wrong, ok=wrong == 0)
            return
        rows, columns, _ = local.shape
        print(f"rank {here.rank} holds {rows} x {columns}")
        for name, amount in {
            "rows": rows,
            "columns": columns,
            "bytes": local.numel() * local.element_size(),
        }.items():
            here.record_scalar(f"rank {here.rank} {name}", amount)
        for step in here.steps(1):
            with step.span("full_tensor"):
                again = placed.full_tensor()
            step.record_scalar("values that differ", (again != whole).sum())


if __name__ == "__main__":
    rank.run_main(main, Config)
