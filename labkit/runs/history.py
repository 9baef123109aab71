"""List recorded runs, compare them, and remove old ones.

    history.find_runs(program="fsdp_wrap", limit=20)  # newest first
    history.compare([labkit.load(folder), labkit.load(another)])
    history.prune(history.find_prunable_runs(keep=100))

Listing reads only the run.json of each run, so that ten thousand take less than a second.

Only finished runs are removed: folders of the runs folder that still have the name that labkit gave
them, and a valid run.json. Links are not followed, and renamed runs stay. A run without an end
counts as broken off once no process of this machine belongs to it and its time limit passed an hour
ago, since another machine may share the folder.
"""

import json
import os
import re
import shlex
import shutil
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

RUN_NAME_PATTERN = re.compile(r"\d{8}-\d{6}-.+-[0-9a-f]{6}(_\d+)?", re.DOTALL)
"""The name that a run's folder has from labkit."""
RUNNING = "running"
FINAL_EXITS = (*FINISHED_EXITS, "failed", "timed out", "interrupted", "cancelled")
ABANDON_GRACE_S = 3600.0
DAY_S = 86400.0
SETTING_NAMES = ("program", "nproc", "device", "exit", "labkit", "python", "git_revision")


@dataclass(frozen=True)
class HistoryEntry:
    """A recorded run.

    Attributes:
        folder: path of the run.
        info: content of run.json; {} if that is damaged.
        problem: what is wrong with run.json, or "".
    """

    folder: Path
    info: dict[str, Any]
    problem: str = ""

    @cached_property
    def start_time_s(self) -> float:
        """Start, in seconds since 1970; 0 if run.json does not say."""
        with suppress(KeyError, ValueError, TypeError, OverflowError):
            return datetime.fromisoformat(self.info["start"]).timestamp()
        return 0.0

    @property
    def is_past_limit(self) -> bool:
        """Whether the run's time limit has passed, on whichever machine it started."""
        limit_s = self.info.get("timeout_s")
        limit_s = float(limit_s) if isinstance(limit_s, int | float) else 0.0
        return datetime.now().timestamp() > self.start_time_s + limit_s + ABANDON_GRACE_S

    def state(self, in_use: set[str]) -> str:
        """Return how the run ended, or "running", "broken off" (wrote no end) or "damaged".

        Args:
            in_use: result of ``folders_in_use``.
        """
        said = "damaged" if self.problem else str(self.info["exit"])
        if str(self.folder) in in_use:
            return RUNNING
        return "broken off" if said == RUNNING and self.is_past_limit else said


def find_runs(*, program: str | None = None, limit: int | None = None) -> list[HistoryEntry]:
    """Return the recorded runs, newest first.

    Args:
        program: only runs of this program.
        limit: at most this many.

    Raises:
        LabError: the runs folder cannot be read.
    """
    place = runs_folder()
    try:
        with os.scandir(place) as found:
            paths = [each.path for each in found if each.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        # Nothing was recorded yet.
        return []
    except OSError as error:
        raise LabError(
            f"cannot list {place} ({error.strerror}): set LABKIT_RUNS to the folder of your runs"
        ) from error
    entries = [entry for entry in map(_read_entry, paths) if entry]
    if program is not None:
        entries = [entry for entry in entries if entry.info.get("program") == program]
    return sorted(entries, key=lambda entry: (entry.start_time_s, entry.folder.name), reverse=True)[
        :limit
    ]


def _read_entry(path: str) -> HistoryEntry | None:
    """Read the entry of a folder; None if it has no run.json of its own."""
    file, folder = os.path.join(path, "run.json"), Path(path)
    try:
        with open(file, "rb", opener=_open_no_link) as opened:
            info = json.loads(opened.read())
        if RUN_JSON_TYPES.keys() <= info.keys():
            return HistoryEntry(folder, info)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError, AttributeError):  # told below
        pass
    if os.path.islink(file) or not os.path.isfile(file):
        return None
    try:
        require_fields(Path(file), read_json(Path(file)), RUN_JSON_TYPES)
    except RecordError as error:
        return HistoryEntry(folder, {}, str(error))
    return None


def _open_no_link(path: str, flags: int) -> int:
    # Neither follow a link nor wait for the writer of a pipe.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def folders_in_use() -> set[str]:
    """Return the folders of runs that still have processes of this user on this machine."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            found.add(process.environ().get(ENV_RUN_FOLDER, ""))
    return found


def find_run_folder(name: str) -> Path:
    """Find the folder of a run.

    Args:
        name: folder name, a unique ending of it, or a path.

    Raises:
        LabError: there is no such run, or several.
    """
    place = runs_folder()
    if (place / name / "run.json").is_file():
        return place / name
    if (Path(name) / "run.json").is_file():
        return Path(name)
    fitting = [entry.folder for entry in find_runs() if name and entry.folder.name.endswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise RunFileNotFound(
            f"{len(fitting)} runs in {place} end with {name!r}: give more of the name"
        )
    raise RunFileNotFound(
        f"no run in {place} is called {name!r}, nor ends so: `python -m labkit runs` lists them"
    )


def format_table(entries: Sequence[HistoryEntry]) -> str:
    """Format runs as a table: start, program, ranks, end, duration, given parameters, folder."""
    unsure = any(entry.info.get("exit") not in FINAL_EXITS for entry in entries)
    in_use = folders_in_use() if unsure else set()
    rows = [_table_row(entry, in_use) for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *(entry.problem for entry in entries if entry.problem)])


def _table_row(entry: HistoryEntry, in_use: set[str]) -> list[str]:
    started = (
        datetime.fromtimestamp(entry.start_time_s).isoformat(" ", "seconds")
        if entry.start_time_s
        else "?"
    )
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
        entry.folder.name,
    ]
    *others, name = [
        "".join(each if each.isprintable() else "?" for each in text) for text in texts
    ]
    return [*(text if len(text) <= 40 else f"{text[:39]}…" for text in others), name]


def compare(results: Iterable[RunResult]) -> "pandas.DataFrame":
    """Compare runs, one column each: arguments that differ, then every measured value.

    Raises:
        ParameterError: there is nothing to compare.
    """
    import pandas

    results = list(results)
    names = [result.folder.name for result in results]
    if len(set(names)) < max(2, len(names)):
        raise ParameterError(
            f"compare needs two runs or more, each once: {', '.join(names) or 'none'} given"
        )
    asked = [
        {name: result.info.get(name) for name in SETTING_NAMES} | result.params
        for result in results
    ]
    wanted = dict.fromkeys(name for each in asked for name in each)
    rows = [(name, [each.get(name, "") for each in asked]) for name in wanted]
    rows = [(name, row) for name, row in rows if any(value != row[0] for value in row)]
    values = [{name: result.value(name) for name in result.summary()} for result in results]
    measured = dict.fromkeys(name for each in values for name in each)
    rows += [(name, [each.get(name, "") for each in values]) for name in measured]
    return pandas.DataFrame(
        [row for _, row in rows], [name for name, _ in rows], names, dtype=object
    )


def find_prunable_runs(
    *, keep: int | None = None, older_than_days: float | None = None, program: str | None = None
) -> list[HistoryEntry]:
    """Return the runs that may be removed, newest first. With both limits, a run must exceed both.

    Args:
        keep: number of newest runs to keep.
        older_than_days: minimum age.
        program: only runs of this program; ``keep`` counts these alone.

    Raises:
        ParameterError: no limit is given, or one is negative.
    """
    if keep is None and older_than_days is None:
        raise ParameterError(
            "prune removes nothing without a limit: say how many to keep, or from which age to"
            " remove"
        )
    if (keep or 0) < 0 or not (older_than_days or 0) >= 0:
        raise ParameterError(
            f"keep = {keep} and older_than = {older_than_days}: neither may be negative"
        )
    begun_before = datetime.now().timestamp() - DAY_S * (older_than_days or 0)
    old = [
        entry
        for entry in find_runs(program=program)[keep or 0 :]
        if entry.start_time_s < begun_before
    ]
    in_use = folders_in_use()
    return [entry for entry in old if not _reason_to_stay(entry, in_use)]


def _reason_to_stay(entry: HistoryEntry, in_use: set[str]) -> str:
    """Return why a run must not be removed, or ""."""
    if entry.folder.parent != runs_folder() or not RUN_NAME_PATTERN.fullmatch(entry.folder.name):
        return "it is not in the runs folder under a name of labkit's"
    if entry.folder.is_symlink() or entry.problem or not entry.start_time_s:
        return "it is not certainly a run"
    state = entry.state(in_use)
    return "" if state in (*FINAL_EXITS, "broken off") else f"it may still go on ({state})"


def prune(entries: Iterable[HistoryEntry]) -> list[str]:
    """Remove these runs; each is checked again first.

    Returns:
        The runs that were kept, and why.
    """
    left, in_use = [], folders_in_use()
    for entry in entries:
        now = _read_entry(str(entry.folder))
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
    with os.scandir(folder) as found:
        others = [each for each in found if each.name != "run.json"]
    for each in others:
        if each.is_dir(follow_symlinks=False):
            shutil.rmtree(each.path)
        else:
            os.unlink(each.path)
    (folder / "run.json").unlink()
    folder.rmdir()


def total_bytes(entries: Iterable[HistoryEntry]) -> int:
    """Return the size of all files of these runs, in bytes."""
    sizes = 0
    for entry in entries:
        for folder, _, names in os.walk(entry.folder):
            for name in names:
                with suppress(OSError):
                    sizes += os.lstat(os.path.join(folder, name)).st_size
    return sizes
