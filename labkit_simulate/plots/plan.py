"""Figures of plans: how long each way to train takes, against the memory that it needs."""

from collections.abc import Mapping
from typing import Any

import pandas
from matplotlib.axes import Axes

from labkit.plots import style
from labkit_simulate.memory_fit import GIB

MARK_COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.VERMILION, style.SKY)
MARK_SHAPES = "osD^vP"
MARK_AREA, SMALL_AREA = 36, 14
LABEL_STYLE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "va": "top"}


def candidate_scatter(
    frame: pandas.DataFrame,
    budget_bytes: float,
    *,
    marks: str = "",
    small: str = "",
    per: str = "",
    words: Mapping[int, str] | None = None,
    chosen: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Step time against needed memory, a mark for each candidate: filled where it fits, the budget
    a dashed line. A grey line through a mark is the range that held-out residuals allow.

    Args:
        frame: rows of ``labkit.SearchResult.frame``, of one kind of hosts and one number of ranks.
        budget_bytes: what a rank may take.
        marks: the column whose values have marks and colours of their own.
        small: the column whose last value, of two, has small marks.
        per: the column by which times are divided, such as ``batch`` where candidates train with
            different ones.
        words: what stands beside a mark, by the number of its candidate.
        chosen: the number of the candidate with a ring around it.
        ax: where to draw.
    """
    ax = style.make_axes(ax)
    shown = frame[frame["step_s"].notna()]
    if per:
        times = [name for name in ("step_s", "step_low_s", "step_high_s") if name in shown]
        shown = shown.assign(**{name: shown[name] / shown[per] for name in times})
    rows = shown.to_dict("records")
    unit, size = style.time_unit(min(row["step_s"] for row in rows))
    values = list(dict.fromkeys(row[marks] for row in rows)) if marks else [None]
    # None, the default of a parameter, has large marks.
    smallest = max({row[small] for row in rows} - {None}) if small else None
    for row in rows:
        place = values.index(row[marks]) if marks else 0
        row |= {"x": row["needed_bytes"] / GIB, "y": row["step_s"] / size, "of": place}
        row["area"] = SMALL_AREA if small and row[small] == smallest else MARK_AREA
    named = []
    for place, value in enumerate(values):
        colour = MARK_COLOURS[place % len(MARK_COLOURS)]
        look: dict[str, Any] = {
            "marker": MARK_SHAPES[place % len(MARK_SHAPES)],
            "edgecolors": colour,
        }
        for fit, fill in ((True, colour), (False, "none")):
            drawn = [
                (row["x"], row["y"], row["area"])
                for row in rows
                if row["of"] == place and row["fits"] == fit
            ]
            ax.scatter(*zip(*drawn, strict=True), facecolors=fill, **look) if drawn else None
        named.append(
            ax.scatter([], [], MARK_AREA, facecolors=colour, label=f"{marks} {value}", **look)
        )
    grey: dict[str, Any] = {"marker": "o", "edgecolors": style.GREY}
    looks = [ax.scatter([], [], MARK_AREA, facecolors="none", label="does not fit", **grey)]
    if small:
        label = f"{small} {smallest}"
        looks.append(ax.scatter([], [], SMALL_AREA, facecolors=style.GREY, label=label, **grey))
    for row in rows:
        if row.get("step_low_s"):
            ends = row["step_low_s"] / size, row["step_high_s"] / size
            ax.plot([row["x"]] * 2, ends, color=style.GREY, alpha=0.4, lw=1, zorder=0)
    ax.axvline(budget_bytes / GIB, **style.PREDICTION_STYLE)
    ax.annotate(
        "budget",
        (budget_bytes / GIB, 1),
        (3, -3),
        xycoords=("data", "axes fraction"),
        **LABEL_STYLE,
    )
    below = True
    for row in sorted(rows, key=lambda row: row["x"]):
        if row["candidate"] == chosen:
            ax.scatter(
                row["x"], row["y"], s=160, facecolors="none", edgecolors="black", linewidths=1.3
            )
        if row["candidate"] in (words or {}):
            ax.annotate(
                (words or {})[row["candidate"]],
                (row["x"], row["y"]),
                (0, -6 if below else 6),
                ha="center",
                **LABEL_STYLE | {"va": "top" if below else "bottom"},
            )
            # Neighbours have their labels on opposite sides, where they cannot collide.
            below = not below
    of_what = f"estimated time of a step / {per}" if per else "estimated time of a step"
    ax.set(xlabel="memory that a rank needs, GiB", ylabel=f"{of_what}, {unit}")
    ax.set_ylim(bottom=0)
    ax.set_xlim(0, 1.05 * max(budget_bytes / GIB, *(row["x"] for row in rows)))
    # Times begin at 0, so the lower end of the axes is empty.
    ax.add_artist(ax.legend(handles=looks, loc="lower right", ncols=2, frameon=False, fontsize=9))
    if marks:
        style.add_legend_above(ax, len(MARK_COLOURS), named)
    return ax
