"""Records: one measurement is one line of JSON.

A rank appends to ``rank_00003.jsonl`` in the folder of its run; the notebook reads all files of the folder into one
table. Nothing else crosses from the ranks to the notebook as a number.

    {"v": 1, "rank": 0, "step": 3, "kind": "span", "name": "backward", "start_us": 1234.5, "dur_us": 678.9}

| kind   | fields           | meaning                                                                      |
|--------|------------------|------------------------------------------------------------------------------|
| span   | start_us, dur_us | one timed stretch; start counts from the start of the rank's session         |
| scalar | value, unit      | one number, such as a loss                                                   |
| memory | bytes            | one amount of memory                                                         |
| comm   | count, bytes     | calls of one collective in a step, and the bytes this rank handed to them    |

Warm-up steps have step -1, timed steps count from 0. Spans named ``compute/forward/layers.0`` are bars of a time line:
lane, what and unit, and their start counts from that of the profiled step. A comm record named ``tp/all_reduce`` is the
part of ``all_reduce`` that ran along the mesh axis ``tp``; ``bucket/0/fc4.weight`` is what bucket 0 carries of one
parameter's gradient.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from labkit.errors import RecordError

VERSION = 1
FIELDS: dict[str, dict[str, type]] = {
    "span": {"start_us": float, "dur_us": float},
    "scalar": {"value": float, "unit": str},
    "memory": {"bytes": int},
    "comm": {"count": int, "bytes": int},
}
COMMON: dict[str, type] = {"v": int, "rank": int, "step": int, "kind": str, "name": str}


def path_of(folder: Path, rank: int) -> Path:
    """The record file of one rank."""
    return folder / f"rank_{rank:05d}.jsonl"


class Writer:
    """Appends one rank's records to its file. ``folder=None`` keeps them in memory only, in ``lines``."""

    def __init__(self, folder: Path | None, rank: int):
        self.folder, self.rank = folder, rank
        self.lines: list[dict[str, Any]] = []
        self._file: TextIO | None = None if folder is None else path_of(folder, rank).open("a", buffering=1)

    def write(self, kind: str, name: str, step: int, **fields: Any) -> None:
        """Write one record. Raises RecordError for a field that its kind does not have, or a number that is not one."""
        line = {"v": VERSION, "rank": self.rank, "step": step, "kind": kind, "name": name, **fields}
        problem = problem_with(line)
        if problem:
            raise RecordError(f"record {line}: {problem}")
        self.lines.append(line)
        if self._file:
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._file:
            self._file.close()


def problem_with(line: Any) -> str:
    """What is wrong with a decoded line, or "" where nothing is."""
    if not isinstance(line, dict):
        return "not a JSON object"
    if line.get("v") != VERSION:
        return f"version {line.get('v')!r} is not {VERSION}"
    if line.get("kind") not in FIELDS:
        return f"kind {line.get('kind')!r} is none of {', '.join(FIELDS)}"
    expected = COMMON | FIELDS[line["kind"]]
    if line.keys() != expected.keys():
        return f"fields {sorted(line)} are not {sorted(expected)}"
    for name, wanted in expected.items():
        value = line[name]
        allowed = (int, float) if wanted is float else wanted
        if not isinstance(value, allowed) or isinstance(value, bool):
            return f"{name} = {value!r} is not {wanted.__name__}"
    return ""


@dataclass
class Records:
    """All records of a run, and the files whose last line was cut off (a rank killed while it wrote)."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    truncated: list[Path] = field(default_factory=list)


def read(folder: Path) -> Records:
    """Read and check the records of every rank in a run's folder, by rank, in the order they were written.

    Raises:
        RecordError: a malformed line that is not the unfinished last one; the message starts with file:line.
    """
    records = Records()
    for path in sorted(folder.glob("rank_*.jsonl")):
        records.lines.extend(_read_file(path, records.truncated))
    return records


def _read_file(path: Path, truncated: list[Path]) -> Iterator[dict[str, Any]]:
    text = path.read_text(errors="replace")
    *whole, rest = text.split("\n")
    if rest:
        truncated.append(path)
    for number, content in enumerate(whole, start=1):
        try:
            line = json.loads(content)
        except ValueError as error:
            raise RecordError(f"{path}:{number}: not JSON ({error})") from None
        problem = problem_with(line)
        if problem:
            raise RecordError(f"{path}:{number}: {problem}")
        yield line
