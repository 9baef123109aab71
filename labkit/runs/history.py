"""List recorded runs, compare them, and remove old ones.

    history.find_runs(program="fsdp_wrap", limit=20)  # newest first
    history.compare([labkit.load(folder), labkit.load(another)])
    history.prune(history.find_prunable_runs(keep=100))

Listing reads only the run.json of each run, so that ten thousand take less than a second. Only
finished runs are removed that still have the name that labkit gave them; no link is followed.
"""

import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from labkit.environment import ENV_RUN_FOLDER
from labkit.errors import LabError, ParameterError, RecordError
from labkit.runs.folder import read_json, require_fields, runs_folder
from labkit.runs.result import RUN_JSON_TYPES, RunFileNotFound, RunResult
from labkit.runs.verdict import FINISHED_EXITS

if TYPE_CHECKING:
    import pandas

# The name that a run's folder has from labkit.
RUN_NAME_PATTERN = re.compile(r"\d{8}-\d{6}-.+-[0-9a-f]{6}(_\d+)?", re.DOTALL)
RUNNING = "running"
FINAL_EXITS = (*FINISHED_EXITS, "failed", "timed out", "interrupted", "cancelled")
ABANDON_GRACE_S = 3600.0
DAY_S = 86400.0
SETTING_NAMES = ("program", "nproc", "device", "exit", "labkit", "python", "git_revision")
MAX_COLUMN_CHARACTERS = 40
MAX_NAME_CHARACTERS = 255


@dataclass(frozen=True)
class HistoryEntry:
    """A recorded run; ``info`` is its run.json, or {} if that has a ``problem``."""

    folder: Path
    info: dict[str, Any]
    problem: str = ""

    @cached_property
    def start_time_s(self) -> float:
        """Start, in seconds since 1970; 0 if run.json does not say."""
        with suppress(KeyError, ValueError, TypeError, OverflowError):
            return datetime.fromisoformat(self.info["start"]).timestamp()
        return 0.0

    def state(self, in_use: set[str]) -> str:
        """Return how the run ended, or "running", "broken off" (wrote no end) or "damaged"."""
        if str(self.folder) in in_use:
            return RUNNING
        if self.problem:
            return "damaged"
        # Another machine may share the folder, so a run gets an hour more before it counts as lost.
        limit_s = self.info.get("timeout_s")
        limit_s = float(limit_s) if isinstance(limit_s, int | float) else 0.0
        is_past_limit = datetime.now().timestamp() > self.start_time_s + limit_s + ABANDON_GRACE_S
        end = str(self.info["exit"])
        return "broken off" if end == RUNNING and is_past_limit else end


def find_runs(*, program: str | None = None, limit: int | None = None) -> list[HistoryEntry]:
    """Return the recorded runs, newest first: those of one program, at most ``limit``."""
    place = runs_folder()
    try:
        with os.scandir(place) as found:
            paths = [each.path for each in found if each.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        # Nothing was recorded yet.
        return []
    except OSError as error:
        fix = "set LABKIT_RUNS to the folder of your runs"
        raise LabError(f"cannot list {place} ({error.strerror}): {fix}") from error
    entries = [entry for entry in map(_read_entry, paths) if entry]
    if program is not None:
        entries = [entry for entry in entries if entry.info.get("program") == program]
    entries.sort(key=lambda entry: (entry.start_time_s, entry.folder.name), reverse=True)
    return entries[:limit]


# None stands for a folder without a run.json of its own.
def _read_entry(folder: str | Path) -> HistoryEntry | None:
    file = Path(folder, "run.json")
    try:
        # A link is not followed, and the writer of a pipe not waited for.
        if not stat.S_ISREG(file.lstat().st_mode):
            return None
        info = read_json(file)
        require_fields(file, info, RUN_JSON_TYPES)
    except RecordError as error:
        return HistoryEntry(file.parent, {}, str(error))
    except OSError:
        return None
    return HistoryEntry(file.parent, info)


def folders_in_use() -> set[str]:
    """Return the folders of runs that still have processes of this user on this machine."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            found.add(process.environ().get(ENV_RUN_FOLDER, ""))
    return found


def find_run_folder(name: str) -> Path:
    """Find a run by its folder's name, a unique ending of it, or a path."""
    place = runs_folder()
    for folder in (place / name, Path(name)):
        # Unlike Path.is_file, this takes a name that is too long for a file.
        if os.path.isfile(folder / "run.json"):
            return folder
    fitting = [entry.folder for entry in find_runs() if name and entry.folder.name.endswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        problem = f"{len(fitting)} runs in {place} end with {name!r}: give more of the name"
    else:
        fix = "`python -m labkit runs` lists them"
        problem = f"no run in {place} is called {name[:MAX_NAME_CHARACTERS]!r}, nor ends so: {fix}"
    raise RunFileNotFound(problem)


def format_table(entries: Sequence[HistoryEntry]) -> str:
    """Format runs as a table: start, program, ranks, end, duration, given parameters, folder."""
    # Asking every process takes long, and tells nothing new of runs that have ended.
    unsure = any(entry.info.get("exit") not in FINAL_EXITS for entry in entries)
    in_use = folders_in_use() if unsure else set()
    rows = [_table_row(entry, in_use) for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *(entry.problem for entry in entries if entry.problem)])


def _table_row(entry: HistoryEntry, in_use: set[str]) -> list[str]:
    started = "?"
    if entry.start_time_s:
        started = datetime.fromtimestamp(entry.start_time_s).isoformat(" ", "seconds")
    ranks, duration = (entry.info.get(name, "?") for name in ("nproc", "duration_s"))
    # Older runs store them as "arguments".
    given = entry.info.get("given_params", entry.info.get("arguments"))
    if isinstance(given, dict):
        given = [f"{name}={value}" for name, value in given.items()]
    texts = [
        started,
        str(entry.info.get("program", "?")),
        f"{ranks} rank" if ranks == 1 else f"{ranks} ranks",
        entry.state(in_use),
        f"{duration:.1f} s" if isinstance(duration, int | float) else "",
        shlex.join(map(str, given)) if isinstance(given, list) else "",
    ]
    limit = MAX_COLUMN_CHARACTERS
    columns = [text if len(text) <= limit else f"{text[: limit - 1]}…" for text in texts]
    # The folder's name comes last and whole, because people copy it.
    return [_printable(text) for text in (*columns, entry.folder.name)]


# A terminal would obey control characters.
def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def compare(results: Iterable[RunResult]) -> "pandas.DataFrame":
    """Compare runs, one column each: arguments that differ, then every measured value."""
    import pandas

    results = list(results)
    names = [result.folder.name for result in results]
    # A run beside itself would give two columns of one name.
    if len(set(names)) < max(2, len(names)):
        given = ", ".join(names) or "none"
        raise ParameterError(f"compare needs two runs or more, each once: {given} given")
    settings = [
        {name: result.info.get(name) for name in SETTING_NAMES} | result.params
        for result in results
    ]
    values = [
        {name: result.value(name) for name in result.summary() if name != "host"}
        for result in results
    ]
    rows = [row for row in _align_by_name(settings) if any(each != row[1] for each in row[2:])]
    rows += _align_by_name(values)
    index = [name for name, *_ in rows]
    return pandas.DataFrame([row[1:] for row in rows], index, names, dtype=object)


# Makes a row for each name: the name, and what each column has, "" for nothing.
def _align_by_name(columns: list[dict[str, Any]]) -> list[list[Any]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "") for column in columns)] for name in names]


def find_prunable_runs(
    *, keep: int | None = None, older_than_days: float | None = None, program: str | None = None
) -> list[HistoryEntry]:
    """Return the runs of one program that may be removed, newest first, beyond both limits."""
    if keep is None and older_than_days is None:
        rule = "say how many to keep, or from which age to remove"
        raise ParameterError(f"prune removes nothing without a limit: {rule}")
    # NaN fails the second comparison.
    if (keep or 0) < 0 or not (older_than_days or 0) >= 0:
        limits = f"keep = {keep} and older_than = {older_than_days}"
        raise ParameterError(f"{limits}: neither may be negative")
    begun_before = datetime.now().timestamp() - DAY_S * (older_than_days or 0)
    runs = find_runs(program=program)[keep or 0 :]
    in_use = folders_in_use()
    return [
        run for run in runs if run.start_time_s < begun_before and not _reason_to_stay(run, in_use)
    ]


def _reason_to_stay(entry: HistoryEntry, in_use: set[str]) -> str:
    # Removing is the one thing that cannot be undone, so every doubt keeps a run.
    if entry.folder.parent != runs_folder() or not RUN_NAME_PATTERN.fullmatch(entry.folder.name):
        return "it is not in the runs folder under a name of labkit's"
    if entry.folder.is_symlink() or entry.problem or not entry.start_time_s:
        return "it is not certainly a run"
    state = entry.state(in_use)
    return "" if state in (*FINAL_EXITS, "broken off") else f"it may still go on ({state})"


def prune(entries: Iterable[HistoryEntry]) -> list[str]:
    """Remove these runs, each checked again first; return those that were kept, and why."""
    left, in_use = [], folders_in_use()
    for entry in entries:
        # A person may have taken a minute to say yes.
        now = _read_entry(entry.folder)
        reason = _reason_to_stay(now, in_use) if now else "it is gone, or no run any more"
        try:
            if not reason:
                _remove_run_folder(entry.folder)
        except OSError as error:
            reason = str(error)
        if reason:
            left.append(f"{entry.folder}: left as it is: {reason}")
    return left


def _remove_run_folder(folder: Path) -> None:
    # run.json goes last, so that an interrupted removal leaves a run that can be removed.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "run.json"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()


def total_bytes(entries: Iterable[HistoryEntry]) -> int:
    """Return the size of all files of these runs, in bytes."""
    paths = (path for entry in entries for path in entry.folder.rglob("*"))
    return sum(path.lstat().st_size for path in paths if path.is_file())
