"""Figures of what messages cost: time against size, and the same bytes in one message and in many."""

import pandas
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from labkit.plots import style
from labkit.result import RunResult
from labkit.theory.collectives import AlphaBeta, fit
from labkit.theory.sizes import readable_bytes


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
    ax.plot(between, [line.seconds(size) * 1e6 for size in between], color=style.ORANGE, lw=2, label=_formula(line))
    ax.axhline(line.alpha_s * 1e6, color=style.ORANGE, lw=1, ls=":")
    if sizes[0] < line.break_even_bytes < sizes[-1]:
        ax.axvline(line.break_even_bytes, color=style.ORANGE, lw=1, ls=":")
        text, box = f" α / β = {_size(line.break_even_bytes)}", {"color": "white", "pad": 1}
        ax.text(line.break_even_bytes, 0.93, text, transform=ax.get_xaxis_transform(), fontsize=9, bbox=box)
    ax.set(xscale="log", yscale="log", xlabel="size of one all-reduce", ylabel="time of one all-reduce, µs")
    ax.set_xticks(sizes, [_size(size) for size in sizes])
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    style.legend_above(ax, 3, middle=0.45)
    return style.stamp(ax, [result])


def pieces(result: RunResult, *, ax: Axes | None = None) -> Axes:
    """Time of the same bytes in one all-reduce and in many small ones, measured and as the fit predicts."""
    ax = style.axes(ax)
    total, measured = int(result.params["total_bytes"]), message_times(result, "pieces")
    line = fit(message_times(result).to_dict())
    counts = list(measured.index)
    predicted = [line.seconds(total, messages=count) for count in counts]
    for label, times, offset, colour in (
        ("predicted: messages x α + bytes x β", predicted, -0.2, style.GREY),
        ("measured, fastest round", measured, 0.2, style.BLUE),
    ):
        for column, time_s in enumerate(times):
            name = label if column == 0 else None
            ax.bar(column + offset, time_s * 1e3, width=0.36, color=colour, label=name)
            ax.text(column + offset, time_s * 1e3, f"{time_s * 1e3:.1f}", ha="center", va="bottom", fontsize=9)
    ax.set_xticks(range(len(counts)), [f"{count} x {_size(total // count)}" for count in counts])
    ax.set(xlabel=f"how {_size(total)} are sent", ylabel="time, ms")
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
