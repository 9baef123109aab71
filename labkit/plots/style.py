"""What all figures share: colours that stay apart in print and for the colour-blind, units, and the stamp."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.runs import result
from labkit.runs.result import RunResult

# Okabe and Ito's palette, "Color Universal Design", 2008.
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
VERMILION, YELLOW, GREY = "#D55E00", "#F0E442", "#8A8A8A"
RANK_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)

MEMORY_CATEGORIES: dict[str, tuple[tuple[str, ...], str]] = {
    "activations": (("activation",), GREEN),
    "parameters": (("parameter",), BLUE),
    "optimizer state": (("optstate", "optimizer"), PURPLE),
    "gradients": (("gradient",), ORANGE),
    "gathered parameters": (("unsharded_parameter",), SKY),
    "communication buffers": (("all_gather", "reduce_scatter"), VERMILION),
    "temporary": (("temp", "unsharded_gradient", "inputs", "buffer", "other"), GREY),
}
"""What memory is used for, in every figure: its name, the recorded categories that it adds up, its colour."""
PHASE_COLOURS = {"forward": BLUE, "backward": ORANGE, "optimizer": PURPLE}
COLLECTIVE_COLOURS = {"all_gather": SKY, "reduce_scatter": GREEN, "all_reduce": YELLOW}
EXPOSURE_COLOUR = VERMILION
PREDICTION_STYLE: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.3}
"""How a prediction looks, in every figure: a dashed line."""


def make_axes(ax: Axes | None, width: float = 7.0, height: float = 3.6) -> Axes:
    """The given Axes, or those of a new figure, sizes in inches."""
    if ax is None:
        ax = pyplot.subplots(figsize=(width, height), layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def make_panels(
    given: Sequence[Axes] | None, names: Iterable[str], width: float, height: float
) -> list[Axes]:
    """The given Axes, or those of a new figure, side by side, each with its name on top; sizes of one in inches."""
    names = list(names)
    if given is None:
        figure = pyplot.subplots(
            1, len(names), figsize=(width * len(names), height), squeeze=False, layout="constrained"
        )
        given = list(figure[1][0])
    for ax, name in zip(given, names, strict=True):
        make_axes(ax).set_title(name, fontsize=10, loc="left", pad=22)
    return list(given)


def add_legend_above(
    ax: Axes, columns: int, handles: list[Any] | None = None, *, middle: float = 0.5, **look: Any
) -> None:
    """A legend on one line above the axes, around this part of their width, of all that is labelled or of handles."""
    look = {"frameon": False, "fontsize": 9, "handles": handles, **look}
    ax.legend(loc="lower center", bbox_to_anchor=(middle, 1.0), ncols=columns, **look)


def draw_bar_stacks(
    ax: Axes,
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    size: float,
    legend: Mapping[str, str],
    columns: int,
) -> None:
    """Stacked bars, one a label: predicted on the left, pale in a dashed frame where anything was measured; measured.

    Both are bytes by part, by label; ``colours`` those of the parts, from the bottom up; ``size`` the bytes of the
    axis's unit, in which the sum stands above each bar. The legend, colours by what they mean, has so many columns.
    """
    labels = list(dict.fromkeys([*predicted, *measured]))
    for column, label in enumerate(labels):
        offset = 0.2 if label in predicted and label in measured else 0.0
        for side, drawn in ((-1, predicted), (1, measured)):
            if label not in drawn:
                continue
            framed, top = drawn is predicted and bool(measured), 0.0
            for part, colour in colours.items():
                height = drawn[label].get(part, 0) / size
                look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5}
                if framed:
                    look = {
                        "facecolor": (colour, 0.45),
                        "edgecolor": "black",
                        "linewidth": 0.8,
                        "linestyle": "--",
                    }
                ax.bar(column + side * offset, height, 0.36, top, **look)
                top += height
            ax.text(column + side * offset, top, f"{top:.3g}", ha="center", va="bottom", fontsize=8)
    ax.set_xticks(range(len(labels)), labels)
    handles = [Patch(color=colour, label=meaning) for meaning, colour in legend.items()]
    if predicted and measured:
        handles.append(
            Patch(facecolor="#EEEEEE", edgecolor="black", linestyle="--", label="predicted")
        )
    add_legend_above(ax, columns, handles)


def short_number_text(value: float) -> str:
    """A number for a label: three digits, or all of a large one, with commas."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit in which times up to so many seconds read best, and how many seconds it has."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    return next(((name, size) for name, size in units if longest_s >= size), units[-1])


def duration_text(seconds: float) -> str:
    """A time in the unit that reads best: ``7.33 ms``."""
    unit, size = time_unit(seconds)
    return f"{short_number_text(seconds / size)} {unit}"


def count_text(number: int, thing: str) -> str:
    """``1 bucket``, ``2 buckets``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def add_stamp(ax: Axes, results: Iterable[RunResult]) -> Axes:
    """Write below the figure where its numbers come from, one line a machine, and give its Axes back."""
    drawn = _runs_by_figure.setdefault(ax.figure, [])
    drawn.extend(results)
    if drawn:
        ax.figure.supxlabel(result.stamp_text(drawn), fontsize=7, color=GREY, x=0.99, ha="right")
    return ax


_runs_by_figure: weakref.WeakKeyDictionary[Any, list[RunResult]] = weakref.WeakKeyDictionary()
"""The runs of each figure, whose axes may be drawn one after another."""
