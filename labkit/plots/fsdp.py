"""Figures of fully sharded training: what a rank holds, by category, predicted beside measured."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from labkit.plots import style
from labkit.plots.runs import memory_parts
from labkit.result import RunResult


def breakdown(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, RunResult] | None = None,
    *,
    ax: Axes | None = None,
    ylabel: str = "peak memory of a rank, MB",
) -> Axes:
    """Stacked bars, one a label: what theory says on the left, in a dashed frame, and what was measured on the right.

    Predicted are bytes by category, by label, as ``theory.fsdp.step_peak`` or ``zero_bytes`` gives them. Measured are
    runs by label: their peak by category is drawn.
    """
    measured = measured or {}
    ax = style.axes(ax, width=8.0, height=4.2)
    bars = {label: _segments(sizes) for label, sizes in predicted.items()}
    peaks = {label: memory_parts(result) for label, result in measured.items()}
    shown = {name for drawn in (*bars.values(), *peaks.values()) for name, size in drawn.items() if size}
    colours = {name: colour for name, (_, colour) in style.MEMORY.items()}
    legend = {name: colour for name, colour in colours.items() if name in shown}
    style.stacks(ax, bars, peaks, colours, 1e6, legend, columns=4)
    ax.set_ylabel(ylabel)
    ax.margins(y=0.06)
    return style.stamp(ax, measured.values())


def _segments(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: sum(sizes.get(part, 0) for part in parts) for name, (parts, _) in style.MEMORY.items()}
