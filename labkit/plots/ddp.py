"""Figures of DDP's buckets: their gradients, what hides them, and what their size costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit import inductor
from labkit.inductor import Bucket
from labkit.plots import style
from labkit.plots.style import Numbers, Runs
from labkit.runs.result import RunResult
from labkit.theory.sizes import byte_unit, readable_bytes

IN_FLIGHT_COLOUR, WAIT_COLOUR = inductor.KIND_COLOURS["collective"], inductor.KIND_COLOURS["wait"]
BAR_STYLE: dict[str, Any] = {"facecolor": IN_FLIGHT_COLOUR, "edgecolor": "black", "linewidth": 0.5}
DOT_STYLE: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 3, "linestyle": ""}
TICK_STYLE = DOT_STYLE | {"color": WAIT_COLOUR, "marker": "|", "markersize": 12}
TICK_STYLE["markeredgewidth"] = 2.5
# Fractions of the width: the boxes, the space after them, and a letter in a box.
BOXES_SHARE, BOXES_GAP, LETTER_WIDTH = 0.56, 0.05, 0.0125
# More letters than this do not fit below the boxes.
MAX_LETTERS_BELOW = 60


def bucket_schedule(drawn: RunResult | Sequence[Bucket], *, ax: Axes | None = None) -> Axes:
    """Draw one row per bucket: its gradients, by bytes, and when it is requested and waited for.

    The scale on the right counts lines of the generated program, like ``inductor.ProgramListing``.
    A dot is a kernel or a GEMM between the request and the first wait, which hides communication.
    ``drawn`` is a run that kept its generated program as ``code`` and recorded its buckets, or the
    buckets that ``inductor.find_buckets`` returns.
    """
    rows = _name_bucket_gradients(drawn) if isinstance(drawn, RunResult) else list(drawn)
    if not rows:
        raise ValueError(
            "no bucket to draw: the program holds no all-reduce; were gradients synchronised?"
        )
    ax = style.make_axes(ax, height=1.6 + 0.6 * len(rows))
    longest = max(bucket.bytes for bucket in rows)
    unit, size = byte_unit(longest)
    ax.set_xlim(0, longest / size / BOXES_SHARE)
    for row, bucket in enumerate(rows):
        _draw_gradient_boxes(ax, row, bucket, size)
    labels = [f"bucket {bucket.index}\n{readable_bytes(bucket.bytes)}" for bucket in rows]
    ax.set(yticks=range(len(rows)), yticklabels=labels, ylim=(len(rows) - 0.4, -0.5))
    # The right part of the axes has a scale of its own.
    ax.set_xticks([tick for tick in ax.get_xticks() if tick <= longest / size])
    ax.spines["bottom"].set_bounds(0, longest / size)
    ax.set_xlabel(f"gradients that travel together, {unit}", x=BOXES_SHARE / 2)
    ax.tick_params(axis="y", length=0)
    _draw_program_order(ax, rows)
    return style.add_stamp(ax, [drawn] if isinstance(drawn, RunResult) else [])


def _draw_gradient_boxes(ax: Axes, row: int, bucket: Bucket, size: float) -> None:
    """Draw one box per gradient, in units of ``size`` bytes; long names go below the boxes."""
    start, others = 0.0, []
    look: dict[str, Any] = {"color": style.SKY, "edgecolor": "black", "linewidth": 0.5}
    for gradient in bucket.gradients:
        width, name = gradient.bytes / size, gradient.name or gradient.buffer
        ax.barh(row, width, left=start, height=0.56, **look)
        if len(name) * LETTER_WIDTH < width / ax.get_xlim()[1]:
            ax.text(start + width / 2, row, name, fontsize=8, **style.CENTRED)
        else:
            others.append(name)
        start += width
    text = "also here: " * (len(others) < len(bucket.gradients)) + ", ".join(others)
    if len(text) > MAX_LETTERS_BELOW:
        text = f"also here: {len(others)} gradients"
    if others:
        ax.text(0, row + 0.31, f" {text}", va="top", fontsize=7, color=style.GREY)


def _draw_program_order(ax: Axes, rows: Sequence[Bucket]) -> None:
    """Draw beside the boxes, by line of the program, each request, what hides it, and its waits."""
    left = BOXES_SHARE + BOXES_GAP
    order: Any = ax.inset_axes((left, 0, 1 - left, 1), sharey=ax)
    for row, bucket in enumerate(rows):
        asked, hidden_by = bucket.request.number, [line.number for line in bucket.hidden_by]
        waits = [line.number for line in bucket.waits]
        until = max([asked, *waits, *hidden_by]) + 1
        order.barh(row, until - asked, left=asked, height=0.3, **BAR_STYLE)
        order.plot(hidden_by, [row] * len(hidden_by), **DOT_STYLE)
        order.plot(waits, [row] * len(waits), **TICK_STYLE)
        text = f"{len(hidden_by) or 'nothing'} in between" if waits else "never waited for"
        colour = style.GREY if waits else WAIT_COLOUR
        order.text(until, row - 0.2, text, ha="right", fontsize=7, color=colour)
    order.spines[["top", "right", "left"]].set_visible(False)
    order.tick_params(axis="y", length=0, labelleft=False)
    # Lines of a program count from 1.
    order.set_xlim(1, order.get_xlim()[1])
    order.set_xlabel("line of the generated program")
    handles: list[Any] = [Patch(label="on its way", **BAR_STYLE)]
    for label, look in {"compute": DOT_STYLE, "wait": TICK_STYLE}.items():
        handles.append(Line2D([], [], label=label, **look))
    style.add_legend_above(order, 3, handles, **style.SMALL_LEGEND)


def backward_program(result: RunResult) -> inductor.ProgramListing:
    """Return inductor's code for rank 0's backward pass, with names for its buffers' contents."""
    code, buckets = result.ranks[0].artifact("code"), _name_bucket_gradients(result)
    names = [gradient.name for bucket in buckets for gradient in bucket.gradients]
    return inductor.ProgramListing(code, inductor.name_buffers(code, names))


def _name_bucket_gradients(result: RunResult) -> list[Bucket]:
    """Return the buckets of rank 0's program with the names that the run recorded."""
    found = inductor.find_buckets(result.ranks[0].artifact("code"))
    records = result.frame.query("rank == 0 and kind == 'bucket'")
    # Every step records its buckets.
    records = records.drop_duplicates(["index", "name"], keep="last")
    coded = [(bucket.index, gradient.bytes) for bucket in found for gradient in bucket.gradients]
    if coded != list(zip(records["index"], records["bytes"], strict=True)):
        raise ValueError(
            f"the code of rank 0 sends {len(coded)} gradients in {len(found)} buckets, the run "
            f"recorded {len(records)} of other sizes: "
            "its records of buckets must follow the program's order"
        )
    names, named = iter(records["name"]), []
    for bucket in found:
        gradients = tuple(replace(gradient, name=next(names)) for gradient in bucket.gradients)
        named.append(replace(bucket, gradients=gradients))
    return named


def step_ms_by_size(result: RunResult) -> dict[str, float]:
    """Return the median step of each size of bucket, on the slowest rank, of a run with sizes."""
    spans = result.frame.query("kind == 'span'")
    spans = spans[spans["name"].str.endswith(" MiB")]
    if spans.empty:
        raise ValueError("this run compared no sizes of buckets: give it sizes_mb")
    slowest = spans.groupby(["name", "step"])["dur_us"].max() / 1e3
    medians = slowest.groupby("name").median()
    return {f"{size:g} MiB": medians[f"{size:g} MiB"] for size in result.params["sizes_mb"]}


def step_time_by_bucket_size(
    results: Runs,
    predicted_ms: Mapping[str, Numbers],
    *,
    axes: Sequence[Axes] | None = None,
    ylabel: str = "backward pass, ms",
    sizes: Sequence[str] | None = None,
) -> list[Axes]:
    """Draw the median step by size of bucket, one panel a run, with its prediction dashed.

    The number of the fastest size is bold. The runs are those of ``step_ms_by_size``. ``sizes``
    names the sizes, which are otherwise in MiB.
    """
    panels = style.make_panels(results, 3.3, 3.2) if axes is None else list(axes)
    for ax, (name, result) in zip(panels, results.items(), strict=True):
        times = step_ms_by_size(result)
        fastest = min(times, key=lambda label: times[label])
        ax.bar(range(len(times)), list(times.values()), 0.6, color=style.BLUE)
        for column, (label, time_ms) in enumerate(times.items()):
            expected = predicted_ms[name].get(label, time_ms)
            if label in predicted_ms[name]:
                style.mark_prediction(ax, column, 0.42, expected)
            weight = "bold" if label == fastest else "normal"
            place = (column, max(time_ms, expected))
            style.add_note(ax, f"{time_ms:.0f}", place, (0, 3), weight=weight)
        labels = sizes or [_size_text(label) for label in times]
        ax.set_xticks(range(len(times)), labels, fontsize=8)
        ax.set_xlabel("a bucket closes at" + ("" if sizes else ", MiB"))
        ax.margins(y=0.12)
    panels[0].set_ylabel(ylabel)
    handles = [*style.legend_patches({"measured": style.BLUE}), style.prediction_handle("formula")]
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "loc": "outside upper right"}
    panels[0].figure.legend(handles=handles, ncols=2, **look)
    style.add_stamp(panels[0], results.values())
    return panels


def _size_text(label: str) -> str:
    """Return a size without its unit; less than a KiB means that each tensor has a bucket."""
    size = float(label.removesuffix(" MiB"))
    return "each\nalone" if size < 1 / 1024 else f"{size:.2g}"


def exposure_by_bucket_size(
    sizes_mb: Sequence[float],
    multiples: Mapping[str, Sequence[float]],
    smallest_mb: Numbers,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw a predicted backward pass over the bucket size, one line a case, in its arithmetic.

    A dot marks the case's smallest size that keeps up, unless it is infinite.
    """
    ax = style.make_axes(ax, 8.0, 3.2)
    for (name, values), colour in zip(multiples.items(), style.RANK_COLOURS, strict=False):
        ax.plot(sizes_mb, values, color=colour, lw=2, label=name)
        size = smallest_mb[name]
        if numpy.isfinite(size):
            order = numpy.argsort(sizes_mb)
            height = numpy.interp(size, numpy.array(sizes_mb)[order], numpy.array(values)[order])
            ax.plot(size, height, "o", color=colour)
            style.add_note(ax, f"{size:.2g} MB", (size, height), (0, -15), color=colour)
    ax.axhline(1, **style.GUIDE_STYLE)
    ax.text(max(sizes_mb), 1, "all hidden", ha="right", va="top", fontsize=8, color=style.GREY)
    ax.set(
        xscale="log", ylim=(0.6, 4), xlabel="a bucket, MB", ylabel="backward pass /\nits arithmetic"
    )
    ticks = [size for size in (1, 10, 100) if min(sizes_mb) <= size <= max(sizes_mb)]
    ax.set_xticks(ticks, [f"{size}" for size in ticks])
    style.add_legend_above(ax, len(multiples))
    return ax
