"""What a DTensor's placements give to each rank, and what it takes to make the whole of it again.
No torch.

Placements are written as PyTorch writes them, one for each axis of the mesh: ``"Shard(0)"``,
``"Shard(1)"`` …, ``"Replicate()"``, ``"Partial()"``, which is a sum. Ranks are counted along the
last axis first.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorPiece:
    """What a rank holds of a tensor: these indices of each dimension, of the term ``term`` of a sum
    of ``terms``.
    """

    indices: tuple[range, ...]
    term: int = 0
    terms: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the local tensor."""
        return tuple(map(len, self.indices))


def local_piece(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[str], rank: int
) -> TensorPiece:
    """Which piece of a tensor a rank holds, as DTensor cuts it: axis by axis of the mesh, the first
    axis first.

    ``Shard(dim)`` leaves of what is left along ``dim`` the rank's chunk of ceil(size / ranks); the
    last ones get less, or nothing. ``Replicate()`` and ``Partial()`` leave all of it. Along a
    Partial axis the ranks hold different terms of a sum; the terms of all Partial axes are counted
    like the ranks.

    Args:
        shape: of the whole tensor.
        mesh: ranks along each axis.
        placements: one for each axis.
        rank: one of the mesh.

    Raises:
        ValueError: not one placement for each axis, one of another form or of a dimension that is
            not there, no such rank.

    Source: PyTorch, ``compute_local_shape_and_global_offset`` of DTensor.
    """
    if len(placements) != len(mesh):
        raise ValueError(
            f"{len(placements)} placements for a mesh of {len(mesh)} axes: give one for each axis"
        )
    if not 0 <= rank < math.prod(mesh):
        raise ValueError(
            f"a mesh of {math.prod(mesh)} ranks has no rank {rank}: take one from 0 to"
            f" {math.prod(mesh) - 1}"
        )
    dims = {f"Shard({dim})": dim for dim in range(len(shape))}
    indices, term, terms = [range(size) for size in shape], 0, 1
    for axis, (length, placement) in enumerate(zip(mesh, placements, strict=True)):
        place = rank // math.prod(mesh[axis + 1 :]) % length
        if placement in dims:
            whole = indices[dims[placement]]
            chunk = -(-len(whole) // length)
            indices[dims[placement]] = whole[place * chunk : (place + 1) * chunk]
        elif placement == "Partial()":
            term, terms = term * length + place, terms * length
        elif placement != "Replicate()":
            known = ", ".join([*dims, "Replicate()", "Partial()"])
            raise ValueError(f"placement {placement!r} of axis {axis} is none of {known}")
    return TensorPiece(tuple(indices), term, terms)


def full_tensor_collectives(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[str], element_bytes: int = 4
) -> dict[str, int]:
    """Collectives with which ``DTensor.full_tensor`` makes the whole on every rank, and the bytes
    handed to them.

    It goes through the axes of the mesh, the last one first. A sharded axis takes an all-gather, to
    which each rank hands a chunk as large as the first rank's; a Partial one takes an all-reduce of
    what there is by then; a replicated one takes nothing. Names are those of ``RunResult.value``; a
    collective that is not made has none.

    Source: PyTorch, how DTensor redistributes; held against runs in tests/test_widgets_spatial.py.
    """
    found: Counter[str] = Counter()
    for axis in reversed(range(len(mesh))):
        name = {"Partial()": "all_reduce", "Replicate()": ""}.get(placements[axis], "all_gather")
        if name and mesh[axis] > 1:
            held = local_piece(shape, mesh[: axis + 1], placements[: axis + 1], rank=0)
            found[f"{name}_count"] += 1
            found[f"{name}_bytes"] += math.prod(held.shape) * element_bytes
    return dict(found)
