"""Figures of estimated steps: their parts, throughput, and estimates beside measurements."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from labkit.plots import style

ESTIMATE_NOTE = "estimated, nothing was run · {}"
PART_COLOURS = {"compute": style.BLUE, "exposed": style.EXPOSURE_COLOUR}


def step_time_parts(
    steps: Mapping[str, Mapping[str, float]], *, note: str, ax: Axes | None = None
) -> Axes:
    """Draw a bar per label: computation, and communication that it does not hide.

    Args:
        steps: seconds by ``compute`` and ``exposed``, by label.
        note: the hardware.
        ax: see ``plots``.
    """
    ax = style.make_axes(ax, height=1.2 + 0.36 * len(steps))
    for row, parts in enumerate(steps.values()):
        end = 0.0
        for name, colour in PART_COLOURS.items():
            label = (
                {"compute": "arithmetic", "exposed": "waits for messages"}[name]
                if row == 0
                else None
            )
            ax.barh(row, parts[name], 0.66, end, color=colour, label=label)
            end += parts[name]
        ax.text(
            end,
            row,
            f"  {style.duration_text(end)}, {parts['exposed'] / end:.0%} waiting",
            va="center",
            fontsize=9,
        )
    longest = max(sum(parts[name] for name in PART_COLOURS) for parts in steps.values())
    ax.set(
        yticks=range(len(steps)),
        yticklabels=list(steps),
        xlim=(0, 1.4 * longest),
        xlabel="time of a step, s",
    )
    ax.invert_yaxis()
    style.add_legend_above(ax, 2)
    return _add_note(ax, ESTIMATE_NOTE.format(note))


def total_throughput(
    series: Mapping[str, Mapping[int, float]], *, note: str, ax: Axes | None = None
) -> Axes:
    """Draw tokens per second of all GPUs over their number, on logarithmic axes."""
    ax = style.make_axes(ax, 5.5, 3.8)
    for (label, points), colour in zip(series.items(), style.RANK_COLOURS, strict=False):
        ax.plot(list(points), list(points.values()), marker="o", color=colour, label=label)
    counts = sorted({count for points in series.values() for count in points})
    ax.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s, all GPUs together")
    _label_gpu_counts(ax, counts)
    style.add_legend_above(ax, 2)
    return _add_note(ax, ESTIMATE_NOTE.format(note))


def throughput_per_gpu(
    series: Mapping[str, Mapping[int, float]], *, note: str, ax: Axes | None = None
) -> Axes:
    """Draw the tokens per second of one GPU over their number, on an axis that begins at 0.

    At the end of each line stands what is left of the speed at its beginning.

    Args:
        series: tokens per second of one GPU by number of GPUs, by label.
        note: the hardware.
        ax: see ``plots``.
    """
    ax = style.make_axes(ax, 5.5, 3.8)
    looks = zip(series.items(), style.RANK_COLOURS, ("top", "bottom"), strict=False)
    for (label, points), colour, side in looks:
        ax.plot(list(points), list(points.values()), marker="o", color=colour, label=label)
        first, last = min(points), max(points)
        left = f"  {points[last] / points[first]:.0%} of {first}"
        ax.annotate(left, (last, points[last]), va=side, fontsize=9, color=colour)
    counts = sorted({count for points in series.values() for count in points})
    ax.set(xscale="log", xlim=(counts[0] * 0.85, counts[-1] * 2.6), xlabel="GPUs")
    ax.set_ylim(0, 1.15 * max(speed for points in series.values() for speed in points.values()))
    ax.set_ylabel("tokens/s of one GPU")
    _label_gpu_counts(ax, counts)
    style.add_legend_above(ax, 2)
    return _add_note(ax, ESTIMATE_NOTE.format(note))


def estimate_accuracy(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    *,
    within: float,
    note: str,
    ax: Axes | None = None,
) -> Axes:
    """Draw predicted over measured for each case on a logarithmic axis.

    Args:
        predicted: by case.
        measured: by case.
        within: factor of the grey band.
        note: what was measured, where and by whom.
        ax: see ``plots``.
    """
    ax = style.make_axes(ax, 7.5, 1.2 + 0.28 * len(measured))
    ax.axvspan(1 / within, within, color=style.GREY, alpha=0.15, lw=0)
    ax.axvline(1.0, color=style.GREY, lw=1)
    for row, (case, seen) in enumerate(measured.items()):
        ratio = predicted[case] / seen
        ax.plot(ratio, row, "o", color=style.BLUE)
        ax.annotate(
            f"{ratio:.2f}",
            (ratio, row),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    ratios = [predicted[case] / seen for case, seen in measured.items()]
    low, high = min(1 / within, *ratios), max(within, *ratios)
    ax.set(
        xscale="log",
        xlim=(low / 1.15, high * 1.25),
        yticks=range(len(measured)),
        yticklabels=list(measured),
    )
    ticks = [
        tick
        for tick in (0.25, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0)
        if low / 1.15 < tick < high * 1.25
    ]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(f"predicted / measured; grey: within a factor of {within:g}")
    ax.invert_yaxis()
    return _add_note(ax, note)


def accuracy_by_hosts(
    ratios: Mapping[str, Sequence[tuple[int, float]]],
    sources: Sequence[str],
    *,
    within: float,
    ax: Axes | None = None,
) -> Axes:
    """Draw estimated over published by number of hosts, both on logarithmic axes.

    Args:
        ratios: number of hosts and ratio of each case, by up to three labels, which stand beside
            each other in colours of their own.
        sources: who published each case, up to three, each with a mark of its own.
        within: factor of the grey band.
        ax: see ``plots``.
    """
    ax = style.make_axes(ax, 7.0, 3.8)
    ax.axhspan(1 / within, within, color=style.GREY, alpha=0.15, lw=0)
    ax.axhline(1.0, color=style.GREY, lw=1)
    colours = dict(zip(ratios, (style.BLUE, style.EXPOSURE_COLOUR, style.GREEN), strict=False))
    marks = dict(zip(dict.fromkeys(sources), "Do^", strict=False))
    shifts = [1 + 0.06 * (place - (len(ratios) - 1) / 2) for place in range(len(ratios))]
    for shift, (label, cases) in zip(shifts, ratios.items(), strict=True):
        for source, mark in marks.items():
            own = [case for case, by in zip(cases, sources, strict=True) if by == source]
            places, values = [shift * count for count, _ in own], [ratio for _, ratio in own]
            ax.plot(places, values, mark, ms=5, alpha=0.6, color=colours[label])
    ticks = (0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
    ax.set(xscale="log", yscale="log", xlabel="hosts", ylabel="estimated / published time")
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.yaxis.set_minor_locator(NullLocator())
    _label_gpu_counts(ax, sorted({count for cases in ratios.values() for count, _ in cases}))
    grey: dict[str, Any] = {"color": style.GREY, "linestyle": ""}
    by = [Line2D([], [], marker=mark, label=source, **grey) for source, mark in marks.items()]
    style.add_legend_above(ax, 3, [*style.legend_patches(colours), *by])
    return ax


def _label_gpu_counts(ax: Axes, counts: Sequence[int]) -> None:
    """Label an axis with numbers of GPUs instead of powers of ten."""
    ax.set_xticks(counts, [f"{count:,}" for count in counts])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_minor_locator(NullLocator())


def _add_note(ax: Axes, text: str) -> Axes:
    """Write the source of the numbers below the figure."""
    figure: Any = ax.figure
    figure.supxlabel(text, fontsize=7, color=style.GREY, x=0.99, ha="right")
    return ax
