"""Explorers of lab 1: which rank holds which piece of a photo; what cutting a ConvNeXt costs."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy
from matplotlib.figure import Figure

import labkit
from labkit.models import photo
from labkit.plots import spatial as plots
from labkit.plots import style
from labkit.plots.memory import byte_bars
from labkit.runs.result import RunResult
from labkit.theory import placements
from labkit.theory import spatial as theory
from labkit.theory.sizes import even_share, readable_bytes
from labkit_course.widgets.explorer import Control, Explorer, Measured, Numbers

# What a run reports of each rank's piece.
PIECE_SIZES = ("rows", "columns", "bytes")
PLACEMENT_NAMES = ("Shard(0)", "Shard(1)", "Replicate()", "Partial()")
# The height of the images, in pixels.
HEIGHT = 64
DEPTHS = (1, 1)  # blocks in each stage
# Left, bottom, width and height of each panel, as fractions of the figure.
PANEL_BOUNDS = ((0.01, 0.14, 0.41, 0.8), (0.5, 0.17, 0.17, 0.68), (0.82, 0.17, 0.17, 0.68))
MESHES = {"1 × 1": (1, 1), "1 × 2": (1, 2), "1 × 4": (1, 4), "2 × 1": (2, 1), "2 × 2": (2, 2)}
CHANNELS = {"16, 32": (16, 32), "32, 64": (32, 64), "64, 128": (64, 128)}
BYTE_COLOURS = {
    "activations": style.MEMORY_COLOURS["activations"],
    "halos": style.ORANGE,
    "sums": style.PURPLE,
}


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
    formulas = (placements.local_piece, placements.full_tensor_collectives)

    def predict(self, **chosen: Any) -> dict[str, float]:
        shape, rank = _photo_sample(chosen["every"]).shape, chosen["rank"]
        mesh, names = chosen["mesh"], _axis_placements(**chosen)
        rows, columns, colours = placements.local_piece(shape, mesh, names, rank).shape
        sizes = (rows, columns, 4 * rows * columns * colours)
        held: dict[str, float] = {}
        for name, size in zip(PIECE_SIZES, sizes, strict=True):
            held[f"rank {rank} {name}"] = size
        collectives = placements.full_tensor_collectives(shape, mesh, names)
        # ``full_tensor`` brings back the photo, bit by bit.
        return held | collectives | {"values that differ": 0}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        whole, rank = _photo_sample(chosen["every"]), chosen["rank"]
        mesh, names = chosen["mesh"], _axis_placements(**chosen)
        pieces, held, measured = {}, {}, {}
        for each in range(math.prod(mesh)):
            pieces[each] = placements.local_piece(whole.shape, mesh, names, each)
            held[each] = _rank_pixels(whole, pieces[each])
            if result is not None:
                sides = [result.value(f"rank {each} {side}") for side in ("rows", "columns")]
                measured[each] = [int(size) for size in sides]
        ax = figure.add_axes((0, 0.03, 1, 0.97))
        plots.placement_picture(whole, pieces, held, mesh[-1], rank=rank, measured=measured, ax=ax)
        rows, columns, size = (predicted[f"rank {rank} {name}"] for name in PIECE_SIZES)
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


def _rank_pixels(whole: numpy.ndarray, piece: placements.TensorPiece) -> numpy.ndarray:
    """Return a rank's pixels, with the terms of a sum scaled to the photo's brightness."""
    rows, columns, _ = piece.indices
    pixels = whole[rows.start : rows.stop, columns.start : columns.stop]
    bright = photo.brightness_term(pixels, piece.term, piece.terms).astype("uint16") * piece.terms
    return bright.clip(0, 255).astype("uint8")


class SpatialExplorer(Explorer):
    """Lab 1's network, one block in each of two stages, on images that are 64 pixels high."""

    title = "Do the activations fit, and what does cutting send?"
    controls: ClassVar = {
        "mesh": Control("ranks, data × space", MESHES, (1, 2)),
        "tensor_dim": Control("cut along space", {"width": 3, "height": 2}, 3),
        "width": Control("width, pixels", (128, 256, 512), 256),
        "batch": Control("images", (2, 4, 8), 4),
        "dims": Control("channels", CHANNELS, (32, 64)),
        "budget": Control("budget, MB", (2, 4, 8, 16), 8, only_drawn=True),
    }
    formulas = (
        theory.convnext_activation_bytes,
        theory.spatial_send_bytes,
        theory.spatial_all_reduces,
    )
    tolerances: ClassVar = {"peak_activation_bytes": 0.05}

    def predict(self, **chosen: Any) -> dict[str, float]:
        (data, space), dims = chosen["mesh"], chosen["dims"]
        theory.check_strips(_cut_side(**chosen), space, DEPTHS)
        batch, neighbours = even_share(chosen["batch"], data, "a batch of"), min(space - 1, 2)
        ranks = {"space_ranks": space, "data_ranks": data, "strategy": "local"}
        network = {"depths": DEPTHS, "dims": dims, "num_classes": 10, "batch": batch}
        count, handed = theory.spatial_all_reduces(**ranks, **network)
        stages = theory.convnext_stages(HEIGHT, chosen["width"], DEPTHS, dims)
        cut = {"neighbours": neighbours, "tensor_dim": chosen["tensor_dim"]}
        messages = {
            "send_count": 2 * neighbours * sum(DEPTHS),
            "send_bytes": theory.spatial_send_bytes(stages=stages, batch=batch, **cut),
            "all_reduce_count": count,
            "all_reduce_bytes": handed,
        }
        # A run has no value for a collective that never ran.
        found = {name: value for name, value in messages.items() if value}
        return {"peak_activation_bytes": _activation_bytes(**chosen), **found}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        (data, space), budget = chosen["mesh"], chosen["budget"] * 1e6
        strips, memory, traffic = (figure.add_axes(place) for place in PANEL_BOUNDS)
        # The 512 columns of the photo around its row 200, with the aspect of the images.
        rows = 512 * HEIGHT // chosen["width"]
        eyes = photo.load_photo()[200 - rows // 2 : 200 + rows // 2]
        halo = theory.HALO * theory.total_stride(DEPTHS)
        look: dict[str, Any] = {"tensor_dim": chosen["tensor_dim"], "ax": strips}
        part = halo / _cut_side(**chosen)
        plots.strip_layout(eyes, (data, space), chosen["batch"], part, **look)
        if space > 1:
            sizes = f"{theory.HALO} of its pixels, {halo} image pixels"
            figure.text(0.01, 0.05, f"shaded: sent for the last stage,\n{sizes}", fontsize=9)
        held = predicted["peak_activation_bytes"]
        alone: float = _activation_bytes(**chosen | {"mesh": (1, 1)})
        bars = {"unsharded": {"activations": alone}, "a rank": {"activations": held}}
        seen, sent = {}, {}
        if result is not None:
            found = {name: result.value(name) for name in predicted}
            seen = {"a rank": {"activations": found["peak_activation_bytes"]}}
            sent = _traffic_bars(found)
        look = {"legend": {}, "ylabel": "activations", "ax": memory}
        byte_bars(bars, seen, BYTE_COLOURS, budget=budget, **look)
        look |= {"ylabel": "handed over", "ax": traffic}
        byte_bars(_traffic_bars(predicted), sent, BYTE_COLOURS, **look)
        for panel in (memory, traffic):
            # Each tick takes some ms to draw.
            panel.locator_params(axis="y", nbins=4)
        fits = "within" if held <= budget else "over"
        halos = readable_bytes(predicted.get("send_bytes", 0))
        sums = readable_bytes(predicted.get("all_reduce_bytes", 0))
        return (
            f"on {data} × {space} ranks a rank keeps {readable_bytes(held)} of activations, "
            f"{fits} the budget of {chosen['budget']} MB, and one rank alone "
            f"{readable_bytes(alone)}; it hands over {halos} for halos and {sums} to all-reduces"
        )

    def launch(self, **chosen: Any) -> RunResult:
        data, space = chosen["mesh"]
        how = {name: chosen[name] for name in ("tensor_dim", "width", "batch", "dims")}
        # One rank has no neighbour: it trains the network that is not cut.
        how |= {"height": HEIGHT, "depths": DEPTHS, "steps": 1, "strategy": "plain"}
        if data * space > 1:
            how |= {"strategy": "local", "mesh": f"{data}x{space}"}
        return labkit.run("convnext_spatial", nproc=data * space, **how)


def _cut_side(*, width: int, tensor_dim: int, **_: Any) -> int:
    """Return the size of the images along the dimension that is cut, in pixels."""
    return width if tensor_dim == 3 else HEIGHT


def _activation_bytes(**chosen: Any) -> int:
    (data, space), dim = chosen["mesh"], chosen["tensor_dim"]
    sides = [HEIGHT, chosen["width"]]
    sides[dim - 2] //= space
    stages = theory.convnext_stages(sides[0], sides[1], DEPTHS, chosen["dims"])
    share = {"batch": chosen["batch"] // data, "ranks": space, "tensor_dim": dim}
    return theory.convnext_activation_bytes(stages=stages, **share)


def _traffic_bars(values: Numbers) -> dict[str, dict[str, float]]:
    return {
        "halos": {"halos": values.get("send_bytes", 0)},
        "all-\nreduces": {"sums": values.get("all_reduce_bytes", 0)},
    }
