"""``my/``: the learner's copies of the notebooks, which nobody else writes in.

| file                              | holds                                                                     |
|-----------------------------------|---------------------------------------------------------------------------|
| my/NN_topic.ipynb                 | the copy                                                                  |
| my/NN_topic.TIME.ipynb            | an earlier copy, from before a reset                                      |
| my/progress.json                  | what the checks said, see verdicts.py                                     |
| my/.labkit/pristine/NN_topic.ipynb | the notebook that the copy was made from: what is not in it is the learner's |
| my/.labkit/earlier/               | copies from before the last update of each                                |

A file is written beside and moved into place. An earlier text is never removed before the new one is there.
"""

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.course import catalog
from labkit.course.catalog import Lab
from labkit.course.merge import merge
from labkit.errors import LabError
from labkit.runs import private
from labkit.runs.folder import HIDDEN, home, write_text


def my_folder() -> Path:
    """Where a learner's copies lie unless another folder is named: my/ in the checkout, or in the current folder."""
    return home() / "my"


@dataclass(frozen=True)
class Place:
    """The files of one lab in a folder of copies."""

    folder: Path
    lab: Lab

    @property
    def copy(self) -> Path:
        """What the learner writes in."""
        return self.folder / self.lab.path.name

    @property
    def pristine(self) -> Path:
        """What it was made from."""
        return self.folder / HIDDEN / "pristine" / self.lab.path.name

    @property
    def earlier(self) -> Path:
        """The copy from before the last update."""
        return self.folder / HIDDEN / "earlier" / self.lab.path.name

    def beside(self) -> Path:
        """A name for the copy that a reset keeps, with the time; one that is free."""
        stamp = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
        names = (f"{self.lab.name}.{stamp}{more}.ipynb" for more in ("", *(f"_{number}" for number in range(2, 100))))
        return next(path for name in names if not (path := self.folder / name).exists())


def make(folder: Path) -> list[Lab]:
    """Make a copy of every lab that has none; the labs whose copies were made. What is there is left alone.

    Raises:
        LabError: the folder cannot be written in.
    """
    places = [Place(folder, lab) for lab in catalog.labs()]
    missing = [place for place in places if not place.copy.exists()]
    with _writing(folder):
        for place in missing:
            _write(place)
    return [place.lab for place in missing]


def reset(lab: Lab, folder: Path) -> Path | None:
    """A fresh copy; where the learner's earlier one is kept, or None where there was none.

    Raises:
        LabError: the folder cannot be written in.
    """
    place = Place(folder, lab)
    kept = place.beside() if place.copy.exists() else None
    with _writing(folder):
        if kept:
            place.copy.rename(kept)
        _write(place)
    return kept


def _write(place: Place) -> None:
    """Write a fresh copy. What it was made from comes first: a copy without it could not be updated."""
    text = place.lab.path.read_text(encoding="utf-8")
    private.make_own(place.folder / HIDDEN)
    place.pristine.parent.mkdir(exist_ok=True)
    write_text(place.pristine, text)
    write_text(place.copy, text)


def outdated(folder: Path) -> list[Lab]:
    """The labs of which there is something new since their copies were made or updated."""
    places = [Place(folder, lab) for lab in catalog.labs()]
    known = [place for place in places if place.pristine.exists()]
    return [place.lab for place in known if place.pristine.read_bytes() != place.lab.path.read_bytes()]


def update(folder: Path) -> tuple[list[str], list[str]]:
    """Bring what is new in the notebooks into the copies.

    Returns:
        For each lab what was done, and what was left and why; and, of those that could not be updated, what to do.

    Raises:
        LabError: the folder cannot be written in.
    """
    made = {lab.name for lab in make(folder)}
    said, problems = [], []
    for lab in catalog.labs():
        try:
            said.append(f"{lab.name}: {'a new copy' if lab.name in made else _update(Place(folder, lab))}")
        except LabError as error:  # the others are updated all the same
            problems.append(f"{lab.name}: left as it is. {error}")
    return said, problems


def _update(place: Place) -> str:
    if not place.pristine.exists():
        fix = f"keep it beside and begin anew: python -m labkit reset {place.lab.name}"
        raise LabError(f"Nobody knows what {place.copy} was made from; {fix}")
    base, new, mine = (_read(path) for path in (place.pristine, place.lab.path, place.copy))
    if base == new:
        return "nothing new"
    merged = merge(base, new, mine)
    with _writing(place.folder):
        place.earlier.parent.mkdir(parents=True, exist_ok=True)
        write_text(place.earlier, place.copy.read_text(encoding="utf-8"))
        write_text(place.copy, _as_text(merged.notebook))
        write_text(place.pristine, place.lab.path.read_text(encoding="utf-8"))  # last: cut off, it is done again
    done = f"{merged.changed} cells with a new text, {merged.added} new, {merged.removed} removed"
    left = [f"  left: {each}".replace("\n", "\n    ") for each in merged.left]
    return "\n".join([f"{done}, {len(left)} left as you have them", *left])


def _read(path: Path) -> Any:
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


def _as_text(notebook: Any) -> str:
    import nbformat

    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns an OSError into a LabError that names the folder and the fix."""
    try:
        yield
    except OSError as error:
        fix = "make room, mend its permissions, or take another with --folder"
        raise LabError(f"{folder}: no copies can be written there ({error.strerror}); {fix}") from error
