"""Create, reset and update ``my/``, the learner's copies of the notebooks.

| file                               | holds                                                   |
|------------------------------------|---------------------------------------------------------|
| my/NN_topic.ipynb                  | the copy                                                |
| my/earlier/TIME_NN_topic.ipynb     | an earlier copy, from before a reset                    |
| my/progress.json                   | what the checks said, see verdict_store.py              |
| my/AGENTS.md                       | how an AI tutor helps here without giving answers away  |
| my/.labkit/pristine/NN_topic.ipynb | the notebook from which the copy was made               |
| my/.labkit/earlier/                | copies from before the last update of each              |

Files are replaced atomically, and an earlier text is removed only after the new one is written.
Each function raises LabError if the folder is not writable.
"""

import datetime
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit.runs import private_files
from labkit.runs.folder import (
    LABKIT_FOLDER_NAME,
    explain_write_errors,
    workspace_folder,
    write_text,
)
from labkit_course import lab_catalog
from labkit_course.lab_catalog import Lab
from labkit_course.merge import merge_notebooks

TUTOR_GUIDE = Path(__file__).with_name("tutor_guide.md")
FIX = "make room, mend its permissions, or take another folder with --folder"


def default_copies_folder() -> Path:
    """Return my/ in the checkout, or in the current folder."""
    return workspace_folder() / "my"


def _pristine_path(folder: Path, lab: Lab) -> Path:
    return folder / LABKIT_FOLDER_NAME / "pristine" / lab.path.name


def has_copies(folder: Path) -> bool:
    """Return whether this is a folder of copies."""
    return (folder / LABKIT_FOLDER_NAME / "pristine").is_dir()


def make_copies(folder: Path) -> list[Lab]:
    """Make a copy of every lab that has none, and return these labs; see to the tutor's guide."""
    missing = [lab for lab in lab_catalog.all_labs() if not (folder / lab.path.name).exists()]
    with explain_write_errors(folder, FIX):
        for lab in missing:
            _write_copy(folder, lab)
        write_tutor_guide(folder)
    return missing


def write_tutor_guide(folder: Path) -> bool:
    """Write AGENTS.md or renew it; return False, and write nothing, if the learner changed it."""
    mine, pristine = folder / "AGENTS.md", folder / LABKIT_FOLDER_NAME / "pristine" / "AGENTS.md"
    new = TUTOR_GUIDE.read_bytes()
    known, there = (each.read_bytes() if each.exists() else None for each in (pristine, mine))
    # One that the learner removed stays away, and one of their own is never replaced.
    if there not in (known, new):
        return False
    _make_pristine_folder(folder)
    for path, text in ((mine, there), (pristine, known)):
        if text != new:
            write_text(path, new.decode())
    return True


def reset_copy(lab: Lab, folder: Path) -> Path | None:
    """Make a fresh copy, and return where an earlier one is kept, if there was one."""
    kept = None
    with explain_write_errors(folder, FIX):
        if (folder / lab.path.name).exists():
            kept = _free_backup_path(folder, lab)
            (folder / lab.path.name).rename(kept)
        _write_copy(folder, lab)
    return kept


# JupyterLab cuts long names at their end, so the time comes first.
def _free_backup_path(folder: Path, lab: Lab) -> Path:
    earlier = folder / "earlier"
    earlier.mkdir(exist_ok=True)
    now, number = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}", 2
    path = earlier / f"{now}_{lab.name}.ipynb"
    # Two resets in a second must not overwrite each other's copy.
    while path.exists():
        path, number = earlier / f"{now}_{number}_{lab.name}.ipynb", number + 1
    return path


def _write_copy(folder: Path, lab: Lab) -> None:
    text, pristine = lab.path.read_text(encoding="utf-8"), _pristine_path(folder, lab)
    _make_pristine_folder(folder)
    # The pristine notebook is written first, because a copy without it could not be updated.
    write_text(pristine, text)
    write_text(folder / lab.path.name, text)


def _make_pristine_folder(folder: Path) -> None:
    private_files.make_own_folder(folder / LABKIT_FOLDER_NAME)
    (folder / LABKIT_FOLDER_NAME / "pristine").mkdir(exist_ok=True)


def labs_to_update(folder: Path) -> list[Lab]:
    """Return the labs that have changed since their copies were made or updated."""
    changed = []
    for lab in lab_catalog.all_labs():
        pristine = _pristine_path(folder, lab)
        if pristine.exists() and pristine.read_bytes() != lab.path.read_bytes():
            changed.append(lab)
    return changed


def update_copies(folder: Path) -> tuple[list[str], list[str]]:
    """Update all copies; return what was done and left for each, and what to do for the others."""
    made = make_copies(folder)
    said, problems = [f"{lab.name}: a new copy" for lab in made], []
    if not write_tutor_guide(folder):
        said.append("AGENTS.md: left as you have it")
    for lab in lab_catalog.all_labs():
        try:
            if lab not in made:
                said.append(f"{lab.name}: {_update_copy(folder, lab)}")
        except LabError as error:
            problems.append(f"{lab.name}: left as it is. {error}")
    said += [f"{name}: no longer a lab; your copy stays as it is" for name in _former_labs(folder)]
    return sorted(said), problems


def _former_labs(folder: Path) -> list[str]:
    """Return the names of copies whose lab has gone, or has another name now."""
    known = {lab.name for lab in lab_catalog.all_labs()}
    copied = (folder / LABKIT_FOLDER_NAME / "pristine").glob("*.ipynb")
    names = {path.stem for path in copied if (folder / path.name).exists()}
    return sorted(names - known)


def _update_copy(folder: Path, lab: Lab) -> str:
    import nbformat

    copy, pristine = folder / lab.path.name, _pristine_path(folder, lab)
    if not pristine.exists():
        fix = f"begin again, which keeps it: python -m labkit reset {lab.name}"
        raise LabError(f"It is unknown what {copy} was made from; {fix}")
    base, new, mine = map(read_notebook, (pristine, lab.path, copy))
    if base == new:
        return "nothing new"
    merged = merge_notebooks(base, new, mine)
    with explain_write_errors(folder, FIX):
        # If a merge went wrong, this is the way back.
        earlier = folder / LABKIT_FOLDER_NAME / "earlier" / lab.path.name
        earlier.parent.mkdir(parents=True, exist_ok=True)
        write_text(earlier, copy.read_text(encoding="utf-8"))
        write_text(copy, nbformat.writes(merged.notebook).rstrip("\n") + "\n")
        # The pristine notebook comes last, so that an interrupted update is repeated.
        write_text(pristine, lab.path.read_text(encoding="utf-8"))
    done = f"{merged.changed} cells with a new text, {merged.added} new, {merged.removed} removed"
    left = [f"  left: {each}".replace("\n", "\n    ") for each in merged.left]
    return "\n".join([f"{done}, {len(left)} left as you have them", *left])


def read_notebook(path: Path) -> Any:
    """Read a copy; raise LabError if it is no notebook."""
    import nbformat

    try:
        notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
        # JSON may hold half a character, which could not be written again.
        nbformat.writes(notebook).encode()
        return notebook
    # A half-written file can raise anything, besides nbformat's own errors.
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        fix = f"mend it, or begin again, which keeps it: python -m labkit reset {path.stem}"
        raise LabError(f"{path} is no notebook ({type(error).__name__}: {first}); {fix}") from None
