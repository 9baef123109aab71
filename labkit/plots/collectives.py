"""Figures of collectives: what ranks held before and after; what a message costs, and the same bytes in many."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator

from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory.collectives import AlphaBeta, fit_alpha_beta
from labkit.theory.sizes import readable_bytes

SUM_COLOUR, PARTIAL_SUM_COLOUR = "#4D4D4D", "#C4C4C4"
LIGHT_COLOURS = (style.ORANGE, style.PURPLE, PARTIAL_SUM_COLOUR)
"""Colours on which white letters are hard to read."""


def values_by_rank(
    result: RunResult,
    names: Mapping[str, str] | Sequence[str],
    *,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """What each rank held before a collective, after it, and at moments between: one panel each.

    A number has the colour of the rank that had it first. One that no rank had is a sum: over all ranks, if some rank
    holds it in the end, else over some.

    Args:
        result: a run whose ranks gave, under each name, a dict with the numbers that they held at each moment, such as
            ``{"before": …, "after": …}``.
        names: those to draw; with titles, if they have any.
        axes: one for each.
    """
    titles = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    panels = {name: [rank.reported[name] for rank in result.ranks] for name in titles}
    if axes is None:
        axes = _rank_panels(panels)
    for ax, (name, ranks) in zip(axes, panels.items(), strict=True):
        moments, left = list(ranks[0]), 0.0
        colours = _value_colours(
            [[_float_list(each[moment]) for moment in moments] for each in ranks]
        )
        for row in range(len(ranks)):
            ax.text(-0.15, row + 0.45, f"rank {row}", ha="right", va="center", fontsize=9)
        for moment in moments:
            if left:
                arrow = {"arrowstyle": "->", "lw": 1.5}
                ax.annotate(
                    "", (left - 0.1, len(ranks) / 2), (left - 0.9, len(ranks) / 2), arrowprops=arrow
                )
            for row, each in enumerate(ranks):
                _draw_cells(ax, _float_list(each[moment]), colours, left, row)
            width = len(_float_list(ranks[0][moment]))
            ax.text(
                left + width / 2,
                -0.15,
                moment,
                ha="center",
                va="bottom",
                fontsize=8,
                color="#666666",
            )
            left += width + 1
        ax.set(xlim=(-1.3, left - 0.9), ylim=(len(ranks) + 0.1, -0.8))
        ax.set_title(titles[name], fontsize=10)
        ax.set_axis_off()
    return axes


def _rank_panels(panels: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Axes]:
    """Axes in one line, each as wide as what it will show, below them a legend."""
    widths = [
        sum(len(_float_list(each)) + 1 for each in ranks[0].values()) + 1.3
        for ranks in panels.values()
    ]
    ranks = len(next(iter(panels.values())))
    look: dict[str, Any] = {"width_ratios": widths, "squeeze": False, "layout": "constrained"}
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(0.36 * sum(widths), 0.36 * ranks + 1.0), **look
    )
    shades = {f"from rank {rank}": style.RANK_COLOURS[rank % 4] for rank in range(ranks)}
    shades["sum over all ranks"] = SUM_COLOUR
    if any(len(moments) > 2 for moments, *_ in panels.values()):
        shades["over some"] = PARTIAL_SUM_COLOUR
    handles = [Patch(color=colour, label=label) for label, colour in shades.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8
    )
    return list(grid[0])


def _value_colours(ranks: Sequence[Sequence[Sequence[float]]]) -> dict[float, str]:
    """The colour of each number, from what each rank held at each moment."""
    every = {
        number: PARTIAL_SUM_COLOUR for moments in ranks for numbers in moments for number in numbers
    }
    in_the_end = {number: SUM_COLOUR for moments in ranks for number in moments[-1]}
    first = {
        number: style.RANK_COLOURS[rank % 4]
        for rank, moments in enumerate(ranks)
        for number in moments[0]
    }
    return every | in_the_end | first


def _float_list(values: Any) -> list[float]:
    return [float(value) for value in values]


def _draw_cells(
    ax: Axes, numbers: Sequence[float], colours: Mapping[float, str], left: float, row: int
) -> None:
    for column, number in enumerate(numbers):
        colour = colours[number]
        text = f"{number:g}"
        size = 9 if len(text) < 4 else 7.5  # of a box as wide as three digits and a little
        look: dict[str, Any] = {
            "color": "black" if colour in LIGHT_COLOURS else "white",
            "fontsize": size,
        }
        ax.add_patch(Rectangle((left + column, row), 1, 0.9, facecolor=colour, edgecolor="white"))
        ax.text(left + column + 0.5, row + 0.45, text, ha="center", va="center", **look)


def all_reduce_rounds(result: RunResult, kind: str = "message") -> pandas.Series:
    """What launch/all_reduce.py timed, in seconds: every round until the last rank is done, in order of the sizes.

    The ``kind`` is "message", by the bytes of a single message, or "pieces", by the number of messages.

    Raises:
        ValueError: the run timed no such thing.
    """
    spans = result.frame[
        (result.frame["kind"] == "span") & result.frame["name"].str.fullmatch(rf"{kind}_\d+")
    ]
    if spans.empty:
        raise ValueError(
            f"this run of {result.info['program']} timed no {kind}: take a run of all_reduce"
        )
    keys = spans["name"].str.partition("_")[2].astype(int)
    return (spans["dur_us"] / 1e6).groupby([keys, spans["step"]]).max().droplevel("step")


def fastest_all_reduce_times(result: RunResult, kind: str = "message") -> pandas.Series:
    """The fastest of ``message_rounds``, since whatever disturbs a round makes it slower."""
    return all_reduce_rounds(result, kind).groupby(level=0).min()


def all_reduce_time_by_size(result: RunResult, *, ax: Axes | None = None) -> Axes:
    """Time of one all-reduce against its size: every round, the fastest, and the line that fits these best."""
    ax = style.make_axes(ax)
    rounds, times = all_reduce_rounds(result), fastest_all_reduce_times(result)
    line = fit_alpha_beta(times.to_dict())
    sizes = list(times.index)
    ax.plot(
        rounds.index,
        rounds * 1e6,
        ".",
        color=style.GREY,
        alpha=0.4,
        markersize=4,
        label="each round",
    )
    ax.plot(sizes, times * 1e6, "o", color=style.BLUE, label="fastest round")
    between = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)]
    ax.plot(
        between,
        [line.seconds(size) * 1e6 for size in between],
        label=_alpha_beta_text(line),
        **style.PREDICTION_STYLE,
    )
    ax.axhline(line.alpha_s * 1e6, color=style.GREY, lw=1, ls=":")
    if sizes[0] < line.break_even_bytes < sizes[-1]:
        ax.axvline(line.break_even_bytes, color=style.GREY, lw=1, ls=":")
        text, box = f" α / β = {_size_text(line.break_even_bytes)}", {"color": "white", "pad": 1}
        ax.text(
            line.break_even_bytes,
            0.93,
            text,
            transform=ax.get_xaxis_transform(),
            fontsize=9,
            bbox=box,
        )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="size of one all-reduce",
        ylabel="time of one all-reduce, µs",
    )
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
    typical: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Time of the same bytes in one all-reduce and in many small ones: measured, and as alpha and beta predict.

    Those of ``network``, by default fitted to the times of the run's single messages. What was measured is the fastest
    round; where ``typical``, the median one.
    """
    ax = style.make_axes(ax)
    rounds = all_reduce_rounds(result, "pieces").groupby(level=0)
    total, measured = (
        int(result.params["total_bytes"]),
        rounds.median() if typical else rounds.min(),
    )
    line = network or fit_alpha_beta(fastest_all_reduce_times(result).to_dict())
    counts, which = list(measured.index), "median" if typical else "fastest"
    for column, (count, time_s) in enumerate(measured.items()):
        expected = line.seconds(total, messages=count)
        first = column == 0
        ax.bar(
            column,
            time_s * 1e3,
            0.5,
            color=style.BLUE,
            label=f"measured, {which} round" if first else None,
        )
        mark = "predicted: messages x α + bytes x β" if first else None
        ax.plot(
            [column - 0.38, column + 0.38],
            [expected * 1e3] * 2,
            label=mark,
            **style.PREDICTION_STYLE,
        )
        text = f"{time_s * 1e3:.1f} ({expected * 1e3:.1f})"
        place: dict[str, Any] = {
            "xytext": (0, 3),
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": 9,
        }
        ax.annotate(text, (column, max(time_s, expected) * 1e3), **place)
    ax.set_xticks(
        range(len(counts)), [f"{count} x {_size_text(total // count)}" for count in counts]
    )
    ax.set(xlabel=f"how {_size_text(total)} are sent", ylabel="time (predicted in brackets), ms")
    ax.margins(y=0.12)
    style.add_legend_above(ax, 2)
    return style.add_stamp(ax, [result])


def communication_break_even(
    panels: Mapping[str, tuple[float, Mapping[str, float]]],
    *,
    batches: Mapping[str, float] | None = None,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """What a step's arithmetic takes, by the tokens of a rank, beside what its messages take; all of it predicted.

    A dot, with its number of tokens, stands where the two take equally long.

    Args:
        panels: for each machine's name, seconds of arithmetic for one token; seconds of the messages, by a label.
        batches: by a machine's name, the tokens that a rank has there; a dotted line.
        axes: one for each machine.
    """
    axes = style.make_panels(axes, panels, width=4.8, height=3.4)
    for ax, (name, (a_token_s, messages_s)) in zip(axes, panels.items(), strict=True):
        equal = {label: seconds / a_token_s for label, seconds in messages_s.items()}
        batch = (batches or {}).get(name)
        tokens = [min(equal.values()) / 8, max(8 * max(equal.values()), 2 * (batch or 0))]
        ax.plot(
            tokens,
            [each * a_token_s * 1e3 for each in tokens],
            **style.PREDICTION_STYLE | {"color": style.BLUE},
        )
        ax.text(
            tokens[1],
            tokens[1] * a_token_s * 1e3,
            "computing",
            ha="right",
            va="bottom",
            color=style.BLUE,
        )
        for (label, seconds), colour in zip(
            messages_s.items(), (style.VERMILION, style.GREEN), strict=False
        ):
            ax.plot(tokens, [seconds * 1e3] * 2, **style.PREDICTION_STYLE | {"color": colour})
            ax.text(tokens[0], seconds * 1e3, label, va="bottom", fontsize=9, color=colour)
            ax.plot(equal[label], seconds * 1e3, "o", color=colour)
            number = f"{equal[label]:,.0f}" if equal[label] >= 100 else f"{equal[label]:.2g}"
            ax.annotate(number, (equal[label], seconds * 1e3), (5, -12), textcoords="offset points")
        if batch:
            ax.axvline(batch, color=style.GREY, lw=1, ls=":")
            ax.text(
                batch,
                0.02,
                f"batch: {batch:,.0f} ",
                transform=ax.get_xaxis_transform(),
                ha="right",
                fontsize=9,
            )
        ax.set(
            xscale="log",
            yscale="log",
            xlabel="tokens of a rank in a step",
            ylabel="predicted time, ms",
        )
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_major_formatter("{x:,g}")
        ax.yaxis.set_minor_formatter(
            ""
        )  # on a short axis matplotlib would write powers between the numbers
    return axes


def _alpha_beta_text(line: AlphaBeta) -> str:
    return f"α + bytes x β, α = {line.alpha_s * 1e6:.0f} µs, β = {line.beta_s_per_byte * 1e12:.0f} µs a MB"


def _size_text(size: float) -> str:
    """Bytes in powers of 1024, in which the sizes are round."""
    return readable_bytes(size, base=1024)
