"""Figures of a mesh with two axes: which ranks form a group, and what crosses each axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Patch

from labkit.plots import style
from labkit.result import RunResult

AXIS_COLOURS = {"tp": style.BLUE, "dp": style.ORANGE}
UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}


def mesh(dp: int, tp: int, *, ax: Axes | None = None) -> Axes:
    """The ranks of a mesh, and a frame around every group: rows share matrices, columns share out the samples.

    Args:
        dp: length of that axis, rows.
        tp: length of that axis, columns.
        ax: where to draw.
    """
    ax = style.axes(ax, width=2.2 + 1.9 * tp, height=1.0 + 1.25 * dp)
    for line in range(dp):
        _frame(ax, -0.42, line - 0.24, tp - 0.16, 0.48, "tp")
        ax.text(-0.5, line, f"tp group {line}\nsamples {line}", color=AXIS_COLOURS["tp"], ha="right", va="center")
        for place in range(tp):
            ax.text(place, line, f"rank {line * tp + place}", ha="center", va="center", weight="bold")
    for place in range(tp):
        _frame(ax, place - 0.33, -0.38, 0.66, dp - 0.24, "dp")
        words = f"dp group {place}\nfeatures {place}"
        ax.text(place, -0.45, words, color="#9A6A00", ha="center", va="bottom")  # of ORANGE, dark enough to be read
    ax.set(xlim=(-1.5, tp - 0.4), ylim=(dp - 0.5, -0.95))
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
    """Stacked bars, one a label: bytes that a rank sends along each axis in a step, predicted on the left, hatched.

    Args:
        predicted: bytes by axis, by label, as ``theory.tensor.wire_bytes`` gives them.
        measured: likewise.
        results: the runs that were measured, for the stamp.
        ax: where to draw.
        xlabel: what the labels are.
    """
    measured = measured or {}
    labels = list(dict.fromkeys([*predicted, *measured]))
    drawn = [*predicted.values(), *measured.values()]
    largest = max((sum(parts.values()) for parts in drawn), default=0)
    unit = next((name for name, size in UNITS.items() if largest >= size), "bytes")
    ax = style.axes(ax, width=7.0, height=3.4)
    for column, label in enumerate(labels):
        offset = 0.2 if label in predicted and label in measured else 0.0
        _stack(ax, column - offset, predicted.get(label, {}), UNITS[unit], "///" if measured else "")
        _stack(ax, column + offset, measured.get(label, {}), UNITS[unit])
    ax.set(xticks=range(len(labels)), xticklabels=labels, ylabel=f"sent by a rank in a step, {unit}", xlabel=xlabel)
    handles = [Patch(color=colour, label=f"along {axis}") for axis, colour in AXIS_COLOURS.items()]
    if predicted and measured:
        handles.append(Patch(facecolor="white", edgecolor="black", hatch="///", label="predicted"))
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=9)
    if results:
        style.stamp(ax, results)
    return ax


def _frame(ax: Axes, x: float, y: float, width: float, height: float, axis: str) -> None:
    shape = "round,pad=0.02,rounding_size=0.08"
    frame = FancyBboxPatch((x, y), width, height, boxstyle=shape, fill=False, lw=2.5, edgecolor=AXIS_COLOURS[axis])
    ax.add_patch(frame)


def _stack(ax: Axes, position: float, parts: Mapping[str, float], size: float, hatch: str = "") -> None:
    bottom = 0.0
    for axis, colour in AXIS_COLOURS.items():
        height = parts.get(axis, 0) / size
        ax.bar(position, height, bottom=bottom, width=0.36, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        bottom += height
