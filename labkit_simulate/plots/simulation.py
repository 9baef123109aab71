"""Figures of what a simulated rank holds: over its step, and by block of the model when it holds
most.
"""

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory.sizes import byte_unit, readable_bytes
from labkit_simulate.block_memory import (
    SUMMARY_COLUMNS,
    block_memory_table,
    peak_phase_and_block,
    read_memory_curve,
)

LEAST_SEEN = 0.005
"""Of the width of a curve: a narrower phase has no place in the legend."""


def memory_curve(result: RunResult, *, rank: int | None = None, ax: Axes | None = None) -> Axes:
    """Bytes that a simulated rank holds over its step, change by change; the peak is named, and
    coloured by phase.

    The axis is not time: each tensor that is made or freed is one step of it.
    """
    curve = read_memory_curve(result, rank)
    ax = style.make_axes(ax, width=8.0, height=3.4)
    unit, scale = byte_unit(max(curve.bytes_by_change), base=1024)
    held = [size / scale for size in curve.bytes_by_change]
    for phase, _, start, end in curve.phase_intervals:
        places = range(max(0, start - 1), end)
        ax.fill_between(
            places,
            [held[place] for place in places],
            color=style.PHASE_COLOURS[phase],
            alpha=0.5,
            lw=0,
        )
    ax.plot(held, color="black", lw=0.8)
    (phase, block), most = peak_phase_and_block(result, rank), curve.bytes_by_change[curve.peak]
    ax.plot(curve.peak, held[curve.peak], "v", color="black", ms=6)
    side = "right" if curve.peak > len(held) / 2 else "left"
    text = f"peak {readable_bytes(most, base=1024)}, {' '.join(filter(None, (phase, block)))}"
    ax.annotate(
        text,
        (curve.peak, held[curve.peak]),
        (0, 8),
        textcoords="offset points",
        ha=side,
        fontsize=9,
    )
    changes: dict[str, int] = {}
    for phase, _, start, end in curve.phase_intervals:
        changes[phase] = changes.get(phase, 0) + end - start
    # An optimizer that works in place makes few tensors: its phase is too narrow to be seen.
    seen = [phase for phase, count in changes.items() if count > LEAST_SEEN * len(held)]
    handles = [Patch(color=style.PHASE_COLOURS[phase], alpha=0.5, label=phase) for phase in seen]
    style.add_legend_above(ax, len(handles), handles)
    ax.set(
        xlabel="tensors made and freed, in order",
        ylabel=f"held by a rank, {unit}",
        xlim=(0, len(held) - 1),
    )
    ax.set_ylim(0, 1.18 * max(held))
    return style.add_stamp(ax, [result])


def memory_by_block(result: RunResult, *, rank: int | None = None, ax: Axes | None = None) -> Axes:
    """What each block of the model holds of a simulated rank's peak, by use: a bar a block, in
    order of the step.
    """
    table = block_memory_table(result, rank)
    table = table[table["total"] > 0].drop(columns=[*SUMMARY_COLUMNS])
    ax = style.make_axes(ax, width=8.0, height=1.3 + 0.35 * len(table))
    unit, scale = byte_unit(table.sum(axis=1).max())
    shown = []
    left = [0.0] * len(table)
    for name, (parts, colour) in style.MEMORY_CATEGORIES.items():
        sizes = (table[[part for part in parts if part in table]].sum(axis=1) / scale).tolist()
        if any(sizes):
            ax.barh(
                range(len(table)), sizes, 0.7, left, color=colour, edgecolor="white", linewidth=0.5
            )
            shown.append(Patch(color=colour, label=name))
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    for row, size in enumerate(left):
        ax.text(size, row, f" {size:.3g}", va="center", fontsize=8)
    ax.set(yticks=range(len(table)), yticklabels=[block or "no block" for block in table.index])
    ax.set_xlabel(f"held of the peak, {unit}")
    ax.margins(x=0.1)
    ax.invert_yaxis()
    style.add_legend_above(ax, 4, shown)
    return style.add_stamp(ax, [result])
