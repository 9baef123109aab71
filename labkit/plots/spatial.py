"""Figures of lab 1: ConvNeXt, how images and tensors are cut over ranks, and what that costs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import MaxNLocator

from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory.placements import TensorPiece
from labkit.theory.sizes import byte_unit
from labkit.theory.spatial import ConvNeXtStage

# The gap between the frames of two ranks, in cells.
FRAME_GAP = 0.8
BLOCK_LAYERS = ("norm", "1 × 1\nC → 4C", "GELU", "1 × 1\n4C → C", "layer\nscale", "+ x")
NEIGHBOURS_COLOUR, OWN_PIXELS_COLOUR, ALL_RANKS_COLOUR = style.ORANGE, style.SKY, style.PURPLE
# For a picture of height 1: its width, and where the ranks' pieces begin.
PICTURE_WIDTH, PIECES_LEFT = 0.86, 1.0
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}

Box = tuple[float, float, float, float]  # left, top, width, height


def convnext_diagram(
    stages: Sequence[ConvNeXtStage],
    height: int,
    width: int,
    classes: int = 10,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw a ConvNeXt from images to logits, with shapes, and one of its blocks.

    Colours say what an operation needs once the images are cut.

    Args:
        stages: those of whole images.
        height: of the images, in pixels.
        width: of the images, in pixels.
        classes: number of logits.
        ax: where to draw.
    """
    ax = style.make_axes(ax, 10, 4.2)
    boxes = [(f"image\n3 × {height} × {width}", "white")]
    step = 10 / (2 * len(stages) + 3)
    for index, stage in enumerate(stages):
        shape = f"{stage.channels} × {stage.height} × {stage.width}"
        into = "down: norm,\n2 × 2, /2" if index else "stem: 4 × 4,\n/4, norm"
        blocks = style.count_text(stage.depth, "block")
        boxes.append((f"{into}\n{shape}", OWN_PIXELS_COLOUR))
        boxes.append((f"{blocks}\n{shape}", NEIGHBOURS_COLOUR))
        left, right = (1 + 2 * index) * step, (3 + 2 * index) * step - 0.12
        ax.plot([left, right], [2.95, 2.95], color=style.GREY, lw=1)
        text = f"stage {index}: C = {stage.channels}"
        ax.text((left + right) / 2, 3.0, text, fontsize=9, **style.ON_TOP)
    boxes.append((f"mean over H, W\n{stages[-1].channels}", ALL_RANKS_COLOUR))
    boxes.append((f"head: linear\n{classes} logits", OWN_PIXELS_COLOUR))
    _draw_row(ax, boxes, top=2.0, height=0.8)
    block = [("x", "white"), ("7 × 7\ndepthwise", NEIGHBOURS_COLOUR)]
    block += [(name, OWN_PIXELS_COLOUR) for name in BLOCK_LAYERS]
    _draw_row(ax, block, top=0.35, height=0.75)
    ax.text(0, 1.25, "one block, C channels in and out:", fontsize=10, va="bottom")
    look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 10, "color": style.GREY}
    skip = FancyArrowPatch((0.5, 0.33), (9.4, 0.33), connectionstyle="arc3,rad=0.06", **look)
    ax.add_patch(skip)
    meanings = {
        "needs what the rank holds": OWN_PIXELS_COLOUR,
        "needs the neighbours' columns": NEIGHBOURS_COLOUR,
        "needs a sum over all ranks": ALL_RANKS_COLOUR,
    }
    handles = []
    for meaning, colour in meanings.items():
        face = style.mix_with_white(colour, 0.55)
        handles.append(Rectangle((0, 0), 1, 1, facecolor=face, label=meaning))
    style.add_legend_above(ax, 3, handles)
    ax.set(xlim=(-0.05, 10), ylim=(-0.15, 3.3))
    ax.set_axis_off()
    return ax


def _draw_row(ax: Axes, boxes: Sequence[tuple[str, str]], top: float, height: float) -> None:
    """Draw boxes with text from left to right, joined by arrows."""
    step, middle = 10 / len(boxes), top + height / 2
    for index, (text, colour) in enumerate(boxes):
        left, width = index * step, step - 0.18
        face = style.mix_with_white(colour, 0.55)
        style.add_box(ax, left, top, width, height, facecolor=face, edgecolor="#444444", lw=0.8)
        ax.text(left + width / 2, middle, text, fontsize=9, **style.CENTRED)
        if index:
            arrow = {"arrowstyle": "->", "lw": 1}
            ax.annotate("", (left, middle), (left - 0.18, middle), arrowprops=arrow)


def halo_diagram(
    picture: numpy.ndarray, ranks: int, halo: int, *, rank: int = 1, ax: Axes | None = None
) -> Axes:
    """Draw a picture cut into one strip per rank, and what ``rank`` holds after a halo exchange.

    Frames in the owner's colour mark the halos, where they come from and where they go.

    Args:
        picture: [height, width, 3].
        ranks: how many strips.
        halo: columns that a neighbour sends.
        rank: the rank whose strip is drawn below.
        ax: where to draw.
    """
    height, width = picture.shape[:2]
    strip, gap = width / ranks, max(2.0, width / 60)
    ax = style.make_axes(ax, 4.8, 4.8 * 2.3 * height / width)
    ax.imshow(picture, extent=(0, width, height, 0), zorder=0)
    ax.axis((-gap, width + gap, 2.32 * height, -0.14 * height))
    for index in range(ranks):
        colour = style.rank_colour(index)
        _draw_frame(ax, (index * strip, 0, strip, height), colour, 1.5)
        x, y = (index + 0.5) * strip, -0.06 * height
        ax.text(x, y, f"rank {index}", weight="bold", color=colour, **style.CENTRED)
    below = 1.26 * height
    start, stop = round(rank * strip), round((rank + 1) * strip)
    ax.imshow(picture[:, start:stop], extent=(start, stop, below + height, below), zorder=0)
    _draw_frame(ax, (start, below, stop - start, height), style.rank_colour(rank), 1.5)
    for source in (rank - 1, rank + 1):
        if not 0 <= source < ranks:
            continue
        if source < rank:
            origin = rank * strip - halo
            to = origin - gap
            side, align = to - gap, "right"
        else:
            origin = (rank + 1) * strip
            to = origin + gap
            side, align = to + halo + gap, "left"
        columns = picture[:, round(origin) : round(origin) + halo]
        ax.imshow(columns, extent=(to, to + halo, below + height, below), zorder=0)
        for left, top in ((origin, 0), (to, below)):
            _draw_frame(ax, (left, top, halo, height), style.rank_colour(source), 2.5)
        ends = (to + halo / 2, below), (origin + halo / 2, height)
        ax.annotate("", *ends, arrowprops={"arrowstyle": "-|>", "lw": 1.5})
        text = f"halo: {halo} columns\nfrom rank {source}"
        ax.text(side, below + height / 2, text, ha=align, va="center", fontsize=9)
    ax.set_axis_off()
    return ax


def _draw_frame(ax: Axes, box: Box, colour: str, thick: float, line: str = "-") -> None:
    style.add_box(ax, *box, fill=False, edgecolor=colour, lw=thick, ls=line, zorder=3)


def shard_panels(
    whole: numpy.ndarray,
    tensors: Mapping[str, Mapping[int, numpy.ndarray]],
    *,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Draw a matrix, and one panel per placement with each rank's numbers in their places.

    Equal local tensors have the same colour.

    Args:
        whole: the matrix.
        tensors: by placement, the local matrix of each of up to four ranks.
        axes: one for the matrix and for each placement.
    """
    if axes is None:
        lines = -(-(len(tensors) + 1) // 3)
        figure, panels = pyplot.subplots(lines, 3, figsize=(8.4, 2.95 * lines))
        figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1)
        axes = list(panels.flat)[: len(tensors) + 1]
    rows, columns = whole.shape
    _prepare_panel(axes[0], "the matrix", rows, columns)
    across, down = columns + FRAME_GAP, rows + FRAME_GAP
    _draw_tile(axes[0], whole, across / 2, down / 2, style.mix_with_white(style.GREY))
    for ax, (name, held) in zip(axes[1:], tensors.items(), strict=True):
        _prepare_panel(ax, name, rows, columns)
        parts: list[numpy.ndarray] = []
        for rank, local in held.items():
            left, top = (rank % 2) * across, (rank // 2) * down
            known = [index for index, part in enumerate(parts) if numpy.array_equal(part, local)]
            if not known:
                known = [len(parts)]
                parts.append(local)
            ax.text(left, top - 0.08, f"rank {rank}", va="bottom", fontsize=8, color="#444444")
            frame: dict[str, Any] = {"facecolor": "#F2F2F2", "edgecolor": style.GREY, "lw": 0.8}
            style.add_box(ax, left, top, columns, rows, **frame)
            row, column = _find_part(local, whole)
            tint = style.mix_with_white(style.rank_colour(known[0]), 0.45)
            _draw_tile(ax, local, left + column, top + row, tint)
    return axes


def _prepare_panel(ax: Axes, name: str, rows: int, columns: int) -> None:
    right, bottom = 2 * columns + FRAME_GAP, 2 * rows + FRAME_GAP
    ax.set(xlim=(-0.1, right + 0.1), ylim=(bottom + 0.1, -0.75), aspect="equal")
    ax.set_title(name, fontsize=10, loc="left")
    ax.set_axis_off()


def _find_part(local: numpy.ndarray, whole: numpy.ndarray) -> tuple[int, int]:
    """Return the row and column at which a part begins in the whole matrix."""
    height, width = local.shape
    for row in range(whole.shape[0] - height + 1):
        for column in range(whole.shape[1] - width + 1):
            part = whole[row : row + height, column : column + width]
            if numpy.array_equal(part, local):
                return row, column
    # A summand of the whole.
    return 0, 0


def _draw_tile(
    ax: Axes, local: numpy.ndarray, left: float, top: float, colour: tuple[float, ...]
) -> None:
    for (row, column), number in numpy.ndenumerate(local):
        x, y = left + column, top + row
        style.add_box(ax, x, y, 1, 1, facecolor=colour, lw=0.8)
        ax.text(x + 0.5, y + 0.5, f"{number:g}", color="black", fontsize=8, **style.CENTRED)


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

    Equal parts have the same colour. Frames are dashed if predicted, solid if measured.

    Args:
        picture: [height, width, 3], bytes.
        pieces: each rank's piece of it.
        held: each rank's pixels, 0 to 255, also where they are one term of a sum.
        columns: ranks in one row of the mesh.
        rank: the rank whose tensor is enlarged.
        measured: rows and columns of each rank's tensor.
        ax: where to draw, without ticks.
    """
    ax = style.make_axes(ax, 8.5, 3.6)
    distinct = list(dict.fromkeys(pieces.values()))
    colours = {each: style.rank_colour(distinct.index(piece)) for each, piece in pieces.items()}
    line, source = ("-", "measured") if measured else ("--", "predicted")
    _draw_owners(ax, picture, pieces, (0, 0, PICTURE_WIDTH))
    ax.text(0, -0.04, "which ranks hold it?", va="bottom", fontsize=10)
    ax.text(PIECES_LEFT, -0.04, f"rows × columns, {source}", va="bottom", fontsize=10)
    scale = min(1.02 / (1.12 * PICTURE_WIDTH * columns), 1 / (1.5 * -(-len(pieces) // columns)))
    for index, piece in pieces.items():
        left = PIECES_LEFT + index % columns * 1.12 * PICTURE_WIDTH * scale
        top = 0.1 + index // columns * 1.5 * scale
        place = (left, top, PICTURE_WIDTH * scale)
        _draw_piece(ax, held[index], piece, picture, place, colours[index], line, 1.6)
        weight = "bold" if index == rank else "normal"
        ax.text(left, top - 0.02, f"rank {index}", va="bottom", fontsize=9, weight=weight)
        rows, across = measured[index] if measured else piece.shape[:2]
        text, size = f"{rows} × {across}", 9 if columns < 3 else 8
        ax.text(left, top + scale + 0.02, text, va="top", fontsize=size)
    piece, right = pieces[rank], PIECES_LEFT + 1.14
    place = (right, 0, PICTURE_WIDTH)
    _draw_piece(ax, held[rank], piece, picture, place, colours[rank], line, thick=3)
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


def _draw_owners(
    ax: Axes,
    picture: numpy.ndarray,
    pieces: Mapping[int, TensorPiece],
    place: tuple[float, float, float],
) -> None:
    """Draw the cut picture with the ranks of each part: "or" joins copies, "+" terms of a sum."""
    whole = TensorPiece((range(len(picture)), range(len(picture[0]))))
    _draw_piece(ax, picture, whole, picture, place, "#CCCCCC")
    parts: dict[tuple[range, ...], dict[int, list[str]]] = {}
    for rank, piece in pieces.items():
        parts.setdefault(piece.indices, {}).setdefault(piece.term, []).append(str(rank))
    for indices, terms in parts.items():
        if not all(map(len, indices)):
            continue
        left, top, width, height = box = _piece_box(TensorPiece(indices), picture, place)
        _draw_frame(ax, box, "white", 2)
        text = "\n+ ".join(" or ".join(ranks) for ranks in terms.values())
        look: dict[str, Any] = {"fontsize": 10, "bbox": LABEL_BOX} | style.CENTRED
        ax.text(left + width / 2, top + height / 2, text, **look)


def _draw_piece(
    ax: Axes,
    pixels: numpy.ndarray,
    piece: TensorPiece,
    picture: numpy.ndarray,
    place: tuple[float, float, float],
    colour: str,
    line: str = "-",
    thick: float = 0.8,
) -> None:
    """Draw a piece inside the picture's outline, whose left, top and width are ``place``."""
    left, top, width = place
    _draw_frame(ax, (left, top, width, width / PICTURE_WIDTH), "#CCCCCC", 0.8)
    x, y, across, down = box = _piece_box(piece, picture, place)
    if pixels.size:
        ax.imshow(pixels, extent=(x, x + across, y + down, y), interpolation="nearest")
        _draw_frame(ax, box, colour, thick, line)


def _piece_box(
    piece: TensorPiece, picture: numpy.ndarray, place: tuple[float, float, float]
) -> Box:
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

    Args:
        picture: [height, width, 3], an example of the images.
        mesh: ranks along data and space.
        batch: images in total; each row of the mesh has an equal share.
        halo: what a neighbour needs, as a fraction of the side that is cut.
        tensor_dim: 3 if the width is cut, 2 if the height is.
        ax: where to draw.
    """
    data, space = mesh
    ax = style.make_axes(ax, 5, 3)
    # The height of a picture whose width is 1.
    height = len(picture) / len(picture[0])
    pitch, share = height + 0.16, batch // data
    for rank in range(data * space):
        row, place = divmod(rank, space)
        colour, top = style.rank_colour(rank), row * pitch
        if not place:
            text = f"images {row * share} to {(row + 1) * share - 1}"
            ax.text(0, top - 0.01, text, va="bottom", fontsize=9)
            ax.imshow(picture, extent=(0, 1, top + height, top))
        box = _strip_box(place / space, 1 / space, top, height, tensor_dim)
        _draw_frame(ax, box, colour, 2)
        starts = []
        if place > 0:
            starts.append(place / space)
        if place < space - 1:
            starts.append((place + 1) / space - halo)
        for start in starts:
            edge = _strip_box(start, halo, top, height, tensor_dim)
            style.add_box(ax, *edge, facecolor=colour, alpha=0.6, edgecolor="none")
        left, up, width, high = box
        look: dict[str, Any] = {"fontsize": 9, "bbox": LABEL_BOX} | style.CENTRED
        ax.text(left + width / 2, up + high / 2, f"rank {rank}", **look)
    ax.set(xlim=(-0.01, 1.01), ylim=(data * pitch - 0.1, -0.08), aspect="equal")
    ax.set_axis_off()
    return ax


def _strip_box(start: float, size: float, top: float, height: float, tensor_dim: int) -> Box:
    """Return the box of a part, in fractions of the cut side, of a picture of width 1."""
    if tensor_dim == 3:
        return start, top, size, height
    return 0, top + start * height, 1, size * height


def byte_bars(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    *,
    budget: float | None = None,
    ylabel: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw bytes by label and part, predicted beside measured; ``budget`` is a dotted line."""
    ax = style.make_axes(ax, 3, 3)
    found = [sum(parts.values()) for drawn in (predicted, measured) for parts in drawn.values()]
    most = max(*found, budget or 0) or 1
    unit, size = byte_unit(most)
    style.draw_bar_stacks(ax, predicted, measured, colours, size, {}, columns=1)
    ax.set(xlim=(-0.5, len(predicted) - 0.5), ylim=(0, 1.12 * most / size))
    ax.set_ylabel(f"{ylabel}, {unit}")
    ax.yaxis.set_major_locator(MaxNLocator(4))
    if budget is not None:
        style.draw_limit(ax, "budget", budget / size, unit)
    return ax


def loss_difference_curves(
    results: Mapping[str, RunResult],
    reference: RunResult,
    *,
    name: str = "one device",
    ax: Axes | None = None,
) -> Axes:
    """Draw the relative difference of each run's loss from the reference's, called ``name``."""
    ax = style.make_axes(ax)
    expected = reference.losses
    for index, (label, result) in enumerate(results.items()):
        # The logarithmic axis has no place for 0.
        difference = ((result.losses - expected).abs() / expected).clip(lower=1e-9)
        look: dict[str, Any] = {"marker": "osD^"[index % 4], "markersize": 9 - 2 * index}
        look |= {"color": style.rank_colour(index), "lw": 1.2, "fillstyle": "none"}
        ax.plot(difference.index, difference, label=label, **look)
    ax.set(yscale="log", xlabel="training step")
    ax.set_ylabel(f"relative difference\nfrom the loss of {name}")
    style.add_legend_above(ax, 2)
    return style.add_stamp(ax, [*results.values(), reference])


def strip_step_times(
    seconds: Mapping[str, Mapping[int, tuple[float, float]]], *, axes: Sequence[Axes] | None = None
) -> Sequence[Axes]:
    """Draw the predicted time of a step by number of ranks, in one panel per machine.

    Args:
        seconds: by machine and number of ranks, seconds of arithmetic and of messages.
        axes: one for each machine.
    """
    axes = style.make_panels(axes, seconds, width=4.2, height=3.2)
    for ax, by_ranks in zip(axes, seconds.values(), strict=True):
        labels, bottom = [str(ranks) for ranks in by_ranks], numpy.zeros(len(by_ranks))
        look: dict[str, Any] = {"edgecolor": "black", "ls": "--", "lw": 1, "width": 0.6}
        parts = (("arithmetic", style.BLUE), ("messages", style.ORANGE))
        for part, (name, colour) in enumerate(parts):
            heights = numpy.array([each[part] * 1e3 for each in by_ranks.values()])
            tint = style.mix_with_white(colour, 0.6)
            ax.bar(labels, heights, bottom=bottom, color=tint, label=name, **look)
            bottom = bottom + heights
        for column, total in enumerate(bottom):
            ax.text(column, total, f"{total:.3g}", fontsize=9, **style.ON_TOP)
        ax.set(xlabel="ranks", ylabel="predicted time of a step, ms", ylim=(0, 1.12 * max(bottom)))
        style.add_legend_above(ax, 2)
    return axes
