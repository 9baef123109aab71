"""Figures of FSDP: a rank's memory by category and its traffic, predicted beside measured."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from labkit.plots import style
from labkit.plots.runs import WHITE_BOX, peak_bytes_by_category, sum_by_category
from labkit.plots.style import Numbers, Stacks
from labkit.runs.result import RunResult


def communication_passes(predicted: Stacks, *, ax: Axes | None = None) -> Axes:
    """Draw what a rank sends in one step, by collective, as a multiple of the parameters' bytes.

    Predicted are passes over the parameters, such as ``{"all_gather": 1.5}``, by label.
    """
    ax = style.make_axes(ax, height=1.3 + 0.5 * len(predicted))
    colours = style.colours_in_use(style.COLLECTIVE_COLOURS, predicted.values())
    texts = [f"{sum(sent.values()):.4g} in all" for sent in predicted.values()]
    style.draw_rows(ax, predicted, colours, texts, edgecolor="white")
    bars: Any
    for bars in ax.containers:
        ax.bar_label(bars, fmt="{:.3g}", label_type="center", fontsize=9)
    ax.set_xlabel("sent over the wire by each rank in a step, times the parameters' bytes")
    ax.margins(x=0.15)
    style.add_legend_above(ax, len(colours), style.legend_patches(colours))
    return ax


def memory_over_step(
    moments: Sequence[Numbers],
    backward: int,
    result: RunResult | None = None,
    *,
    budget: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the predicted memory of a rank during a step, by category, in MB, and mark its peak.

    ``moments`` are bytes after each event of theory's ledger, and ``backward`` is the index of
    the first one of the backward pass. The peak of a run is a bar at the end; ``budget``, in bytes,
    is a dotted line.
    """
    ax = style.make_axes(ax, width=6.5, height=3.8)
    parts, end = [sum_by_category(moment) for moment in moments], len(moments)
    colours = style.colours_in_use(style.MEMORY_COLOURS, parts)
    heights = [[part[name] / 1e6 for part in parts] for name in colours]
    tops = numpy.cumsum([numpy.zeros(end), *heights], axis=0)  # [1 + category, moment]
    # The curve has steps: each event's height twice, at its left and at its right edge.
    edges = numpy.repeat(numpy.arange(end + 1), 2)[1:-1]
    there_and_back, areas = numpy.append(edges, edges[::-1]), []
    for lower, upper in pairwise(numpy.repeat(tops, 2, axis=1)):
        areas.append(numpy.column_stack([there_and_back, numpy.append(upper, lower[::-1])]))
    # An explorer redraws this at each click: a single collection without limits of its own is fast.
    look: dict[str, Any] = {"facecolors": list(colours.values()), "alpha": 0.45, "linewidths": 0}
    ax.add_collection(PolyCollection(areas, **look), autolim=False)
    ax.plot(edges, numpy.repeat(tops[-1], 2), **style.PREDICTION_STYLE)
    fullest = int(tops[-1].argmax())
    peak, place, side = tops[-1][fullest], fullest + 0.5, "right" if fullest > end / 2 else "left"
    ax.plot(place, peak, "v", color="black", ms=6)
    text = style.add_note(ax, f"peak {peak:.3g} MB", (place, peak), (0, 6), ha=side)
    text.set_bbox(WHITE_BOX | {"alpha": 0.8})
    places = {"forward pass": backward / 2, "backward pass": (backward + end) / 2}
    top = max(peak, (budget or 0.0) / 1e6)
    if result is not None:
        places["measured"] = middle = 1.09 * end
        found = {name: size / 1e6 for name, size in peak_bytes_by_category(result).items()}
        look = {"edgecolor": "white", "linewidth": 0.5}
        bar = style.draw_stack(ax.bar, middle, found, style.MEMORY_COLOURS, 0.09 * end, **look)
        ax.text(middle, bar, f"{bar:.3g}", fontsize=9, **style.ON_TOP)
        top = max(top, bar)
    if budget is not None:
        style.draw_limit(ax, "budget", budget / 1e6, "MB")
    ax.axvline(backward, color=style.GREY, lw=1)
    ax.set_xticks(list(places.values()), list(places))
    ax.tick_params(axis="x", length=0)
    ax.set(ylabel="held by a rank, MB", ylim=(0, 1.14 * top))
    ax.set_xlim(0, 1.18 * end if result else end)
    style.add_legend_above(ax, 3, style.legend_patches(colours))
    return style.add_stamp(ax, [result] if result else [])
