"""Figures of fully sharded training: what a rank holds, by category, predicted beside measured, and what it sends."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.plots import style
from labkit.plots.runs import memory_parts
from labkit.result import RunResult

UNITS = {"MB": 1e6, "GB": 1e9}
BESIDE: dict[str, Any] = {
    "xycoords": ("axes fraction", "data"),
    "textcoords": "offset points",
    "va": "center",
    "fontsize": 9,
}


def breakdown(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, RunResult] | None = None,
    *,
    bound: float | None = None,
    unit: str = "MB",
    ax: Axes | None = None,
    ylabel: str = "peak memory of a rank",
) -> Axes:
    """Stacked bars, one a label: what theory says on the left, in a dashed frame, and what was measured on the right.

    Predicted are bytes by category, by label, as ``theory.fsdp.step_peak`` or ``zero_bytes`` gives them. Measured are
    runs by label: their peak by category is drawn. The axis is in ``unit``, MB or GB. A ``bound``, in bytes, is a
    dotted line over all bars.
    """
    measured = measured or {}
    ax = style.axes(ax, width=8.0, height=4.2)
    bars = {label: _segments(sizes) for label, sizes in predicted.items()}
    peaks = {label: memory_parts(result) for label, result in measured.items()}
    shown = {name for drawn in (*bars.values(), *peaks.values()) for name, size in drawn.items() if size}
    colours = {name: colour for name, (_, colour) in style.MEMORY.items()}
    legend = {name: colour for name, colour in colours.items() if name in shown}
    style.stacks(ax, bars, peaks, colours, UNITS[unit], legend, columns=4)
    if bound is not None:
        for text in ax.texts:  # a number that the line crosses stays legible
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        ax.axhline(bound / UNITS[unit], color="black", lw=1, ls=":")
        ax.annotate(f"bound\n{bound / UNITS[unit]:.3g} {unit}", (1, bound / UNITS[unit]), (3, 0), **BESIDE)
    ax.set_ylabel(f"{ylabel}, {unit}")
    ax.margins(y=0.06)
    return style.stamp(ax, measured.values())


def passes(predicted: Mapping[str, Mapping[str, float]], *, ax: Axes | None = None) -> Axes:
    """What a rank sends over the wire in one step, by collective, one bar a label, times the parameters' bytes.

    Predicted are passes over the parameters, such as ``{"all_gather": 1.5, "reduce_scatter": 0.75}``.
    """
    ax = style.axes(ax, height=1.3 + 0.5 * len(predicted))
    for row, sent in enumerate(predicted.values()):
        end = 0.0
        for name in (name for name in style.COMMUNICATION if name in sent):
            ax.barh(row, sent[name], 0.6, end, color=style.COMMUNICATION[name], edgecolor="white")
            ax.text(end + sent[name] / 2, row, f"{sent[name]:.3g}", ha="center", va="center", fontsize=9)
            end += sent[name]
        ax.text(end, row, f"  {end:.4g} in all", va="center", fontsize=9)
    ax.set(yticks=range(len(predicted)), yticklabels=list(predicted))
    ax.set_xlabel("sent over the wire by each rank in a step, times the parameters' bytes")
    ax.margins(x=0.15)
    ax.invert_yaxis()
    shown = [name for name in style.COMMUNICATION if any(name in sent for sent in predicted.values())]
    handles = [Patch(color=style.COMMUNICATION[name], label=name.replace("_", "-")) for name in shown]
    style.legend_above(ax, len(handles), handles)
    return ax


def _segments(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: sum(sizes.get(part, 0) for part in parts) for name, (parts, _) in style.MEMORY.items()}
