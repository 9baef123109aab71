"""One file with a learner's verdicts for a teacher, and many such files as one table."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit.course import lab_catalog
from labkit.course.verdict_store import (
    LEGEND,
    MARKS,
    OPEN_MARK,
    Verdicts,
    verdicts_from_json,
    verdicts_to_json,
)
from labkit.errors import LabError
from labkit.runs.folder import write_json, write_text

EXPORT_KIND = "labkit progress"
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
    verdicts: Verdicts
    path: Path


def write_export(path: Path, name: str, verdicts: Verdicts) -> None:
    """Write a learner's file.

    Raises:
        LabError: the name is empty, the file holds something else, or it cannot be written.
    """
    if not name.strip():
        raise LabError(
            "the file needs a name, so that a teacher knows whose it is: give it with --name"
        )
    if path.exists():
        # Only another export may be overwritten; anything else raises here.
        read_export(path)
    versions = [found.version for found in metadata.distributions(name="labkit")]
    content = {
        "kind": EXPORT_KIND,
        "name": name.strip(),
        "when": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "labkit": versions[0] if versions else "unknown",
        **verdicts_to_json(verdicts),
    }
    try:
        write_json(path, content)
    except OSError as error:
        raise LabError(f"{path} cannot be written ({error.strerror}): give another file") from None


def read_export(path: Path) -> Export:
    """Read a learner's file.

    Raises:
        LabError: it is unreadable, or not an export.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise LabError(f"{path}: broken, not JSON ({error}); ask for a new export") from None
    if not isinstance(content, dict) or content.get("kind") != EXPORT_KIND:
        raise LabError(f"{path}: not made by `python -m labkit export`")
    name, when, version = (str(content.get(field) or "") for field in ("name", "when", "labkit"))
    if not (name and version and _parse_time(when)):
        raise LabError(
            f"{path}: broken, its name, version or time is missing; ask for a new export"
        )
    return Export(name, when, version, verdicts_from_json(content, path), path)


def _parse_time(text: str) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)
    except ValueError:
        return None


def newest_exports(paths: Sequence[Path]) -> tuple[list[Export], list[str]]:
    """Return the newest export of each learner, by name, and a message for every file left out."""
    by_name: dict[str, Export] = {}
    problems = []
    for path in paths:
        try:
            found = read_export(path)
        except LabError as error:
            problems.append(str(error))
            continue
        other = by_name.get(found.name)
        if other:
            older, newer = sorted([other, found], key=lambda each: str(_parse_time(each.when)))
            problems.append(
                f"{older.path}: left out, {newer.path} is of {found.name}, too, and not older"
            )
            found = newer
        by_name[found.name] = found
    return sorted(by_name.values(), key=lambda each: each.name.casefold()), problems


def progress_frame(exports: Sequence[Export]) -> Any:
    """Return learners × exercises as a pandas DataFrame of states, "" for never checked."""
    import pandas

    columns = {
        (lab.key, each.name): each.number
        for lab in lab_catalog.all_labs()
        for each in lab.exercises
    }
    # An export of another version of labkit may have other exercises.
    for one in exports:
        for lab, exercises in one.verdicts.items():
            for name in exercises:
                columns.setdefault((lab, name), f"{lab}.{name}")
    rows = []
    for one in exports:
        states = []
        for lab, name in columns:
            kept = one.verdicts.get(lab, {}).get(name)
            states.append(kept.state if kept else "")
        rows.append((one.name, states.count("passed"), one.when, one.labkit, *states))
    names = ["name", "passed", "exported", "labkit", *columns.values()]
    return pandas.DataFrame(rows, columns=names).set_index("name")


def write_csv(frame: Any, path: Path) -> None:
    """Write the table for a spreadsheet, with formulas in a learner's text escaped."""
    plain = frame.reset_index().map(_escape_formula).rename(columns=_escape_formula)
    _write_file(path, plain.to_csv(index=False))


def _escape_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_PREFIXES) else value


def write_html(frame: Any, path: Path) -> None:
    """Write the table as a self-contained page."""
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>labkit: progress</title><style>{PAGE_CSS}</style>"
    )
    marked = frame.replace({**MARKS, "not attempted": OPEN_MARK}).reset_index()
    rows = marked.to_html(border=0, index=False, justify="left")
    learners = f"{len(frame)} learner{'s' if len(frame) != 1 else ''}"
    about = f"<h1>Progress of {learners}</h1><p>{LEGEND}; an empty cell was never checked</p>"
    _write_file(path, f"{head}{about}{rows}</html>\n")


def _write_file(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise LabError(f"{path} cannot be written ({error.strerror}): give another file") from None
