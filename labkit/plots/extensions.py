"""Figures of all-gather extensions: who holds which memory when, and the error of fewer bytes."""

from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.plots import style
from labkit.plots.style import Numbers, Runs

ROW_COLOURS = {
    "local shard": style.BLUE,
    "sent": style.ORANGE,
    "gathered": style.SKY,
    "parameter": style.GREEN,
    "whole": style.PURPLE,
}
# By kind of error, the value of a run and the label of the axis.
ERROR_KINDS = {
    "largest": (
        "weight_error",
        "largest error of a gathered weight,\nas a part of the largest weight",
    ),
    "rms": (
        "weight_rms_error",
        "RMS error of the gathered weights,\nas a part of the weights' own RMS",
    ),
}
# Before and after these moments of a gather, the parameter is sharded.
GATHER_MOMENTS = ("pre hook", "all-gather", "post hook", "compute")


def encoding_colour(label: str) -> str:
    """Return the colour of an encoding: bfloat16, float8, int8, or any other."""
    known = {"bf": style.BLUE, "float8": style.ORANGE, "int8": style.GREEN}
    return next((colour for word, colour in known.items() if word in label), style.PURPLE)


class TensorLife(NamedTuple):
    """A tensor that exists for a part of each gather."""

    row: str
    # The first and the last of ``GATHER_MOMENTS`` at which it exists.
    start: str
    end: str
    # The row in whose memory it lies, "" for memory of its own.
    shares: str
    # Its texts in the first gather and in later ones, "" where it does not exist.
    first: str
    again: str


SAME_TENSORS = "same tensors, new memory"
# The tensors of each gather beside the local shard, which is always there.
TENSOR_LIVES = {
    "TwoTensor": (
        TensorLife("sent", "pre hook", "all-gather", "local shard", "a and b", "a and b"),
        TensorLife("gathered", "all-gather", "compute", "", "all rows of a and of b", SAME_TENSORS),
        TensorLife(
            "parameter", "post hook", "compute", "gathered", "a TwoTensor of both", "nothing to do"
        ),
    ),
    "int8": (
        TensorLife("sent", "pre hook", "all-gather", "", "int8, scales", "int8, scales"),
        TensorLife("gathered", "all-gather", "compute", "", "all int8, all scales", SAME_TENSORS),
        TensorLife(
            "parameter", "post hook", "compute", "", "the decoded parameter", "out, filled again"
        ),
        # In the first gather it is the parameter itself.
        TensorLife("whole", "post hook", "post hook", "", "", "a copy"),
    ),
}


def hook_memory(
    extension: Literal["TwoTensor", "int8"], *, leaky: bool = False, ax: Axes | None = None
) -> Axes:
    """Sketch who holds which memory in the first gather of a parameter and in later ones.

    With ``leaky`` hooks FSDP2 is not told to free a parameter that has memory of its own.
    """
    ax = style.make_axes(ax, 10.0, 3.4)
    count = len(GATHER_MOMENTS)
    moments = ("sharded", *GATHER_MOMENTS) * 2 + ("sharded",)
    text = "this rank's rows: always there, the optimizer updates them"
    _draw_tensor_life(ax, "local shard", 0, len(moments), "", text)
    lives = TENSOR_LIVES[extension]
    rows = ["local shard", *(each.row for each in lives)]
    for call, title in enumerate(("the first gather", "every later gather, with out=")):
        offset = 1 + call * (count + 1)
        for row, born, freed, shares, *texts in lives:
            if not texts[call]:
                continue
            start, end = (offset + GATHER_MOMENTS.index(each) for each in (born, freed))
            if not leaky or row != "parameter":
                _draw_tensor_life(ax, row, start, end + 1, shares, texts[call])
            elif call == 0:
                text = "the decoded parameter: nobody frees it"
                _draw_tensor_life(ax, row, start, len(moments), shares, text)
        ax.axvline(offset + count, color="black", lw=1, zorder=0)
        ax.text(offset + count / 2, -1.25, title, ha="center", weight="bold", fontsize=10)
        ax.text(offset + count + 0.5, 2, "freed\nby FSDP", fontsize=8, **style.CENTRED)
    ax.set_xticks([column + 0.5 for column in range(len(moments))], moments, fontsize=8)
    # The legend takes the place below.
    ax.xaxis.tick_top()
    ax.set(xlim=(0, len(moments)), ylim=(len(rows) - 0.5, -0.55))
    ax.set(yticks=range(len(rows)), yticklabels=rows)
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    if any(each.shares for each in lives):
        shared: dict[str, Any] = {"facecolor": "white", "edgecolor": style.GREY, "hatch": "////"}
        handles = style.legend_patches({"memory of its own": style.GREY})
        handles.append(Patch(label="the memory of the row that has this colour", **shared))
        look: dict[str, Any] = {"bbox_to_anchor": (0.5, 0.0), "frameon": False, "fontsize": 8}
        ax.legend(handles=handles, loc="upper center", ncols=2, **look)
    return ax


def _draw_tensor_life(ax: Axes, row: str, start: int, end: int, shares: str, text: str) -> None:
    position, colour = list(ROW_COLOURS).index(row), ROW_COLOURS[row]
    look: dict[str, Any] = {"facecolor": colour, "linewidth": 1}
    if shares:
        look |= {"facecolor": "white", "edgecolor": ROW_COLOURS[shares], "hatch": "////"}
    style.add_box(ax, start, position - 0.4, end - start, 0.8, **look)
    said = ax.text((start + end) / 2, position, text, fontsize=8, **style.CENTRED)
    said.set_color(style.text_colour(look["facecolor"]))
    # The hatches would cross the letters.
    if shares:
        said.set_bbox({"color": "white", "pad": 1.5})


def error_by_bytes(
    results: Runs,
    *,
    bounds: Numbers | None = None,
    error: Literal["largest", "rms"] = "largest",
    ax: Axes | None = None,
) -> Axes:
    """Draw the error of the gathered weights by the bytes gathered in a step, one point per run.

    The results are runs of allgather_extensions, and the bytes fractions of those of "fp32".
    ``bounds``, the errors that theory allows, are dashed. ``error`` is the largest error over the
    largest weight, or the RMS error over the weights' RMS.
    """
    if "fp32" not in results:
        known = ", ".join(results) or "no runs"
        raise ValueError(f"no run 'fp32' among {known}: add one, the bytes are parts of its")
    ax = style.make_axes(ax, 6.5, 3.8)
    whole = results["fp32"].value("all_gather_bytes")
    value, what = ERROR_KINDS[error]
    for label, result in results.items():
        sent, found = result.value("all_gather_bytes") / whole, result.value(value)
        ax.plot(sent, found, "o", color=encoding_colour(label), ms=8, clip_on=False, zorder=3)
        # Below an error of 0, the label would lie on the axis.
        shift = (0, 20 if found == 0 else -20)
        style.add_note(ax, f"{label}\n{found:.2g}", (sent, found), shift, va="center")
        if bounds and label in bounds:
            style.mark_prediction(ax, sent, 0.05, bounds[label], clip_on=False)
    # symlog has a place for 0, the error of float32.
    ax.set_yscale("symlog", linthresh=1e-3)
    ax.set(xlim=(0, 1.1), ylim=(0, 0.2))
    ax.set(xlabel="bytes gathered in a step, as a part of float32's", ylabel=what)
    handles = ax.plot([], [], "o", color=style.GREY, label="measured")
    if bounds:
        handles.append(style.prediction_handle("theory: at most"))
    ax.legend(handles=handles, loc="upper right", frameon=False, fontsize=9)
    return style.add_stamp(ax, results.values())
