"""Figures of fully sharded training: what a rank holds, by category, predicted beside measured, and what it sends."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from labkit.plots import style
from labkit.plots.runs import peak_bytes_by_category
from labkit.runs.result import RunResult

BYTE_UNITS = {"MB": 1e6, "GB": 1e9}
EDGE_LABEL_STYLE: dict[str, Any] = {
    "xycoords": ("axes fraction", "data"),
    "textcoords": "offset points",
    "va": "center",
    "fontsize": 9,
}


def memory_comparison(
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
    ax = style.make_axes(ax, width=8.0, height=4.2)
    bars = {label: _bytes_by_category(sizes) for label, sizes in predicted.items()}
    peaks = {label: peak_bytes_by_category(result) for label, result in measured.items()}
    shown = {
        name for drawn in (*bars.values(), *peaks.values()) for name, size in drawn.items() if size
    }
    colours = {name: colour for name, (_, colour) in style.MEMORY_CATEGORIES.items()}
    legend = {name: colour for name, colour in colours.items() if name in shown}
    style.draw_bar_stacks(ax, bars, peaks, colours, BYTE_UNITS[unit], legend, columns=4)
    if bound is not None:
        for text in ax.texts:  # a number that the line crosses stays legible
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        ax.axhline(bound / BYTE_UNITS[unit], color="black", lw=1, ls=":")
        ax.annotate(
            f"bound\n{bound / BYTE_UNITS[unit]:.3g} {unit}",
            (1, bound / BYTE_UNITS[unit]),
            (3, 0),
            **EDGE_LABEL_STYLE,
        )
    ax.set_ylabel(f"{ylabel}, {unit}")
    ax.margins(y=0.06)
    return style.add_stamp(ax, measured.values())


def communication_passes(
    predicted: Mapping[str, Mapping[str, float]], *, ax: Axes | None = None
) -> Axes:
    """What a rank sends over the wire in one step, by collective, one bar a label, times the parameters' bytes.

    Predicted are passes over the parameters, such as ``{"all_gather": 1.5, "reduce_scatter": 0.75}``.
    """
    ax = style.make_axes(ax, height=1.3 + 0.5 * len(predicted))
    for row, sent in enumerate(predicted.values()):
        end = 0.0
        for name in (name for name in style.COLLECTIVE_COLOURS if name in sent):
            ax.barh(
                row, sent[name], 0.6, end, color=style.COLLECTIVE_COLOURS[name], edgecolor="white"
            )
            ax.text(
                end + sent[name] / 2, row, f"{sent[name]:.3g}", ha="center", va="center", fontsize=9
            )
            end += sent[name]
        ax.text(end, row, f"  {end:.4g} in all", va="center", fontsize=9)
    ax.set(yticks=range(len(predicted)), yticklabels=list(predicted))
    ax.set_xlabel("sent over the wire by each rank in a step, times the parameters' bytes")
    ax.margins(x=0.15)
    ax.invert_yaxis()
    shown = [
        name
        for name in style.COLLECTIVE_COLOURS
        if any(name in sent for sent in predicted.values())
    ]
    handles = [
        Patch(color=style.COLLECTIVE_COLOURS[name], label=name.replace("_", "-")) for name in shown
    ]
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
    """What a rank holds in the course of a step, by category, as theory's ledger says, in MB; its peak is marked.

    ``moments`` are bytes by category after each event, ``backward`` is the first of the backward pass. The peak of a
    measured run is a bar at the end. A ``budget``, in bytes, is a dotted line.
    """
    ax = style.make_axes(ax, width=6.5, height=3.8)
    parts = [_bytes_by_category(moment) for moment in moments]
    shown = [name for name in style.MEMORY_CATEGORIES if any(part[name] for part in parts)]
    colours = [style.MEMORY_CATEGORIES[name][1] for name in shown]
    tops = numpy.cumsum(
        [[part[name] / 1e6 for part in parts] for name in shown], axis=0
    )  # [category, moment]
    edges = numpy.repeat(numpy.arange(len(parts) + 1), 2)[1:-1]
    outlines = [numpy.repeat(top, 2) for top in (numpy.zeros(len(parts)), *tops)]
    areas = [
        numpy.column_stack([numpy.append(edges, edges[::-1]), numpy.append(upper, lower[::-1])])
        for lower, upper in pairwise(outlines)
    ]
    # one collection without limits of its own, since an explorer redraws this at once
    ax.add_collection(
        PolyCollection(areas, facecolors=colours, alpha=0.45, linewidths=0), autolim=False
    )
    ax.plot(edges, outlines[-1], **style.PREDICTION_STYLE)
    fullest, end = int(tops[-1].argmax()), len(parts)
    peak, middle, width = tops[-1][fullest], 1.09 * end, 0.09 * end
    _mark_peak(ax, fullest + 0.5, peak, "right" if fullest > end / 2 else "left")
    places = {"forward pass": backward / 2, "backward pass": (backward + end) / 2}
    bar = 0.0
    if result is not None:
        places["measured"] = middle
        for name, size in peak_bytes_by_category(result).items():
            ax.bar(
                middle,
                size / 1e6,
                width,
                bar,
                color=style.MEMORY_CATEGORIES[name][1],
                edgecolor="white",
                linewidth=0.5,
            )
            bar += size / 1e6
        ax.text(middle, bar, f"{bar:.3g}", ha="center", va="bottom", fontsize=9)
    if budget is not None:
        ax.axhline(budget / 1e6, color="black", lw=1, ls=":")
        ax.annotate(f"budget\n{budget / 1e6:.3g} MB", (1, budget / 1e6), (3, 0), **EDGE_LABEL_STYLE)
    ax.axvline(backward, color=style.GREY, lw=1)
    ax.set_xticks(list(places.values()), list(places))
    ax.tick_params(axis="x", length=0)
    top = 1.14 * max(peak, bar, (budget or 0.0) / 1e6)
    ax.set(ylabel="held by a rank, MB", xlim=(0, 1.18 * end if result else end), ylim=(0, top))
    handles = [Patch(color=colour, label=name) for name, colour in zip(shown, colours, strict=True)]
    style.add_legend_above(ax, 3, handles)
    return style.add_stamp(ax, [result] if result else [])


def _mark_peak(ax: Axes, place: float, peak: float, side: Literal["left", "right"]) -> None:
    ax.plot(place, peak, "v", color="black", ms=6)
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "ha": side}
    text = ax.annotate(f"peak {peak:.3g} MB", (place, peak), (0, 6), **look)
    text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8})


def traffic_by_collective(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]] | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Bytes that leave a rank in a step, by collective, one bar a label, in MB: predicted, and beside it measured."""
    ax = style.make_axes(ax, width=3.0, height=3.8)
    given = (*predicted.values(), *(measured or {}).values())
    shown = [name for name in style.COLLECTIVE_COLOURS if any(name in sent for sent in given)]
    legend = {name.replace("_", "-"): style.COLLECTIVE_COLOURS[name] for name in shown}
    style.draw_bar_stacks(
        ax, predicted, measured or {}, style.COLLECTIVE_COLOURS, 1e6, legend, columns=1
    )
    ax.set(xlim=(-0.6, max(len(predicted), 2) - 0.4), ylim=(0, 1.08 * ax.dataLim.y1))
    ax.set_ylabel("sent by a rank in a step, MB")
    return ax


def _bytes_by_category(sizes: Mapping[str, float]) -> dict[str, float]:
    return {
        name: sum(sizes.get(part, 0) for part in parts)
        for name, (parts, _) in style.MEMORY_CATEGORIES.items()
    }
