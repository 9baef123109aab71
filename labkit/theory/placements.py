"""Compute each rank's piece of a DTensor, and the collectives that rebuild the whole tensor.

Placements are strings, one for each axis of the mesh: ``"Shard(0)"``, ``"Shard(1)"`` …,
``"Replicate()"``, or ``"Partial()"``, which is a sum. Ranks are numbered along the last axis first.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorPiece:
    """The indices of each dimension that a rank holds, of term ``term`` of a sum of ``terms``."""

    indices: tuple[range, ...]
    term: int = 0
    terms: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(map(len, self.indices))


def local_piece(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[str], rank: int
) -> TensorPiece:
    """Return the piece of a tensor that a rank holds, cut as DTensor does, first mesh axis first.

    ``Shard(dim)`` cuts what is left of ``dim`` into chunks of ceil(size / ranks); the last ranks
    get less, or nothing. ``Replicate()`` and ``Partial()`` cut nothing. Along a Partial axis each
    rank holds another term of a sum. Source: ``compute_local_shape_and_global_offset`` of DTensor.
    """
    if len(placements) != len(mesh):
        given = f"{len(placements)} placements for a mesh of {len(mesh)} axes"
        raise ValueError(f"{given}: give one for each axis")
    ranks = math.prod(mesh)
    if not 0 <= rank < ranks:
        known = f"take one from 0 to {ranks - 1}"
        raise ValueError(f"a mesh of {ranks} ranks has no rank {rank}: {known}")
    dims = {f"Shard({dim})": dim for dim in range(len(shape))}
    indices, term, terms = [range(size) for size in shape], 0, 1
    for axis, (length, placement) in enumerate(zip(mesh, placements, strict=True)):
        # This rank's coordinate along the axis.
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
    """Return the collectives of ``DTensor.full_tensor`` and the bytes that a rank hands to them.

    Mesh axes are undone last one first. A Shard axis takes an all-gather, to which each rank hands
    a chunk as large as the first rank's; a Partial axis takes an all-reduce of what has been
    gathered so far; a Replicate axis takes nothing. Source: DTensor's redistribute.
    """
    found: Counter[str] = Counter()
    for axis in reversed(range(len(mesh))):
        name = {"Partial()": "all_reduce", "Replicate()": ""}.get(placements[axis], "all_gather")
        if name and mesh[axis] > 1:
            held = local_piece(shape, mesh[: axis + 1], placements[: axis + 1], rank=0)
            found[f"{name}_count"] += 1
            found[f"{name}_bytes"] += math.prod(held.shape) * element_bytes
    return dict(found)
