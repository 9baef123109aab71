"""The labs and their exercises, as the metadata of the learner's notebooks names them."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import LabError, ParameterError
from labkit.runs.folder import ROOT

NOTEBOOK_FOLDER = ROOT / "notebooks"
"""The learner's notebooks: of a checkout, or of an installed labkit."""


@dataclass(frozen=True)
class Exercise:
    """One exercise: what the learner writes, and what its heading says."""

    name: str
    """The function or class to complete."""
    number: str
    """The lab's and its own, such as "2.4"."""
    title: str


@dataclass(frozen=True)
class Lab:
    """One learner's notebook."""

    path: Path
    key: str
    """The lab's name in every folder of labkit, such as "fsdp"; "" of a notebook without
    exercises.
    """
    exercises: tuple[Exercise, ...]

    @property
    def name(self) -> str:
        """The notebook's name without its ending, such as "02_fsdp_wrapping"."""
        return self.path.stem


def all_labs() -> tuple[Lab, ...]:
    """All labs, in order.

    Raises:
        LabError: there is no notebook, or one cannot be read.
    """
    return _load_labs(NOTEBOOK_FOLDER)


@functools.cache
def _load_labs(folder: Path) -> tuple[Lab, ...]:
    paths = sorted(folder.glob("[0-9]*.ipynb"))
    if not paths:
        raise LabError(
            f"no labs in {folder}: install labkit again, or run `make notebooks` in a checkout"
        )
    return tuple(map(_read_lab, paths))


def _read_lab(path: Path) -> Lab:
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        marks = [
            cell["metadata"]["labkit"] for cell in notebook["cells"] if "labkit" in cell["metadata"]
        ]
        exercises = tuple(
            Exercise(mark["exercise"], mark["number"], mark["title"]) for mark in marks
        )
        return Lab(path, notebook["metadata"].get("labkit", {}).get("lab", ""), exercises)
    except (OSError, ValueError, LookupError, TypeError) as error:
        fix = "install labkit again, or run `make notebooks` in a checkout"
        raise LabError(
            f"{path} is no learner's notebook ({type(error).__name__}: {error}); {fix}"
        ) from None


def find_lab(name: str) -> Lab:
    """The lab of this name: the notebook's, its number, or the lab's short one.

    Raises:
        ParameterError: there is none, or there are several.
    """
    wanted = name.removesuffix(".ipynb")
    found = [lab for lab in all_labs() if wanted and wanted in (lab.name, lab.key)]
    if wanted.isdigit():
        found = [
            lab for lab in all_labs() if lab.name.partition("_")[0].zfill(2) == wanted.zfill(2)
        ]
    if len(found) != 1:
        there = ", ".join(lab.name for lab in all_labs())
        raise ParameterError(f"no lab is called {name!r}. Give a lab's number, or one of: {there}")
    return found[0]


def find_lab_by_key(key: str) -> Lab | None:
    """The lab with this short name, such as "fsdp"."""
    return next((lab for lab in all_labs() if lab.key == key), None)
