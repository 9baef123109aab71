"""``my/``: the learner's copies of the notebooks, which nobody else writes in.

| file                               | holds                                                       |
| ---------------------------------- | ----------------------------------------------------------- |
| my/NN_topic.ipynb                  | the copy                                                    |
| my/NN_topic.TIME.ipynb             | an earlier copy, from before a reset                        |
| my/progress.json                   | what the checks said, see verdict_store.py                  |
| my/.labkit/pristine/NN_topic.ipynb | the notebook that was copied; a difference is the learner's |
| my/.labkit/earlier/                | copies from before the last update of each                  |

A file is written beside and moved into place. An earlier text is never removed before the new one
is there.
"""

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.course import lab_catalog
from labkit.course.lab_catalog import Lab
from labkit.course.merge import merge_notebooks
from labkit.errors import LabError
from labkit.runs import private_files
from labkit.runs.folder import LABKIT_FOLDER_NAME, workspace_folder, write_text


def default_copies_folder() -> Path:
    """Where a learner's copies lie unless another folder is named: my/ in the checkout, or in the
    current folder.
    """
    return workspace_folder() / "my"


@dataclass(frozen=True)
class CopyPaths:
    """The files of one lab in a folder of copies."""

    folder: Path
    lab: Lab

    @property
    def copy_path(self) -> Path:
        """What the learner writes in."""
        return self.folder / self.lab.path.name

    @property
    def pristine_path(self) -> Path:
        """What it was made from."""
        return self.folder / LABKIT_FOLDER_NAME / "pristine" / self.lab.path.name

    @property
    def earlier_path(self) -> Path:
        """The copy from before the last update."""
        return self.folder / LABKIT_FOLDER_NAME / "earlier" / self.lab.path.name

    def free_backup_path(self) -> Path:
        """A name for the copy that a reset keeps, with the time; one that is free."""
        stamp = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
        names = (
            f"{self.lab.name}.{stamp}{more}.ipynb"
            for more in ("", *(f"_{number}" for number in range(2, 100)))
        )
        return next(path for name in names if not (path := self.folder / name).exists())


def make_copies(folder: Path) -> list[Lab]:
    """Make a copy of every lab that has none; the labs whose copies were made. What is there is
    left alone.

    Raises:
        LabError: the folder cannot be written in.
    """
    places = [CopyPaths(folder, lab) for lab in lab_catalog.all_labs()]
    missing = [place for place in places if not place.copy_path.exists()]
    with _explain_write_errors(folder):
        for place in missing:
            _write_copy(place)
    return [place.lab for place in missing]


def reset_copy(lab: Lab, folder: Path) -> Path | None:
    """A fresh copy; where the learner's earlier one is kept, or None where there was none.

    Raises:
        LabError: the folder cannot be written in.
    """
    place = CopyPaths(folder, lab)
    kept = place.free_backup_path() if place.copy_path.exists() else None
    with _explain_write_errors(folder):
        if kept:
            place.copy_path.rename(kept)
        _write_copy(place)
    return kept


def _write_copy(place: CopyPaths) -> None:
    """Write a fresh copy. What it was made from comes first: a copy without it could not be
    updated.
    """
    text = place.lab.path.read_text(encoding="utf-8")
    private_files.make_own_folder(place.folder / LABKIT_FOLDER_NAME)
    place.pristine_path.parent.mkdir(exist_ok=True)
    write_text(place.pristine_path, text)
    write_text(place.copy_path, text)


def labs_to_update(folder: Path) -> list[Lab]:
    """The labs of which there is something new since their copies were made or updated."""
    places = [CopyPaths(folder, lab) for lab in lab_catalog.all_labs()]
    known = [place for place in places if place.pristine_path.exists()]
    return [
        place.lab
        for place in known
        if place.pristine_path.read_bytes() != place.lab.path.read_bytes()
    ]


def update_copies(folder: Path) -> tuple[list[str], list[str]]:
    """Bring what is new in the notebooks into the copies.

    Returns:
        For each lab what was done, and what was left and why; and, of those that could not be
        updated, what to do.

    Raises:
        LabError: the folder cannot be written in.
    """
    made = {lab.name for lab in make_copies(folder)}
    said, problems = [], []
    for lab in lab_catalog.all_labs():
        try:
            said.append(
                f"{lab.name}:"
                f" {'a new copy' if lab.name in made else _update_copy(CopyPaths(folder, lab))}"
            )
        except LabError as error:  # the others are updated all the same
            problems.append(f"{lab.name}: left as it is. {error}")
    return said, problems


def _update_copy(place: CopyPaths) -> str:
    if not place.pristine_path.exists():
        fix = f"keep it beside and begin anew: python -m labkit reset {place.lab.name}"
        raise LabError(f"Nobody knows what {place.copy_path} was made from; {fix}")
    base, new, mine = (
        _read_notebook(path) for path in (place.pristine_path, place.lab.path, place.copy_path)
    )
    if base == new:
        return "nothing new"
    merged = merge_notebooks(base, new, mine)
    with _explain_write_errors(place.folder):
        place.earlier_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(place.earlier_path, place.copy_path.read_text(encoding="utf-8"))
        write_text(place.copy_path, _notebook_text(merged.notebook))
        write_text(
            place.pristine_path, place.lab.path.read_text(encoding="utf-8")
        )  # last: cut off, it is done again
    done = f"{merged.changed} cells with a new text, {merged.added} new, {merged.removed} removed"
    left = [f"  left: {each}".replace("\n", "\n    ") for each in merged.left]
    return "\n".join([f"{done}, {len(left)} left as you have them", *left])


def _read_notebook(path: Path) -> Any:
    """A notebook.

    Raises:
        LabError: it is none; the message says what to do.
    """
    import nbformat

    try:
        return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except Exception as error:  # nbformat's own, and whatever a half-written file leads to
        first = (str(error).splitlines() or [""])[0][:200]
        name = path.name.removesuffix(".ipynb")
        fix = f"mend it, or keep it beside and begin anew: python -m labkit reset {name}"
        raise LabError(f"{path} is no notebook ({type(error).__name__}: {first}); {fix}") from None


def _notebook_text(notebook: Any) -> str:
    import nbformat

    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"


@contextlib.contextmanager
def _explain_write_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError into a LabError that names the folder and the fix."""
    try:
        yield
    except OSError as error:
        fix = "make room, mend its permissions, or take another with --folder"
        raise LabError(
            f"{folder}: no copies can be written there ({error.strerror}); {fix}"
        ) from error
