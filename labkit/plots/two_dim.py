"""Figures of a mesh with two axes: how layers are cut, what ranks hold, what crosses each axis."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory.sizes import byte_unit

Matrix = Sequence[Sequence[float]]

AXIS_COLOURS = {"tp": style.BLUE, "data": style.ORANGE}
# Darker variants for text.
DARK_AXIS_COLOURS = {"tp": "#004C77", "data": "#8A5A00"}
TIME_COLOURS = {"compute": style.GREY} | AXIS_COLOURS
TIME_LABELS = {"compute": "computing", "tp": "along tp", "data": "along data"}


def pair_diagram(
    x: Matrix, first: Matrix, second: Matrix, ranks: int = 2, *, ax: Axes | None = None
) -> Axes:
    """Draw two linear layers with a ReLU between, cut over ranks: one row per rank, and the sum.

    Weights have PyTorch's layout, [features out, features in].

    Args:
        x: [tokens, width].
        first: [inner, width].
        second: [width, inner].
        ranks: how many ranks share the inner features, evenly.
        ax: where to draw.
    """
    share = len(first) // ranks
    ax = style.make_axes(ax, 10, 1.0 + 1.55 * ranks)
    tokens, whole = numpy.array(x), numpy.zeros((len(x), len(second)))
    for rank in range(ranks):
        start, stop = rank * share, (rank + 1) * share
        rows, columns = numpy.array(first)[start:stop], numpy.array(second)[:, start:stop]
        inner = numpy.maximum(tokens @ rows.T, 0)
        part = inner @ columns.T
        whole += part
        middle, colour = -2.6 * rank, style.rank_colour(rank)
        ax.text(-0.25, middle, f"rank {rank}", ha="right", va="center", weight="bold", color=colour)
        left = 0.0
        for name, matrix, sign in (
            ("x", tokens, "@"),
            (f"first, rows {start}–{stop - 1}, .T", rows.T, "→"),
            ("after the ReLU", inner, "@"),
            (f"second, columns {start}–{stop - 1}, .T", columns.T, "="),
            ("part of y", part, ""),
        ):
            tint = "white" if name == "x" else style.mix_with_white(colour, 0.3)
            left = _draw_matrix(ax, left, middle, matrix, tint, name)
            if sign:
                ax.text(left + 0.57, middle, sign, fontsize=12, **style.CENTRED)
                left += 1.15
    centre = -2.6 * (ranks - 1) / 2
    arrow = {"arrowstyle": "-|>", "lw": 1.2}
    for rank in range(ranks):
        ax.annotate("", (left + 1.3, centre), (left + 0.1, -2.6 * rank), arrowprops=arrow)
    look: dict[str, Any] = {"va": "center", "fontsize": 9, "color": DARK_AXIS_COLOURS["tp"]}
    ax.text(left + 0.85, centre + 0.95, "all-reduce", **look)
    end = _draw_matrix(ax, left + 1.45, centre, whole, "#E8E8E8", "y, on each rank")
    ax.set(xlim=(-1.5, end + 0.3), ylim=(-2.6 * (ranks - 1) - 1.3, 1.35))
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def _draw_matrix(
    ax: Axes, left: float, middle: float, matrix: numpy.ndarray, colour: Any, name: str
) -> float:
    """Draw a matrix around the height ``middle``, its name above; return its right end."""
    rows, columns = matrix.shape
    width, height = 0.62, 0.52
    top = middle + rows * height / 2
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": "#444444", "lw": 0.6}
    for (row, column), value in numpy.ndenumerate(matrix):
        x, y = left + column * width, top - (row + 1) * height
        style.add_box(ax, x, y, width, height, **look)
        ax.text(x + width / 2, y + height / 2, f"{value:g}", fontsize=8.5, **style.CENTRED)
    ax.text(left + columns * width / 2, top + 0.12, name, fontsize=8, **style.ON_TOP)
    return left + columns * width


def mesh_diagram(data: int, tp: int, *, ax: Axes | None = None) -> Axes:
    """Draw the ranks of a mesh, ``data`` rows by ``tp`` columns, with their weights and messages.

    Every group has a frame. In each rank, the outlines of ``first`` and ``second`` are the whole
    weights, the pale part is the rank's share along ``tp``, and the dark part is what FSDP leaves
    of that along ``data``.
    """
    ax = style.make_axes(ax, width=3.4 + 2.6 * tp, height=1.6 + 1.75 * data)
    look: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 9}
    for line in range(data):
        _draw_axis_frame(ax, -0.44, line - 0.33, tp - 0.12, 0.66, "tp")
        said = f"tp group {line}:\nsamples {line}\n\nall-reduce\nactivations"
        ax.text(-0.52, line, said, color=DARK_AXIS_COLOURS["tp"], **look)
        for place in range(tp):
            name = f"rank {line * tp + place}"
            ax.text(place, line - 0.2, name, weight="bold", **style.CENTRED)
            _draw_weights(ax, place, line, tp, data)
    for place in range(tp):
        _draw_axis_frame(ax, place - 0.37, -0.4, 0.74, data - 0.2, "data")
        said = (
            f"data group {place}: features {place}\n"
            "all-gather parameters,\nreduce-scatter gradients"
        )
        ax.text(place, -0.47, said, color=DARK_AXIS_COLOURS["data"], fontsize=9, **style.ON_TOP)
    ax.set(xlim=(-1.25, tp - 0.45), ylim=(data - 0.48, -0.82))
    ax.set_axis_off()
    return ax


def _draw_axis_frame(ax: Axes, x: float, y: float, width: float, height: float, axis: str) -> None:
    shape = "round,pad=0.02,rounding_size=0.08"
    look: dict[str, Any] = {"fill": False, "lw": 2.5, "edgecolor": AXIS_COLOURS[axis]}
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **look))


def _draw_weights(ax: Axes, place: int, line: int, tp: int, data: int) -> None:
    """Draw the two weights of a pair in one rank: ``first`` upright, ``second`` on its side."""
    top = line - 0.1
    for name, left, width, height in (
        ("first", place - 0.25, 0.13, 0.28),
        ("second", place + 0.05, 0.2, 0.18),
    ):
        style.add_box(ax, left, top, width, height, fill=False, edgecolor="#444444", lw=0.8)
        # TP cuts the rows of first and the columns of second; FSDP cuts the rows of both.
        if name == "first":
            x, y, wide, high = left, top + place * height / tp, width, height / tp
        else:
            x, y, wide, high = left + place * width / tp, top, width / tp, height
        look: dict[str, Any] = {"edgecolor": "none", "facecolor": style.mix_with_white(style.GREEN)}
        style.add_box(ax, x, y, wide, high, **look)
        look["facecolor"] = style.GREEN
        style.add_box(ax, x, y + line * high / data, wide, high / data, **look)
        ax.text(left + width / 2, top + 0.3, name, ha="center", va="top", fontsize=8)


def traffic_by_axis(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]] | None = None,
    *,
    results: Sequence[RunResult] = (),
    ax: Axes | None = None,
    xlabel: str = "",
) -> Axes:
    """Draw the bytes that a rank sends along each axis in a step, in stacks, one per label.

    Args:
        predicted: bytes by label and axis, as ``theory.two_dim.axis_wire_bytes`` gives them.
        measured: bytes by label and axis.
        results: the runs that were measured, for the stamp.
        ax: where to draw.
        xlabel: below the bars.
    """
    measured = measured or {}
    drawn = [*predicted.values(), *measured.values()]
    unit, size = byte_unit(max((sum(parts.values()) for parts in drawn), default=0))
    ax = style.make_axes(ax, height=3.4)
    legend = {f"along {axis}": colour for axis, colour in AXIS_COLOURS.items()}
    style.draw_bar_stacks(ax, predicted, measured, AXIS_COLOURS, size, legend, columns=3)
    ax.set(ylabel=f"on the wire from a rank in a step, {unit}", xlabel=xlabel)
    ax.margins(y=0.08)
    if not measured:
        _draw_prediction_frames(ax)
    return style.add_stamp(ax, results)


def _draw_prediction_frames(ax: Axes) -> None:
    """Give every bar the dashed frame of a prediction."""
    for bar in ax.patches:
        bar.set(**style.FRAME_STYLE)
        # The frame of an empty part would be a line across the stack.
        if not bar.get_extents().height:
            bar.set_linewidth(0.0)


def step_time_by_tp(
    seconds: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    sent: Mapping[str, Mapping[str, float]] | None = None,
    xlabel: str = "ranks along tp",
) -> Sequence[Axes]:
    """Draw the predicted time of a step by tp, in one panel per way of counting.

    Args:
        seconds: for each panel's title, by label, seconds of ``compute``, ``tp`` and ``data``.
        sent: bytes by label and axis, for a first panel.
        xlabel: of every panel.
    """
    count = len(seconds) + (sent is not None)
    axes: list[Any] = style.make_row(count, 3.6 * count, 3.7)
    if sent is not None:
        traffic_by_axis(sent, ax=axes[0], xlabel=xlabel)
        axes[0].get_legend().remove()
        axes[0].set_title("bytes", fontsize=10)
    highest = max(sum(parts.values()) for each in seconds.values() for parts in each.values()) * 1e3
    for ax, (title, bars) in zip(axes[sent is not None :], seconds.items(), strict=True):
        style.make_axes(ax)
        style.draw_bar_stacks(ax, bars, {}, TIME_COLOURS, 1e-3, {}, 1)
        ax.get_legend().remove()
        ax.set_title(title, fontsize=10)
        ax.set(xlabel=xlabel, ylabel="one step of a rank, ms", ylim=(0, 1.12 * highest))
        _draw_prediction_frames(ax)
    handles = style.legend_patches({TIME_LABELS[part]: each for part, each in TIME_COLOURS.items()})
    look: dict[str, Any] = {"ncols": len(handles), "frameon": False, "fontsize": 9}
    axes[0].figure.legend(handles=handles, loc="outside upper center", **look)
    return axes


def step_time_by_split(
    seconds: Mapping[int, Mapping[str, float]],
    *,
    chosen: int,
    best: int,
    measured_s: float | None = None,
    ax: Axes | None = None,
    xlabel: str = "ranks along tp",
) -> Axes:
    """Draw the predicted time of a step by tp, with the chosen size in bold and the best one named.

    Args:
        seconds: by size of tp, seconds of ``compute``, ``tp`` and ``data``.
        chosen: the size in bold.
        best: the fastest size.
        measured_s: seconds measured for the chosen size, a bar beside it.
        ax: where to draw.
        xlabel: below the bars.
    """
    ax = style.make_axes(ax)
    highest = max(*(sum(parts.values()) for parts in seconds.values()), measured_s or 0.0)
    unit, size = style.time_unit(highest)
    columns, tops = range(len(seconds)), numpy.zeros(len(seconds))
    for part, colour in TIME_COLOURS.items():
        heights = [parts[part] / size for parts in seconds.values()]
        ax.bar(columns, heights, 0.5, tops, color=colour, label=TIME_LABELS[part])
        tops = tops + heights
    ax.bar(columns, tops, 0.5, fill=False, **style.FRAME_STYLE)
    place = list(seconds).index(chosen)
    for column, (tp, top) in enumerate(zip(seconds, tops, strict=True)):
        said = ax.text(column, top, style.short_number_text(top), fontsize=8, **style.ON_TOP)
        if tp == best:
            said.set_text(f"best: {said.get_text()}")
        # The measured bar takes the space to the right.
        if tp == chosen and measured_s:
            said.set(x=column + 0.25, ha="right")
    if measured_s:
        height = measured_s / size
        ax.bar(place + 0.37, height, 0.2, color=style.GREEN, label="measured")
        ax.text(place + 0.29, height, style.short_number_text(height), va="bottom", fontsize=8)
    ax.set_xticks(columns, list(map(str, seconds)))
    ax.get_xticklabels()[place].set_fontweight("bold")
    ax.set(ylabel=f"one step of a rank, {unit}", ylim=(0, 1.12 * highest / size), xlabel=xlabel)
    style.add_legend_above(ax, 4, fontsize=8, handlelength=1.2, columnspacing=1.0)
    return ax
