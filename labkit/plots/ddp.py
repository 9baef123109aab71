"""The program that compiled DDP runs, and figures of what the size of its buckets costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
from matplotlib.axes import Axes

from labkit import inductor
from labkit.inductor import Bucket
from labkit.plots import style
from labkit.plots.style import Numbers, Runs
from labkit.runs.result import RunResult


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
    """Draw the median step by size of bucket, one panel a run on one scale, its prediction dashed.

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
    top = max(ax.get_ylim()[1] for ax in panels)
    for ax in panels:
        ax.set_ylim(0, top)
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
