"""Figures of runs that go wrong: who waits for whom, numbers by step, and what aids to debugging cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.plots import style
from labkit.runs.result import RunResult

LINE_STYLES = ("-", "-", "-.", ":", "-", ":")  # dashed is for predictions
LINE_COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.ORANGE, "black")


def wait_times(
    result: RunResult,
    *,
    predicted_ms: float | None = None,
    title: str = "",
    ax: Axes | None = None,
    key: bool = True,
) -> Axes:
    """A line a rank: when it computed, and when it waited in a collective.

    Args:
        result: of a run whose ranks gave ``steps``: for each step when it began, when the rank had computed, and when
            the collective was done, in seconds of a common beginning.
        predicted_ms: where a dashed line says that the last step should end.
        title: above the axes.
        ax: see ``plots``.
        key: draw a legend.
    """
    ax = style.make_axes(ax, height=1.2 + 0.4 * result.world_size)
    last = 0.0
    for rank in result.ranks:
        waited = computed = 0.0
        for begun, ready, done in rank.reported["steps"]:
            for start, end, colour in (
                (begun, ready, style.BLUE),
                (ready, done, style.EXPOSURE_COLOUR),
            ):
                ax.broken_barh(
                    [(start * 1e3, (end - start) * 1e3)], (rank.rank - 0.35, 0.7), facecolors=colour
                )
            computed, waited, last = (
                computed + ready - begun,
                waited + done - ready,
                max(last, done),
            )
        share = waited / (waited + computed)
        ax.text(done * 1e3, rank.rank, f"  waited {share:.0%}", va="center", fontsize=9)
    if predicted_ms is not None:
        ax.axvline(predicted_ms, **style.PREDICTION_STYLE)
    ax.set(
        xlabel="time since the first step, ms", xlim=(0, max(last * 1e3, predicted_ms or 0) * 1.22)
    )
    ax.set_yticks(range(result.world_size), [f"rank {rank.rank}" for rank in result.ranks])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    if title:
        ax.set_title(title, fontsize=10, loc="left")
    if key:
        handles: list[Any] = [
            Patch(color=style.BLUE, label="computes"),
            Patch(color=style.EXPOSURE_COLOUR, label="waits in the all-reduce"),
        ]  # fmt: skip
        handles += (
            ax.plot([], [], label="predicted end", **style.PREDICTION_STYLE)
            if predicted_ms is not None
            else []
        )
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
    """Numbers by training step, one line a label, later ones on top; on a logarithmic axis, zeros are left out."""
    ax = style.make_axes(ax)
    for index, (label, values) in enumerate(curves.items()):
        shown = [value if value > 0 or not log else float("nan") for value in values]
        look: dict[str, Any] = {
            "color": LINE_COLOURS[index % len(LINE_COLOURS)],
            "ls": LINE_STYLES[index % len(LINE_STYLES)],
            "lw": 1.8,
        }
        label += "" if any(values) else " (0 everywhere)"
        ax.plot(range(1, len(shown) + 1), shown, label=label, **look)
    ax.set(xlabel="training step", ylabel=ylabel, yscale="log" if log else "linear")
    ax.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return style.add_stamp(ax, [result])


def debug_costs(step_ms: Mapping[str, float], result: RunResult, *, ax: Axes | None = None) -> Axes:
    """Time of a step with each aid, one bar each; the first is the step without any."""
    ax = style.make_axes(ax, height=1.0 + 0.45 * len(step_ms))
    plain = next(iter(step_ms.values()))
    for row, duration in enumerate(step_ms.values()):
        ax.barh(row, duration, color=style.BLUE if row else style.GREY, height=0.6)
        text = f"  {duration:.2g} ms" + (f", {duration / plain:.2g} ×" if row else "")
        ax.text(duration, row, text, va="center", fontsize=9)
    ax.set(
        yticks=range(len(step_ms)), yticklabels=list(step_ms), xlim=(0, max(step_ms.values()) * 1.4)
    )
    ax.set_xlabel("time of one step, ms (fastest round of the slowest rank)")
    ax.invert_yaxis()
    return style.add_stamp(ax, [result])
