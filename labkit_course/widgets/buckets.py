"""Explorer of lab 4b: what DDP's bucket size does to the messages of a backward pass."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import labkit
from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory import ddp as theory
from labkit.theory.collectives import AlphaBeta
from labkit.theory.emulated import Emulated, slow_motion_factor
from labkit_course.widgets.explorer import Control, Explorer, Measured, Numbers

# The * is DDP's default, whose first bucket closes at 1 MiB.
BUCKET_SIZES_MB = {
    "one gradient": 0.0001,
    "0.1 MiB": 0.1,
    "1 MiB": 1.0,
    "5 MiB": 5.0,
    "25 MiB*": 25.0,
    "100 MiB": 100.0,
}
NETWORKS = {"100 × 64": (100, 64), "24 × 256": (24, 256), "4 × 1,000": (4, 1000)}
# In an all-reduce of two ranks, each sends twice.
RANKS, ALL_REDUCE_STEPS = 2, 2
MESSAGE_COLOURS = {
    "arithmetic": style.ORANGE,
    "hidden message": style.COLLECTIVE_COLOURS["all_reduce"],
    "exposed": style.EXPOSURE_COLOUR,
}
# The white outlines of more messages than this would cover the messages themselves.
OUTLINE_LIMIT = 40
Span = tuple[float, float]


class BucketExplorer(Explorer):
    """A chain of linear layers under DDP; a run emulates the chosen network card in slow motion."""

    title = "Which gradients travel together, and what hides them?"
    controls: ClassVar = {
        "network": Control("layers", NETWORKS, (100, 64)),
        "bucket_mb": Control("bucket", BUCKET_SIZES_MB, 0.1),
        "alpha_us": Control("alpha, µs a message", (5, 20, 100, 400), 100),
        "gb_per_s": Control("1 / beta, GB/s", (1, 2, 10, 100), 2),
        "backward_ms": Control("arithmetic, ms", (2, 5, 20), 5),
    }
    formulas = (theory.bucket_plan, theory.bucket_transfer_times, theory.smallest_bucket_bytes)
    tolerances: ClassVar = {"backward_ms": 0.15}
    run_tip = "measure this on two real ranks that wait for the chosen times in slow motion"
    size = (8.5, 3.4)

    def predict(self, **chosen: Any) -> dict[str, float]:
        layers, dim = chosen["network"]
        buckets = theory.chain_buckets(dim, chosen["bucket_mb"], layers=layers)
        size = sum(sum(each.values()) for each in buckets)
        sent = {"all_reduce_count": len(buckets), "all_reduce_bytes": size}
        return sent | {"backward_ms": 1e3 * _backward_end_s(**chosen)}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        measured_s = self.measured_value("backward_ms", result) / 1e3 if result else 0.0
        margins = {"left": 0.115, "right": 0.985, "top": 0.86, "bottom": 0.21, "wspace": 0.32}
        line, sizes = figure.subplots(1, 2, width_ratios=(1.7, 1), gridspec_kw=margins)
        backward_s = chosen["backward_ms"] / 1e3
        journeys = _bucket_transfer_times(**chosen)
        backward_timeline(journeys, backward_s, measured_s=measured_s, ax=line)
        line.locator_params(axis="x", nbins=5)
        parts = {}
        for name, size in BUCKET_SIZES_MB.items():
            exposed_s = _backward_end_s(**chosen | {"bucket_mb": size}) - backward_s
            parts[name] = (backward_s, exposed_s)
            if size == chosen["bucket_mb"]:
                label = name
        backward_time_by_bucket_size(parts, label, measured_s=measured_s, ax=sizes)
        sizes.set_xlabel("backward pass, ms (*: first bucket at 1 MiB)", fontsize=8)
        end_ms, exposed_ms = 1e3 * sum(parts[label]), 1e3 * parts[label][1]
        words = (
            f"{style.count_text(len(journeys), 'bucket')}, "
            f"{predicted['all_reduce_bytes'] / 1e6:.3g} MB; "
            f"the backward pass is predicted to take {style.short_number_text(end_ms)} ms, "
            f"of which {style.short_number_text(exposed_ms)} ms are exposed messages"
        )
        if measured_s:
            words += f"; it took {style.short_number_text(1e3 * measured_s)} ms"
        return words

    def launch(self, **chosen: Any) -> RunResult:
        layers, dim = chosen["network"]
        sizes = {"dim": dim, "layers": layers, "batch": 2, "bucket_mb": chosen["bucket_mb"]}
        hardware = _slow_network_card(**chosen)
        return labkit.run(
            "ddp_compile", nproc=RANKS, mode="ddp", steps=1, emulate=hardware, **sizes
        )


def _slow_network_card(**chosen: Any) -> Emulated:
    """Return hardware with the chosen costs in slow motion."""
    slower = slow_motion_factor(_backward_end_s(**chosen))
    layers, _ = chosen["network"]
    return Emulated(
        latency_us=slower * chosen["alpha_us"] / ALL_REDUCE_STEPS,
        gb_per_s=chosen["gb_per_s"] / slower,
        backward_ms=slower * chosen["backward_ms"] / layers,
        hardware=f"a card of {chosen['alpha_us']} µs and {chosen['gb_per_s']} GB/s",
        slower=slower,
    )


def _bucket_transfer_times(**chosen: Any) -> list[tuple[float, float]]:
    """Return when each bucket leaves and arrives, in seconds."""
    layers, dim = chosen["network"]
    network = AlphaBeta(chosen["alpha_us"] / 1e6, 1e-9 / chosen["gb_per_s"])
    how: dict[str, Any] = {"backward_s": chosen["backward_ms"] / 1e3, "network": network}
    return theory.backward_transfer_times(dim, layers, chosen["bucket_mb"], **how)


def _backward_end_s(**chosen: Any) -> float:
    return max(chosen["backward_ms"] / 1e3, _bucket_transfer_times(**chosen)[-1][1])


def backward_timeline(
    journeys_s: Sequence[Span],
    backward_s: float,
    *,
    measured_s: float = 0.0,
    ax: Axes | None = None,
) -> Axes:
    """Draw a predicted backward pass above its messages, with the exposed ones in vermilion.

    ``journeys_s`` are when each bucket leaves and arrives, ``backward_s`` is the arithmetic alone.
    ``measured_s``, if any, is a third bar.
    """
    ax = style.make_axes(ax)
    messages = 1e3 * numpy.array(journeys_s)  # [bucket, 2]: leaves, arrives
    done = 1e3 * backward_s
    work = numpy.array([(0.0, done)])
    # A message is exposed from its seam on: from the end of the arithmetic.
    leaves, arrives = messages.T
    seams = numpy.minimum(arrives, done)
    covered = numpy.column_stack([leaves, seams])
    exposed = numpy.column_stack([numpy.maximum(leaves, seams), arrives])
    end, measured_ms = max(done, arrives.max()), 1e3 * measured_s
    width = 0.4 if len(messages) <= OUTLINE_LIMIT else 0.0
    rows = ((work, -0.3, 0.0), (covered, 0.7, width), (exposed, 0.7, width))
    for (spans, top, edge), colour in zip(rows, MESSAGE_COLOURS.values(), strict=True):
        lengths = [(start, stop - start) for start, stop in spans if stop > start]
        look: dict[str, Any] = {"edgecolor": "white", "linewidth": edge}
        ax.broken_barh(lengths, (top, 0.6), facecolor=colour, **look)
    ax.axvline(end, **style.PREDICTION_STYLE)
    labels = ["computes", style.count_text(len(messages), "bucket")]
    if measured_s:
        ax.barh(2, measured_ms, height=0.6, color=style.BLUE)
        text = f" {style.short_number_text(measured_ms)}"
        ax.text(measured_ms, 2, text, va="center", fontsize=9)
        labels.append("measured")
    ax.set_yticks(range(len(labels)), labels)
    ax.set(xlim=(0, 1.12 * max(end, measured_ms)), ylim=(len(labels) - 0.5, -0.9))
    ax.set_xlabel("since the backward pass began, ms")
    ax.tick_params(axis="y", length=0)
    text = f"predicted {style.short_number_text(end)}"
    style.add_note(ax, text, (end, -0.6), (-4, 0), ha="right")
    style.add_legend_above(ax, 3, style.legend_patches(MESSAGE_COLOURS))
    return ax


def backward_time_by_bucket_size(
    predicted_s: Mapping[str, Span], chosen: str, *, measured_s: float = 0.0, ax: Axes | None = None
) -> Axes:
    """Draw the predicted backward pass by bucket size: arithmetic, then exposed messages.

    The label ``chosen`` is bold; ``measured_s``, the time measured for it, is a dot.
    """
    ax = style.make_axes(ax)
    rows = {}
    for label, (work_s, exposed_s) in predicted_s.items():
        rows[label] = {"arithmetic": 1e3 * work_s, "exposed": 1e3 * exposed_s}
    style.draw_rows_with_choice(ax, rows, MESSAGE_COLOURS, chosen, 1e3 * measured_s)
    ax.set_xlabel("backward pass, ms")
    title = "by size of bucket" + (", dot: measured" if measured_s else "")
    ax.set_title(title, fontsize=9, loc="left")
    return ax
