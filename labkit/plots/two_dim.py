"""Figures of a mesh with two axes: how a pair of layers is cut, who holds what, and what crosses each axis."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch, Rectangle

from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory.sizes import byte_unit

Matrix = Sequence[Sequence[float]]

AXIS_COLOURS = {"tp": style.BLUE, "data": style.ORANGE}
DARK_AXIS_COLOURS = {"tp": "#004C77", "data": "#8A5A00"}
"""The same colours, dark enough for text."""


def pair_diagram(
    x: Matrix, first: Matrix, second: Matrix, ranks: int = 2, *, ax: Axes | None = None
) -> Axes:
    """Two linear layers with a ReLU between, cut over ranks: one row a rank, from x to its part, and their sum.

    Each rank's numbers have its colour. Weights are drawn as PyTorch stores them, [features out, features in].

    Args:
        x: [tokens, width].
        first: [inner, width].
        second: [width, inner].
        ranks: how many share the inner features, evenly.
        ax: where to draw.
    """
    share = len(first) // ranks
    parts = []
    ax = style.make_axes(ax, 10, 1.0 + 1.55 * ranks)
    for rank in range(ranks):
        own = slice(rank * share, (rank + 1) * share)
        rows, columns = first[own], [line[own] for line in second]
        inner = [[max(0.0, _dot_product(token, row)) for row in rows] for token in x]
        part = [[_dot_product(token, column) for column in columns] for token in inner]
        parts.append(part)
        middle, colour = -2.6 * rank, style.RANK_COLOURS[rank % 4]
        ax.text(-0.25, middle, f"rank {rank}", ha="right", va="center", weight="bold", color=colour)
        left = 0.0
        for name, matrix, sign in (
            ("x", x, "@"),
            (f"first, rows {own.start}–{own.stop - 1}, .T", [*zip(*rows, strict=True)], "→"),
            ("after the ReLU", inner, "@"),
            (f"second, columns {own.start}–{own.stop - 1}, .T", [*zip(*columns, strict=True)], "="),
            ("part of y", part, ""),
        ):
            tint = "white" if name == "x" else _mix_with_white(colour)
            right = _draw_matrix(ax, left, middle, matrix, tint, name)
            left = right + (1.15 if sign else 0.0)
            if sign:
                ax.text(right + 0.57, middle, sign, ha="center", va="center", fontsize=12)
    whole = [
        [sum(values) for values in zip(*lines, strict=True)] for lines in zip(*parts, strict=True)
    ]
    centre = -2.6 * (ranks - 1) / 2
    for rank in range(ranks):
        ax.annotate(
            "",
            (left + 1.3, centre),
            (left + 0.1, -2.6 * rank),
            arrowprops={"arrowstyle": "-|>", "lw": 1.2},
        )
    ax.text(
        left + 0.85,
        centre + 0.95,
        "all-reduce",
        ha="left",
        va="center",
        fontsize=9,
        color=DARK_AXIS_COLOURS["tp"],
    )
    end = _draw_matrix(ax, left + 1.45, centre, whole, "#E8E8E8", "y, on each rank")
    ax.set(xlim=(-1.5, end + 0.3), ylim=(-2.6 * (ranks - 1) - 1.3, 1.35))
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def _dot_product(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _mix_with_white(colour: str, strength: float = 0.3) -> tuple[float, ...]:
    """A colour mixed with white, on which black digits can be read."""
    return tuple(strength * channel + 1 - strength for channel in to_rgb(colour))


def _draw_matrix(
    ax: Axes, left: float, middle: float, matrix: Sequence[Sequence[float]], colour: Any, name: str
) -> float:
    """Boxes with numbers, their middle at this height, with a name above; where they end on the right."""
    rows, columns = len(matrix), len(matrix[0])
    width, height = 0.62, 0.52
    top = middle + rows * height / 2
    for row, line in enumerate(matrix):
        for column, value in enumerate(line):
            corner = (left + column * width, top - (row + 1) * height)
            ax.add_patch(
                Rectangle(corner, width, height, facecolor=colour, edgecolor="#444444", lw=0.6)
            )
            ax.text(
                corner[0] + width / 2,
                corner[1] + height / 2,
                f"{value:g}",
                ha="center",
                va="center",
                fontsize=8.5,
            )
    ax.text(left + columns * width / 2, top + 0.12, name, ha="center", va="bottom", fontsize=8)
    return left + columns * width


def mesh_diagram(data: int, tp: int, *, ax: Axes | None = None) -> Axes:
    """The ranks of a mesh, ``data`` rows by ``tp`` columns: what each holds of a pair's two weights, and what travels.

    There is a frame around every group. In each rank the outline of ``first`` and ``second`` stands for the whole
    weight. Pale: this rank's share along ``tp``. Dark: what FSDP leaves of that along ``data``.
    """
    ax = style.make_axes(ax, width=3.4 + 2.6 * tp, height=1.6 + 1.75 * data)
    for line in range(data):
        _draw_axis_frame(ax, -0.44, line - 0.33, tp - 0.12, 0.66, "tp")
        said = f"tp group {line}:\nsamples {line}\n\nall-reduce\nactivations"
        ax.text(
            -0.52, line, said, color=DARK_AXIS_COLOURS["tp"], ha="right", va="center", fontsize=9
        )
        for place in range(tp):
            ax.text(
                place,
                line - 0.2,
                f"rank {line * tp + place}",
                ha="center",
                va="center",
                weight="bold",
            )
            _draw_weights(ax, place, line, tp, data)
    for place in range(tp):
        _draw_axis_frame(ax, place - 0.37, -0.4, 0.74, data - 0.2, "data")
        words = f"data group {place}: features {place}\nall-gather parameters,\nreduce-scatter gradients"
        ax.text(
            place,
            -0.47,
            words,
            color=DARK_AXIS_COLOURS["data"],
            ha="center",
            va="bottom",
            fontsize=9,
        )
    ax.set(xlim=(-1.25, tp - 0.45), ylim=(data - 0.48, -0.82))
    ax.set_axis_off()
    return ax


def _draw_weights(ax: Axes, place: int, line: int, tp: int, data: int) -> None:
    """The two weights of a pair in one rank of the mesh: ``first`` upright, ``second`` on its side."""
    for name, left, width, height in (
        ("first", place - 0.25, 0.13, 0.28),
        ("second", place + 0.05, 0.2, 0.18),
    ):
        top = line - 0.1
        outline: dict[str, Any] = {"fill": False, "edgecolor": "#444444", "lw": 0.8}
        ax.add_patch(Rectangle((left, top), width, height, **outline))
        if name == "first":  # rows over tp, and these rows over data
            share = (left, top + place * height / tp, width, height / tp)
            own = (left, share[1] + line * share[3] / data, width, share[3] / data)
        else:  # columns over tp, rows over data
            share = (left + place * width / tp, top, width / tp, height)
            own = (share[0], top + line * height / data, share[2], height / data)
        for (x, y, wide, high), strength in ((share, 0.35), (own, 1.0)):
            ax.add_patch(
                Rectangle(
                    (x, y),
                    wide,
                    high,
                    facecolor=_mix_with_white(style.GREEN, strength),
                    edgecolor="none",
                )
            )
        ax.text(left + width / 2, top + 0.3, name, ha="center", va="top", fontsize=8)


def traffic_by_axis(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]] | None = None,
    *,
    results: Sequence[RunResult] = (),
    ax: Axes | None = None,
    xlabel: str = "",
) -> Axes:
    """Stacked bars, one a label: bytes that a rank sends along each axis in a step; predicted in a dashed frame.

    Predicted and measured are bytes by axis, by label, as ``theory.two_dim.wire_bytes`` gives them; ``results`` are the
    runs that were measured, for the stamp.
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
    """Give all bars the dashed frame of what is predicted."""
    for bar in ax.patches:
        seen = bar.get_extents().height > 0
        bar.set(edgecolor="black", linestyle="--", linewidth=0.8 if seen else 0.0)


TIME_COLOURS = {"compute": style.GREY, "tp": AXIS_COLOURS["tp"], "data": AXIS_COLOURS["data"]}
TIME_LABELS = {"compute": "computing", "tp": "along tp", "data": "along data"}


def step_time_by_tp(
    seconds: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    sent: Mapping[str, Mapping[str, float]] | None = None,
    xlabel: str = "ranks along tp",
) -> Sequence[Axes]:
    """Panels side by side, one a way of counting: stacked bars of a step's time by tp; before them, bytes by axis.

    All of it is predicted, and so in dashed frames.

    Args:
        seconds: for each panel's title, by label, seconds of ``compute``, ``tp`` and ``data``.
        sent: bytes by axis, by label, for a first panel.
        xlabel: of every panel.
    """
    count = len(seconds) + (sent is not None)
    figure, panels = pyplot.subplots(
        1, count, figsize=(3.6 * count, 3.7), layout="constrained", squeeze=False
    )
    axes = list(panels.flat)
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
    handles = [
        Rectangle((0, 0), 1, 1, color=TIME_COLOURS[part], label=TIME_LABELS[part])
        for part in TIME_COLOURS
    ]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9
    )
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
    """A step's time by tp, as ``step_times`` stacks it; the best split is named, the chosen one in bold.

    All of it is predicted, and so in dashed frames; beside the chosen one a bar without, what was measured.

    Args:
        seconds: by length of tp, seconds of ``compute``, ``tp`` and ``data``.
        chosen: one of these lengths.
        best: another.
        measured_s: of the chosen one, all in one.
        ax: where to draw.
        xlabel: below.
    """
    ax = style.make_axes(ax)
    highest = max(*(sum(parts.values()) for parts in seconds.values()), measured_s or 0.0)
    unit, size = style.time_unit(highest)
    columns, tops = range(len(seconds)), [0.0] * len(seconds)
    for part, colour in TIME_COLOURS.items():
        heights = [parts[part] / size for parts in seconds.values()]
        ax.bar(columns, heights, 0.5, tops, color=colour, label=TIME_LABELS[part])
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    ax.bar(columns, tops, 0.5, fill=False, edgecolor="black", linestyle="--", linewidth=0.8)
    place = list(seconds).index(chosen)
    for column, top in enumerate(tops):
        side = "right" if column == place and measured_s else "center"
        x = column + 0.25 if side == "right" else column
        text = (
            style.short_number_text(top)
            if list(seconds)[column] != best
            else f"best: {style.short_number_text(top)}"
        )
        ax.text(x, top, text, ha=side, va="bottom", fontsize=8)
    if measured_s:
        height = measured_s / size
        ax.bar(place + 0.37, height, 0.2, color=style.GREEN, label="measured")
        ax.text(place + 0.29, height, style.short_number_text(height), va="bottom", fontsize=8)
    ax.set_xticks(columns, list(map(str, seconds)))
    ax.get_xticklabels()[place].set_fontweight("bold")
    ax.set(ylabel=f"one step of a rank, {unit}", ylim=(0, 1.12 * highest / size), xlabel=xlabel)
    style.add_legend_above(ax, 4, fontsize=8, handlelength=1.2, columnspacing=1.0)
    return ax


def _draw_axis_frame(ax: Axes, x: float, y: float, width: float, height: float, axis: str) -> None:
    shape = "round,pad=0.02,rounding_size=0.08"
    frame = FancyBboxPatch(
        (x, y), width, height, boxstyle=shape, fill=False, lw=2.5, edgecolor=AXIS_COLOURS[axis]
    )
    ax.add_patch(frame)
