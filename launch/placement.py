r"""Place a photo on a mesh of ranks as a DTensor, print what each rank holds, and reassemble it.

    torchrun --standalone --nproc-per-node 4 -m launch.placement                  # four strips
    torchrun --standalone --nproc-per-node 4 -m launch.placement --check parity   # restored?
    torchrun --standalone --nproc-per-node 4 -m launch.placement \
        --mesh 2x2 --placements "Shard(0)" "Partial()"

For each axis of the mesh a placement says what its ranks hold: different parts, the same, or terms
of a sum. It decides how many bytes a rank holds, and which collectives restore the whole tensor.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from labkit import rank
from labkit.config import PositiveInt
from labkit.models import photo
from labkit.theory.placements import local_piece
from labkit.theory.sizes import parse_mesh_axes

PlacementName = Literal["Shard(0)", "Shard(1)", "Replicate()", "Partial()"]
PLACEMENTS = {
    "Shard(0)": Shard(0),
    "Shard(1)": Shard(1),
    "Replicate()": Replicate(),
    "Partial()": Partial(),
}


@dataclass
class Config:
    """Which photo, on which mesh, with which placements."""

    every: PositiveInt = 2
    """Take every n-th row and column of the photo's 600 × 512."""
    mesh: str = ""
    """Ranks as 4 (one line) or 2x2 (two axes); by default one line."""
    placements: tuple[PlacementName, ...] = ("Shard(1)",)
    """One per mesh axis. Dimension 0 is rows, 1 is columns; Partial() holds terms of a sum."""
    check: Literal["none", "parity"] = "none"
    """parity: compare the reassembled photo with the original, instead of measuring."""

    def validate(self, world_size: int) -> None:
        lengths = list(parse_mesh_axes(self.mesh, world_size).values())
        local_piece((1, 1), lengths, self.placements, rank=0)


def main(config: Config) -> None:
    """Place the photo, and reassemble it."""
    with rank.session() as here:
        axes = parse_mesh_axes(config.mesh, here.world_size)
        mesh = here.mesh(**axes)
        # [rows, columns, 3]
        picture = photo.load_photo()[:: config.every, :: config.every].astype("float32")
        whole = torch.from_numpy(picture).to(here.device)
        piece = local_piece(picture.shape, list(axes.values()), config.placements, here.rank)
        term = photo.brightness_term(picture, piece.term, piece.terms)
        mine = torch.from_numpy(term).to(here.device)
        placements = [PLACEMENTS[name] for name in config.placements]
        # Partial() cuts nothing: this rank's term is already in ``mine``.
        cut = [Replicate() if placement.is_partial() else placement for placement in placements]
        # All ranks have the photo, so without a source rank nothing is sent.
        local = distribute_tensor(mine, mesh, cut, src_data_rank=None).to_local()
        placed = DTensor.from_local(
            local, mesh, placements, shape=whole.shape, stride=whole.stride()
        )
        if config.check == "parity":
            wrong = int((placed.full_tensor() != whole).sum())
            here.finish_check(check="parity", compared=whole.numel(), wrong=wrong, ok=wrong == 0)
            return
        rows, columns, _ = local.shape
        print(f"rank {here.rank} holds {rows} x {columns}")
        for name, amount in (("rows", rows), ("columns", columns), ("bytes", local.nbytes)):
            here.record_scalar(f"rank {here.rank} {name}", amount)
        for step in here.steps(1):
            with step.span("full_tensor"):
                again = placed.full_tensor()
            step.record_scalar("values that differ", (again != whole).sum())


if __name__ == "__main__":
    rank.run_main(main, Config)
