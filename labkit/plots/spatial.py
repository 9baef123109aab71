"""Figures of lab 1: ConvNeXt, how images and tensors are cut over ranks, and what that costs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from labkit.plots import style
from labkit.theory.placements import TensorPiece
from labkit.theory.spatial import ConvNeXtStage

# The gap between the frames of two ranks, in cells.
FRAME_GAP = 0.8
BLOCK_LAYERS = ("norm", "1 × 1\nC → 4C", "GELU", "1 × 1\n4C → C", "layer\nscale", "+ x")
NEED_COLOURS = {
    "needs what the rank holds": style.mix_with_white(style.SKY, 0.55),
    "needs the neighbours' columns": style.mix_with_white(style.ORANGE, 0.55),
    "needs a sum over all ranks": style.mix_with_white(style.PURPLE, 0.55),
}
# For a picture of height 1: its width, and where the ranks' pieces begin.
PICTURE_WIDTH, PIECES_LEFT = 0.86, 1.0
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}

Box = tuple[float, float, float, float]  # left, top, width, height
Place = tuple[float, float, float]  # left, top and width of a picture


def convnext_diagram(
    stages: Sequence[ConvNeXtStage], height: int, width: int, *, ax: Axes | None = None
) -> Axes:
    """Draw a ConvNeXt for images of ``height`` × ``width`` pixels, with shapes, and a block of it.

    Colours say what an operation needs once the images are cut. ``stages`` are of whole images.
    """
    ax = style.make_axes(ax, 10, 4.2)
    own, neighbours, everyone = NEED_COLOURS.values()
    boxes: list[tuple[str, Any]] = [(f"image\n3 × {height} × {width}", "white")]
    step = 10 / (2 * len(stages) + 3)
    for index, stage in enumerate(stages):
        shape = f"{stage.channels} × {stage.height} × {stage.width}"
        into = "down: norm,\n2 × 2, /2" if index else "stem: 4 × 4,\n/4, norm"
        boxes.append((f"{into}\n{shape}", own))
        boxes.append((f"{style.count_text(stage.depth, 'block')}\n{shape}", neighbours))
        left, right = (1 + 2 * index) * step, (3 + 2 * index) * step - 0.12
        ax.plot([left, right], [2.95, 2.95], color=style.GREY, lw=1)
        text = f"stage {index}: C = {stage.channels}"
        ax.text((left + right) / 2, 3.0, text, fontsize=9, **style.ON_TOP)
    boxes.append((f"mean over H, W\n{stages[-1].channels}", everyone))
    boxes.append(("head: linear\n10 logits", own))
    _draw_row(ax, boxes, top=2.0, height=0.8)
    layers = [(name, own) for name in BLOCK_LAYERS]
    block = [("x", "white"), ("7 × 7\ndepthwise", neighbours), *layers]
    _draw_row(ax, block, top=0.35, height=0.75)
    ax.text(0, 1.25, "one block, C channels in and out:", fontsize=10, va="bottom")
    look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 10, "color": style.GREY}
    skip = FancyArrowPatch((0.5, 0.33), (9.4, 0.33), connectionstyle="arc3,rad=0.06", **look)
    ax.add_patch(skip)
    style.add_legend_above(ax, 3, style.legend_patches(NEED_COLOURS))
    ax.set(xlim=(-0.05, 10), ylim=(-0.15, 3.3))
    ax.set_axis_off()
    return ax


def _draw_row(ax: Axes, boxes: Sequence[tuple[str, Any]], top: float, height: float) -> None:
    """Draw boxes with text from left to right, joined by arrows."""
    # All rows are 10 wide, whatever the number of boxes.
    step, middle = 10 / len(boxes), top + height / 2
    for index, (text, face) in enumerate(boxes):
        left, width = index * step, step - 0.18
        style.add_box(ax, left, top, width, height, facecolor=face, edgecolor="#444444", lw=0.8)
        ax.text(left + width / 2, middle, text, fontsize=9, **style.CENTRED)
        if index:
            style.draw_arrow(ax, (left - 0.18, middle), (left, middle))


def halo_diagram(
    picture: numpy.ndarray,
    ranks: int,
    halo: int,
    *,
    rank: int = 1,
    backward: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw a picture cut into one strip per rank, and what ``rank`` holds after a halo exchange.

    Frames in the owner's colour mark the halos, where they come from and where they go. The picture
    is [height, width, 3]; a neighbour sends ``halo`` columns. ``backward`` sends gradients home.
    """
    height, width = picture.shape[:2]
    strip, gap = width / ranks, max(2.0, width / 60)
    # The rank's own columns are drawn below the picture, with room for the arrows.
    below = 1.26 * height
    ax = style.make_axes(ax, 4.8, 4.8 * 2.3 * height / width)
    ax.imshow(picture, extent=(0, width, height, 0), zorder=0)
    ax.axis((-gap, width + gap, 2.32 * height, -0.14 * height))
    for index in range(ranks):
        colour = style.rank_colour(index)
        _draw_frame(ax, (index * strip, 0, strip, height), edgecolor=colour, lw=1.5)
        x, y = (index + 0.5) * strip, -0.06 * height
        ax.text(x, y, f"rank {index}", weight="bold", color=colour, **style.CENTRED)
    start, stop = round(rank * strip), round((rank + 1) * strip)
    ax.imshow(picture[:, start:stop], extent=(start, stop, below + height, below), zorder=0)
    look: dict[str, Any] = {"edgecolor": style.rank_colour(rank), "lw": 1.5}
    _draw_frame(ax, (start, below, stop - start, height), **look)
    sides = (
        (rank - 1, rank * strip - halo, -gap, "right"),
        (rank + 1, (rank + 1) * strip, gap, "left"),
    )
    for source, origin, shift, align in sides:
        # The first and the last rank have one neighbour.
        if not 0 <= source < ranks:
            continue
        to = origin + shift
        side = to + shift + (halo if shift > 0 else 0)
        columns = picture[:, round(origin) : round(origin) + halo]
        ax.imshow(columns, extent=(to, to + halo, below + height, below), zorder=0)
        look = {"edgecolor": style.rank_colour(source), "lw": 2.5}
        for left, top in ((origin, 0), (to, below)):
            _draw_frame(ax, (left, top, halo, height), **look)
        ends = (origin + halo / 2, height), (to + halo / 2, below)
        text = f"halo: {halo} columns\nfrom rank {source}"
        if backward:
            ends, text = ends[::-1], f"gradient: added\non rank {source}"
            _label_box(ax, (origin, 0, halo, height), "+", 9)
        style.draw_arrow(ax, *ends, "-|>", 1.5)
        ax.text(side, below + height / 2, text, ha=align, va="center", fontsize=9)
    ax.set_axis_off()
    return ax


def _draw_frame(ax: Axes, box: Box, **look: Any) -> None:
    style.add_box(ax, *box, fill=False, zorder=3, **look)


def shard_panels(
    whole: numpy.ndarray,
    tensors: Mapping[str, Mapping[int, numpy.ndarray]],
    *,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Draw a matrix, and one panel per placement with each rank's numbers in their places.

    Equal local tensors have the same colour. ``tensors`` are by placement and rank, of which there
    are up to four; ``axes`` are one for the matrix and one for each placement.
    """
    if axes is None:
        lines = -(-(len(tensors) + 1) // 3)
        figure, panels = pyplot.subplots(lines, 3, figsize=(8.4, 2.95 * lines))
        figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1)
        axes = list(panels.flat)[: len(tensors) + 1]
    rows, columns = whole.shape
    # The ranks form a square, in whose middle the whole matrix is drawn.
    across, down = columns + FRAME_GAP, rows + FRAME_GAP
    for ax, name in zip(axes, ("the matrix", *tensors), strict=True):
        limits = {"xlim": (-0.1, columns + across + 0.1), "ylim": (rows + down + 0.1, -0.75)}
        ax.set(aspect="equal", **limits)
        ax.set_title(name, fontsize=10, loc="left")
        ax.set_axis_off()
    grey = style.mix_with_white(style.GREY)
    style.draw_cells(axes[0], whole, (across / 2, down / 2), grey, lw=0.8)
    frame: dict[str, Any] = {"facecolor": "#F2F2F2", "edgecolor": style.GREY, "lw": 0.8}
    for ax, held in zip(axes[1:], tensors.values(), strict=True):
        colours: dict[str, str] = {}
        for rank, local in held.items():
            left, top = (rank % 2) * across, (rank // 2) * down
            ax.text(left, top - 0.08, f"rank {rank}", va="bottom", fontsize=8, color="#444444")
            style.add_box(ax, left, top, columns, rows, **frame)
            colour = colours.setdefault(str(local.tolist()), style.rank_colour(len(colours)))
            row, column = _find_part(local, whole)
            tint = style.mix_with_white(colour, 0.45)
            style.draw_cells(ax, local, (left + column, top + row), tint, lw=0.8)
    return axes


def _find_part(local: numpy.ndarray, whole: numpy.ndarray) -> tuple[int, int]:
    """Return the row and column at which a part begins, (0, 0) for a summand of the whole."""
    # Every part of the whole that has the local shape: [row, column, *local].
    windows = numpy.lib.stride_tricks.sliding_window_view(whole, local.shape)
    places = numpy.argwhere((windows == local).all(axis=(2, 3)))
    row, column = places[0] if len(places) else (0, 0)
    return row, column


def placement_picture(
    picture: numpy.ndarray,
    pieces: Mapping[int, TensorPiece],
    held: Mapping[int, numpy.ndarray],
    columns: int,
    *,
    rank: int = 0,
    measured: Mapping[int, Sequence[int]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw which ranks hold which part of a picture, each rank's part, and one of them enlarged.

    Equal parts have the same colour. Frames are dashed if predicted, solid if ``measured``, which
    are rows and columns of each rank's tensor. The picture is [height, width, 3], bytes; ``held``
    are each rank's pixels, 0 to 255, also where they are one term of a sum. The mesh has this many
    ranks, ``columns``, in a row.
    """
    ax, right = style.make_axes(ax, 8.5, 3.6), PIECES_LEFT + 1.14
    distinct = list(dict.fromkeys(pieces.values()))
    line, source = ("-", "measured") if measured else ("--", "predicted")
    _draw_owners(ax, picture, pieces)
    ax.text(0, -0.04, "which ranks hold it?", va="bottom", fontsize=10)
    ax.text(PIECES_LEFT, -0.04, f"rows × columns, {source}", va="bottom", fontsize=10)
    # The height of a piece with which all rows and columns of the mesh fit, labels included.
    scale = min(1.02 / (1.12 * PICTURE_WIDTH * columns), 1 / (1.5 * -(-len(pieces) // columns)))
    for index, piece in pieces.items():
        left = PIECES_LEFT + index % columns * 1.12 * PICTURE_WIDTH * scale
        top = 0.1 + index // columns * 1.5 * scale
        frame = {"edgecolor": style.rank_colour(distinct.index(piece)), "ls": line}
        place = (left, top, PICTURE_WIDTH * scale)
        _draw_piece(ax, held[index], piece, picture, place, **frame, lw=1.6)
        if index == rank:
            place = (right, 0, PICTURE_WIDTH)
            _draw_piece(ax, held[rank], piece, picture, place, **frame, lw=3)
        weight = "bold" if index == rank else "normal"
        ax.text(left, top - 0.02, f"rank {index}", va="bottom", fontsize=9, weight=weight)
        rows, across = measured[index] if measured else piece.shape[:2]
        size = 9 if columns < 3 else 8
        ax.text(left, top + scale + 0.02, f"{rows} × {across}", va="top", fontsize=size)
    piece = pieces[rank]
    ax.text(right, -0.04, f"rank {rank}", va="bottom", fontsize=10, weight="bold")
    below = "nothing is left for it"
    if all(piece.shape):
        lines, span = piece.indices[:2]
        below = f"rows {lines.start}–{lines.stop - 1}, columns {span.start}–{span.stop - 1}"
    if piece.terms > 1:
        below += f"\nterm {piece.term + 1} of {piece.terms}, drawn {piece.terms} × as bright"
    ax.text(right, 1.03, below, va="top", fontsize=9)
    ax.set(xlim=(-0.02, right + PICTURE_WIDTH + 0.02), ylim=(1.22, -0.12), aspect="equal")
    ax.set_axis_off()
    return ax


def _draw_owners(ax: Axes, picture: numpy.ndarray, pieces: Mapping[int, TensorPiece]) -> None:
    """Draw the cut picture with the ranks of each part: "or" joins copies, "+" terms of a sum."""
    whole = TensorPiece((range(len(picture)), range(len(picture[0]))))
    place = (0, 0, PICTURE_WIDTH)
    _draw_piece(ax, picture, whole, picture, place, edgecolor="#CCCCCC", lw=0.8)
    parts: dict[tuple[range, ...], dict[int, list[str]]] = {}
    for rank, piece in pieces.items():
        if all(piece.shape):
            parts.setdefault(piece.indices, {}).setdefault(piece.term, []).append(str(rank))
    for indices, terms in parts.items():
        box = _piece_box(TensorPiece(indices), picture, place)
        _draw_frame(ax, box, edgecolor="white", lw=2)
        _label_box(ax, box, "\n+ ".join(" or ".join(ranks) for ranks in terms.values()), 10)


def _label_box(ax: Axes, box: Box, text: str, fontsize: float) -> None:
    left, top, width, height = box
    look: dict[str, Any] = {"fontsize": fontsize, "bbox": LABEL_BOX} | style.CENTRED
    ax.text(left + width / 2, top + height / 2, text, **look)


def _draw_piece(
    ax: Axes, pixels: Any, piece: TensorPiece, picture: numpy.ndarray, place: Place, **frame: Any
) -> None:
    """Draw a piece with its frame inside the picture's outline."""
    left, top, width = place
    _draw_frame(ax, (left, top, width, width / PICTURE_WIDTH), edgecolor="#CCCCCC", lw=0.8)
    x, y, across, down = box = _piece_box(piece, picture, place)
    if pixels.size:
        ax.imshow(pixels, extent=(x, x + across, y + down, y), interpolation="nearest")
        _draw_frame(ax, box, **frame)


def _piece_box(piece: TensorPiece, picture: numpy.ndarray, place: Place) -> Box:
    left, top, width = place
    rows, columns = piece.indices[:2]
    a_row, a_column = width / PICTURE_WIDTH / len(picture), width / len(picture[0])
    x, y = left + columns.start * a_column, top + rows.start * a_row
    return x, y, len(columns) * a_column, len(rows) * a_row


def strip_layout(
    picture: numpy.ndarray,
    mesh: tuple[int, int],
    batch: int,
    halo: float,
    *,
    tensor_dim: int = 3,
    ax: Axes | None = None,
) -> Axes:
    """Draw which strip of which images each rank of a mesh data × space holds, with its halos.

    The picture, [height, width, 3], stands for the images, of which there are ``batch`` in total.
    ``halo`` is a fraction of the side that is cut: the width (``tensor_dim`` 3) or the height (2).
    """
    data, space = mesh
    ax = style.make_axes(ax, 5, 3)
    # The height of a picture whose width is 1.
    height = len(picture) / len(picture[0])
    pitch, share = height + 0.16, batch // data
    for row in range(data):
        top, text = row * pitch, f"images {row * share} to {(row + 1) * share - 1}"
        ax.text(0, top - 0.01, text, va="bottom", fontsize=9)
        ax.imshow(picture, extent=(0, 1, top + height, top))
        for place in range(space):
            rank = row * space + place
            colour, first, last = style.rank_colour(rank), place / space, (place + 1) / space - halo
            box = _strip_box(first, 1 / space, top, height, tensor_dim)
            _draw_frame(ax, box, edgecolor=colour, lw=2)
            # The first and the last strip have one neighbour.
            for start in [first] * (place > 0) + [last] * (place < space - 1):
                edge = _strip_box(start, halo, top, height, tensor_dim)
                style.add_box(ax, *edge, facecolor=colour, alpha=0.6, edgecolor="none")
            _label_box(ax, box, f"rank {rank}", 9)
    ax.set(xlim=(-0.01, 1.01), ylim=(data * pitch - 0.1, -0.08), aspect="equal")
    ax.set_axis_off()
    return ax


def _strip_box(start: float, size: float, top: float, height: float, tensor_dim: int) -> Box:
    """Return the box of a part, in fractions of the cut side, of a picture of width 1."""
    if tensor_dim == 3:
        return start, top, size, height
    return 0, top + start * height, 1, size * height
