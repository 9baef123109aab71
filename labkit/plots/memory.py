"""Figures of bytes: a rank's memory by category and its traffic, predicted beside measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes

from labkit.plots import style
from labkit.plots.style import Numbers, Runs, Stacks
from labkit.runs.result import RunResult
from labkit.theory.sizes import byte_unit

BYTE_UNITS = {"MB": 1e6, "GB": 1e9, "GiB": 2**30}
# White behind numbers keeps them legible where a line crosses them.
WHITE_BOX: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def memory_by_category(
    results: Runs, *, predicted: Numbers | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the peak memory of the fullest rank by category, in MB, one bar per run.

    ``predicted`` are bytes of activations, by label, drawn as dashed lines.
    """
    ax = memory_comparison({}, results, ax=style.make_axes(ax, height=4.0))
    for column, (label, result) in enumerate(results.items()):
        size = peak_bytes_by_category(result)["activations"] / 1e6
        ax.text(column, size / 2, f"{size:.3g}", fontsize=8, color="white", **style.CENTRED)
        if predicted and label in predicted:
            style.mark_prediction(ax, column, 0.3, predicted[label] / 1e6)
    # A figure has one legend, so the line of theory joins that of the categories.
    legend: Any = ax.get_legend()
    line = [style.prediction_handle("activations, predicted")] if predicted else []
    style.add_legend_above(ax, 3, [*legend.legend_handles, *line])
    ax.set_xlim(-0.6, len(results) - 0.4)
    return ax


def memory_comparison(
    predicted: Stacks,
    measured: Runs | None = None,
    *,
    bound: float | None = None,
    unit: str = "MB",
    ax: Axes | None = None,
    ylabel: str = "peak memory of a rank",
) -> Axes:
    """Draw stacked bars of memory by category, predicted beside the peaks of measured runs.

    Predicted are bytes such as ``theory.fsdp.fsdp_step_peak`` gives them. ``bound``, in bytes, is a
    dotted line; ``unit`` is MB, GB or GiB, and ``ylabel`` comes before it.
    """
    measured, size = measured or {}, BYTE_UNITS[unit]
    ax = style.make_axes(ax, width=8.0, height=4.2)
    bars = {label: sum_by_category(sizes) for label, sizes in predicted.items()}
    peaks = {label: peak_bytes_by_category(result) for label, result in measured.items()}
    style.draw_bar_stacks(ax, bars, peaks, style.MEMORY_COLOURS, size, columns=4)
    if bound is not None:
        # The line crosses the numbers of bars that end near it.
        for text in ax.texts:
            text.set_bbox(WHITE_BOX)
        style.draw_limit(ax, "bound", bound / size, unit)
    ax.set_ylabel(f"{ylabel}, {unit}")
    ax.margins(y=0.06)
    return style.add_stamp(ax, measured.values())


def peak_bytes_by_category(result: RunResult) -> dict[str, float]:
    """Return the bytes of a run's peak by the categories of ``style.MEMORY_CATEGORIES``."""
    peaks = [name for name in result.summary() if name.startswith("peak_")]
    return sum_by_category(
        {name[len("peak_") : -len("_bytes")]: result.value(name) for name in peaks}
    )


def sum_by_category(sizes: Numbers) -> dict[str, float]:
    """Sum bytes by recorded category to those of ``style.MEMORY_CATEGORIES``."""
    categories = style.MEMORY_CATEGORIES.items()
    return {name: sum(sizes.get(part, 0) for part in parts) for name, (parts, _) in categories}


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
    # The curve has steps: each event's height twice, at its left and at its right edge.
    edges = numpy.repeat(numpy.arange(end + 1), 2)[1:-1]
    heights = [numpy.repeat([part[name] / 1e6 for part in parts], 2) for name in colours]
    ax.stackplot(edges, heights, colors=list(colours.values()), alpha=0.45, lw=0)
    total = numpy.sum(heights, axis=0)
    ax.plot(edges, total, **style.PREDICTION_STYLE)
    fullest = int(total.argmax()) // 2
    peak, place = total.max(), fullest + 0.5
    side = "right" if fullest > end / 2 else "left"
    ax.plot(place, peak, "v", color="black", ms=6)
    text = style.add_note(ax, f"peak {peak:.3g} MB", (place, peak), (0, 6), ha=side)
    text.set_bbox(WHITE_BOX | {"alpha": 0.8})
    places = {"forward pass": backward / 2, "backward pass": (backward + end) / 2}
    top = max(peak, (budget or 0.0) / 1e6)
    if result is not None:
        places["measured"] = middle = 1.09 * end
        found = {name: size / 1e6 for name, size in peak_bytes_by_category(result).items()}
        look: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
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


def byte_bars(
    predicted: Stacks,
    measured: Stacks,
    colours: Mapping[str, str],
    *,
    ylabel: str,
    budget: float | None = None,
    ax: Axes | None = None,
    **look: Any,
) -> Axes:
    """Draw bytes by label and part, predicted beside measured; ``budget`` is a dotted line.

    ``look`` are ``legend`` and ``columns`` of ``style.draw_bar_stacks``.
    """
    ax = style.make_axes(ax, 3, 3)
    found = [sum(parts.values()) for parts in (*predicted.values(), *measured.values())]
    most = max([*found, budget or 0]) or 1
    unit, size = byte_unit(most)
    style.draw_bar_stacks(ax, predicted, measured, colours, size, **{"columns": 1, **look})
    columns = len(predicted.keys() | measured.keys())
    ax.set(xlim=(-0.5, max(columns, 2) - 0.5), ylim=(0, 1.12 * most / size))
    ax.set_ylabel(f"{ylabel}, {unit}")
    # Every bar has its number, and each tick takes time to draw.
    ax.locator_params(axis="y", nbins=4)
    if budget is not None:
        style.draw_limit(ax, "budget", budget / size, unit)
    return ax
