"""Figures of fully sharded training: what a rank holds, by category, predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.plots import style
from labkit.result import RunResult

SEGMENTS = {
    "parameters": (("parameter",), style.BLUE),
    "gradients": (("gradient",), style.ORANGE),
    "optimizer": (("optstate", "optimizer"), style.PURPLE),
    "activations": (("activation",), style.GREEN),
    "gathered parameters": (("unsharded_parameter",), style.SKY),
    "communication buffers": (("all_gather", "reduce_scatter"), "#D55E00"),
    "temporary": (("temp", "unsharded_gradient", "inputs", "buffer", "other"), style.GREY),
}
"""Legend, the categories that a segment adds up, and its colour (Okabe and Ito's palette)."""


def breakdown(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, RunResult] | None = None,
    *,
    ax: Axes | None = None,
    ylabel: str = "peak memory of a rank, MB",
) -> Axes:
    """Stacked bars, one a label: what theory says on the left, hatched, and what was measured on the right.

    Args:
        predicted: bytes by category (as ``theory.fsdp.step_peak`` or ``zero_bytes`` gives them), by label.
        measured: runs by label; their peak by category is drawn.
        ax: where to draw.
        ylabel: of the vertical axis.
    """
    measured = measured or {}
    labels = list(dict.fromkeys([*predicted, *measured]))
    ax = style.axes(ax, width=8.0, height=4.2)
    for column, label in enumerate(labels):
        offset = 0.2 if label in predicted and label in measured else 0.0
        if label in predicted:
            _stack(ax, column - offset, predicted[label], hatch="///" if measured else "")
        if label in measured:
            _stack(ax, column + offset, _peak(measured[label]))
    ax.set(xticks=range(len(labels)), xticklabels=labels, ylabel=ylabel)
    ax.margins(y=0.06)
    drawn = [*predicted.values(), *(_peak(result) for result in measured.values())]
    shown = {name for name, (parts, _) in SEGMENTS.items() if any(sizes.get(part) for sizes in drawn for part in parts)}
    handles = [Patch(color=colour, label=name) for name, (_, colour) in SEGMENTS.items() if name in shown]
    if predicted and measured:
        handles.append(Patch(facecolor="white", edgecolor="black", hatch="///", label="predicted"))
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=9)
    if measured:
        style.stamp(ax, list(measured.values()))
    return ax


def _peak(result: RunResult) -> dict[str, float]:
    names = [part for parts, _ in SEGMENTS.values() for part in parts]
    summary = result.summary()
    return {name: result.value(f"peak_{name}_bytes") for name in names if f"peak_{name}_bytes" in summary}


def _stack(ax: Axes, position: float, sizes: Mapping[str, float], hatch: str = "") -> None:
    bottom = 0.0
    for parts, colour in SEGMENTS.values():
        height = sum(sizes.get(part, 0) for part in parts) / 1e6
        ax.bar(position, height, bottom=bottom, width=0.36, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        bottom += height
