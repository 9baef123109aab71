"""Create, reset and update ``my/``, the learner's copies of the notebooks.

| file                               | holds                                                   |
|------------------------------------|---------------------------------------------------------|
| my/NN_topic.ipynb                  | the copy                                                |
| my/NN_topic.TIME.ipynb             | an earlier copy, from before a reset                    |
| my/progress.json                   | what the checks said, see verdict_store.py              |
| my/.labkit/pristine/NN_topic.ipynb | the notebook from which the copy was made               |
| my/.labkit/earlier/                | copies from before the last update of each              |

Files are replaced atomically, and an earlier text is removed only after the new one is written.
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
    """Return my/ in the checkout, or in the current folder."""
    return workspace_folder() / "my"


@dataclass(frozen=True)
class CopyPaths:
    """The files of one lab in a folder of copies."""

    folder: Path
    lab: Lab

    @property
    def copy_path(self) -> Path:
        """The learner's notebook."""
        return self.folder / self.lab.path.name

    @property
    def pristine_path(self) -> Path:
        """The notebook from which the copy was made."""
        return self.folder / LABKIT_FOLDER_NAME / "pristine" / self.lab.path.name

    @property
    def earlier_path(self) -> Path:
        """The copy from before the last update."""
        return self.folder / LABKIT_FOLDER_NAME / "earlier" / self.lab.path.name

    def free_backup_path(self) -> Path:
        """Return an unused path for an earlier copy, with the time in its name."""
        stem = f"{self.lab.name}.{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
        path, number = self.folder / f"{stem}.ipynb", 2
        while path.exists():
            path, number = self.folder / f"{stem}_{number}.ipynb", number + 1
        return path


def make_copies(folder: Path) -> list[Lab]:
    """Make a copy of every lab that has none, and return these labs.

    Raises:
        LabError: the folder is not writable.
    """
    places = [CopyPaths(folder, lab) for lab in lab_catalog.all_labs()]
    missing = [place for place in places if not place.copy_path.exists()]
    with _explain_write_errors(folder):
        for place in missing:
            _write_copy(place)
    return [place.lab for place in missing]


def reset_copy(lab: Lab, folder: Path) -> Path | None:
    """Make a fresh copy, and return where an earlier one is kept, if there was one.

    Raises:
        LabError: the folder is not writable.
    """
    place = CopyPaths(folder, lab)
    kept = place.free_backup_path() if place.copy_path.exists() else None
    with _explain_write_errors(folder):
        if kept:
            place.copy_path.rename(kept)
        _write_copy(place)
    return kept


def _write_copy(place: CopyPaths) -> None:
    text = place.lab.path.read_text(encoding="utf-8")
    private_files.make_own_folder(place.folder / LABKIT_FOLDER_NAME)
    place.pristine_path.parent.mkdir(exist_ok=True)
    # The pristine notebook is written first, because a copy without it could not be updated.
    write_text(place.pristine_path, text)
    write_text(place.copy_path, text)


def labs_to_update(folder: Path) -> list[Lab]:
    """Return the labs that have changed since their copies were made or updated."""
    changed = []
    for lab in lab_catalog.all_labs():
        pristine = CopyPaths(folder, lab).pristine_path
        if pristine.exists() and pristine.read_bytes() != lab.path.read_bytes():
            changed.append(lab)
    return changed


def update_copies(folder: Path) -> tuple[list[str], list[str]]:
    """Bring what is new in the notebooks into the copies.

    Returns:
        For each updated lab what was done and what was left; for each other lab what to do.

    Raises:
        LabError: the folder is not writable.
    """
    made = {lab.name for lab in make_copies(folder)}
    said, problems = [], []
    for lab in lab_catalog.all_labs():
        if lab.name in made:
            said.append(f"{lab.name}: a new copy")
            continue
        try:
            said.append(f"{lab.name}: {_update_copy(CopyPaths(folder, lab))}")
        except LabError as error:
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
        # The pristine notebook comes last, so that an interrupted update is repeated.
        write_text(place.pristine_path, place.lab.path.read_text(encoding="utf-8"))
    done = f"{merged.changed} cells with a new text, {merged.added} new, {merged.removed} removed"
    left = [f"  left: {each}".replace("\n", "\n    ") for each in merged.left]
    return "\n".join([f"{done}, {len(left)} left as you have them", *left])


def _read_notebook(path: Path) -> Any:
    import nbformat

    try:
        return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    # A half-written file can raise anything, besides nbformat's own errors.
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        name = path.name.removesuffix(".ipynb")
        fix = f"mend it, or keep it beside and begin anew: python -m labkit reset {name}"
        raise LabError(f"{path} is no notebook ({type(error).__name__}: {first}); {fix}") from None


def _notebook_text(notebook: Any) -> str:
    import nbformat

    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"


@contextlib.contextmanager
def _explain_write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "make room, mend its permissions, or take another with --folder"
        raise LabError(
            f"{folder}: no copies can be written there ({error.strerror}); {fix}"
        ) from error
