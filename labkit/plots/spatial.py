"""Figures of how images and tensors are cut over ranks."""

from collections.abc import Mapping, Sequence

import numpy
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from labkit.plots import style

GAP = 0.5  # between tiles, in cells


def halos(picture: numpy.ndarray, ranks: int, halo: int, *, rank: int = 1, ax: Axes | None = None) -> Axes:
    """A picture [height, width, 3] cut into a vertical strip for each rank, and what ``rank`` needs of its neighbours.

    That is ``halo`` columns on each side.
    """
    ax = style.axes(ax, 7, 7 * picture.shape[0] / picture.shape[1])
    height, width = picture.shape[:2]
    strip = width / ranks
    ax.imshow(picture)
    for index in range(ranks):
        own = index == rank
        if not own:
            ax.add_patch(Rectangle((index * strip, 0), strip, height, color="white", alpha=0.55, lw=0))
        ax.axvline(index * strip - 0.5, color="white", lw=2) if index else None
        place, box = ((index + 0.5) * strip, height * 0.05), {"color": style.RANK_COLOURS[index % 4], "pad": 3}
        ax.text(*place, f"rank {index}", ha="center", va="center", weight="bold", color="white", bbox=box)
    for start, source in ((rank * strip - halo, rank - 1), ((rank + 1) * strip, rank + 1)):
        if 0 <= source < ranks:
            ax.add_patch(Rectangle((start, 0), halo, height, color=style.RANK_COLOURS[source % 4], alpha=0.75, lw=0))
            side = -1 if source < rank else 1
            middle = start + halo / 2
            at, beside = (middle, height * 0.86), (middle + side * strip * 0.55, height * 0.93)
            box, arrow = {"color": "white", "alpha": 0.85, "pad": 2}, {"arrowstyle": "->", "lw": 1.5}
            text = f"halo: {halo} columns\nfrom rank {source}"
            ax.annotate(text, at, beside, ha="center", va="center", fontsize=9, bbox=box, arrowprops=arrow)
    ax.set_axis_off()
    return ax


def shards(
    tensors: Mapping[str, Mapping[int, numpy.ndarray]],
    grids: Mapping[str, Sequence[Sequence[int]]],
    *,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """What each rank holds of a matrix, one panel a placement: a tile of numbers a rank, labelled and coloured.

    Args:
        tensors: for each placement's name, the local matrix of each rank.
        grids: for each name, how to lay the ranks out, such as [[0, 1], [2, 3]].
        axes: one for each placement.
    """
    if axes is None:
        size = (2.9 * len(tensors), 3.2)
        axes = list(numpy.atleast_1d(pyplot.subplots(1, len(tensors), figsize=size, layout="constrained")[1]))
    for ax, (name, held) in zip(axes, tensors.items(), strict=True):
        top, right = 0.0, 0.0
        for line in grids[name]:
            left = 0.0
            for rank in line:
                _tile(ax, held[rank], rank, left, top)
                left += held[rank].shape[1] + GAP
            right = max(right, left)
            top += held[line[0]].shape[0] + 2 * GAP
        ax.set(xlim=(-0.2, max(right, 9)), ylim=(max(top, 7.2), -2 * GAP), aspect="equal")
        ax.set_title(name, fontsize=10, loc="left")
        ax.set_axis_off()
    return axes


def _tile(ax: Axes, local: numpy.ndarray, rank: int, left: float, top: float) -> None:
    colour = style.RANK_COLOURS[rank % 4]
    ax.text(left, top - 0.1, f"rank {rank}", va="bottom", fontsize=7, color=colour, weight="bold")
    for (row, column), number in numpy.ndenumerate(local):
        ax.add_patch(Rectangle((left + column, top + row), 1, 1, facecolor=colour, edgecolor="white"))
        middle = left + column + 0.5, top + row + 0.5
        ax.text(*middle, f"{number:g}", ha="center", va="center", color="white", fontsize=9)
