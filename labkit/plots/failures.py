"""Figures of runs that go wrong: waiting ranks, values by step, and the cost of debugging."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from labkit.plots import style
from labkit.runs.result import RunResult

# Dashed lines are reserved for predictions.
LINE_STYLES = ("-", "-", "-.", ":", "-", ":")
LINE_COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.ORANGE, "black")


def wait_times(
    result: RunResult,
    *,
    predicted_ms: float | None = None,
    title: str = "",
    ax: Axes | None = None,
    key: bool = True,
) -> Axes:
    """Draw when each rank computed and when it waited in a collective.

    Args:
        result: a run whose ranks reported ``steps``: for each step when it began, when the rank
            had computed, and when the collective was done, in seconds since a common start.
        predicted_ms: the predicted end of the last step, a dashed line.
        title: above the axes.
        ax: where to draw.
        key: draw a legend.
    """
    ax = style.make_axes(ax, height=1.2 + 0.4 * result.world_size)
    last = 0.0
    for rank in result.ranks:
        waited = computed = 0.0
        place = (rank.rank - 0.35, 0.7)
        for begun, ready, done in rank.reported["steps"]:
            computed += ready - begun
            waited += done - ready
            last = max(last, done)
            ax.broken_barh([(begun * 1e3, (ready - begun) * 1e3)], place, facecolors=style.BLUE)
            wait = (ready * 1e3, (done - ready) * 1e3)
            ax.broken_barh([wait], place, facecolors=style.EXPOSURE_COLOUR)
        text = f"  waited {waited / (waited + computed):.0%}"
        ax.text(done * 1e3, rank.rank, text, va="center", fontsize=9)
    if predicted_ms is not None:
        ax.axvline(predicted_ms, **style.PREDICTION_STYLE)
    ax.set(xlabel="time since the first step, ms")
    ax.set_xlim(0, max(last * 1e3, predicted_ms or 0) * 1.22)
    ax.set_yticks(range(result.world_size), [f"rank {rank.rank}" for rank in result.ranks])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    if title:
        ax.set_title(title, fontsize=10, loc="left")
    if key:
        colours = {"computes": style.BLUE, "waits in the all-reduce": style.EXPOSURE_COLOUR}
        handles = style.legend_patches(colours)
        if predicted_ms is not None:
            handles += ax.plot([], [], label="predicted end", **style.PREDICTION_STYLE)
        style.add_legend_above(ax, 3, handles, middle=0.6)
    return style.add_stamp(ax, [result])


def values_by_step(
    curves: Mapping[str, Sequence[float]],
    result: RunResult,
    *,
    ylabel: str,
    log: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw values by training step, one line per label; a logarithmic axis leaves out zeros."""
    ax = style.make_axes(ax)
    for index, (label, values) in enumerate(curves.items()):
        shown = [value if value > 0 or not log else float("nan") for value in values]
        colour, line = (
            LINE_COLOURS[index % len(LINE_COLOURS)],
            LINE_STYLES[index % len(LINE_STYLES)],
        )
        label += "" if any(values) else " (0 everywhere)"
        ax.plot(range(1, len(shown) + 1), shown, label=label, color=colour, ls=line, lw=1.8)
    ax.set(xlabel="training step", ylabel=ylabel, yscale="log" if log else "linear")
    ax.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return style.add_stamp(ax, [result])


def debug_costs(step_ms: Mapping[str, float], result: RunResult, *, ax: Axes | None = None) -> Axes:
    """Draw the time of a step with each debugging aid; the first bar is the step without any."""
    ax = style.make_axes(ax, height=1.0 + 0.45 * len(step_ms))
    plain = next(iter(step_ms.values()))
    for row, duration in enumerate(step_ms.values()):
        ax.barh(row, duration, color=style.BLUE if row else style.GREY, height=0.6)
        text = f"  {duration:.2g} ms" + (f", {duration / plain:.2g} ×" if row else "")
        ax.text(duration, row, text, va="center", fontsize=9)
    ax.set_yticks(range(len(step_ms)), list(step_ms))
    ax.set(xlim=(0, max(step_ms.values()) * 1.4))
    ax.set_xlabel("time of one step, ms (fastest round of the slowest rank)")
    ax.invert_yaxis()
    return style.add_stamp(ax, [result])
