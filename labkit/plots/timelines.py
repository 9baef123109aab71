"""Figures of one step, profiled or reckoned: what each rank computed and sent when, and what of it was exposed."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.plots import style
from labkit.runs.result import RunResult

BAR_COLOURS = style.PHASE_COLOURS | style.COLLECTIVE_COLOURS
LANES = ("compute", "communication")
EXPOSURE_VALUE_NAMES = {
    False: ("exposed_communication", "profiled_step"),
    True: ("reckoned_exposed_s", "reckoned_step_s"),
}
"""What is exposed and the whole step, by whether the run was simulated."""
LETTER_WIDTH_POINTS = 5.5  # width of a letter in a bar
TOUCHING_MS = 0.01  # bars that overlap by less follow one another


def timeline(
    result: RunResult, *, ax: Axes | None = None, ranks: Sequence[int] | None = None
) -> Axes:
    """Two rows a rank, compute and communication, over one step; exposed communication is underlined.

    What runs at the same time stands one above the other. All ``ranks`` that ran are shown by default. A line parts
    those of one host from those of another, and its first rank has its name.

    Raises:
        ValueError: the run recorded no timeline of one of these ranks.
    """
    bars = _bar_rows(result)
    shown = result.active_ranks if ranks is None else ranks
    missing = sorted(set(shown) - set(bars["rank"]))
    if missing:
        fix = (
            "simulate it for a hardware"
            if result.is_simulated
            else "run the program with its option timeline=True"
        )
        raise ValueError(f"no timeline of ranks {missing}: {fix}")
    ax = style.make_axes(ax, 8.5, 1.3 + 1.1 * len(shown))
    shown_bars = bars[bars["rank"].isin(shown)]
    ax.set_xlim(0, (shown_bars["start"] + shown_bars["length"]).max())
    labels = {}
    hosts = result.hosts or [""] * result.world_size
    for position, rank in enumerate(shown):
        begins = bool(hosts[rank]) and (position == 0 or hosts[rank] != hosts[shown[position - 1]])
        if begins and position:
            ax.axhline(2.4 * position - 0.7, color=style.GREY, lw=0.8)
        for lane, name in enumerate(LANES):
            row = 2.4 * position + lane
            labels[row] = f"rank {rank} {name}" if lane == 0 else name
            if begins and lane == 0:
                labels[row] = f"{hosts[rank]}: {labels[row]}"
            drawn = bars[(bars["rank"] == rank) & (bars["lane"] == name)]
            above = 0.0  # how far the row of names above it reaches, ms
            for bar, (slot, slots) in zip(drawn.itertuples(), _overlap_slots(drawn), strict=True):
                above = _draw_bar(ax, bar, row - 0.4 + 0.8 * slot / slots, 0.8 / slots, above)
        waits = bars[(bars["rank"] == rank) & (bars["lane"] == "exposed")]
        ax.broken_barh(
            list(zip(waits["start"], waits["length"], strict=True)),
            (row + 0.42, 0.14),
            color=style.EXPOSURE_COLOUR,
        )
    ax.set(
        yticks=list(labels),
        yticklabels=list(labels.values()),
        xlabel="time since each rank began its step, ms",
    )
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(2.4 * len(shown) - 0.45, -0.6)
    open_name, whole_name = EXPOSURE_VALUE_NAMES[result.is_simulated]
    ranks_shown = result.summary().loc[list(shown)]
    _add_legend(
        ax, set(bars["phase"]), ranks_shown[open_name].mean() / ranks_shown[whole_name].mean()
    )
    return style.add_stamp(ax, [result])


def communication_exposure(results: Mapping[str, RunResult], *, ax: Axes | None = None) -> Axes:
    """Communication of the profiled step, split into hidden and exposed, one bar a run; the mean of its ranks."""
    ax = style.make_axes(ax, height=1.1 + 0.5 * len(results))
    for row, result in enumerate(results.values()):
        whole, open_ms, step_ms = _communication_ms(result)
        kinds = ("exposed", "hidden behind compute") if row == 0 else (None, None)
        ax.barh(row, open_ms, color=style.EXPOSURE_COLOUR, height=0.6, label=kinds[0])
        ax.barh(row, whole - open_ms, left=open_ms, color=style.SKY, height=0.6, label=kinds[1])
        text = f"  {open_ms:.0f} of {whole:.0f} ms exposed, {open_ms / step_ms:.0%} of the step"
        ax.text(whole, row, text, va="center", fontsize=9)
    longest = max(_communication_ms(result)[0] for result in results.values())
    ax.set(yticks=range(len(results)), yticklabels=list(results), xlim=(0, longest * 1.75))
    ax.set_xlabel("communication in one step, ms (mean of the ranks)")
    ax.invert_yaxis()
    style.add_legend_above(ax, 2)
    return style.add_stamp(ax, results.values())


def _communication_ms(result: RunResult) -> tuple[float, ...]:
    """Communication, what of it was exposed, and the step, in ms: reckoned of a simulation, else profiled."""
    if result.is_simulated:
        return tuple(
            1000 * result.value(f"reckoned_{part}_s")
            for part in ("communication", "exposed", "step")
        )
    return tuple(map(result.value, ("communication", "exposed_communication", "profiled_step")))


def _bar_rows(result: RunResult) -> pandas.DataFrame:
    """One row a bar: rank, lane, phase, name; start and length in ms."""
    bars = result.frame[result.frame["kind"] == "bar"]
    bars = bars.assign(start=bars["start_us"] / 1000, length=bars["dur_us"] / 1000)
    return bars.sort_values("start", kind="stable")


def _overlap_slots(bars: pandas.DataFrame) -> list[tuple[int, int]]:
    """Where each bar stands among those that run at the same time: its place from the top, and how many there are."""
    places: list[list[int]] = []  # of bars that touch in time, one list for each such group
    ends: list[float] = []  # of the last bar in each place
    for start, length in zip(bars["start"], bars["length"], strict=True):
        if all(end <= start + TOUCHING_MS for end in ends):
            places.append([])
            ends = []
        place = next(
            (place for place, end in enumerate(ends) if end <= start + TOUCHING_MS), len(ends)
        )
        ends[place : place + 1] = [start + length]
        places[-1].append(place)
    return [(place, max(group) + 1) for group in places for place in group]


def _draw_bar(ax: Axes, bar: Any, top: float, height: float, taken: float) -> float:
    """One bar, with the last part of its name if it fits in; beside it, if it is an all-gather.

    That is above it, or below where the names above reach up to ``taken``. Gives back how far they reach now.
    """
    colour = BAR_COLOURS.get(bar.phase, style.GREY)
    ax.broken_barh(
        [(bar.start, bar.length)],
        (top, height),
        facecolors=colour,
        edgecolor="white",
        linewidth=0.4,
    )
    text, middle = bar.name.rpartition(".")[2], bar.start + bar.length / 2
    a_point = bar.length / _length_in_points(ax, bar.length)  # in ms
    if text and bar.length > (LETTER_WIDTH_POINTS * len(text) + 2) * a_point:
        tint = "white" if colour in (style.BLUE, style.GREEN) else "black"
        ax.text(middle, top + height / 2, text, ha="center", va="center", fontsize=8, color=tint)
    elif text and bar.phase == "all_gather":  # what a unit is gathered with says which unit it is
        half = LETTER_WIDTH_POINTS * len(text) / 2 * a_point
        if middle - half >= taken:
            ax.text(middle, top, text, ha="center", va="bottom", fontsize=7)
            return float(middle + half)
        ax.text(middle, top + height + 0.2, text, ha="center", va="top", fontsize=7)
    return taken


def _length_in_points(ax: Axes, length: float) -> float:
    """A time of the axis, in points of the figure."""
    left, right = ax.get_xlim()
    return float(ax.get_window_extent().width * 72 / ax.figure.dpi * length / (right - left))


def _add_legend(ax: Axes, phases: set[str], share: float) -> None:
    shown = {
        phase.replace("_", "-"): colour for phase, colour in BAR_COLOURS.items() if phase in phases
    }
    shown |= {"other": style.GREY} if phases - BAR_COLOURS.keys() else {}
    patches = [Patch(color=colour, label=label) for label, colour in shown.items()]
    patches.append(Patch(color=style.EXPOSURE_COLOUR, label=f"exposed: {share:.0%} of the step"))
    style.add_legend_above(
        ax, len(patches), patches, middle=0.45, fontsize=8, handlelength=1.2, columnspacing=1.2
    )
