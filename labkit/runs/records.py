"""Records: one measurement is one line of JSON.

A rank appends to ``rank_00003.jsonl`` in the folder of its run; the notebook reads all files of the
folder into one table. Numbers reach the notebook in no other way.

    {"v": 2, "rank": 0, "step": 3, "kind": "span", "name": "backward", "start_us": 12, "dur_us": 7}

| kind   | name           | fields                                | meaning                      |
| ------ | -------------- | ------------------------------------- | ---------------------------- |
| span   | stretch        | start_us, dur_us                      | from the session's start     |
| bar    | module, bucket | lane, phase, start_us, dur_us         | from its step's start        |
| bucket | parameter      | index, bytes                          | bytes of its gradient        |
| scalar | quantity       | value, unit                           | such as a loss               |
| memory | use            | bytes                                 | amount of memory             |
| comm   | collective     | axis, group_size, hosts, count, bytes | calls per step, bytes passed |

Warm-up steps have step -1, timed steps count from 0. ``axis`` is the mesh axis of a collective, and
"" where the record is the total. ``group_size`` ranks on ``hosts`` hosts took part. Older runs lack
``group_size``, so the bytes of their collectives on the wire are unknown, or ``hosts``: these had
one. In version 1 bars, buckets and axes were part of the names of other kinds.
"""

import errno
import fcntl
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from labkit.errors import RecordError
from labkit.runs import private_files

# The version of records and run.json that is written.
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
FIELDS_BY_KIND: dict[str, dict[str, type]] = {
    "span": {"start_us": float, "dur_us": float},
    "bar": {"lane": str, "phase": str, "start_us": float, "dur_us": float},
    "bucket": {"index": int, "bytes": int},
    "scalar": {"value": float, "unit": str},
    "memory": {"bytes": int},
    "comm": {"axis": str, "group_size": int, "hosts": int, "count": int, "bytes": int},
}
OPTIONAL_FIELDS = {"group_size", "hosts"}
COMMON_FIELDS: dict[str, type] = {"v": int, "rank": int, "step": int, "kind": str, "name": str}
RECORD_FIX = "A record is a line of JSON (labkit/runs/records.py): remove the line, or run again"
# The scalar in which a rank says how many steps it will time, for the display of progress.
PLANNED_STEPS = "planned_steps"
# Scalars that tell whether other programs used the cores while steps were timed.
TIMED_S, RANK_CORES, BUSY_CORES = "timed_s", "rank_cores", "busy_cores"
# Scalars that no table shows.
ABOUT_THE_RUN = (PLANNED_STEPS, TIMED_S, RANK_CORES, BUSY_CORES)
# The largest number that an integer column of a table holds.
MAX_INT64 = 2**63 - 1


def record_path(folder: Path, rank: int) -> Path:
    """Return the record file of one rank."""
    return folder / f"rank_{rank:05d}.jsonl"


class RecordWriter:
    """Append one rank's records to its file, or without a folder only to ``lines``."""

    def __init__(self, folder: Path | None, rank: int):
        self.folder, self.rank = folder, rank
        self.lines: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        if folder:
            # Line by line, so that a rank that is killed loses no whole record.
            self._file = private_files.open_file(record_path(folder, rank), "a", buffering=1)
            _lock_record_file(self._file)

    def write(self, kind: str, name: str, step: int, **fields: Any) -> None:
        """Write one record; raise RecordError unless it has the fields and types of its kind."""
        common = {"v": FORMAT_VERSION, "rank": self.rank, "step": step, "kind": kind, "name": name}
        line = common | fields
        if problem := record_problem(line):
            raise RecordError(f"record {line}: {problem}")
        self.lines.append(line)
        if self._file:
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._file:
            self._file.close()


def _lock_record_file(file: IO[str]) -> None:
    """Lock a rank's file for this process, not for its children; the lock ends with the process."""
    # Sums over the records of two runs would be wrong for both.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error means that this disk has no locks.
        if error.errno in (errno.EAGAIN, errno.EACCES):
            what = f"{file.name}: another process is writing records here"
            fix = "give each run a folder of its own, or unset LABKIT_RUN_FOLDER"
            raise RecordError(f"{what}: {fix}") from None


def collective_label(axis: str, name: str) -> str:
    """Return a collective's name among a run's values: ``tp/all_reduce``, or without an axis."""
    return f"{axis}/{name}" if axis else name


def record_problem(line: Any, ranks: int = MAX_INT64) -> str:
    """Return what is wrong with a decoded line of the present version, or "" for nothing."""
    if not isinstance(line, dict):
        return "not a JSON object"
    if line.get("v") != FORMAT_VERSION:
        return f"version {line.get('v')!r} is none of {', '.join(map(str, READABLE_VERSIONS))}"
    kind = line.get("kind")
    if not isinstance(kind, str) or kind not in FIELDS_BY_KIND:
        return f"kind {kind!r} is none of {', '.join(FIELDS_BY_KIND)}"
    expected = COMMON_FIELDS | FIELDS_BY_KIND[kind]
    if not expected.keys() - OPTIONAL_FIELDS <= line.keys() <= expected.keys():
        return f"fields {sorted(line)} are not {sorted(expected)}"
    for name, value in line.items():
        wanted = expected[name]
        allowed = (int, float) if wanted is float else wanted
        if not isinstance(value, allowed) or isinstance(value, bool):
            return f"{name} = {value!r} is not {wanted.__name__}"
        if name == "rank" and isinstance(value, int) and not 0 <= value < ranks:
            return f"rank = {value} is none of 0 to {ranks - 1}, the ranks of the run"
        if isinstance(value, int) and abs(value) > MAX_INT64:
            return f"{name} has {len(str(abs(value)))} digits, more than 64 bits hold"
    return ""


def upgrade_from_version_1(line: Any) -> Any:
    """Convert a decoded line to version 2, and leave what does not fit to ``record_problem``."""
    # Names became fields: of the span compute/forward/layers.0 a bar, of the comm record
    # bucket/0/fc4.weight a bucket, of tp/all_reduce a collective along an axis.
    # True would equal 1.
    if not isinstance(line, dict) or type(line.get("v")) is not int or line["v"] != 1:
        return line
    line, name = line | {"v": 2}, line.get("name")
    match line.get("kind"), name.split("/", maxsplit=2) if isinstance(name, str) else []:
        case "span", [("compute" | "communication" | "exposed") as lane, phase, name]:
            return line | {"kind": "bar", "lane": lane, "phase": phase, "name": name}
        case "comm", ["bucket", index, name] if index.isdecimal():
            line.pop("count", None)
            return line | {"kind": "bucket", "index": int(index), "name": name}
        case "comm", [*axis, name]:
            return line | {"axis": "".join(axis), "name": name}
    return line


@dataclass
class Records:
    """All records of a run, and the files whose last line is cut off, because a rank was killed."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    incomplete_files: list[Path] = field(default_factory=list)


def read_records(folder: Path, ranks: int = MAX_INT64) -> Records:
    """Read the records of all ranks in order; RecordError gives file:line of a malformed one.

    A rank beyond the run's number of ``ranks`` is malformed.
    """
    records = Records()
    for path in sorted(folder.glob("rank_*.jsonl")):
        try:
            *whole, rest = path.read_text(errors="replace").split("\n")
        except OSError as error:
            raise RecordError(f"{path}: cannot be read ({error.strerror}). {RECORD_FIX}") from None
        if rest:
            records.incomplete_files.append(path)
        for number, content in enumerate(whole, start=1):
            records.lines.append(_parse_record(content, f"{path}:{number}", ranks))
    return records


def _parse_record(content: str, place: str, ranks: int) -> dict[str, Any]:
    try:
        line: dict[str, Any] = upgrade_from_version_1(json.loads(content))
        problem = record_problem(line, ranks)
    except (ValueError, RecursionError) as error:
        problem = f"not JSON ({error})"
    if problem:
        raise RecordError(f"{place}: {problem}. {RECORD_FIX}")
    return line
