"""Figures of a mesh with two axes: how layers are cut, what ranks hold, what crosses each axis."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from labkit.plots import style
from labkit.plots.memory import byte_bars
from labkit.plots.style import Stacks
from labkit.runs.result import RunResult

Matrix = Sequence[Sequence[float]]

AXIS_COLOURS = {"tp": style.BLUE, "data": style.ORANGE}
# Darker variants for text.
DARK_AXIS_COLOURS = {"tp": "#004C77", "data": "#8A5A00"}
TIME_COLOURS = {"compute": style.GREY} | AXIS_COLOURS
AXIS_LABELS = {f"along {axis}": colour for axis, colour in AXIS_COLOURS.items()}
TIME_LABELS = {"computing": style.GREY} | AXIS_LABELS
# A number of a matrix, and the distance between the matrices of two ranks.
CELL_WIDTH, CELL_HEIGHT, RANK_PITCH = 0.62, 0.52, 2.6


def pair_diagram(
    x: Matrix,
    first: Matrix,
    second: Matrix,
    *,
    gradient: Matrix | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw two linear layers with a ReLU between, cut over two ranks: a row per rank, and the sum.

    x is [tokens, width]. Weights have PyTorch's layout, [features out, features in]: first is
    [inner, width] and second [width, inner]. With ``gradient``, that of the output, draw the
    backward pass.
    """
    share = len(first) // 2
    ax = style.make_axes(ax, 10, 4.1)
    # The sum of the ranks' parts, as the all-reduce makes it.
    tokens, end = numpy.array(x), 0.0
    whole = numpy.zeros_like(tokens)
    for rank in range(2):
        start, stop = rank * share, (rank + 1) * share
        rows, columns = numpy.array(first)[start:stop], numpy.array(second)[:, start:stop]
        cuts = f"first, rows {start}–{stop - 1}", f"second, columns {start}–{stop - 1}"
        inner = numpy.maximum(tokens @ rows.T, 0)
        if gradient is None:
            part = inner @ columns.T
            steps = [("x", tokens), (f"{cuts[0]}, .T", rows.T), ("after the ReLU", inner)]
            steps += [(f"{cuts[1]}, .T", columns.T), ("part of y", part)]
        else:
            arrived = numpy.array(gradient)
            passed = (arrived @ columns) * (inner > 0)
            part = passed @ rows
            steps = [("gradient of y", arrived), (cuts[1], columns)]
            steps += [("0 where ReLU gave 0", passed), (cuts[0], rows), ("part of gradient", part)]
        whole = whole + part
        end = _draw_steps(ax, rank, steps)
    centre = RANK_PITCH / 2
    for rank in range(2):
        start_point, end_point = (end + 0.1, RANK_PITCH * rank), (end + 1.3, centre)
        style.draw_arrow(ax, start_point, end_point, "-|>", 1.2)
    look: dict[str, Any] = {"va": "center", "fontsize": 9, "color": DARK_AXIS_COLOURS["tp"]}
    ax.text(end + 0.85, centre - 0.95, "all-reduce", **look)
    name = "y, on each rank" if gradient is None else "gradient of x"
    end = _draw_matrix(ax, end + 1.45, centre, whole, "#E8E8E8", name)
    ax.set(xlim=(-1.5, end + 0.3), ylim=(RANK_PITCH + 1.3, -1.35), aspect="equal")
    ax.set_axis_off()
    return ax


def _draw_steps(ax: Axes, rank: int, steps: Sequence[tuple[str, numpy.ndarray]]) -> float:
    """Draw a rank's two products in a row; return its right end."""
    middle, colour = RANK_PITCH * rank, style.rank_colour(rank)
    at: dict[str, Any] = {"ha": "right", "va": "center", "weight": "bold", "color": colour}
    ax.text(-0.25, middle, f"rank {rank}", **at)
    left, tint = 0.0, style.mix_with_white(colour, 0.3)
    for (name, matrix), sign in zip(steps, ("@", "→", "@", "=", ""), strict=True):
        # What comes first is whole on each rank.
        left = _draw_matrix(ax, left, middle, matrix, "white" if not left else tint, name)
        if sign:
            ax.text(left + 0.57, middle, sign, fontsize=12, **style.CENTRED)
            left += 1.15
    return left


def _draw_matrix(
    ax: Axes, left: float, middle: float, matrix: numpy.ndarray, colour: Any, name: str
) -> float:
    """Draw a matrix around the height ``middle``, its name above; return its right end."""
    rows, columns = matrix.shape
    top, width = middle - rows * CELL_HEIGHT / 2, columns * CELL_WIDTH
    look: dict[str, Any] = {"edgecolor": "#444444", "lw": 0.6}
    style.draw_cells(ax, matrix, (left, top), colour, (CELL_WIDTH, CELL_HEIGHT), **look)
    ax.text(left + width / 2, top - 0.12, name, fontsize=8, **style.ON_TOP)
    return left + width


def sequence_diagram(tokens: int = 4, *, ax: Axes | None = None) -> Axes:
    """Draw what two ranks hold before, in and behind a pair: the sequence whole, and cut.

    Each frame is a tensor of ``tokens`` rows by features; what a rank holds of it is filled.
    """
    ax = style.make_axes(ax, 9.5, 3.6)
    columns = {"norm, residual": 0.0, "inner features": 3.6, "norm, residual ": 7.8}
    arrows = {
        "sequence whole": ("as it is", "all-reduce"),
        "sequence cut": ("all-gather", "reduce-scatter"),
    }
    for line, (way, names) in enumerate(arrows.items()):
        for rank in range(2):
            top = 3.3 * line + 1.35 * rank
            colour = style.rank_colour(rank)
            said = f"rank {rank}"
            ax.text(-0.2, top + 0.5, said, ha="right", va="center", weight="bold", color=colour)
            for place, left in enumerate(columns.values()):
                inside = place == 1
                width = 2.0 if inside else 1.4
                style.add_box(ax, left, top, width, 1, fill=False, edgecolor="#444444", lw=0.8)
                # Rows are tokens, columns are features.
                x, y, wide, high = left, top, width, 1.0
                if inside:
                    x, wide = left + rank * width / 2, width / 2
                elif line:
                    y, high = top + rank / 2, 0.5
                look: dict[str, Any] = {"facecolor": colour, "edgecolor": "none", "alpha": 0.75}
                style.add_box(ax, x, y, wide, high, **look)
        middle = 3.3 * line + 1.2
        for left, right, name in ((1.5, 3.5, names[0]), (5.7, 7.7, names[1])):
            style.draw_arrow(ax, (left, middle), (right, middle), "-|>", 1.2)
            look = {"ha": "center", "va": "bottom", "fontsize": 9, "color": DARK_AXIS_COLOURS["tp"]}
            ax.text((left + right) / 2, middle - 0.12, name, **look)
        ax.text(-1.5, middle, way, ha="right", va="center", fontsize=10)
    for name, left in columns.items():
        width = 2.0 if left == columns["inner features"] else 1.4
        ax.text(left + width / 2, -0.12, name.strip(), fontsize=9, **style.ON_TOP)
    ax.text(9.4, 0.5, f"{tokens} tokens\n(rows)", va="center", fontsize=8)
    ax.set(xlim=(-4.2, 10.6), ylim=(5.8, -0.7))
    ax.set_axis_off()
    return ax


def mesh_diagram(data: int, tp: int, *, ax: Axes | None = None) -> Axes:
    """Draw the ranks of a mesh, ``data`` rows by ``tp`` columns, with their weights and messages.

    Every group has a frame. In each rank, the outlines of ``first`` and ``second`` are the whole
    weights, the pale part is the rank's share along ``tp``, and the dark part is what FSDP leaves
    of that along ``data``.
    """
    ax = style.make_axes(ax, width=3.4 + 2.6 * tp, height=1.6 + 1.75 * data)
    look: dict[str, Any] = {"fontsize": 9, "color": DARK_AXIS_COLOURS["tp"]}
    for line in range(data):
        _draw_axis_frame(ax, -0.44, line - 0.33, tp - 0.12, 0.66, "tp")
        said = f"tp group {line}:\nsamples, part {line}\n\nall-reduce\nactivations"
        ax.text(-0.52, line, said, ha="right", va="center", **look)
        for place in range(tp):
            name = f"rank {line * tp + place}"
            ax.text(place, line - 0.2, name, weight="bold", **style.CENTRED)
            _draw_weights(ax, place, line, tp, data)
    look["color"] = DARK_AXIS_COLOURS["data"]
    for place in range(tp):
        _draw_axis_frame(ax, place - 0.37, -0.4, 0.74, data - 0.2, "data")
        said = f"data group {place}: features, part {place}\nall-gather parameters,\n"
        ax.text(place, -0.47, f"{said}reduce-scatter gradients", **look, **style.ON_TOP)
    ax.set(xlim=(-1.25, tp - 0.45), ylim=(data - 0.48, -0.82))
    ax.set_axis_off()
    return ax


def _draw_axis_frame(ax: Axes, x: float, y: float, width: float, height: float, axis: str) -> None:
    shape = "round,pad=0.02,rounding_size=0.08"
    look: dict[str, Any] = {"fill": False, "lw": 2.5, "edgecolor": AXIS_COLOURS[axis]}
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **look))


def _draw_weights(ax: Axes, place: int, line: int, tp: int, data: int) -> None:
    """Draw the two weights of a pair in one rank: ``first`` upright, ``second`` on its side."""
    top, pale = line - 0.1, style.mix_with_white(style.GREEN)
    # TP cuts the rows of first and the columns of second; FSDP cuts the rows of both.
    for name, left, width, height, x, y, wide, high in (
        ("first", place - 0.25, 0.13, 0.28, 0.0, place * 0.28 / tp, 0.13, 0.28 / tp),
        ("second", place + 0.05, 0.2, 0.18, place * 0.2 / tp, 0.0, 0.2 / tp, 0.18),
    ):
        style.add_box(ax, left, top, width, height, fill=False, edgecolor="#444444", lw=0.8)
        x, y = left + x, top + y
        style.add_box(ax, x, y, wide, high, edgecolor="none", facecolor=pale)
        y, high = y + line * high / data, high / data
        style.add_box(ax, x, y, wide, high, edgecolor="none", facecolor=style.GREEN)
        ax.text(left + width / 2, top + 0.3, name, ha="center", va="top", fontsize=8)


def traffic_by_axis(
    predicted: Stacks,
    measured: Stacks | None = None,
    *,
    results: Sequence[RunResult] = (),
    ax: Axes | None = None,
    xlabel: str = "",
) -> Axes:
    """Draw the bytes that a rank sends along each axis in a step, in stacks, one per label.

    Bytes are by label and axis, as ``theory.two_dim.axis_wire_bytes`` gives them; ``results`` are
    the runs that were measured, for the stamp.
    """
    look: dict[str, Any] = {"legend": AXIS_LABELS, "columns": 3}
    look |= {"ylabel": "on the wire from a rank in a step", "ax": style.make_axes(ax, height=3.4)}
    ax = byte_bars(predicted, measured or {}, AXIS_COLOURS, **look)
    ax.set_xlabel(xlabel)
    return style.add_stamp(ax, results)


def step_time_by_tp(
    seconds: Mapping[str, Stacks], *, xlabel: str = "ranks along tp"
) -> Sequence[Axes]:
    """Draw the predicted time of a rank's step by tp, in a panel for each way of counting.

    ``seconds`` are, for each panel's title, by label, of ``compute``, ``tp`` and ``data``.
    """
    axes: list[Any] = style.make_row(len(seconds), 4.4 * len(seconds), 3.7)
    # One scale, so that the panels can be compared.
    highest = max(sum(parts.values()) for each in seconds.values() for parts in each.values()) * 1e3
    for ax, (title, bars) in zip(axes, seconds.items(), strict=True):
        style.draw_bar_stacks(style.make_axes(ax), bars, {}, TIME_COLOURS, 1e-3)
        ax.set_title(title, fontsize=10)
        ax.set(xlabel=xlabel, ylabel="one step of a rank, ms", ylim=(0, 1.12 * highest))
    style.add_figure_legend(axes[0], "upper", TIME_LABELS, fontsize=9)
    return axes
