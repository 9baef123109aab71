"""Figures of collectives: values before and after, and time by message size and count."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy
import pandas
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory.collectives import AlphaBeta, fit_alpha_beta
from labkit.theory.sizes import readable_bytes

SUM_COLOUR, PARTIAL_SUM_COLOUR = "#4D4D4D", "#C4C4C4"
COST_COLOURS = {"latency": style.ORANGE, "bytes": style.SKY}

Moments = Mapping[str, Sequence[float]]
_size_text = partial(readable_bytes, base=1024)


def values_by_rank(result: RunResult, titles: Mapping[str, str]) -> Sequence[Axes]:
    """Draw what each rank held before a collective, after it, and between, in one panel per title.

    Titles are by the name under which ranks reported a dict with their numbers at each moment, such
    as ``{"before": …, "after": …}``. A number has the colour of the rank that held it first. All
    other numbers are sums: over all ranks if some rank holds the number in the end, else over some.
    If there are moments between, a frame marks each number that has just changed.
    """
    # A report may hold tensors, of which dictionaries of colours need plain numbers.
    panels: list[list[Moments]] = []
    for name in titles:
        reports = [rank.reported[name].items() for rank in result.ranks]
        panels.append([{moment: list(map(float, each)) for moment, each in own} for own in reports])
    widths = [sum(len(each) + 1 for each in ranks[0].values()) + 1.3 for ranks in panels]
    size = (0.36 * sum(widths), 0.36 * result.world_size + 1.0)
    axes = style.make_row(len(panels), *size, width_ratios=widths)
    colours = [_value_colours(ranks) for ranks in panels]
    for ax, title, ranks, shown in zip(axes, titles.values(), panels, colours, strict=True):
        _draw_moments(ax, ranks, shown)
        ax.set_title(title, fontsize=10)
    shades = {f"from rank {rank}": style.rank_colour(rank) for rank in range(result.world_size)}
    shades |= {"sum over all ranks": SUM_COLOUR, "sum over some ranks": PARTIAL_SUM_COLOUR}
    used = set(chain(*(shown.values() for shown in colours)))
    shades = {words: colour for words, colour in shades.items() if colour in used}
    style.add_figure_legend(axes[0], "lower", shades, fontsize=8)
    return axes


def _draw_moments(ax: Axes, ranks: Sequence[Moments], colours: Mapping[float, str]) -> None:
    """Draw a row of numbers per rank for each moment, from left to right."""
    left, middle = 0, len(ranks) / 2
    before: list[Sequence[float]] = []
    for row in range(len(ranks)):
        ax.text(-0.15, row + 0.45, f"rank {row}", ha="right", va="center", fontsize=9)
    for moment, numbers in ranks[0].items():
        if left:
            style.draw_arrow(ax, (left - 0.9, middle), (left - 0.1, middle), lw=1.5)
        for row, each in enumerate(ranks):
            for column, number in enumerate(each[moment], left):
                style.draw_cells(ax, number, (column, row), colours[number], (1, 0.9))
                if len(ranks[0]) > 2 and before and number != before[row][column - left]:
                    style.add_box(ax, column, row, 1, 0.9, fill=False, edgecolor="black", lw=3)
        before = [each[moment] for each in ranks]
        place = left + len(numbers) / 2
        ax.text(place, -0.15, moment, fontsize=8, color="#666666", **style.ON_TOP)
        left += len(numbers) + 1
    ax.set(xlim=(-1.3, left - 0.9), ylim=(len(ranks) + 0.1, -0.8))
    ax.set_axis_off()


def _value_colours(ranks: Sequence[Moments]) -> dict[float, str]:
    sums: dict[float, str] = {}
    finals: dict[float, str] = {}
    owners: dict[float, str] = {}
    for rank, moments in enumerate(ranks):
        first, *between, last = moments.values()
        owners |= dict.fromkeys(first, style.rank_colour(rank))
        sums |= dict.fromkeys(chain(*between), PARTIAL_SUM_COLOUR)
        finals |= dict.fromkeys(last, SUM_COLOUR)
    # A later colour replaces an earlier one.
    return sums | finals | owners


def all_reduce_rounds(result: RunResult, kind: str = "message") -> pandas.Series:
    """Return the seconds of each round that launch/all_reduce.py timed, until its last rank ended.

    The index is the size of the message, in bytes, for ``kind`` "message", and the number of
    messages for "pieces".
    """
    spans = result.frame.query("kind == 'span'")
    spans = spans[spans["name"].str.fullmatch(rf"{kind}_\d+")]
    if spans.empty:
        raise ValueError(
            f"this run of {result.info['program']} timed no {kind}: take a run of all_reduce"
        )
    keys = spans["name"].str.partition("_")[2].astype(int)
    return (spans["dur_us"] / 1e6).groupby([keys, spans["step"]]).max().droplevel("step")


def fastest_all_reduce_times(result: RunResult, kind: str = "message") -> pandas.Series:
    """Return the fastest of ``all_reduce_rounds`` per size or count, in seconds."""
    # A disturbance can only make a round slower, so the minimum is closest to the network.
    return all_reduce_rounds(result, kind).groupby(level=0).min()


def all_reduce_time_by_size(
    result: RunResult, *, network: AlphaBeta | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the time of an all-reduce by its size: all rounds, the fastest, and a line.

    The line is that of ``network``, by default fitted to the fastest rounds.
    """
    ax = style.make_axes(ax)
    rounds, times = all_reduce_rounds(result), fastest_all_reduce_times(result)
    line, sizes = network or fit_alpha_beta(times.to_dict()), list(times.index)
    alpha_us, beta_us_per_mb = line.alpha_s * 1e6, line.beta_s_per_byte * 1e12
    formula = f"α + bytes x β, α = {alpha_us:.0f} µs, β = {beta_us_per_mb:.0f} µs a MB"
    look: dict[str, Any] = {"color": style.GREY, "alpha": 0.4, "markersize": 4}
    ax.plot(rounds.index, rounds * 1e6, ".", label="each round", **look)
    ax.plot(sizes, times * 1e6, "o", color=style.BLUE, label="fastest round")
    # With two logarithmic axes, the fitted line is a curve.
    between = numpy.geomspace(sizes[0], sizes[-1], 61)
    fitted = [line.seconds(size) * 1e6 for size in between]
    ax.plot(between, fitted, label=formula, **style.PREDICTION_STYLE)
    ax.axhline(alpha_us, **style.GUIDE_STYLE)
    # Elsewhere, the mark would widen the axis.
    if sizes[0] < line.break_even_bytes < sizes[-1]:
        ax.axvline(line.break_even_bytes, **style.GUIDE_STYLE)
        text = f" α / β = {_size_text(line.break_even_bytes)}"
        look = {"fontsize": 9, "bbox": {"color": "white", "pad": 1}}
        ax.text(line.break_even_bytes, 0.93, text, transform=ax.get_xaxis_transform(), **look)
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="size of one all-reduce", ylabel="time of one all-reduce, µs")
    ax.set_xticks(sizes, [_size_text(size) for size in sizes])
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    style.add_legend_above(ax, 3, middle=0.45)
    return style.add_stamp(ax, [result])


def all_reduce_time_by_count(
    result: RunResult,
    *,
    network: AlphaBeta | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the time of the same bytes in one all-reduce and in many: measured and predicted.

    The prediction uses ``network``, by default fitted to the run's single messages. The measured
    time is that of the fastest round.
    """
    ax = style.make_axes(ax)
    measured_ms = 1e3 * fastest_all_reduce_times(result, "pieces")
    total = int(result.params["total_bytes"])
    line = network or fit_alpha_beta(fastest_all_reduce_times(result).to_dict())
    ax.bar(
        range(len(measured_ms)), measured_ms, 0.5, color=style.BLUE, label="measured, fastest round"
    )
    for column, (count, time_ms) in enumerate(measured_ms.items()):
        expected_ms = 1e3 * line.seconds(total, messages=count)
        dashed = style.mark_prediction(ax, column, 0.38, expected_ms)
        text = f"{time_ms:.1f} ({expected_ms:.1f})"
        style.add_note(ax, text, (column, max(time_ms, expected_ms)), (0, 3))
    dashed.set_label("predicted: messages x α + bytes x β")
    ticks = [f"{count} x {_size_text(total // count)}" for count in measured_ms.index]
    ax.set_xticks(range(len(ticks)), ticks)
    ax.set(xlabel=f"how {_size_text(total)} are sent", ylabel="time (predicted in brackets), ms")
    ax.margins(y=0.12)
    style.add_legend_above(ax, 2)
    return style.add_stamp(ax, [result])


def all_reduce_time_by_ranks(
    predicted_s: Mapping[str, tuple[float, float]],
    chosen: str,
    *,
    measured_s: float = 0.0,
    ax: Axes | None = None,
) -> Axes:
    """Draw the predicted time of an all-reduce by number of ranks: latency, then bytes.

    The label ``chosen`` is bold; ``measured_s``, the time measured for it, is a dot.
    """
    ax = style.make_axes(ax)
    unit, size = style.time_unit(max(map(sum, predicted_s.values())))
    rows = {
        label: {"latency": latency_s / size, "bytes": bytes_s / size}
        for label, (latency_s, bytes_s) in predicted_s.items()
    }
    style.draw_rows_with_choice(ax, rows, COST_COLOURS, chosen, measured_s / size)
    ax.set(xlabel=f"time, {unit}", ylabel="ranks (bold: chosen)")
    style.add_legend_above(ax, 2, style.legend_patches(COST_COLOURS))
    return ax


def step_time_by_ranks(
    results: Mapping[str, Sequence[RunResult]],
    predicted_s: Mapping[str, Mapping[int, float]],
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw the time of a training step by number of ranks: measured as dots, predicted dashed.

    Runs and predictions in seconds are by label, such as a wire's name, and by number of ranks.
    Predictions that are not numbers are left out.
    """
    ax = style.make_axes(ax)
    colours = dict(zip(results, (style.BLUE, style.ORANGE, style.GREEN), strict=False))
    for label, runs in results.items():
        points = {run.world_size: run.value("step_ms") for run in runs}
        ax.plot(list(points), list(points.values()), "o", color=colours[label], label=label)
        for count, time_ms in points.items():
            style.add_note(ax, f"{time_ms:.0f}", (count, time_ms), (9, 4))
        known = {
            count: 1e3 * each for count, each in predicted_s[label].items() if each is not None
        }
        dashed = style.PREDICTION_STYLE | {"color": colours[label]}
        ax.plot(list(known), list(known.values()), **dashed)
    counts = sorted({run.world_size for runs in results.values() for run in runs})
    ax.set_xscale("log")
    ax.set_xticks(counts, list(map(str, counts)))
    ax.minorticks_off()
    ax.set(xlabel="ranks", ylabel="time of one step, ms", ylim=(0, None))
    ax.margins(y=0.12)
    handles, _ = ax.get_legend_handles_labels()
    style.add_legend_above(ax, 3, [*handles, style.prediction_handle("predicted")])
    return style.add_stamp(ax, [run for runs in results.values() for run in runs])


def predicted_time_by_size(
    network: AlphaBeta,
    sizes: Sequence[int],
    chosen: int,
    *,
    messages: int = 1,
    measured_s: float = 0.0,
    ax: Axes | None = None,
) -> Axes:
    """Draw the predicted time of all-reduces by their bytes, and where latency and bytes are equal.

    A ring marks the size ``chosen``; ``measured_s``, the time measured for it, is a dot.
    """
    ax = style.make_axes(ax)
    between = numpy.geomspace(sizes[0], sizes[-1], 61)
    times_us = [1e6 * network.seconds(size, messages=messages) for size in between]
    ax.plot(between, times_us, label="both", **style.PREDICTION_STYLE)
    latency_us = 1e6 * messages * network.alpha_s
    ax.plot(between, [latency_us] * len(between), color=COST_COLOURS["latency"], label="latency")
    bytes_us = [1e6 * size * network.beta_s_per_byte for size in between]
    ax.plot(between, bytes_us, color=COST_COLOURS["bytes"], label="bytes")
    predicted_us = 1e6 * network.seconds(chosen, messages=messages)
    ax.plot(chosen, predicted_us, "o", markerfacecolor="white", markeredgecolor="black")
    if measured_s:
        ax.plot(chosen, 1e6 * measured_s, "o", color=style.BLUE)
    ax.set(xscale="log", yscale="log", xlabel="bytes in total", ylabel="time, µs")
    ax.set_ylim(bottom=min(times_us) / 5)
    ax.set_xticks(sizes, [_size_text(size) for size in sizes])
    ax.minorticks_off()
    style.add_legend_above(ax, 3)
    return ax
