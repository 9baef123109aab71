"""Keep the verdict of every check beside the learner's copies, and tell how far a learner is.

A verdict is written to ``progress.json`` if the notebook's kernel started in or below a folder of
copies, or to the file that LABKIT_VERDICTS names. Elsewhere, as where notebooks are built and
tested, it lasts as long as the kernel. A pass is never taken back.
"""

import contextlib
import datetime
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from labkit.environment import ENV_VERDICTS
from labkit.errors import LabError
from labkit.runs import private_files
from labkit.runs.folder import LABKIT_FOLDER_NAME, read_json, write_json
from labkit_course import lab_catalog
from labkit_course.lab_catalog import Exercise, Lab

PROGRESS_FILE = "progress.json"
FORMAT_VERSION = 1
STATES = ("passed", "wrong", "not attempted", "not judged")
MARKS = {"passed": "✓", "wrong": "✗", "not judged": "?"}
OPEN_MARK = "·"
LEGEND = "   ".join([*(f"{mark} {state}" for state, mark in MARKS.items()), f"{OPEN_MARK} open"])
# Labs whose exercises come in part from an earlier lab, under which a pass may be stored.
EARLIER_LABS = {"step_time": "simulation"}
FIX = "mend it by hand, or move it away: the next check begins a new one"
try:
    STARTED_IN: Path | None = Path.cwd()
# The current folder may have been deleted.
except OSError:
    STARTED_IN = None


@dataclass(frozen=True)
class ExerciseProgress:
    """The last verdict on one exercise, how often it was judged, and when it first passed."""

    verdict: str
    # Times are ISO 8601, and "" for never.
    when: str
    tries: int = 0
    first_passed: str = ""

    def __post_init__(self) -> None:
        # A person may have edited the file.
        texts = (self.verdict, self.when, self.first_passed)
        is_count = isinstance(self.tries, int) and self.tries >= 0
        if not (self.verdict in STATES and is_count and all(isinstance(x, str) for x in texts)):
            raise TypeError(f"{asdict(self)} is no verdict")

    @property
    def state(self) -> str:
        """The last verdict, or "passed" from the first pass on."""
        return "passed" if self.first_passed else self.verdict

    def with_verdict(self, verdict: str, when: str) -> "ExerciseProgress":
        """Return the progress after one more verdict."""
        tries = self.tries + (verdict in ("passed", "wrong"))
        passed = when if verdict == "passed" else ""
        return ExerciseProgress(verdict, when, tries, self.first_passed or passed)


# By a lab's short name, then by an exercise's.
Verdicts = Mapping[str, Mapping[str, ExerciseProgress]]
_process_verdicts: dict[str, dict[str, ExerciseProgress]] = {}


def store_verdict(lab: str, exercise: str, verdict: str) -> bool:
    """Keep a verdict, one of STATES; return whether this lab ("fsdp") has this exercise."""
    # labkit may be installed without its notebooks, and then there are no labs.
    with contextlib.suppress(LabError):
        found = next((each for each in lab_catalog.all_labs() if each.key == lab), None)
        if found and exercise in [each.name for each in found.exercises]:
            _keep_verdict(lab, exercise, verdict)
            return True
    return False


def _keep_verdict(lab: str, exercise: str, verdict: str) -> None:
    when = datetime.datetime.now().astimezone().isoformat(timespec="seconds")

    def add_to(kept: dict[str, dict[str, ExerciseProgress]]) -> None:
        exercises = kept.setdefault(lab, {})
        before = exercises.get(exercise, ExerciseProgress("not attempted", ""))
        exercises[exercise] = before.with_verdict(verdict, when)

    add_to(_process_verdicts)
    path = progress_path()
    if path is None:
        return
    hidden = path.parent / LABKIT_FOLDER_NAME
    folder = hidden if private_files.is_own_folder(hidden) else path.parent
    try:
        # The lock is a file of its own, because every write replaces the file of verdicts.
        with private_files.lock_file(folder / f"{path.name}.lock"):
            kept = read_verdicts(path)
            add_to(kept)
            write_json(path, verdicts_to_json(kept))
    except (LabError, OSError) as error:
        # Five calls up is the learner's cell.
        warnings.warn(f"this verdict is not kept: {error}", stacklevel=5)


def progress_path() -> Path | None:
    """Return the file named by LABKIT_VERDICTS, that of the copies, or None."""
    if named := os.environ.get(ENV_VERDICTS):
        return Path(named).expanduser()
    for folder in [STARTED_IN, *STARTED_IN.parents] if STARTED_IN else []:
        hidden = folder / LABKIT_FOLDER_NAME
        if private_files.is_own_folder(hidden) and (hidden / "pristine").is_dir():
            return folder / PROGRESS_FILE
    return None


def read_verdicts(path: Path) -> dict[str, dict[str, ExerciseProgress]]:
    """Return the verdicts of a file, {} if it does not exist; else raise LabError."""
    return verdicts_from_json(read_json(path, FIX), path)


def verdicts_from_json(
    content: Mapping[str, Any], path: Path
) -> dict[str, dict[str, ExerciseProgress]]:
    """Parse the result of ``verdicts_to_json``, or raise LabError that names ``path``."""
    if not content:
        return {}
    if content.get("version") != FORMAT_VERSION:
        problem = f"version {content.get('version')!r} of verdicts, not {FORMAT_VERSION}"
        raise LabError(f"{path}: {problem}; {FIX}")
    try:
        return {
            lab: {name: ExerciseProgress(**fields) for name, fields in exercises.items()}
            for lab, exercises in content["verdicts"].items()
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise LabError(f"{path}: holds no verdicts ({error}); {FIX}") from None


def verdicts_to_json(verdicts: Verdicts) -> dict[str, Any]:
    """Return verdicts as a file holds them."""
    plain = {
        lab: {name: asdict(kept) for name, kept in each.items()} for lab, each in verdicts.items()
    }
    return {"version": FORMAT_VERSION, "verdicts": plain}


@dataclass(frozen=True)
class LabProgress:
    """How far a learner is with one lab; ``states`` has no entry for an exercise never judged."""

    lab: Lab
    states: Mapping[str, str]

    @property
    def pending_exercises(self) -> list[Exercise]:
        """The exercises that have not passed, in order."""
        return [each for each in self.lab.exercises if self.states.get(each.name) != "passed"]

    @property
    def pass_count_text(self) -> str:
        """Text such as "4 of 6 passed"."""
        total = len(self.lab.exercises)
        return f"{total - len(self.pending_exercises)} of {total} passed"

    def __repr__(self) -> str:
        titles = "; ".join(f"{each.number} {each.title}" for each in self.pending_exercises)
        return self.pass_count_text + (f", these are open: {titles}" if titles else "")

    def _repr_html_(self) -> str:
        titles = [f"{each.number} {escape(each.title)}" for each in self.pending_exercises]
        head = f"<p><b>{self.pass_count_text}</b>"
        items = "".join(f"<li>{title}</li>" for title in titles)
        return f"{head}, these are open:</p><ul>{items}</ul>" if items else f"{head}</p>"


def lab_progress(lab: Lab, verdicts: Verdicts) -> LabProgress:
    """Return how far a learner with these verdicts is."""
    states = {name: kept.state for name, kept in verdicts.get(lab.key, {}).items()}
    earlier = verdicts.get(EARLIER_LABS.get(lab.key, ""), {})
    moved = [each.name for each in lab.exercises if each.name in earlier]
    passed = {name: "passed" for name in moved if earlier[name].state == "passed"}
    return LabProgress(lab, states | passed)


def so_far(lab: str) -> LabProgress:
    """Return how far you are with a lab, such as "fsdp", in this session and earlier ones."""
    path, known = progress_path(), lab_catalog.find_lab(lab)
    try:
        earlier = read_verdicts(path) if path else {}
    except LabError as error:
        warnings.warn(str(error), stacklevel=2)
        earlier = {}
    # Outside a folder of copies verdicts are only in this process.
    before, now = (lab_progress(known, each).states for each in (earlier, _process_verdicts))
    # A pass in an earlier session counts even if the exercise is wrong now.
    passed = {name: state for name, state in before.items() if state == "passed"}
    return LabProgress(known, {**before, **now, **passed})


def progress_text(verdicts: Verdicts) -> str:
    """Return a table of labs × exercises for a terminal."""
    known = [lab for lab in lab_catalog.all_labs() if lab.exercises]
    numbers = range(1, max(len(lab.exercises) for lab in known) + 1)
    lines = [f"{'lab':<26}{'exercises':<16}{''.join(f'{number:>3}' for number in numbers)}"]
    for lab in known:
        progress = lab_progress(lab, verdicts)
        states = [progress.states.get(each.name, "") for each in lab.exercises]
        marks = "".join(f"{MARKS.get(state, OPEN_MARK):>3}" for state in states)
        lines.append(f"{lab.name:<26}{progress.pass_count_text:<16}{marks}")
    return "\n".join([*lines, "", LEGEND])
