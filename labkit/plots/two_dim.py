"""Figures of a mesh with two axes: which ranks form a group, and what crosses each axis."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from labkit.plots import style
from labkit.result import RunResult
from labkit.theory.sizes import byte_unit

AXIS_COLOURS = {"tp": style.BLUE, "data": style.ORANGE}


def mesh(data: int, tp: int, *, ax: Axes | None = None) -> Axes:
    """The ranks of a mesh, ``data`` rows by ``tp`` columns: rows share matrices, columns share out the samples.

    There is a frame around every group.
    """
    ax = style.axes(ax, width=2.2 + 1.9 * tp, height=1.0 + 1.25 * data)
    for line in range(data):
        _frame(ax, -0.42, line - 0.24, tp - 0.16, 0.48, "tp")
        ax.text(-0.5, line, f"tp group {line}\nsamples {line}", color=AXIS_COLOURS["tp"], ha="right", va="center")
        for place in range(tp):
            ax.text(place, line, f"rank {line * tp + place}", ha="center", va="center", weight="bold")
    for place in range(tp):
        _frame(ax, place - 0.33, -0.38, 0.66, data - 0.24, "data")
        words = f"data group {place}\nfeatures {place}"
        ax.text(place, -0.45, words, color="#9A6A00", ha="center", va="bottom")  # of ORANGE, dark enough to be read
    ax.set(xlim=(-1.5, tp - 0.4), ylim=(data - 0.5, -0.95))
    ax.set_axis_off()
    return ax


def traffic(
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
    ax = style.axes(ax, height=3.4)
    legend = {f"along {axis}": colour for axis, colour in AXIS_COLOURS.items()}
    style.stacks(ax, predicted, measured, AXIS_COLOURS, size, legend, columns=3)
    ax.set(ylabel=f"sent by a rank in a step, {unit}", xlabel=xlabel)
    return style.stamp(ax, results)


def _frame(ax: Axes, x: float, y: float, width: float, height: float, axis: str) -> None:
    shape = "round,pad=0.02,rounding_size=0.08"
    frame = FancyBboxPatch((x, y), width, height, boxstyle=shape, fill=False, lw=2.5, edgecolor=AXIS_COLOURS[axis])
    ax.add_patch(frame)
