"""Figures of runs that go wrong: waiting ranks, values by step, and the cost of debugging."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from labkit.plots import style
from labkit.plots.style import Numbers
from labkit.runs.result import RunResult

# Dashed lines are reserved for predictions.
LINES = (
    (style.BLUE, "-"),
    (style.VERMILION, "-"),
    (style.GREEN, "-."),
    (style.PURPLE, ":"),
    (style.ORANGE, "-"),
    ("black", ":"),
)


def wait_times(result: RunResult, *, predicted_ms: float, ax: Axes | None = None) -> Axes:
    """Draw when each rank computed and when it waited in a collective.

    Its ranks reported ``steps``: for each step when it began, when the rank had computed, and when
    the collective was done, in seconds since a common start. ``predicted_ms`` is the predicted end
    of the last step.
    """
    ax = style.make_axes(ax, height=1.2 + 0.4 * result.world_size)
    colours = {"computes": style.BLUE, "waits in the all-reduce": style.EXPOSURE_COLOUR}
    last_ms = predicted_ms
    for rank in result.ranks:
        steps = [[1e3 * second for second in step] for step in rank.reported["steps"]]
        computes = [(begun, ready - begun) for begun, ready, _ in steps]
        waits = [(ready, done - ready) for _, ready, done in steps]
        for spans, colour in zip((computes, waits), colours.values(), strict=True):
            ax.broken_barh(spans, (rank.rank - 0.35, 0.7), facecolors=colour)
        waited, computed = (sum(length for _, length in spans) for spans in (waits, computes))
        end = steps[-1][-1]
        text = f"  waited {waited / (waited + computed):.0%}"
        ax.text(end, rank.rank, text, va="center", fontsize=9)
        last_ms = max(last_ms, end)
    ax.axvline(predicted_ms, **style.PREDICTION_STYLE)
    ax.set(xlabel="time since the first step, ms", xlim=(0, 1.22 * last_ms))
    ax.set_yticks(range(result.world_size), [f"rank {rank.rank}" for rank in result.ranks])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    handles = [*style.legend_patches(colours), style.prediction_handle("predicted end")]
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
        colour, line = LINES[index % len(LINES)]
        label += "" if any(values) else " (0 everywhere)"
        ax.plot(range(1, len(shown) + 1), shown, label=label, color=colour, ls=line, lw=1.8)
    ax.set(xlabel="training step", ylabel=ylabel, yscale="log" if log else "linear")
    ax.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return style.add_stamp(ax, [result])


def debug_costs(step_ms: Numbers, result: RunResult, *, ax: Axes | None = None) -> Axes:
    """Draw the time of a step with each debugging aid; the first bar is the step without any."""
    ax = style.make_axes(ax, height=1.0 + 0.45 * len(step_ms))
    (first, plain), *others = step_ms.items()
    rows = {first: {"plain": plain}} | {label: {"aid": took} for label, took in others}
    texts = [f"{plain:.2g} ms", *(f"{took:.2g} ms, {took / plain:.2g} ×" for _, took in others)]
    style.draw_rows(ax, rows, {"plain": style.GREY, "aid": style.BLUE}, texts)
    ax.set(xlim=(0, max(step_ms.values()) * 1.4))
    ax.set_xlabel("time of one step, ms (fastest round of the slowest rank)")
    return style.add_stamp(ax, [result])
