"""Figures of lab 1: the network, how images and tensors are cut over ranks, what cutting costs and what it pays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import MaxNLocator

from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory.placements import TensorPiece
from labkit.theory.sizes import byte_unit
from labkit.theory.spatial import ConvNeXtStage

FRAME_GAP = 0.8  # between the frames of two ranks, in cells
BLOCK_LAYERS = (
    "7 × 7\ndepthwise",
    "norm",
    "1 × 1\nC → 4C",
    "GELU",
    "1 × 1\n4C → C",
    "layer\nscale",
)
NEIGHBOURS_COLOUR, OWN_PIXELS_COLOUR, ALL_RANKS_COLOUR = style.ORANGE, style.SKY, style.PURPLE


def convnext_diagram(
    stages: Sequence[ConvNeXtStage],
    height: int,
    width: int,
    classes: int = 10,
    *,
    ax: Axes | None = None,
) -> Axes:
    """A ConvNeXt from images of this size to logits with the shapes between, and below it one block.

    ``stages`` are those of the whole images. Colours say what an operation needs once the images are cut.
    """
    ax = style.make_axes(ax, 10, 4.2)
    boxes = [(f"image\n3 × {height} × {width}", "white")]
    for index, stage in enumerate(stages):
        shape = f"{stage.channels} × {stage.height} × {stage.width}"
        into = "down: norm,\n2 × 2, /2" if index else "stem: 4 × 4,\n/4, norm"
        boxes.append((f"{into}\n{shape}", OWN_PIXELS_COLOUR))
        boxes.append((f"{stage.depth} block{'s' * (stage.depth > 1)}\n{shape}", NEIGHBOURS_COLOUR))
    boxes += [
        (f"mean over H, W\n{stages[-1].channels}", ALL_RANKS_COLOUR),
        (f"head: linear\n{classes} logits", OWN_PIXELS_COLOUR),
    ]
    _draw_row(ax, boxes, top=2.0, height=0.8, size=9)
    step = 10 / len(boxes)
    for index, stage in enumerate(stages):
        left, right = (1 + 2 * index) * step, (3 + 2 * index) * step - 0.12
        ax.plot([left, right], [2.95, 2.95], color=style.GREY, lw=1)
        ax.text(
            (left + right) / 2,
            3.0,
            f"stage {index}: C = {stage.channels}",
            ha="center",
            va="bottom",
            fontsize=9,
        )
    _draw_row(
        ax,
        [
            ("x", "white"),
            *((name, OWN_PIXELS_COLOUR) for name in BLOCK_LAYERS),
            ("+ x", OWN_PIXELS_COLOUR),
        ],
        0.35,
        0.75,
        9,
        BLOCK_LAYERS[0],
    )
    ax.text(0, 1.25, "one block, C channels in and out:", fontsize=10, va="bottom")
    around = FancyArrowPatch(
        (0.5, 0.33),
        (9.4, 0.33),
        connectionstyle="arc3,rad=0.06",
        arrowstyle="-|>",
        mutation_scale=10,
        color=style.GREY,
    )
    ax.add_patch(around)
    meanings = {
        "needs what the rank holds": OWN_PIXELS_COLOUR,
        "needs the neighbours' columns": NEIGHBOURS_COLOUR,
        "needs a sum over all ranks": ALL_RANKS_COLOUR,
    }
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=_mix_with_white(colour, 0.55))
        for colour in meanings.values()
    ]
    ax.legend(
        handles,
        list(meanings),
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    ax.set(xlim=(-0.05, 10), ylim=(-0.15, 3.3))
    ax.set_axis_off()
    return ax


def _draw_row(
    ax: Axes,
    boxes: Sequence[tuple[str, str]],
    top: float,
    height: float,
    size: float,
    special: str = "",
) -> None:
    """Boxes with text from left to right, with arrows between; the ``special`` one asks its neighbours."""
    step = 10 / len(boxes)
    for index, (text, colour) in enumerate(boxes):
        colour = NEIGHBOURS_COLOUR if special and text == special else colour
        face = _mix_with_white(colour, 0.55) if colour != "white" else "white"
        ax.add_patch(
            Rectangle(
                (index * step, top),
                step - 0.18,
                height,
                facecolor=face,
                edgecolor="#444444",
                lw=0.8,
            )
        )
        ax.text(
            index * step + (step - 0.18) / 2,
            top + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=size,
        )
        if index:
            start = (index * step - 0.18, top + height / 2)
            ax.annotate(
                "", (index * step, start[1]), start, arrowprops={"arrowstyle": "->", "lw": 1}
            )


def _mix_with_white(colour: str, strength: float = 0.35) -> tuple[float, ...]:
    """A colour mixed with white, on which black digits can be read."""
    return tuple(strength * channel + 1 - strength for channel in to_rgb(colour))


def halo_diagram(
    picture: numpy.ndarray, ranks: int, halo: int, *, rank: int = 1, ax: Axes | None = None
) -> Axes:
    """A picture [height, width, 3] cut into a strip a rank, and below it what ``rank`` holds once halos came.

    The ``halo`` columns that travel to it are framed in their owner's colour where they come from and where they go.
    """
    height, width = picture.shape[:2]
    strip, gap = width / ranks, max(2.0, width / 60)
    ax = style.make_axes(ax, 4.8, 4.8 * 2.3 * height / width)
    ax.imshow(picture, extent=(0, width, height, 0), zorder=0)
    ax.axis((-gap, width + gap, 2.32 * height, -0.14 * height))
    for index in range(ranks):
        colour = style.RANK_COLOURS[index % 4]
        _draw_frame(ax, index * strip, 0, strip, height, colour, 1.5)
        place = ((index + 0.5) * strip, -0.06 * height)
        ax.text(*place, f"rank {index}", ha="center", va="center", weight="bold", color=colour)
    below = 1.26 * height
    own = slice(round(rank * strip), round((rank + 1) * strip))
    ax.imshow(picture[:, own], extent=(own.start, own.stop, below + height, below), zorder=0)
    _draw_frame(
        ax, own.start, below, own.stop - own.start, height, style.RANK_COLOURS[rank % 4], 1.5
    )
    for source in (rank - 1, rank + 1):
        if not 0 <= source < ranks:
            continue
        start = rank * strip - halo if source < rank else (rank + 1) * strip
        to = start - gap if source < rank else start + gap
        colour = style.RANK_COLOURS[source % 4]
        columns = picture[:, round(start) : round(start) + halo]
        ax.imshow(columns, extent=(to, to + halo, below + height, below), zorder=0)
        for left, top in ((start, 0), (to, below)):
            _draw_frame(ax, left, top, halo, height, colour, 2.5)
        ax.annotate(
            "",
            (to + halo / 2, below),
            (start + halo / 2, height),
            arrowprops={"arrowstyle": "-|>", "lw": 1.5},
        )
        side, align = (to - gap, "right") if source < rank else (to + halo + gap, "left")
        text = f"halo: {halo} columns\nfrom rank {source}"
        ax.text(side, below + height / 2, text, ha=align, va="center", fontsize=9)
    ax.set_axis_off()
    return ax


def _draw_frame(
    ax: Axes,
    left: float,
    top: float,
    width: float,
    height: float,
    colour: str,
    thick: float,
    line: str = "-",
) -> None:
    ax.add_patch(
        Rectangle(
            (left, top), width, height, fill=False, edgecolor=colour, lw=thick, ls=line, zorder=3
        )
    )


def shard_panels(
    whole: numpy.ndarray,
    tensors: Mapping[str, Mapping[int, numpy.ndarray]],
    *,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """A matrix, and one panel a placement of it: a frame a rank with the numbers that it holds, where they belong.

    Parts have colours: ranks that hold the same part show the same colour.

    Args:
        whole: the matrix.
        tensors: for each placement's name, the local matrix of each of four ranks.
        axes: one for the matrix and for each placement.
    """
    if axes is None:
        lines = -(-(len(tensors) + 1) // 3)
        figure, panels = pyplot.subplots(lines, 3, figsize=(8.4, 2.95 * lines))
        figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1)
        axes = list(panels.flat)[: len(tensors) + 1]
    rows, columns = whole.shape
    _prepare_panel(axes[0], "the matrix", rows, columns)
    _draw_tile(
        axes[0],
        whole,
        (columns + FRAME_GAP) / 2,
        (rows + FRAME_GAP) / 2,
        _mix_with_white(style.GREY),
    )
    for ax, (name, held) in zip(axes[1:], tensors.items(), strict=True):
        _prepare_panel(ax, name, rows, columns)
        parts: list[numpy.ndarray] = []
        for rank, local in held.items():
            left, top = (rank % 2) * (columns + FRAME_GAP), (rank // 2) * (rows + FRAME_GAP)
            known = [index for index, part in enumerate(parts) if numpy.array_equal(part, local)]
            parts += [] if known else [local]
            colour = style.RANK_COLOURS[(known[0] if known else len(parts) - 1) % 4]
            ax.text(left, top - 0.08, f"rank {rank}", va="bottom", fontsize=8, color="#444444")
            ax.add_patch(
                Rectangle(
                    (left, top), columns, rows, facecolor="#F2F2F2", edgecolor=style.GREY, lw=0.8
                )
            )
            row, column = _find_part(local, whole)
            _draw_tile(ax, local, left + column, top + row, _mix_with_white(colour, 0.45))
    return axes


def _prepare_panel(ax: Axes, name: str, rows: int, columns: int) -> None:
    ax.set(
        xlim=(-0.1, 2 * columns + FRAME_GAP + 0.1),
        ylim=(2 * rows + FRAME_GAP + 0.1, -0.75),
        aspect="equal",
    )
    ax.set_title(name, fontsize=10, loc="left")
    ax.set_axis_off()


def _find_part(local: numpy.ndarray, whole: numpy.ndarray) -> tuple[int, int]:
    """Row and column at which a part begins in the whole matrix."""
    for row in range(whole.shape[0] - local.shape[0] + 1):
        for column in range(whole.shape[1] - local.shape[1] + 1):
            if numpy.array_equal(
                whole[row : row + local.shape[0], column : column + local.shape[1]], local
            ):
                return row, column
    return 0, 0  # a summand of the whole


def _draw_tile(
    ax: Axes, local: numpy.ndarray, left: float, top: float, colour: tuple[float, ...]
) -> None:
    for (row, column), number in numpy.ndenumerate(local):
        ax.add_patch(
            Rectangle((left + column, top + row), 1, 1, facecolor=colour, edgecolor="white", lw=0.8)
        )
        middle = left + column + 0.5, top + row + 0.5
        ax.text(*middle, f"{number:g}", ha="center", va="center", color="black", fontsize=8)


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
    """A picture with the ranks that hold its parts, what each rank holds of it, and the tensor of one rank.

    The same part has the same colour. Frames are dashed where they are predicted, full where they were measured.

    Args:
        picture: the whole, [height, width, 3], bytes.
        pieces: what each rank holds of it.
        held: that as a picture, 0 to 255, however small a term of a sum is.
        columns: ranks in a row of the mesh.
        rank: whose tensor is drawn large.
        measured: rows and columns of each rank's tensor.
        ax: where to draw, without ticks.
    """
    ax = style.make_axes(ax, 8.5, 3.6)
    distinct = list(dict.fromkeys(pieces.values()))
    line = "-" if measured else "--"
    _draw_owners(ax, picture, pieces, (0, 0, PICTURE_WIDTH))
    ax.text(0, -0.04, "which ranks hold it?", va="bottom", fontsize=10)
    scale = min(1.02 / (1.12 * PICTURE_WIDTH * columns), 1 / (1.5 * -(-len(pieces) // columns)))
    for index, piece in pieces.items():
        left, top = (
            PIECES_LEFT + index % columns * 1.12 * PICTURE_WIDTH * scale,
            0.1 + index // columns * 1.5 * scale,
        )
        look: dict[str, Any] = {
            "colour": style.RANK_COLOURS[distinct.index(piece) % 4],
            "line": line,
            "thick": 1.6,
        }
        _draw_piece(ax, held[index], piece, picture, (left, top, PICTURE_WIDTH * scale), **look)
        weight, shape = (
            "bold" if index == rank else "normal",
            measured[index] if measured else piece.shape,
        )
        ax.text(left, top - 0.02, f"rank {index}", va="bottom", fontsize=9, weight=weight)
        ax.text(
            left,
            top + scale + 0.02,
            f"{shape[0]} × {shape[1]}",
            va="top",
            fontsize=9 if columns < 3 else 8,
        )
    ax.text(
        PIECES_LEFT,
        -0.04,
        "rows × columns, " + ("measured" if measured else "predicted"),
        va="bottom",
        fontsize=10,
    )
    piece, right = pieces[rank], PIECES_LEFT + 1.14
    colour = style.RANK_COLOURS[distinct.index(piece) % 4]
    _draw_piece(ax, held[rank], piece, picture, (right, 0, PICTURE_WIDTH), colour, line, thick=3)
    ax.text(right, -0.04, f"rank {rank}", va="bottom", fontsize=10, weight="bold")
    term = (
        f"term {piece.term + 1} of {piece.terms}, drawn {piece.terms} × as bright"
        if piece.terms > 1
        else ""
    )
    spans = [
        f"{name} {part.start}–{part.stop - 1}"
        for name, part in zip(("rows", "columns"), piece.indices, strict=False)
    ]
    below = "\n".join(
        filter(None, [", ".join(spans) if all(piece.shape) else "nothing is left for it", term])
    )
    ax.text(right, 1.03, below, va="top", fontsize=9)
    ax.set(xlim=(-0.02, right + PICTURE_WIDTH + 0.02), ylim=(1.22, -0.12), aspect="equal")
    ax.set_axis_off()
    return ax


PICTURE_WIDTH, PIECES_LEFT = (
    0.86,
    1.0,
)  # of a picture of height 1: its width, and where the ranks' begin


def _draw_owners(
    ax: Axes,
    picture: numpy.ndarray,
    pieces: Mapping[int, TensorPiece],
    place: tuple[float, float, float],
) -> None:
    """The picture cut into its parts, and on each the ranks that hold it: or, where they hold the same; + for terms."""
    _draw_piece(
        ax,
        picture,
        TensorPiece((range(len(picture)), range(len(picture[0])))),
        picture,
        place,
        "#CCCCCC",
    )
    parts: dict[tuple[range, ...], dict[int, list[str]]] = {}
    for rank, piece in pieces.items():
        parts.setdefault(piece.indices, {}).setdefault(piece.term, []).append(str(rank))
    for indices, terms in parts.items():
        if not all(map(len, indices)):
            continue
        left, top, width, height = box = _piece_box(TensorPiece(indices), picture, place)
        _draw_frame(ax, *box, "white", 2)
        text = "\n+ ".join(" or ".join(ranks) for ranks in terms.values())
        back = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}
        ax.text(
            left + width / 2,
            top + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=10,
            bbox=back,
        )


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
    """A piece where it belongs in the picture, whose outline has its left upper corner and its width at ``place``."""
    left, top, width = place
    _draw_frame(ax, left, top, width, width / PICTURE_WIDTH, "#CCCCCC", 0.8)
    x, y, across, down = _piece_box(piece, picture, place)
    if pixels.size:
        ax.imshow(pixels, extent=(x, x + across, y + down, y), interpolation="nearest")
        _draw_frame(ax, x, y, across, down, colour, thick, line)


def _piece_box(
    piece: TensorPiece, picture: numpy.ndarray, place: tuple[float, float, float]
) -> tuple[float, float, float, float]:
    """Left, top, width and height of a piece in a picture drawn at this place."""
    left, top, width = place
    rows, columns = piece.indices[:2]
    a_row, a_column = width / PICTURE_WIDTH / len(picture), width / len(picture[0])
    return (
        left + columns.start * a_column,
        top + rows.start * a_row,
        len(columns) * a_column,
        len(rows) * a_row,
    )


def strip_layout(
    picture: numpy.ndarray,
    mesh: tuple[int, int],
    batch: int,
    halo: float,
    *,
    tensor_dim: int = 3,
    ax: Axes | None = None,
) -> Axes:
    """Which strip of which images each rank of a mesh data × space holds; shaded is what goes to a neighbour.

    Args:
        picture: [height, width, 3], which stands for all images.
        mesh: ranks along data and space.
        batch: images in all; a row of the figure has its share of them.
        halo: what a neighbour needs, as a part of the side that is cut.
        tensor_dim: 3 where the width is cut, 2 where the height is.
        ax: where to draw.
    """
    data, space = mesh
    ax = style.make_axes(ax, 5, 3)
    height = len(picture) / len(picture[0])  # of a picture whose width is 1
    pitch, share = height + 0.16, batch // data
    for rank in range(data * space):
        row, place = divmod(rank, space)
        colour, top = style.RANK_COLOURS[rank % 4], row * pitch
        if not place:
            ax.text(
                0,
                top - 0.01,
                f"images {row * share} to {(row + 1) * share - 1}",
                va="bottom",
                fontsize=9,
            )
            ax.imshow(picture, extent=(0, 1, top + height, top))
        box = _strip_box(place / space, 1 / space, top, height, tensor_dim)
        _draw_frame(ax, *box, colour, 2)
        for start in [place / space] * (place > 0) + [(place + 1) / space - halo] * (
            place < space - 1
        ):
            edge = _strip_box(start, halo, top, height, tensor_dim)
            ax.add_patch(
                Rectangle(edge[:2], *edge[2:], facecolor=colour, alpha=0.6, edgecolor="none")
            )
        left, up, width, high = box
        middle = left + width / 2, up + high / 2
        back = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}
        ax.text(*middle, f"rank {rank}", ha="center", va="center", fontsize=9, bbox=back)
    ax.set(xlim=(-0.01, 1.01), ylim=(data * pitch - 0.1, -0.08), aspect="equal")
    ax.set_axis_off()
    return ax


def _strip_box(
    start: float, size: float, top: float, height: float, tensor_dim: int
) -> tuple[float, float, float, float]:
    """Left, top, width and height of a part of a picture of width 1, along the side that is cut."""
    return (
        (start, top, size, height)
        if tensor_dim == 3
        else (0, top + start * height, 1, size * height)
    )


def byte_bars(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    *,
    budget: float | None = None,
    ylabel: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Bytes by label and part, predicted and, beside it, measured; a dotted line at the ``budget``, in bytes."""
    ax = style.make_axes(ax, 3, 3)
    found = [sum(parts.values()) for drawn in (predicted, measured) for parts in drawn.values()]
    most = max(*found, budget or 0) or 1
    unit, size = byte_unit(most)
    style.draw_bar_stacks(ax, predicted, measured, colours, size, {}, columns=1)
    ax.set(
        ylabel=f"{ylabel}, {unit}", xlim=(-0.5, len(predicted) - 0.5), ylim=(0, 1.12 * most / size)
    )
    ax.yaxis.set_major_locator(MaxNLocator(4))
    if budget is not None:
        ax.axhline(budget / size, color="black", lw=1.2, ls=":")
        place: dict[str, Any] = {
            "xycoords": ("axes fraction", "data"),
            "textcoords": "offset points",
            "va": "center",
        }
        ax.annotate(
            f"budget\n{budget / size:g} {unit}", (1, budget / size), (3, 0), fontsize=9, **place
        )
    return ax


def loss_difference_curves(
    results: Mapping[str, RunResult],
    reference: RunResult,
    *,
    name: str = "one device",
    ax: Axes | None = None,
) -> Axes:
    """How far each run's loss is from the reference's, whose ``name`` is given, as a part of it; from 1e-9 on."""
    ax = style.make_axes(ax)
    expected = reference.losses
    for index, (label, result) in enumerate(results.items()):
        difference = ((result.losses - expected).abs() / expected).clip(lower=1e-9)
        look: dict[str, Any] = {
            "marker": "osD^"[index % 4],
            "markersize": 9 - 2 * index,
            "fillstyle": "none",
        }
        ax.plot(
            difference.index,
            difference,
            lw=1.2,
            color=style.RANK_COLOURS[index % 4],
            label=label,
            **look,
        )
    ax.set(
        yscale="log", xlabel="training step", ylabel=f"relative difference\nfrom the loss of {name}"
    )
    style.add_legend_above(ax, 2)
    return style.add_stamp(ax, [*results.values(), reference])


def strip_step_times(
    seconds: Mapping[str, Mapping[int, tuple[float, float]]], *, axes: Sequence[Axes] | None = None
) -> Sequence[Axes]:
    """Time of a step by number of ranks, a panel a machine: arithmetic and messages, stacked; all of it predicted.

    Args:
        seconds: for each machine's name, by number of ranks, seconds of arithmetic and of messages.
        axes: one for each machine.
    """
    axes = style.make_panels(axes, seconds, width=4.2, height=3.2)
    for ax, by_ranks in zip(axes, seconds.values(), strict=True):
        arithmetic, messages = (
            numpy.array([each[part] * 1e3 for each in by_ranks.values()]) for part in (0, 1)
        )
        labels = [str(ranks) for ranks in by_ranks]
        look: dict[str, Any] = {"edgecolor": "black", "ls": "--", "lw": 1, "width": 0.6}
        ax.bar(
            labels, arithmetic, color=_mix_with_white(style.BLUE, 0.6), label="arithmetic", **look
        )
        ax.bar(
            labels,
            messages,
            bottom=arithmetic,
            color=_mix_with_white(style.ORANGE, 0.6),
            label="messages",
            **look,
        )
        for column, total in enumerate(arithmetic + messages):
            ax.text(column, total, f"{total:.3g}", ha="center", va="bottom", fontsize=9)
        ax.set(
            xlabel="ranks",
            ylabel="predicted time of a step, ms",
            ylim=(0, 1.12 * max(arithmetic + messages)),
        )
        style.add_legend_above(ax, 2)
    return axes
