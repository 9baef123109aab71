"""Which blocks of a model hold the memory of a simulated rank, when it holds most, and what each keeps.

blocks(result)              # a table, a row a block
peak_of(result)             # ("backward", "layers.31"): what was at work then
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
    """What a simulated rank held over its step.

    Attributes:
        held_bytes: after each change.
        marks: from which place of it on which phase and block were at work.
        peak: the place at which most was held.
        at_peak: what was held there: block, category, bytes.
    """

    bytes_by_change: list[int]
    marks: list[tuple[int, str, str]]
    peak: int
    at_peak: list[tuple[str, str, int]]

    @property
    def phase_intervals(self) -> list[tuple[str, str, int, int]]:
        """Phase, block, first place and the one after the last, in order."""
        ends = [mark[0] for mark in self.marks[1:]] + [len(self.bytes_by_change)]
        return [
            (phase, block, start, end)
            for (start, phase, block), end in zip(self.marks, ends, strict=True)
        ]


def read_memory_curve(result: RunResult, rank: int | None = None) -> MemoryCurve:
    """What a simulated rank held over its step.

    Args:
        result: of ``labkit.simulate``.
        rank: which of those simulated; the first by default.

    Raises:
        Missing: the rank was not simulated, or its program followed no memory.
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
    """The phase and the block that were at work when a simulated rank held most. The arguments are ``curve_of``'s."""
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
    """A table of the blocks of a model, by what they hold when the rank holds most; the arguments are ``curve_of``'s.

    A column a category, such as ``activation`` or ``optstate``, has the bytes that belong to the block at that moment:
    what was made while it was at work, and its parameters with what the optimizer keeps of them. Memory that belongs
    to no block is that of "", and "root" is the model outside of blocks. ``forward_kept`` is by how much more is held
    after a block's forward pass than before, and
    ``forward_peak``, ``backward_peak`` the most that the rank held while it was at work.
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
