"""Figures of one step, profiled or simulated: computation, communication, and what was exposed."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas
from matplotlib.axes import Axes

from labkit.plots import style
from labkit.runs.result import RunResult

BAR_COLOURS = style.PHASE_COLOURS | style.COLLECTIVE_COLOURS
LANES = ("compute", "communication")
# The width of a letter in a bar.
LETTER_WIDTH_POINTS = 5.5
# Bars that overlap by less than this count as consecutive.
TOUCHING_MS = 0.01


def timeline(
    result: RunResult, *, ax: Axes | None = None, ranks: Sequence[int] | None = None
) -> Axes:
    """Draw compute and communication of each rank over one step, exposed communication underlined.

    Operations that overlap in one lane share its height. Lines separate the ranks of different
    hosts, and the host's name is at its first rank.

    Args:
        result: a profiled or simulated run.
        ax: where to draw.
        ranks: the ranks to draw, by default all that ran.

    Raises:
        ValueError: the run recorded no timeline of one of these ranks.
    """
    bars = _bar_rows(result)
    shown = result.active_ranks if ranks is None else ranks
    missing = sorted(set(shown) - set(bars["rank"]))
    if missing:
        fix = "run the program with its option timeline=True"
        if result.is_simulated:
            fix = "simulate it for a hardware"
        raise ValueError(f"no timeline of ranks {missing}: {fix}")
    ax = style.make_axes(ax, 8.5, 1.3 + 1.1 * len(shown))
    # The names of bars are placed by their width in points, which needs the final limits.
    shown_bars = bars[bars["rank"].isin(shown)]
    ax.set_xlim(0, (shown_bars["start"] + shown_bars["length"]).max())
    labels = {}
    hosts, last_host = result.hosts or [""] * result.world_size, ""
    for position, rank in enumerate(shown):
        top, host = 2.4 * position, hosts[rank]
        labels[top], labels[top + 1] = f"rank {rank} {LANES[0]}", LANES[1]
        if host and host != last_host:
            labels[top] = f"{host}: {labels[top]}"
            if position:
                ax.axhline(top - 0.7, color=style.GREY, lw=0.8)
        last_host = host
        own = bars[bars["rank"] == rank]
        for lane, name in enumerate(LANES):
            drawn = own[own["lane"] == name]
            # Where the last name above this lane ends, ms.
            reach = 0.0
            for bar, (slot, slots) in zip(drawn.itertuples(), _overlap_slots(drawn), strict=True):
                upper = top + lane - 0.4 + 0.8 * slot / slots
                reach = _draw_bar(ax, bar, upper, 0.8 / slots, reach)
        waits = own[own["lane"] == "exposed"]
        spans = list(zip(waits["start"], waits["length"], strict=True))
        ax.broken_barh(spans, (top + 1.42, 0.14), color=style.EXPOSURE_COLOUR)
    ax.set(yticks=list(labels), yticklabels=list(labels.values()))
    ax.set_xlabel("time since each rank began its step, ms")
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(2.4 * len(shown) - 0.45, -0.6)
    exposed, step = ("exposed_communication", "profiled_step")
    if result.is_simulated:
        exposed, step = ("reckoned_exposed_s", "reckoned_step_s")
    means = result.summary().loc[list(shown)].mean(numeric_only=True)
    _add_legend(ax, set(bars["phase"]), means[exposed] / means[step])
    return style.add_stamp(ax, [result])


def communication_exposure(results: Mapping[str, RunResult], *, ax: Axes | None = None) -> Axes:
    """Draw hidden and exposed communication of the profiled step, the mean of the ranks, by run."""
    ax = style.make_axes(ax, height=1.1 + 0.5 * len(results))
    longest = 0.0
    for row, result in enumerate(results.values()):
        whole, open_ms, step_ms = _communication_ms(result)
        longest = max(longest, whole)
        ax.barh(row, open_ms, color=style.EXPOSURE_COLOUR, height=0.6)
        ax.barh(row, whole - open_ms, left=open_ms, color=style.SKY, height=0.6)
        text = f"  {open_ms:.0f} of {whole:.0f} ms exposed, {open_ms / step_ms:.0%} of the step"
        ax.text(whole, row, text, va="center", fontsize=9)
    ax.set(yticks=range(len(results)), yticklabels=list(results), xlim=(0, longest * 1.75))
    ax.set_xlabel("communication in one step, ms (mean of the ranks)")
    ax.invert_yaxis()
    colours = {"exposed": style.EXPOSURE_COLOUR, "hidden behind compute": style.SKY}
    style.add_legend_above(ax, 2, style.legend_patches(colours))
    return style.add_stamp(ax, results.values())


def _communication_ms(result: RunResult) -> tuple[float, ...]:
    """Return communication, its exposed part, and the step, in ms."""
    if result.is_simulated:
        parts = ("communication", "exposed", "step")
        return tuple(1000 * result.value(f"reckoned_{part}_s") for part in parts)
    return tuple(map(result.value, ("communication", "exposed_communication", "profiled_step")))


def _bar_rows(result: RunResult) -> pandas.DataFrame:
    bars = result.frame[result.frame["kind"] == "bar"]
    bars = bars.assign(start=bars["start_us"] / 1000, length=bars["dur_us"] / 1000)
    return bars.sort_values("start", kind="stable")


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


def _draw_bar(ax: Axes, bar: Any, top: float, height: float, taken: float) -> float:
    """Draw one bar and its name: inside where it fits, else, for an all-gather, above or below.

    Names above the lane reach up to ``taken``; return how far they reach now, in ms.
    """
    colour = BAR_COLOURS.get(bar.phase, style.GREY)
    look: dict[str, Any] = {"facecolors": colour, "edgecolor": "white", "linewidth": 0.4}
    ax.broken_barh([(bar.start, bar.length)], (top, height), **look)
    text, middle = bar.name.rpartition(".")[2], bar.start + bar.length / 2
    left, right = ax.get_xlim()
    a_point = (right - left) * ax.figure.dpi / 72 / ax.get_window_extent().width  # in ms
    if text and bar.length > (LETTER_WIDTH_POINTS * len(text) + 2) * a_point:
        tint = "white" if colour in (style.BLUE, style.GREEN) else "black"
        ax.text(middle, top + height / 2, text, fontsize=8, color=tint, **style.CENTRED)
    # Names of all-gathers are always shown, since they tell which unit is gathered.
    elif text and bar.phase == "all_gather":
        half = LETTER_WIDTH_POINTS * len(text) / 2 * a_point
        if middle - half >= taken:
            ax.text(middle, top, text, fontsize=7, **style.ON_TOP)
            return float(middle + half)
        ax.text(middle, top + height + 0.2, text, ha="center", va="top", fontsize=7)
    return taken


def _add_legend(ax: Axes, phases: set[str], share: float) -> None:
    shown = {}
    for phase, colour in BAR_COLOURS.items():
        if phase in phases:
            shown[phase.replace("_", "-")] = colour
    if phases - BAR_COLOURS.keys():
        shown["other"] = style.GREY
    shown[f"exposed: {share:.0%} of the step"] = style.EXPOSURE_COLOUR
    look: dict[str, Any] = {"fontsize": 8, "handlelength": 1.2, "columnspacing": 1.2}
    style.add_legend_above(ax, len(shown), style.legend_patches(shown), middle=0.45, **look)
