"""List the labs and their exercises from the metadata of the learner's notebooks."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import LabError, ParameterError
from labkit.runs.folder import ROOT

NOTEBOOK_FOLDER = ROOT / "notebooks"
FIX = "install labkit again, or run `make notebooks` in a checkout"


@dataclass(frozen=True)
class Exercise:
    """The name of the function or class to complete, a number such as "2.4", and the title."""

    name: str
    number: str
    title: str


@dataclass(frozen=True)
class Lab:
    """One notebook; ``key`` is its short name, such as "fsdp", or "" without exercises."""

    path: Path
    key: str
    exercises: tuple[Exercise, ...]

    @property
    def name(self) -> str:
        """The notebook's name without its suffix, such as "02_fsdp_wrapping"."""
        return self.path.stem


def all_labs() -> tuple[Lab, ...]:
    """Return all labs, in order; raise LabError if there is no notebook, or one is unreadable."""
    return _load_labs(NOTEBOOK_FOLDER)


@functools.cache
def _load_labs(folder: Path) -> tuple[Lab, ...]:
    paths = sorted(folder.glob("[0-9]*.ipynb"))
    if not paths:
        raise LabError(f"no labs in {folder}: {FIX}")
    return tuple(map(read_lab, paths))


def read_lab(path: Path) -> Lab:
    """Read a learner's notebook; raise LabError if it is none."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells = [cell["metadata"] for cell in notebook["cells"]]
        marks = [metadata["labkit"] for metadata in cells if "labkit" in metadata]
        exercises = [Exercise(mark["exercise"], mark["number"], mark["title"]) for mark in marks]
        key = notebook["metadata"].get("labkit", {}).get("lab", "")
        return Lab(path, key, tuple(exercises))
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise LabError(f"{path} is no learner's notebook ({what}); {FIX}") from None


def find_lab(name: str) -> Lab:
    """Return a lab by the notebook's name, its number, or its short name; else ParameterError."""
    wanted = name.removesuffix(".ipynb")
    # The number of a lab, such as "2" or "0b", may be given without its leading zero.
    wanted = f"0{wanted}" if wanted[:1].isdigit() and len(wanted.rstrip("bc")) == 1 else wanted
    for lab in all_labs():
        if wanted and wanted in (lab.name, lab.name.partition("_")[0], lab.key):
            return lab
    there = ", ".join(lab.name for lab in all_labs())
    raise ParameterError(f"no lab is called {name!r}. Give a lab's number, or one of: {there}")
