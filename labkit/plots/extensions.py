"""Figures of all-gather extensions: who holds which memory when, and what fewer bytes cost in error."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from labkit.plots import style
from labkit.result import RunResult

COLOURS = {"local shard": style.BLUE, "sent": style.ORANGE, "gathered": style.SKY, "parameter": style.GREEN}
GATHER = ("pre hook", "all-gather", "post hook", "compute")
"""The moments of a gather; before and after it the parameter is sharded."""


class Held(NamedTuple):
    """A tensor that a gather brings and that goes again.

    Attributes:
        row: a key of ``COLOURS``.
        start: the moment of ``GATHER`` at whose beginning it comes.
        end: the moment at whose end it goes.
        shares: the row in whose memory it lies; "" for memory of its own.
        first: what to say of it in the first gather.
        again: what to say of it in every later one.
    """

    row: str
    start: str
    end: str
    shares: str
    first: str
    again: str


LIVES = {
    "TwoTensor": (
        Held("sent", "pre hook", "all-gather", "local shard", "a and b", "a and b"),
        Held("gathered", "all-gather", "compute", "", "all rows of a and of b", "same tensors, new memory"),
        Held("parameter", "post hook", "compute", "gathered", "a TwoTensor of both", "nothing to do"),
    ),
    "int8": (
        Held("sent", "pre hook", "all-gather", "", "int8, scales", "int8, scales"),
        Held("gathered", "all-gather", "compute", "", "all int8, all scales", "same tensors, new memory"),
        Held("parameter", "post hook", "compute", "", "decoded: name it", "decoded into out"),
    ),
}
"""What each gather holds beside the local shard, which is always there."""


def hook_memory(extension: Literal["TwoTensor", "int8"], *, ax: Axes | None = None) -> Axes:
    """Who holds which memory in the first gather of a parameter and in a later one. A drawing, nothing is measured."""
    ax = style.axes(ax, 10.0, 3.0)
    moments = ("sharded", *GATHER) * 2 + ("sharded",)
    _block(ax, "local shard", 0, len(moments), "", "this rank's rows: always there, the optimizer updates them")
    for call, title in enumerate(("the first gather", "every later gather, with out=")):
        offset = 1 + call * (len(GATHER) + 1)
        for held in LIVES[extension]:
            start, end = offset + GATHER.index(held.start), offset + GATHER.index(held.end) + 1
            _block(ax, held.row, start, end, held.shares, held.again if call else held.first)
        ax.axvline(offset + len(GATHER), color="black", lw=1, zorder=0)
        ax.text(offset + len(GATHER) / 2, -1.25, title, ha="center", weight="bold", fontsize=9)
        ax.text(offset + len(GATHER) + 0.5, 2, "freed\nby FSDP", ha="center", va="center", fontsize=8)
    ax.set_xticks([column + 0.5 for column in range(len(moments))], moments, fontsize=8)
    ax.xaxis.tick_top()
    ax.set(xlim=(0, len(moments)), ylim=(len(COLOURS) - 0.5, -0.55), yticks=range(len(COLOURS)), yticklabels=COLOURS)
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    own, shared = Patch(color=style.GREY), Patch(facecolor="white", edgecolor=style.GREY, hatch="////")
    meanings = ["memory of its own", "the memory of the row that has this colour"]
    below = (0.5, 0.0)
    ax.legend([own, shared], meanings, loc="upper center", bbox_to_anchor=below, ncols=2, frameon=False, fontsize=8)
    return ax


def bytes_against_error(
    results: Mapping[str, RunResult], *, bounds: Mapping[str, float] | None = None, ax: Axes | None = None
) -> Axes:
    """One point a run: what it gathered in a step, over float32's bytes, against the error of its gathered weights.

    The results are runs of allgather_extensions; the one that is called "fp32" is the unit of the bytes. ``bounds`` are
    the largest errors that theory allows, by label: each is drawn as a line above its point.

    Raises:
        ValueError: there is no run "fp32" to compare with.
    """
    if "fp32" not in results:
        raise ValueError(f"no run 'fp32' among {', '.join(results) or 'no runs'}: add one, the bytes are parts of its")
    ax = style.axes(ax, 6.5, 3.8)
    whole = results["fp32"].value("all_gather_bytes")
    for index, (label, result) in enumerate(results.items()):
        sent, error = result.value("all_gather_bytes") / whole, result.value("weight_error")
        colour = style.RANK_COLOURS[index % len(style.RANK_COLOURS)]
        ax.plot(sent, error, "o", color=colour, ms=8, clip_on=False, zorder=3)
        above = 20 if error == 0 else -20  # points; below the lowest one is the axis
        text = f"{label}\n{sent:.3g}"
        ax.annotate(text, (sent, error), (0, above), textcoords="offset points", ha="center", va="center", fontsize=9)
        if bounds and label in bounds:
            ax.plot([sent - 0.03, sent + 0.03], [bounds[label]] * 2, color=colour, lw=2, clip_on=False)
    # 0, the error of float32, has a place on this axis
    ax.set_yscale("symlog", linthresh=1e-3)
    ax.set(xlim=(0, 1.1), ylim=(0, 0.2), xlabel="bytes gathered in a step, as a part of float32's")
    ax.set_ylabel("largest error of a gathered weight,\nas a part of the largest weight")
    handles = [ax.plot([], [], "o", color=style.GREY, label="measured")[0]]
    handles += [ax.plot([], [], "-", color=style.GREY, lw=2, label="theory: at most")[0]] if bounds else []
    ax.legend(handles=handles, loc="upper right", frameon=False, fontsize=9)
    return style.stamp(ax, results.values())


def _block(ax: Axes, row: str, start: int, end: int, shares: str, text: str) -> None:
    """A tensor's stretch of time in its row, filled if it has memory of its own."""
    position = list(COLOURS).index(row)
    look = {"facecolor": COLOURS[row], "edgecolor": "white"}
    if shares:
        look = {"facecolor": "white", "edgecolor": COLOURS[shares], "hatch": "////"}
    ax.add_patch(Rectangle((start, position - 0.4), end - start, 0.8, linewidth=1, **look))  # type: ignore[arg-type]
    said = ax.text((start + end) / 2, position, text, ha="center", va="center", fontsize=8)
    if shares:
        said.set_bbox({"color": "white", "pad": 1.5})
    elif row in ("local shard", "parameter"):  # the dark ones
        said.set_color("white")
