"""What each check said, kept beside the learner's copies; how far a learner is.

A check's verdict is written to ``progress.json`` where the notebook's kernel started in a folder of
copies, which is known by its hidden folder, or below one. Elsewhere, as where notebooks are built
and tested, nothing is written, and the verdicts last as long as the kernel. LABKIT_VERDICTS names
another file.

A pass is never taken back: of an exercise the first pass, the last verdict and the number of tries
are kept.
"""

import contextlib
import datetime
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from labkit.course import lab_catalog
from labkit.course.lab_catalog import Exercise, Lab
from labkit.environment import ENV_VERDICTS
from labkit.errors import LabError, RecordError
from labkit.runs import private_files
from labkit.runs.folder import JSON_FIX, LABKIT_FOLDER_NAME, read_json, write_json

PROGRESS_FILE = "progress.json"
FORMAT_VERSION = 1
STATES = ("passed", "wrong", "not attempted", "not judged")
MARKS = {"passed": "✓", "wrong": "✗", "not judged": "?"}
OPEN_MARK = "·"
LEGEND = (
    f"{MARKS['passed']} passed   {MARKS['wrong']} wrong   {MARKS['not judged']} not judged  "
    f" {OPEN_MARK} open"
)
FIX = "mend it by hand, or move it away: the next check begins a new one"
try:
    STARTED_IN: Path | None = Path.cwd()
except OSError:  # the folder is gone
    STARTED_IN = None


@dataclass(frozen=True)
class ExerciseProgress:
    """What is known of one exercise."""

    verdict: str
    """The last one."""
    when: str
    """Of the last one, ISO 8601."""
    tries: int = 0
    """How often it was judged as passed or wrong."""
    first_passed: str = ""
    """When; "" for not yet."""

    @property
    def state(self) -> str:
        """The last verdict; "passed" from the first pass on."""
        return "passed" if self.first_passed else self.verdict

    def with_verdict(self, verdict: str, when: str) -> "ExerciseProgress":
        """This exercise after one more verdict."""
        tries = self.tries + (verdict in ("passed", "wrong"))
        return ExerciseProgress(
            verdict, when, tries, self.first_passed or (when if verdict == "passed" else "")
        )


Verdicts = Mapping[str, Mapping[str, ExerciseProgress]]
"""By a lab's short name, then by an exercise's."""
_process_verdicts: dict[str, dict[str, ExerciseProgress]] = {}
"""The verdicts of this process."""


def store_verdict(lab: str, exercise: str, verdict: str) -> bool:
    """Keep a verdict; whether there is such an exercise. Who cannot write is warned, and the check
    goes on.

    Args:
        lab: its short name, such as "fsdp".
        exercise: the name of the function or class that was judged.
        verdict: one of STATES.
    """
    try:
        found = lab_catalog.find_lab_by_key(lab)
    except LabError:  # labkit lies here without its notebooks
        found = None
    if found is None or exercise not in [each.name for each in found.exercises]:
        return False
    when = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    _add_verdict(_process_verdicts, lab, exercise, verdict, when)
    path = progress_path()
    if path:
        try:
            with _lock_file(path):
                kept = read_verdicts(path)
                _add_verdict(kept, lab, exercise, verdict, when)
                write_json(path, verdicts_to_json(kept))
        except (LabError, OSError) as error:
            warnings.warn(f"this verdict is not kept: {error}", stacklevel=4)
    return True


def _add_verdict(
    kept: dict[str, dict[str, ExerciseProgress]], lab: str, exercise: str, verdict: str, when: str
) -> None:
    of_lab = kept.setdefault(lab, {})
    of_lab[exercise] = of_lab.get(exercise, ExerciseProgress("", "")).with_verdict(verdict, when)


def progress_path() -> Path | None:
    """Where this process keeps verdicts: the file that LABKIT_VERDICTS names, that of the copies,
    or nowhere.
    """
    if named := os.environ.get(ENV_VERDICTS):
        return Path(named).expanduser()
    above = [STARTED_IN, *STARTED_IN.parents] if STARTED_IN else []
    known = (
        folder
        for folder in above
        if private_files.is_own_folder(folder / LABKIT_FOLDER_NAME)
        and (folder / LABKIT_FOLDER_NAME / "pristine").is_dir()
    )
    return next((folder / PROGRESS_FILE for folder in known), None)


def read_verdicts(path: Path) -> dict[str, dict[str, ExerciseProgress]]:
    """The verdicts of a file; none where there is no file.

    Raises:
        LabError: it cannot be read, or holds something else.
    """
    try:
        content = read_json(path)
    except RecordError as error:
        raise LabError(f"{str(error).removesuffix(JSON_FIX)}{FIX}") from None
    return verdicts_from_json(content, path)


def verdicts_from_json(
    content: Mapping[str, Any], path: Path
) -> dict[str, dict[str, ExerciseProgress]]:
    """Verdicts as ``as_json`` wrote them; ``path`` is for the message.

    Raises:
        LabError: it is something else.
    """
    if not content:
        return {}
    if content.get("version") != FORMAT_VERSION:
        raise LabError(
            f"{path}: version {content.get('version')!r} of verdicts, not {FORMAT_VERSION}; {FIX}"
        )
    try:
        kept = {
            lab: {name: ExerciseProgress(**fields) for name, fields in exercises.items()}
            for lab, exercises in content["verdicts"].items()
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise LabError(f"{path}: holds no verdicts ({error}); {FIX}") from None
    for lab, exercises in kept.items():
        for name, each in exercises.items():
            texts = (each.verdict, each.when, each.first_passed)
            if each.verdict not in STATES or not all(isinstance(text, str) for text in texts):
                raise LabError(f"{path}: {lab}.{name} = {asdict(each)} is no verdict; {FIX}")
            if not isinstance(each.tries, int) or each.tries < 0:
                raise LabError(
                    f"{path}: {lab}.{name}: tries = {each.tries!r} is no number of tries; {FIX}"
                )
    return kept


def verdicts_to_json(verdicts: Verdicts) -> dict[str, Any]:
    """Verdicts as a file holds them."""
    plain = {
        lab: {name: asdict(kept) for name, kept in each.items()} for lab, each in verdicts.items()
    }
    return {"version": FORMAT_VERSION, "verdicts": plain}


@contextlib.contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """No other kernel writes the file meanwhile; the lock is beside it, since the file is
    replaced.
    """
    folder = path.parent / LABKIT_FOLDER_NAME
    with private_files.lock_file(
        (folder if private_files.is_own_folder(folder) else path.parent) / f"{path.name}.lock"
    ):
        yield


@dataclass(frozen=True)
class LabProgress:
    """How far a learner is with one lab. A notebook shows it as a list of what is open."""

    lab: Lab
    states: Mapping[str, str]
    """By the names of its exercises; one without is open."""

    @property
    def pending_exercises(self) -> list[Exercise]:
        """The exercises that have not passed, in order."""
        return [each for each in self.lab.exercises if self.states.get(each.name) != "passed"]

    @property
    def pass_count_text(self) -> str:
        """Such as "4 of 6 passed"."""
        total = len(self.lab.exercises)
        return f"{total - len(self.pending_exercises)} of {total} passed"

    def __repr__(self) -> str:
        titles = [f"{each.number} {each.title}" for each in self.pending_exercises]
        return (
            f"{self.pass_count_text}, these are open: {'; '.join(titles)}"
            if titles
            else self.pass_count_text
        )

    def _repr_html_(self) -> str:
        items = "".join(
            f"<li>{each.number} {escape(each.title)}</li>" for each in self.pending_exercises
        )
        return f"<p><b>{self.pass_count_text}</b>{', these are open:' if items else ''}</p>" + (
            items and f"<ul>{items}</ul>"
        )

    def table_line(self) -> str:
        """A line of the table: a mark for each exercise."""
        marks = [
            MARKS.get(self.states.get(each.name, ""), OPEN_MARK) for each in self.lab.exercises
        ]
        columns = "".join(f"{mark:>3}" for mark in marks)
        return f"{self.lab.name:<26}{self.pass_count_text:<16}{columns}"


def lab_progress(lab: Lab, verdicts: Verdicts) -> LabProgress:
    """How far a learner with these verdicts is."""
    return LabProgress(lab, {name: kept.state for name, kept in verdicts.get(lab.key, {}).items()})


def so_far(lab: str) -> LabProgress:
    """How far you are with this lab, by what its checks said: here, and in earlier sessions if they
    were kept.

    Args:
        lab: its short name, such as "fsdp".

    Raises:
        ParameterError: there is no such lab.
    """
    path, known = progress_path(), lab_catalog.find_lab(lab)
    try:
        earlier = read_verdicts(path) if path else {}
    except LabError as error:
        warnings.warn(str(error), stacklevel=2)
        earlier = {}
    before, now = lab_progress(known, earlier).states, lab_progress(known, _process_verdicts).states
    passed = {
        name: state for each in (before, now) for name, state in each.items() if state == "passed"
    }
    return LabProgress(known, {**before, **now, **passed})


def progress_text(verdicts: Verdicts) -> str:
    """Labs × exercises, for a terminal."""
    known = [lab for lab in lab_catalog.all_labs() if lab.exercises]
    numbers = range(1, max(len(lab.exercises) for lab in known) + 1)
    head = f"{'lab':<26}{'exercises':<16}{''.join(f'{number:>3}' for number in numbers)}"
    lines = [lab_progress(lab, verdicts).table_line() for lab in known]
    return "\n".join([head, *lines, "", LEGEND])
