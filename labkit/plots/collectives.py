"""Figures of collectives: what ranks held before and after; what a message costs, and the same bytes in many."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator

from labkit.plots import style
from labkit.result import RunResult
from labkit.theory.collectives import AlphaBeta, fit
from labkit.theory.sizes import readable_bytes

SUM = "#4D4D4D"
DARK_ON = (style.ORANGE, style.PURPLE)
"""Colours on which white letters are hard to read."""


def held(
    result: RunResult, names: Mapping[str, str] | Sequence[str], *, axes: Sequence[Axes] | None = None
) -> Sequence[Axes]:
    """What each rank held before a collective and after it, one panel each; a number has the colour of its first owner.

    Args:
        result: a run whose ranks gave a dict with the numbers ``before`` and ``after``, under each name.
        names: those to draw; with titles, if they have any.
        axes: one for each.
    """
    titles = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    if axes is None:
        size = (3.5 * len(titles), 0.36 * result.world_size + 1.0)
        figure, grid = pyplot.subplots(1, len(titles), figsize=size, layout="constrained", squeeze=False)
        axes = list(grid[0])
        handles = [
            Patch(color=style.RANK_COLOURS[rank % 4], label=f"from rank {rank}") for rank in range(result.world_size)
        ]
        handles.append(Patch(color=SUM, label="sum over the ranks"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        held_by = [rank.gave[name] for rank in result.ranks]
        before, after = ([list(map(float, each[moment])) for each in held_by] for moment in ("before", "after"))
        owner = {number: rank for rank, numbers in enumerate(before) for number in numbers}
        width = max(map(len, before))
        for rank, (own, got) in enumerate(zip(before, after, strict=True)):
            ax.text(-0.15, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
            _cells(ax, own, owner, 0, rank)
            _cells(ax, got, owner, width + 1, rank)
        middle = len(before) / 2
        ax.annotate("", (width + 0.9, middle), (width + 0.1, middle), arrowprops={"arrowstyle": "->", "lw": 1.5})
        right = width + 1 + max(map(len, after))
        ax.text(width / 2, -0.15, "before", ha="center", va="bottom", fontsize=8, color=style.GREY)
        ax.text((width + 1 + right) / 2, -0.15, "after", ha="center", va="bottom", fontsize=8, color=style.GREY)
        ax.set(xlim=(-1.3, 9.1), ylim=(len(before) + 0.1, -0.8))
        ax.set_title(title, fontsize=10)
        ax.set_axis_off()
    return axes


def _cells(ax: Axes, numbers: Sequence[float], owner: Mapping[float, int], left: float, row: int) -> None:
    for column, number in enumerate(numbers):
        colour = style.RANK_COLOURS[owner[number] % 4] if number in owner else SUM
        look: dict[str, Any] = {"color": "black" if colour in DARK_ON else "white", "fontsize": 9}
        ax.add_patch(Rectangle((left + column, row), 1, 0.9, facecolor=colour, edgecolor="white"))
        ax.text(left + column + 0.5, row + 0.45, f"{number:g}", ha="center", va="center", **look)


def message_times(result: RunResult, kind: str = "message") -> pandas.Series:
    """What launch/all_reduce.py timed, in seconds: its fastest round, since whatever disturbs a round makes it slower.

    The ``kind`` is "message", by the bytes of a single message, or "pieces", by the number of messages.

    Raises:
        ValueError: the run timed no such thing.
    """
    return _rounds(result, kind).groupby(level=0).min()


def messages(result: RunResult, *, ax: Axes | None = None) -> Axes:
    """Time of one all-reduce against its size: every round, the fastest, and the line that fits these best."""
    ax = style.axes(ax)
    rounds, times = _rounds(result, "message"), message_times(result)
    line = fit(times.to_dict())
    sizes = list(times.index)
    ax.plot(rounds.index, rounds * 1e6, ".", color=style.GREY, alpha=0.4, markersize=4, label="each round")
    ax.plot(sizes, times * 1e6, "o", color=style.BLUE, label="fastest round")
    between = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)]
    ax.plot(
        between, [line.seconds(size) * 1e6 for size in between], color="black", lw=1.5, ls="--", label=_formula(line)
    )
    ax.axhline(line.alpha_s * 1e6, color=style.GREY, lw=1, ls=":")
    if sizes[0] < line.break_even_bytes < sizes[-1]:
        ax.axvline(line.break_even_bytes, color=style.GREY, lw=1, ls=":")
        text, box = f" α / β = {_size(line.break_even_bytes)}", {"color": "white", "pad": 1}
        ax.text(line.break_even_bytes, 0.93, text, transform=ax.get_xaxis_transform(), fontsize=9, bbox=box)
    ax.set(xscale="log", yscale="log", xlabel="size of one all-reduce", ylabel="time of one all-reduce, µs")
    ax.set_xticks(sizes, [_size(size) for size in sizes])
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    style.legend_above(ax, 3, middle=0.45)
    return style.stamp(ax, [result])


def pieces(result: RunResult, *, network: AlphaBeta | None = None, ax: Axes | None = None) -> Axes:
    """Time of the same bytes in one all-reduce and in many small ones: measured, and as alpha and beta predict.

    Those of ``network``, by default fitted to the times of the run's single messages.
    """
    ax = style.axes(ax)
    total, measured = int(result.params["total_bytes"]), message_times(result, "pieces")
    line = network or fit(message_times(result).to_dict())
    counts = list(measured.index)
    for column, (count, time_s) in enumerate(measured.items()):
        expected = line.seconds(total, messages=count)
        first = column == 0
        ax.bar(column, time_s * 1e3, 0.5, color=style.BLUE, label="measured, fastest round" if first else None)
        mark = "predicted: messages x α + bytes x β" if first else None
        ax.plot([column - 0.38, column + 0.38], [expected * 1e3] * 2, "k--", lw=1.5, label=mark)
        text = f"{time_s * 1e3:.1f} ({expected * 1e3:.1f})"
        place: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 9}
        ax.annotate(text, (column, max(time_s, expected) * 1e3), **place)
    ax.set_xticks(range(len(counts)), [f"{count} x {_size(total // count)}" for count in counts])
    ax.set(xlabel=f"how {_size(total)} are sent", ylabel="time (predicted in brackets), ms")
    ax.margins(y=0.12)
    style.legend_above(ax, 2)
    return style.stamp(ax, [result])


def _rounds(result: RunResult, kind: str) -> pandas.Series:
    """Seconds of each round, until the last rank is done, by what follows the kind in the span's name; in order."""
    spans = result.frame[(result.frame["kind"] == "span") & result.frame["name"].str.fullmatch(rf"{kind}_\d+")]
    if spans.empty:
        raise ValueError(f"this run of {result.info['program']} timed no {kind}: take a run of all_reduce")
    keys = spans["name"].str.partition("_")[2].astype(int)
    return (spans["dur_us"] / 1e6).groupby([keys, spans["step"]]).max().droplevel("step")


def _formula(line: AlphaBeta) -> str:
    return f"α + bytes x β, α = {line.alpha_s * 1e6:.0f} µs, β = {line.beta_s_per_byte * 1e12:.0f} µs a MB"


def _size(size: float) -> str:
    """Bytes in powers of 1024, in which the sizes are round."""
    return readable_bytes(size, base=1024)
