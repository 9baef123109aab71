"""Show which blocks of a model hold a simulated rank's memory at its peak.

block_memory_table(result)     # a row per block
peak_phase_and_block(result)   # ("backward", "layers.31")
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.runs.result import RunResult
from labkit_simulate.artifacts import ARTIFACT_BLOCKS, ARTIFACT_MEMORY

if TYPE_CHECKING:
    import pandas

ROOT_BLOCK = "root"
SUMMARY_COLUMNS = ("total", "forward_kept", "forward_peak", "backward_peak")


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of a simulated rank over its step.

    Attributes:
        bytes_by_change: bytes after each change.
        marks: where in ``bytes_by_change`` each phase and block began.
        peak: index of the largest value.
        at_peak: bytes at the peak by block and category.
    """

    bytes_by_change: list[int]
    marks: list[tuple[int, str, str]]
    peak: int
    at_peak: list[tuple[str, str, int]]

    @property
    def phase_intervals(self) -> list[tuple[str, str, int, int]]:
        """Return (phase, block, first index, index after the last), in order."""
        ends = [mark[0] for mark in self.marks[1:]] + [len(self.bytes_by_change)]
        return [
            (phase, block, start, end)
            for (start, phase, block), end in zip(self.marks, ends, strict=True)
        ]


def read_memory_curve(result: RunResult, rank: int | None = None) -> MemoryCurve:
    """Read the memory curve of a simulated rank.

    Args:
        result: of ``labkit.simulate``.
        rank: a simulated rank; by default the first.

    Raises:
        LabError: the rank was not simulated, or its program tracked no memory.
    """
    output = result.ranks[min(result.active_ranks) if rank is None else rank]
    found = json.loads(output.artifact(ARTIFACT_BLOCKS))
    marks = [(start, phase, block) for start, phase, block in found["marks"]]
    held = [int(line) for line in output.artifact(ARTIFACT_MEMORY).split()]
    return MemoryCurve(
        held,
        marks,
        found["peak"],
        [(block, category, size) for block, category, size in found["held"]],
    )


def peak_phase_and_block(result: RunResult, rank: int | None = None) -> tuple[str, str]:
    """Return the phase and the block that ran at the memory peak; arguments as
    ``read_memory_curve``.
    """
    curve = read_memory_curve(result, rank)
    return next(
        (
            (phase, block)
            for phase, block, start, end in curve.phase_intervals
            if start <= curve.peak < end
        ),
        ("before", "the step"),
    )


def block_memory_table(result: RunResult, rank: int | None = None) -> pandas.DataFrame:
    """Return a table of a model's blocks at the memory peak; arguments as ``read_memory_curve``.

    A column per category, such as ``activation`` or ``optstate``, counts bytes that belong to the
    block: tensors made while it ran, and its parameters with their optimizer state. Memory of no
    block is in row "", the model outside of blocks is "root". ``forward_kept`` is the growth over
    the block's forward pass; ``forward_peak`` and ``backward_peak`` are the rank's maxima while the
    block ran.
    """
    import pandas

    curve = read_memory_curve(result, rank)
    table: dict[str, dict[str, int]] = {}
    for block, category, size in curve.at_peak:
        row = table.setdefault(block, {})
        row[category] = row.get(category, 0) + size
        row["total"] = row.get("total", 0) + size
    for phase, block, start, end in curve.phase_intervals:
        if phase == "optimizer":
            continue
        row = table.setdefault(block, {})
        most = max(curve.bytes_by_change[start:end])
        row[f"{phase}_peak"] = max(row.get(f"{phase}_peak", 0), most)
        if phase == "forward" and block != ROOT_BLOCK:
            row["forward_kept"] = (
                row.get("forward_kept", 0)
                + curve.bytes_by_change[end - 1]
                - curve.bytes_by_change[start - 1]
            )
    order = [block for block in dict.fromkeys(mark[2] for mark in curve.marks) if block in table]
    columns = sorted({category for _, category, _ in curve.at_peak})
    frame = pandas.DataFrame.from_dict(table, orient="index").rename_axis("block")
    return (
        frame.loc[list(dict.fromkeys([*order, *table]))]
        .reindex(columns=[*columns, *SUMMARY_COLUMNS])
        .fillna(0)
        .astype(int)
    )
