"""Figures of all-gather extensions: who holds which memory when, and what fewer bytes cost in error."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from labkit.plots import style
from labkit.plots.spatial import FRAME_GAP, shard_panels
from labkit.runs.result import RunResult

ROW_COLOURS = {
    "local shard": style.BLUE,
    "sent": style.ORANGE,
    "gathered": style.SKY,
    "parameter": style.GREEN,
}
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
"""What a figure of errors draws: the value of a run, and the words for it."""
GATHER_MOMENTS = ("pre hook", "all-gather", "post hook", "compute")
"""The moments of a gather; before and after it the parameter is sharded."""


def encoding_colour(label: str) -> str:
    """The colour of a way to send, whatever figure it is in: bfloat16, float8, int8, or anything else."""
    known = {"bf": style.BLUE, "float8": style.ORANGE, "int8": style.GREEN}
    return next((colour for word, colour in known.items() if word in label), style.PURPLE)


class TensorLife(NamedTuple):
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


TENSOR_LIVES = {
    "TwoTensor": (
        TensorLife("sent", "pre hook", "all-gather", "local shard", "a and b", "a and b"),
        TensorLife(
            "gathered",
            "all-gather",
            "compute",
            "",
            "all rows of a and of b",
            "same tensors, new memory",
        ),
        TensorLife(
            "parameter", "post hook", "compute", "gathered", "a TwoTensor of both", "nothing to do"
        ),
    ),
    "int8": (
        TensorLife("sent", "pre hook", "all-gather", "", "int8, scales", "int8, scales"),
        TensorLife(
            "gathered",
            "all-gather",
            "compute",
            "",
            "all int8, all scales",
            "same tensors, new memory",
        ),
        TensorLife(
            "parameter", "post hook", "compute", "", "the decoded parameter", "decoded into out"
        ),
    ),
}
"""What each gather holds beside the local shard, which is always there."""


def hook_memory(extension: Literal["TwoTensor", "int8"], *, ax: Axes | None = None) -> Axes:
    """Who holds which memory in the first gather of a parameter and in a later one. A drawing, nothing is measured."""
    ax = style.make_axes(ax, 10.0, 3.4)
    moments = ("sharded", *GATHER_MOMENTS) * 2 + ("sharded",)
    _draw_tensor_life(
        ax,
        "local shard",
        0,
        len(moments),
        "",
        "this rank's rows: always there, the optimizer updates them",
    )
    for call, title in enumerate(("the first gather", "every later gather, with out=")):
        offset = 1 + call * (len(GATHER_MOMENTS) + 1)
        for held in TENSOR_LIVES[extension]:
            start, end = (
                offset + GATHER_MOMENTS.index(held.start),
                offset + GATHER_MOMENTS.index(held.end) + 1,
            )
            _draw_tensor_life(
                ax, held.row, start, end, held.shares, held.again if call else held.first
            )
        ax.axvline(offset + len(GATHER_MOMENTS), color="black", lw=1, zorder=0)
        ax.text(
            offset + len(GATHER_MOMENTS) / 2, -1.25, title, ha="center", weight="bold", fontsize=10
        )
        ax.text(
            offset + len(GATHER_MOMENTS) + 0.5,
            2,
            "freed\nby FSDP",
            ha="center",
            va="center",
            fontsize=8,
        )
    ax.set_xticks([column + 0.5 for column in range(len(moments))], moments, fontsize=8)
    ax.xaxis.tick_top()
    ax.set(
        xlim=(0, len(moments)),
        ylim=(len(ROW_COLOURS) - 0.5, -0.55),
        yticks=range(len(ROW_COLOURS)),
        yticklabels=ROW_COLOURS,
    )
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    own, shared = (
        Patch(color=style.GREY),
        Patch(facecolor="white", edgecolor=style.GREY, hatch="////"),
    )
    meanings = ["memory of its own", "the memory of the row that has this colour"]
    below = (0.5, 0.0)
    ax.legend(
        [own, shared],
        meanings,
        loc="upper center",
        bbox_to_anchor=below,
        ncols=2,
        frameon=False,
        fontsize=8,
    )
    return ax


def shard_padding(
    whole: numpy.ndarray, held: Mapping[int, numpy.ndarray], sent: Mapping[int, numpy.ndarray]
) -> Sequence[Axes]:
    """A matrix and what two ranks hold of it; the matrix with the rows of zeros that they add, and what they send."""
    padded = numpy.concatenate([sent[rank] for rank in sorted(sent)])
    axes = list(pyplot.subplots(1, 4, figsize=(10, 1.9), layout="constrained")[1])
    for first, matrix, name, parts in ((0, whole, "held", held), (2, padded, "sent", sent)):
        shard_panels(matrix, {name: parts}, axes=axes[first : first + 2])
        rows, columns = matrix.shape
        down, right = (
            (rows + FRAME_GAP) / 2,
            (columns + FRAME_GAP) / 2,
        )  # where shards puts the matrix, which stands between four
        axes[first].set(
            xlim=(right - 0.1, right + 2 * columns + FRAME_GAP + 0.1),
            ylim=(down + rows + 0.1, down - 0.75),
        )
        axes[first + 1].set_ylim(rows + 0.1, -0.75)
    axes[2].set_title("the matrix, padded", fontsize=10, loc="left")
    for ax in axes:
        ax.set_anchor("NW")
    return axes


def error_by_bytes(
    results: Mapping[str, RunResult],
    *,
    bounds: Mapping[str, float] | None = None,
    error: Literal["largest", "rms"] = "largest",
    ax: Axes | None = None,
) -> Axes:
    """One point a run: what it gathered in a step, over float32's bytes, against the error of its gathered weights.

    The results are runs of allgather_extensions; the one that is called "fp32" is the unit of the bytes. The error is
    the largest, over the largest weight, or the root mean square, over that of the weights. ``bounds`` are errors that
    theory allows, by label: each is drawn as a dashed line above its point.

    Raises:
        ValueError: there is no run "fp32" to compare with.
    """
    if "fp32" not in results:
        raise ValueError(
            f"no run 'fp32' among {', '.join(results) or 'no runs'}: add one, the bytes are parts of its"
        )
    ax = style.make_axes(ax, 6.5, 3.8)
    whole = results["fp32"].value("all_gather_bytes")
    value, what = ERROR_KINDS[error]
    for label, result in results.items():
        sent, found = result.value("all_gather_bytes") / whole, result.value(value)
        colour = encoding_colour(label)
        ax.plot(sent, found, "o", color=colour, ms=8, clip_on=False, zorder=3)
        text = f"{label}\n{found:.2g}"
        above = 20 if found == 0 else -20  # points; below the lowest one is the axis
        ax.annotate(
            text,
            (sent, found),
            (0, above),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
        )
        if bounds and label in bounds:
            ax.plot(
                [sent - 0.05, sent + 0.05],
                [bounds[label]] * 2,
                clip_on=False,
                **style.PREDICTION_STYLE,
            )
    # 0, the error of float32, has a place on this axis
    ax.set_yscale("symlog", linthresh=1e-3)
    ax.set(
        xlim=(0, 1.1),
        ylim=(0, 0.2),
        xlabel="bytes gathered in a step, as a part of float32's",
        ylabel=what,
    )
    handles = [ax.plot([], [], "o", color=style.GREY, label="measured")[0]]
    handles += (
        [ax.plot([], [], label="theory: at most", **style.PREDICTION_STYLE)[0]] if bounds else []
    )
    ax.legend(handles=handles, loc="upper right", frameon=False, fontsize=9)
    return style.add_stamp(ax, results.values())


def gather_byte_bars(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, float] | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """What a rank hands to the all-gathers of a step, in MB, one bar a label: numbers and scales; measured beside it.

    ``predicted`` are bytes of ``numbers`` and of ``scales``, by label, ``measured`` bytes in all.
    """
    ax = style.make_axes(ax, 4.0, 3.6)
    parts = {"numbers": style.SKY, "scales": style.VERMILION, "measured": style.GREY}
    beside = {label: {"measured": size} for label, size in (measured or {}).items()}
    shown = [
        name
        for name in parts
        if any(sizes.get(name) for sizes in (*predicted.values(), *beside.values()))
    ]
    style.draw_bar_stacks(
        ax, predicted, beside, parts, 1e6, {name: parts[name] for name in shown}, columns=2
    )
    ax.set(xlim=(-0.6, max(len(predicted), 2) - 0.4), ylim=(0, 1.08 * ax.dataLim.y1))
    ax.set_ylabel("handed to the all-gathers of a step, MB")
    return ax


def error_histogram(
    errors: numpy.ndarray,
    bound: float,
    measured: float | None = None,
    *,
    label: str = "",
    result: RunResult | None = None,
    ax: Axes | None = None,
) -> Axes:
    """How the errors of gathered weights lie, each over the largest weight of its parameter, in percent.

    ``bound`` is the largest that theory allows, ``measured`` the largest that a run has found; ``label`` gives the
    colour, see ``colour_of``.
    """
    ax = style.make_axes(ax, 5.0, 3.6)
    side = 115 * (bound or 0.001)
    shares, edges = numpy.histogram(100 * errors, bins=61, range=(-side, side))
    tops = numpy.repeat(100 * shares / errors.size, 2)
    ax.fill_between(
        numpy.repeat(edges, 2)[1:-1], tops, color=encoding_colour(label), alpha=0.45, lw=0
    )
    found: dict[str, Any] = {"color": style.VERMILION, "linewidth": 3, "alpha": 0.6, "zorder": 0}
    for line, look, who in (
        (bound, style.PREDICTION_STYLE, "theory"),
        (measured, found, "measured"),
    ):
        if line is not None:
            ax.axvline(-100 * line, **look)
            ax.axvline(100 * line, label=f"{who}: at most {100 * line:.3g} %", **look)
    ax.set(xlim=(-side, side), ylim=(0, 1.05 * tops.max()), ylabel="share of the weights, %")
    ax.locator_params(axis="x", nbins=7)
    ax.set_xlabel("error of a gathered weight, as % of the largest in its parameter")
    style.add_legend_above(ax, 2)
    return style.add_stamp(ax, [result] if result else [])


def gather_costs(
    results: Mapping[str, RunResult],
    *,
    predicted: Mapping[str, float],
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Two panels of bars, one a run: time to gather all units once, and what is held of them while they compute.

    The results are runs of allgather_extensions. ``predicted`` are bytes that are held, by label.
    """
    if axes is None:
        axes = list(pyplot.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")[1])
    for ax in axes:
        style.make_axes(ax)
        ax.set_xticks(range(len(results)), list(results), fontsize=9)
    for column, (label, result) in enumerate(results.items()):
        took = result.value("gather_ms")
        coding = result.value("hooks_ms")
        axes[0].bar(column, coding, 0.6, color=style.GREY)
        axes[0].bar(
            column, took - coding, 0.6, coding, color=style.COLLECTIVE_COLOURS["all_gather"]
        )
        held = result.value("held_bytes") / 1e6
        axes[1].bar(column, held, 0.6, color=style.MEMORY_CATEGORIES["gathered parameters"][1])
        axes[1].plot(
            [column - 0.35, column + 0.35], [predicted[label] / 1e6] * 2, **style.PREDICTION_STYLE
        )
        for ax, height in ((axes[0], took), (axes[1], held)):
            text = ax.annotate(
                f"{height:.3g}", (column, height), (0, 4), textcoords="offset points", ha="center"
            )
            text.set_fontsize(9)
    meanings = {
        "in the hooks: encode and decode": style.GREY,
        "the rest of the gather": style.COLLECTIVE_COLOURS["all_gather"],
    }
    style.add_legend_above(
        axes[0], 2, [Patch(color=colour, label=meaning) for meaning, colour in meanings.items()]
    )
    bar = Patch(color=style.MEMORY_CATEGORIES["gathered parameters"][1], label="measured")
    line = axes[1].plot([], [], label="predicted", **style.PREDICTION_STYLE)[0]
    style.add_legend_above(axes[1], 2, [bar, line])
    axes[0].set_ylabel("gathering all units once, ms")
    axes[1].set_ylabel("held while they compute, MB")
    for ax in axes:
        ax.margins(y=0.12)
    style.add_stamp(axes[0], results.values())
    return axes


def gather_time_by_bandwidth(
    seconds: Mapping[str, tuple[float, float]],
    *,
    machines: Mapping[str, float],
    measured: Mapping[str, tuple[float, float]] | None = None,
    results: Iterable[RunResult] = (),
    ax: Axes | None = None,
) -> Axes:
    """Predicted time of gathers against bandwidth, a line for each way to send; its lines cross where one pays.

    Args:
        seconds: for each way's name, bytes that a rank sends over the wire, and seconds to encode and decode.
        machines: bandwidths to mark, in bytes a second, by name.
        measured: for some of the ways, a bandwidth and the seconds that were measured there.
        results: the runs that this was measured in.
        ax: where to draw.
    """
    ax = style.make_axes(ax, 5.2, 3.6)
    low, high = min(machines.values()) / 10, max(machines.values()) * 10
    bandwidths = numpy.geomspace(low, high, 60)
    for name, (sent, coding) in seconds.items():
        colour = encoding_colour(name)
        ax.plot(
            bandwidths / 1e9,
            1e3 * (sent / bandwidths + coding),
            **style.PREDICTION_STYLE | {"color": colour},
            label=name,
        )
        if name in (measured or {}):
            bandwidth, took = (measured or {})[name]
            ax.plot(bandwidth / 1e9, 1e3 * took, "o", color=colour, ms=7, label=f"{name}, measured")
    for name, bandwidth in machines.items():
        ax.axvline(bandwidth / 1e9, color=style.GREY, lw=1, ls=":", zorder=0)
        place: dict[str, Any] = {
            "xycoords": ("data", "axes fraction"),
            "textcoords": "offset points",
        }
        ax.annotate(
            name, (bandwidth / 1e9, 0.02), (-3, 0), rotation=90, ha="right", fontsize=8, **place
        )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="bandwidth on the wire, GB/s",
        ylabel="gathering all units once, ms",
    )
    style.add_legend_above(ax, 2)
    return style.add_stamp(ax, results)


def _draw_tensor_life(ax: Axes, row: str, start: int, end: int, shares: str, text: str) -> None:
    """A tensor's stretch of time in its row, filled if it has memory of its own."""
    position = list(ROW_COLOURS).index(row)
    look = {"facecolor": ROW_COLOURS[row], "edgecolor": "white"}
    if shares:
        look = {"facecolor": "white", "edgecolor": ROW_COLOURS[shares], "hatch": "////"}
    ax.add_patch(Rectangle((start, position - 0.4), end - start, 0.8, linewidth=1, **look))  # type: ignore[arg-type]
    said = ax.text((start + end) / 2, position, text, ha="center", va="center", fontsize=8)
    if shares:
        said.set_bbox({"color": "white", "pad": 1.5})
    elif row in ("local shard", "parameter"):  # the dark ones
        said.set_color("white")
