"""What all figures share: colours that stay apart in print and for the colour-blind, units, and the stamp."""

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.result import RunResult

# Okabe and Ito's palette, "Color Universal Design", 2008.
BLUE, ORANGE, GREEN, PURPLE, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8A8A8A"
RANK_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)


def axes(ax: Axes | None, width: float = 7.0, height: float = 3.6) -> Axes:
    """The given Axes, or those of a new figure, sizes in inches."""
    if ax is None:
        ax = pyplot.subplots(figsize=(width, height), layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def legend_above(ax: Axes, columns: int, handles: list[Any] | None = None, *, middle: float = 0.5, **look: Any) -> None:
    """A legend on one line above the axes, around this part of their width, of all that is labelled or of handles."""
    look = {"frameon": False, "fontsize": 9, "handles": handles, **look}
    ax.legend(loc="lower center", bbox_to_anchor=(middle, 1.0), ncols=columns, **look)


def stacks(
    ax: Axes,
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    size: float,
    legend: Mapping[str, str],
    columns: int,
) -> None:
    """Stacked bars, one a label: predicted on the left, hatched where anything was measured; measured on the right.

    Both are bytes by part, by label; ``colours`` those of the parts, from the bottom up; ``size`` the bytes of the
    axis's unit. The legend above them, colours by what they mean, has so many columns.
    """
    labels = list(dict.fromkeys([*predicted, *measured]))
    for column, label in enumerate(labels):
        offset = 0.2 if label in predicted and label in measured else 0.0
        for side, drawn, hatch in ((-1, predicted, "///" if measured else ""), (1, measured, "")):
            bottom = 0.0
            for part, colour in colours.items() if label in drawn else ():
                height = drawn[label].get(part, 0) / size
                ax.bar(
                    column + side * offset, height, 0.36, bottom, color=colour, hatch=hatch, edgecolor="white", lw=0.5
                )
                bottom += height
    ax.set_xticks(range(len(labels)), labels)
    handles = [Patch(color=colour, label=meaning) for meaning, colour in legend.items()]
    if predicted and measured:
        handles.append(Patch(facecolor="white", edgecolor="black", hatch="///", label="predicted"))
    legend_above(ax, columns, handles)


def stamp(ax: Axes, results: Iterable[RunResult]) -> Axes:
    """Write below the figure where its numbers come from, each origin once, and give its Axes back."""
    written = ax.figure.get_supxlabel().splitlines()
    lines = dict.fromkeys([*written, *(result.stamp for result in results)])
    if lines:
        ax.figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, x=0.99, ha="right")
    return ax
