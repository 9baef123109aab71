"""One file with a learner's verdicts for a teacher, and many such files as one table."""

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit.runs.folder import explain_write_errors, read_json, write_json, write_text
from labkit_course import lab_catalog, verdict_store

EXPORT_KIND = "labkit progress"
EXPORT_FIX = "Ask for a new export"
FIX = "give another file"
# A spreadsheet evaluates a cell that begins with one of these.
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")
PAGE_CSS = (
    "body{font-family:sans-serif}table{border-collapse:collapse}"
    "th,td{border:1px solid #bbb;padding:2px 6px;white-space:nowrap}"
)


@dataclass(frozen=True)
class Export:
    """One learner's file."""

    name: str
    when: str
    labkit: str
    verdicts: verdict_store.Verdicts
    path: Path


def write_export(path: Path, name: str, verdicts: verdict_store.Verdicts) -> None:
    """Write a learner's file; raise LabError without a name, or if the file is something else."""
    if not name.strip():
        rule = "the file needs a name, so that a teacher knows whose it is"
        raise LabError(f"{rule}: give it with --name")
    if os.path.exists(path):
        # Only another export may be overwritten; anything else raises here.
        read_export(path)
    # In a checkout on the path labkit may not be installed, and then has no version.
    versions = [found.version for found in metadata.distributions(name="labkit")]
    content = {
        "kind": EXPORT_KIND,
        "name": name.strip(),
        "when": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "labkit": versions[0] if versions else "unknown",
        **verdict_store.verdicts_to_json(verdicts),
    }
    with explain_write_errors(path, FIX):
        write_json(path, content)


def read_export(path: Path) -> Export:
    """Read a learner's file; raise LabError if it is unreadable, or not an export."""
    # read_json takes a file that does not exist for an empty one.
    if not os.path.exists(path):
        raise LabError(f"{path}: cannot be read, there is no such file")
    content = read_json(path, EXPORT_FIX)
    if content.get("kind") != EXPORT_KIND:
        raise LabError(f"{path}: not made by `python -m labkit export`")
    name, when, version = (str(content.get(field) or "") for field in ("name", "when", "labkit"))
    if not (name and version and _parse_time(when)):
        raise LabError(f"{path}: broken, its name, version or time is missing. {EXPORT_FIX}")
    try:
        json.dumps(content, ensure_ascii=False).encode()
    # JSON may hold half a character, which no table can.
    except UnicodeEncodeError as error:
        raise LabError(f"{path}: broken ({error.reason}). {EXPORT_FIX}") from None
    verdicts = verdict_store.verdicts_from_json(content, path)
    return Export(name, when, version, verdicts, path)


def _parse_time(text: str) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)
    # UTC has no moment before the year 1 or after 9999.
    except (ValueError, OverflowError):
        return None


def newest_exports(paths: Sequence[Path]) -> tuple[list[Export], list[str]]:
    """Return the newest export of each learner, by name, and a message for every file left out."""
    by_name: dict[str, Export] = {}
    problems = []
    for path in paths:
        try:
            newer = read_export(path)
        except LabError as error:
            problems.append(str(error))
            continue
        if older := by_name.get(newer.name):
            older, newer = sorted([older, newer], key=lambda each: str(_parse_time(each.when)))
            why = f"left out, {newer.path} is of {newer.name}, too, and not older"
            problems.append(f"{older.path}: {why}")
        by_name[newer.name] = newer
    return sorted(by_name.values(), key=lambda each: each.name.casefold()), problems


def progress_frame(exports: Sequence[Export]) -> Any:
    """Return learners × exercises as a pandas DataFrame of states, "" for never checked."""
    import pandas

    columns = {
        (lab.key, each.name): each.number
        for lab in lab_catalog.all_labs()
        for each in lab.exercises
    }
    # A learner who has checked nothing has a row, too, and every exercise of today a column.
    by_learner = {}
    for one in exports:
        states = by_learner[one.name] = dict.fromkeys(columns, "")
        for lab, exercises in one.verdicts.items():
            states |= {(lab, name): kept.state for name, kept in exercises.items()}
    frame = pandas.DataFrame.from_dict(by_learner, orient="index").fillna("").rename_axis("name")
    # An export of another version of labkit may have other exercises.
    frame.columns = [columns.get((lab, name), f"{lab}.{name}") for lab, name in frame]
    frame.insert(0, "passed", (frame == "passed").sum(axis="columns"))
    frame.insert(1, "exported", [one.when for one in exports])
    frame.insert(2, "labkit", [one.labkit for one in exports])
    return frame


def write_csv(frame: Any, path: Path) -> None:
    """Write the table for a spreadsheet, with formulas in a learner's text escaped."""
    plain = frame.reset_index().map(_escape_formula).rename(columns=_escape_formula)
    with explain_write_errors(path, FIX):
        write_text(path, plain.to_csv(index=False))


def _escape_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_PREFIXES) else value


def write_html(frame: Any, path: Path) -> None:
    """Write the table as a self-contained page."""
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="refresh" content="60">'  # the board of a class that is at work
        f"<title>labkit: progress</title><style>{PAGE_CSS}</style>"
    )
    marks = {**verdict_store.MARKS, "not attempted": verdict_store.OPEN_MARK}
    rows = frame.replace(marks).reset_index().to_html(border=0, index=False, justify="left")
    learners = f"{len(frame)} learner{'s' if len(frame) != 1 else ''}"
    legend = f"{verdict_store.LEGEND}; an empty cell was never checked"
    page = f"{head}<h1>Progress of {learners}</h1><p>{legend}</p>{rows}</html>\n"
    with explain_write_errors(path, FIX):
        write_text(path, page)
