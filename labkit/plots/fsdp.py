"""Figures of FSDP: a rank's memory by category and its traffic, predicted beside measured."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from labkit.plots import style
from labkit.plots.runs import peak_bytes_by_category
from labkit.runs.result import RunResult

BYTE_UNITS = {"MB": 1e6, "GB": 1e9}


def memory_comparison(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, RunResult] | None = None,
    *,
    bound: float | None = None,
    unit: str = "MB",
    ax: Axes | None = None,
    ylabel: str = "peak memory of a rank",
) -> Axes:
    """Draw stacked bars of memory by category, predicted beside measured.

    Args:
        predicted: bytes by category, by label, such as ``theory.fsdp.fsdp_step_peak`` gives them.
        measured: runs by label, whose peak is drawn.
        bound: bytes at which to draw a dotted line.
        unit: of the axis, MB or GB.
        ax: where to draw.
        ylabel: of the axis, without its unit.
    """
    measured = measured or {}
    ax = style.make_axes(ax, width=8.0, height=4.2)
    bars = {label: _bytes_by_category(sizes) for label, sizes in predicted.items()}
    peaks = {label: peak_bytes_by_category(result) for label, result in measured.items()}
    legend = style.memory_colours_in_use([*bars.values(), *peaks.values()])
    size = BYTE_UNITS[unit]
    style.draw_bar_stacks(ax, bars, peaks, style.MEMORY_COLOURS, size, legend, columns=4)
    if bound is not None:
        # White behind the numbers keeps them legible where the line crosses them.
        for text in ax.texts:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        style.draw_limit(ax, "bound", bound / size, unit)
    ax.set_ylabel(f"{ylabel}, {unit}")
    ax.margins(y=0.06)
    return style.add_stamp(ax, measured.values())


def communication_passes(
    predicted: Mapping[str, Mapping[str, float]], *, ax: Axes | None = None
) -> Axes:
    """Draw what a rank sends in one step, by collective, as a multiple of the parameters' bytes.

    Predicted are passes over the parameters, such as ``{"all_gather": 1.5}``, by label.
    """
    ax = style.make_axes(ax, height=1.3 + 0.5 * len(predicted))
    for row, sent in enumerate(predicted.values()):
        end = 0.0
        for name, colour in style.COLLECTIVE_COLOURS.items():
            if name in sent:
                ax.barh(row, sent[name], 0.6, end, color=colour, edgecolor="white")
                text = f"{sent[name]:.3g}"
                ax.text(end + sent[name] / 2, row, text, fontsize=9, **style.CENTRED)
                end += sent[name]
        ax.text(end, row, f"  {end:.4g} in all", va="center", fontsize=9)
    ax.set(yticks=range(len(predicted)), yticklabels=list(predicted))
    ax.set_xlabel("sent over the wire by each rank in a step, times the parameters' bytes")
    ax.margins(x=0.15)
    ax.invert_yaxis()
    handles = style.legend_patches(_collectives_in_use(predicted.values()))
    style.add_legend_above(ax, len(handles), handles)
    return ax


def memory_over_step(
    moments: Sequence[Mapping[str, float]],
    backward: int,
    result: RunResult | None = None,
    *,
    budget: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the predicted memory of a rank during a step, by category, in MB, and mark its peak.

    Args:
        moments: bytes by category after each event of theory's ledger.
        backward: index of the first event of the backward pass.
        result: a measured run; its peak is a bar at the end.
        budget: bytes at which to draw a dotted line.
        ax: where to draw.
    """
    ax = style.make_axes(ax, width=6.5, height=3.8)
    parts = [_bytes_by_category(moment) for moment in moments]
    shown = style.memory_colours_in_use(parts)
    heights = [[part[name] / 1e6 for part in parts] for name in shown]
    tops = numpy.cumsum(heights, axis=0)  # [category, moment]
    edges = numpy.repeat(numpy.arange(len(parts) + 1), 2)[1:-1]
    outlines = [numpy.repeat(top, 2) for top in (numpy.zeros(len(parts)), *tops)]
    there_and_back, areas = numpy.append(edges, edges[::-1]), []
    for lower, upper in pairwise(outlines):
        areas.append(numpy.column_stack([there_and_back, numpy.append(upper, lower[::-1])]))
    # An explorer redraws this at each click: a single collection without limits of its own is fast.
    look: dict[str, Any] = {"facecolors": list(shown.values()), "alpha": 0.45, "linewidths": 0}
    ax.add_collection(PolyCollection(areas, **look), autolim=False)
    ax.plot(edges, outlines[-1], **style.PREDICTION_STYLE)
    fullest, end = int(tops[-1].argmax()), len(parts)
    peak, middle = tops[-1][fullest], 1.09 * end
    _mark_peak(ax, fullest + 0.5, peak, "right" if fullest > end / 2 else "left")
    places = {"forward pass": backward / 2, "backward pass": (backward + end) / 2}
    bar = 0.0
    if result is not None:
        places["measured"] = middle
        look = {"edgecolor": "white", "linewidth": 0.5}
        for name, size in peak_bytes_by_category(result).items():
            colour = style.MEMORY_COLOURS[name]
            ax.bar(middle, size / 1e6, 0.09 * end, bar, color=colour, **look)
            bar += size / 1e6
        ax.text(middle, bar, f"{bar:.3g}", fontsize=9, **style.ON_TOP)
    if budget is not None:
        style.draw_limit(ax, "budget", budget / 1e6, "MB")
    ax.axvline(backward, color=style.GREY, lw=1)
    ax.set_xticks(list(places.values()), list(places))
    ax.tick_params(axis="x", length=0)
    top = 1.14 * max(peak, bar, (budget or 0.0) / 1e6)
    ax.set(ylabel="held by a rank, MB", xlim=(0, 1.18 * end if result else end), ylim=(0, top))
    style.add_legend_above(ax, 3, style.legend_patches(shown))
    return style.add_stamp(ax, [result] if result else [])


def _mark_peak(ax: Axes, place: float, peak: float, side: Literal["left", "right"]) -> None:
    ax.plot(place, peak, "v", color="black", ms=6)
    text = style.add_note(ax, f"peak {peak:.3g} MB", (place, peak), (0, 6), ha=side)
    text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8})


def traffic_by_collective(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]] | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw the bytes that a rank sends in a step, in MB, by label and collective."""
    ax = style.make_axes(ax, width=3.0, height=3.8)
    measured = measured or {}
    legend = _collectives_in_use([*predicted.values(), *measured.values()])
    colours = style.COLLECTIVE_COLOURS
    style.draw_bar_stacks(ax, predicted, measured, colours, 1e6, legend, columns=1)
    ax.set(xlim=(-0.6, max(len(predicted), 2) - 0.4), ylim=(0, 1.08 * ax.dataLim.y1))
    ax.set_ylabel("sent by a rank in a step, MB")
    return ax


def _collectives_in_use(sent: Iterable[Mapping[str, float]]) -> dict[str, str]:
    names = {name for each in sent for name in each}
    colours = style.COLLECTIVE_COLOURS
    return {name.replace("_", "-"): colours[name] for name in colours if name in names}


def _bytes_by_category(sizes: Mapping[str, float]) -> dict[str, float]:
    return {
        name: sum(sizes.get(part, 0) for part in parts)
        for name, (parts, _) in style.MEMORY_CATEGORIES.items()
    }
