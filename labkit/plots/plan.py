"""Figures of plans: how long each way to train takes, against the memory that it needs."""

from collections.abc import Mapping
from typing import Any

import pandas
from matplotlib.axes import Axes

from labkit.plots import style

GIB = 2**30
COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.VERMILION, style.SKY)
MARKS = "osD^vP"
BESIDE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "va": "top"}


def candidates(
    frame: pandas.DataFrame,
    budget_bytes: float,
    *,
    marks: str = "",
    words: Mapping[int, str] | None = None,
    chosen: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Step time against needed memory, a mark for each candidate: filled where it fits, the budget a dashed line.

    Args:
        frame: rows of ``labkit.Plan.frame``, of one kind of hosts and one number of ranks.
        budget_bytes: what a rank may take.
        marks: the column whose values have marks and colours of their own.
        words: what stands beside a mark, by the number of its candidate.
        chosen: the number of the candidate with a ring around it.
        ax: where to draw.
    """
    ax = style.axes(ax)
    rows = frame[frame["step_s"].notna()]
    unit, size = style.time_unit(rows["step_s"].min())
    for place, value in enumerate(dict.fromkeys(rows[marks]) if marks else [""]):
        colour = COLOURS[place % len(COLOURS)]
        look: dict[str, Any] = {"marker": MARKS[place % len(MARKS)], "edgecolors": colour, "s": 36}
        of_value = [not marks or each == value for each in rows[marks or "step_s"]]
        for fit in (True, False):
            part = rows[of_value & (rows["fits"] == fit)]
            label = f"{marks} {value}" if marks and fit else None
            fill = colour if fit else "none"
            ax.scatter(part["needed_bytes"] / GIB, part["step_s"] / size, facecolors=fill, label=label, **look)
    ax.axvline(budget_bytes / GIB, **style.PREDICTED)
    ax.annotate("budget", (budget_bytes / GIB, 1), (3, -3), xycoords=("data", "axes fraction"), **BESIDE)
    for number, row in zip(rows["candidate"], rows.to_dict("records"), strict=True):
        x, y = row["needed_bytes"] / GIB, row["step_s"] / size
        if number == chosen:
            ax.scatter(x, y, s=160, facecolors="none", edgecolors="black", linewidths=1.3)
        if number in (words or {}):
            ax.annotate((words or {})[number], (x, y), (6, -3), **BESIDE)
    ax.set(xlabel="memory that a rank needs, GiB", ylabel=f"time of a step, reckoned, {unit}")
    ax.set_ylim(bottom=0)
    ax.set_xlim(left=0)
    if marks:
        style.legend_above(ax, len(COLOURS))
    return ax
