"""What all figures share: colours that stay apart in print and for the colour-blind, units, and the stamp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.result import RunResult

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

# Okabe and Ito's palette, "Color Universal Design", 2008.
BLUE, ORANGE, GREEN, PURPLE, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8A8A8A"
RANK_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
CATEGORY_COLOURS = {
    "parameter": BLUE, "gradient": ORANGE, "optstate": PURPLE, "activation": GREEN, "temp": SKY, "other": GREY,
    "buffer": GREY
}  # fmt: skip


def axes(ax: Axes | None, width: float = 7.0, height: float = 3.6) -> Axes:
    """The given Axes, or those of a new figure, sizes in inches."""
    if ax is None:
        ax = pyplot.subplots(figsize=(width, height), layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def stamp(ax: Axes, results: Sequence[RunResult]) -> None:
    """Write below the figure where its numbers come from, each origin once."""
    origins = list(dict.fromkeys(result.stamp for result in results))
    figure: Figure | SubFigure = ax.figure
    lines = figure.get_supxlabel().splitlines()
    lines += [origin for origin in origins if origin not in lines]
    figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, x=0.99, ha="right")


def readable_bytes(count: float) -> str:
    """Bytes in the unit that reads best, in powers of 1000: 1536 is ``1.54 kB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g} B"
