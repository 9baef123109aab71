"""Explorer of lab 1: which rank of a mesh holds which piece of a photo, by placement."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy
from matplotlib.figure import Figure

import labkit
from labkit.models import photo
from labkit.plots import spatial as plots
from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory import placements as theory
from labkit.theory.sizes import readable_bytes
from labkit.widgets.explorer import Control, Explorer, Measured, Numbers

PLACEMENT_NAMES = ("Shard(0)", "Shard(1)", "Replicate()", "Partial()")


class PlacementExplorer(Explorer):
    """A photo as a DTensor of float32 values, [rows, columns, 3]."""

    title = "Which rank holds which piece?"
    controls: ClassVar = {
        "every": Control("photo, rows × columns", {"300 × 256": 2, "30 × 26": 20, "6 × 6": 100}, 2),
        "mesh": Control("mesh, ranks", {"2": (2,), "4": (4,), "2 × 2": (2, 2)}, (2, 2)),
        "first": Control("placement on axis 0", PLACEMENT_NAMES, "Shard(0)"),
        "second": Control("on axis 1 (of 2 × 2)", PLACEMENT_NAMES, "Shard(1)"),
        "rank": Control("look at rank", (0, 1, 2, 3), 1, only_drawn=True),
    }
    formulas = (theory.local_piece, theory.full_tensor_collectives)

    def predict(self, **chosen: Any) -> dict[str, float]:
        shape, rank = _photo_sample(chosen["every"]).shape, chosen["rank"]
        mesh, names = chosen["mesh"], _axis_placements(**chosen)
        rows, columns, colours = theory.local_piece(shape, mesh, names, rank).shape
        sizes = {"rows": rows, "columns": columns, "bytes": 4 * rows * columns * colours}
        held: dict[str, float] = {f"rank {rank} {name}": size for name, size in sizes.items()}
        return held | theory.full_tensor_collectives(shape, mesh, names) | {"values that differ": 0}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        whole, rank = _photo_sample(chosen["every"]), chosen["rank"]
        mesh, names = chosen["mesh"], _axis_placements(**chosen)
        pieces, held, measured = {}, {}, {}
        for each in range(math.prod(mesh)):
            pieces[each] = theory.local_piece(whole.shape, mesh, names, each)
            held[each] = _rank_pixels(whole, pieces[each])
            if result is not None:
                sides = [result.value(f"rank {each} {side}") for side in ("rows", "columns")]
                measured[each] = [int(size) for size in sides]
        ax = figure.add_axes((0, 0.03, 1, 0.97))
        plots.placement_picture(whole, pieces, held, mesh[-1], rank=rank, measured=measured, ax=ax)
        rows, columns, size = (
            predicted[f"rank {rank} {name}"] for name in ("rows", "columns", "bytes")
        )
        piece, calls = pieces[rank], []
        term = f" of term {piece.term + 1} of {piece.terms}" if piece.terms > 1 else ""
        for name in ("all_gather", "all_reduce"):
            if count := predicted.get(f"{name}_count"):
                calls.append(style.count_text(count, name.replace("_", "-")))
        return (
            f"rank {rank} holds {rows} × {columns} pixels{term}, {readable_bytes(size)}; "
            f"the whole on every rank takes {' and '.join(calls) or 'no message'}"
        )

    def launch(self, **chosen: Any) -> RunResult:
        mesh, names = chosen["mesh"], _axis_placements(**chosen)
        how: dict[str, Any] = {"mesh": "x".join(map(str, mesh)), "placements": names}
        return labkit.run("placement", nproc=math.prod(mesh), every=chosen["every"], **how)


def _photo_sample(every: int) -> numpy.ndarray:
    """Return every ``every``-th row and column of the photo."""
    return photo.load_photo()[::every, ::every]


def _axis_placements(mesh: Sequence[int], first: str, second: str, **_: Any) -> list[str]:
    return [first, second][: len(mesh)]


def _rank_pixels(whole: numpy.ndarray, piece: theory.TensorPiece) -> numpy.ndarray:
    """Return a rank's pixels, with the terms of a sum scaled to the photo's brightness."""
    rows, columns, _ = piece.indices
    pixels = whole[rows.start : rows.stop, columns.start : columns.stop]
    bright = photo.brightness_term(pixels, piece.term, piece.terms).astype("uint16") * piece.terms
    return bright.clip(0, 255).astype("uint8")
