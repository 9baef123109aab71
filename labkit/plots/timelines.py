"""Figures of time: when each rank computed, communicated and waited, profiled or simulated."""

from collections.abc import Sequence
from typing import Any

import pandas
from matplotlib.axes import Axes

from labkit.plots import style
from labkit.plots.style import Runs
from labkit.runs.result import RunResult

BAR_COLOURS = style.PHASE_COLOURS | style.COLLECTIVE_COLOURS
LANES = ("compute", "communication")
# The width of a letter in a bar.
LETTER_WIDTH_POINTS = 5.5
# Bars that overlap by less than this count as consecutive.
TOUCHING_MS = 0.01
# From the rows of one rank to those of the next.
RANK_PITCH = 2.4


def timeline(
    result: RunResult, *, ax: Axes | None = None, ranks: Sequence[int] | None = None
) -> Axes:
    """Draw compute and communication of each rank over one step, exposed communication underlined.

    Operations that overlap in one lane share its height. Lines separate the ranks of different
    hosts, and the host's name is at its first rank. ``ranks`` are by default all that ran.
    """
    bars = _bars(result)
    shown = result.active_ranks if ranks is None else ranks
    missing = sorted(set(shown) - set(bars["rank"]))
    if missing:
        fix = "run the program with its option timeline=True"
        if result.is_simulated:
            fix = "simulate it for a hardware"
        raise ValueError(f"no timeline of ranks {missing}: {fix}")
    ax = style.make_axes(ax, 8.5, 1.3 + 1.1 * len(shown))
    # The names of bars are placed by their width in points, which needs the final limits.
    drawn = bars[bars["rank"].isin(shown)]
    ax.set_xlim(0, (drawn["start"] + drawn["length"]).max())
    labels = {}
    hosts, last_host = result.hosts or [""] * result.world_size, ""
    for position, rank in enumerate(shown):
        top, host = RANK_PITCH * position, hosts[rank]
        labels[top], labels[top + 1] = f"rank {rank} {LANES[0]}", LANES[1]
        if host and host != last_host:
            labels[top] = f"{host}: {labels[top]}"
            if position:
                ax.axhline(top - 0.7, color=style.GREY, lw=0.8)
        last_host = host
        own = bars[bars["rank"] == rank]
        _draw_rank(ax, own, top)
        if result.world_size == 1 and "communication" not in set(own["lane"]):
            said = " one rank sends nothing"
            ax.text(0, top + 1, said, va="center", fontsize="small", color=style.GREY)
    _finish_rows(ax, labels, len(shown))
    ax.set_xlabel("time since each rank began its step, ms")
    _, exposed_ms, step_ms = _communication_ms(result, shown)
    phases = set(bars["phase"])
    colours = {phase: colour for phase, colour in BAR_COLOURS.items() if phase in phases}
    if phases - BAR_COLOURS.keys():
        colours["other"] = style.GREY
    colours[f"exposed: {exposed_ms / step_ms:.0%} of the step"] = style.EXPOSURE_COLOUR
    look = style.SMALL_LEGEND | {"columnspacing": 1.2}
    style.add_legend_above(ax, len(colours), style.legend_patches(colours), middle=0.45, **look)
    return style.add_stamp(ax, [result])


def timelines_by_run(results: Runs, *, rank: int = 0, ax: Axes | None = None) -> Axes:
    """Draw one rank's step of each run on a common scale of time, one run below the other."""
    for result in results.values():
        if not ((result.frame["kind"] == "bar") & (result.frame["rank"] == rank)).any():
            raise ValueError(f"no timeline of rank {rank}: run it with its option timeline=True")
    ax = style.make_axes(ax, 8.5, 1.3 + 1.1 * len(results))
    steps = {}
    for label, result in results.items():
        bars = _bars(result)
        bars = bars[bars["rank"] == rank]
        # Where no unit is marked, as in a compiled graph, all would have the name of the whole.
        if set(bars.loc[bars["lane"] == "compute", "name"]) <= {"root", ""}:
            bars = bars.assign(name="")
        steps[label] = bars
    ends = {label: (bars["start"] + bars["length"]).max() for label, bars in steps.items()}
    # Room for the texts behind the longest step.
    ax.set_xlim(0, 1.13 * max(ends.values()))
    labels: dict[float, str] = {}
    for position, (label, bars) in enumerate(steps.items()):
        top = RANK_PITCH * position
        labels |= {top: label, top + 1: "messages"}
        _draw_rank(ax, bars, top)
        ax.text(ends[label], top, f" {ends[label]:.0f} ms", va="center", fontsize=9)
    _finish_rows(ax, labels, len(results))
    ax.set_xlabel(f"time since rank {rank} began its step, ms")
    phases = set().union(*(bars["phase"] for bars in steps.values()))
    colours = {phase: colour for phase, colour in BAR_COLOURS.items() if phase in phases}
    colours["exposed"] = style.EXPOSURE_COLOUR
    style.add_legend_above(ax, len(colours), style.legend_patches(colours), **style.SMALL_LEGEND)
    return style.add_stamp(ax, results.values())


def wait_times(result: RunResult, *, predicted_ms: float | None, ax: Axes | None = None) -> Axes:
    """Draw when each rank computed and when it waited in a collective.

    Its ranks reported ``steps``: for each step when it began, when the rank had computed, and when
    the collective was done, in seconds since a common start. ``predicted_ms`` is the predicted end
    of the last step, if there is a prediction.
    """
    ax = style.make_axes(ax, height=1.2 + 0.4 * result.world_size)
    predicted = [] if predicted_ms is None else [predicted_ms]
    colours = {"computes": style.BLUE, "waits in the all-reduce": style.EXPOSURE_COLOUR}
    last_ms = max(predicted, default=0.0)
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
    for each in predicted:
        ax.axvline(each, **style.PREDICTION_STYLE)
    # The texts need room to the right of the bars.
    ax.set(xlabel="time since the first step, ms", xlim=(0, 1.22 * last_ms))
    ax.set_yticks(range(result.world_size), [f"rank {rank.rank}" for rank in result.ranks])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    handles = [*style.legend_patches(colours)]
    handles += [style.prediction_handle("predicted end") for _ in predicted]
    style.add_legend_above(ax, len(handles), handles, middle=0.6)
    return style.add_stamp(ax, [result])


def _communication_ms(result: RunResult, ranks: Sequence[int]) -> list[float]:
    """Return communication, its exposed part, and the step, in ms, the mean of these ranks."""
    names, unit = ["communication", "exposed_communication", "profiled_step"], 1.0
    if result.is_simulated:
        names = ["reckoned_communication_s", "reckoned_exposed_s", "reckoned_step_s"]
        unit = 1000.0
    return list(unit * result.summary().loc[list(ranks), names].astype(float).mean())


def _bars(result: RunResult) -> pandas.DataFrame:
    """Return the bars of a profiled step in the order of time; start and length are in ms."""
    bars = result.frame[result.frame["kind"] == "bar"]
    bars = bars.assign(start=bars["start_us"] / 1000, length=bars["dur_us"] / 1000)
    return bars.sort_values("start", kind="stable")


def _draw_rank(ax: Axes, bars: pandas.DataFrame, top: float) -> None:
    """Draw both lanes of a rank, and underline what is exposed."""
    lanes = {name: each for name, each in bars.groupby("lane")}
    for row, name in enumerate(LANES):
        if name in lanes:
            _draw_lane(ax, lanes[name], top + row - 0.4)
    if "exposed" in lanes:
        spans = lanes["exposed"][["start", "length"]].to_numpy()
        # Without an edge, which would show parts of less than a pixel as wide.
        ax.broken_barh(spans, (top + 1.42, 0.14), facecolors=style.EXPOSURE_COLOUR, linewidth=0)


def _finish_rows(ax: Axes, labels: dict[float, str], count: int) -> None:
    """Name the lanes, of which ``count`` pairs stand one below the other."""
    ax.set(yticks=list(labels), yticklabels=list(labels.values()))
    ax.tick_params(axis="y", length=0)
    # From the top down: the first pair stands on top.
    ax.set_ylim(RANK_PITCH * count - 0.45, -0.6)


def _draw_lane(ax: Axes, bars: pandas.DataFrame, top: float) -> None:
    """Draw bars and their names: inside where they fit, else, for all-gathers, above or below."""
    left, right = ax.get_xlim()
    a_point = (right - left) * ax.figure.dpi / 72 / ax.get_window_extent().width  # in ms
    # Where the last names above and below this lane end, ms.
    reach = below = 0.0
    for bar, (slot, slots) in zip(bars.itertuples(), _overlap_slots(bars), strict=True):
        upper, height = top + 0.8 * slot / slots, 0.8 / slots
        colour = BAR_COLOURS.get(bar.phase, style.GREY)
        ax.broken_barh([(bar.start, bar.length)], (upper, height), fc=colour, ec="white", lw=0.4)
        text, middle = bar.name.rpartition(".")[2], bar.start + bar.length / 2
        half = LETTER_WIDTH_POINTS * len(text) / 2 * a_point
        if text and bar.length > 2 * (half + a_point):
            look: dict[str, Any] = {"fontsize": 8, **style.CENTRED}
            ax.text(middle, upper + height / 2, text, color=style.text_colour(colour), **look)
        # All-gathers too short for their names have them above the lane, else below or left of it.
        elif bar.phase == "all_gather" and middle - half >= reach:
            ax.text(middle, top, text, fontsize=7, **style.ON_TOP)
            reach = middle + half
        elif bar.phase == "all_gather" and (middle < half or middle - half >= below):
            place, side = (left, "right") if middle < half else (middle, "center")
            ax.text(place, top + 1.0, text, ha=side, va="top", fontsize=7)
            below = place + half * (side == "center")


def _overlap_slots(bars: pandas.DataFrame) -> list[tuple[int, int]]:
    """Return each bar's slot among those that run at the same time, and how many slots they use."""
    # The slots of the bars in each group of overlapping bars.
    groups: list[list[int]] = []
    # Where the last bar of each slot ends.
    ends: list[float] = []
    for start, length in zip(bars["start"], bars["length"], strict=True):
        free = [slot for slot, end in enumerate(ends) if end <= start + TOUCHING_MS]
        if len(free) == len(ends):
            groups.append([])
            free, ends = [], []
        slot = free[0] if free else len(ends)
        ends[slot : slot + 1] = [start + length]
        groups[-1].append(slot)
    return [(slot, max(group) + 1) for group in groups for slot in group]
