"""Which cells of a learner's notebook are an exercise: marked for nbgrader, for labkit's own progress, and for updates.

An exercise begins with a heading, ``### Exercise 3: bytes on the wire (••, 12 minutes)``. It holds a cell to complete,
and ends with the cell that hands what was completed to a check. Both get a lasting id, so that an update finds them
however their text has changed, and nbgrader's metadata (schema 3): a dot of difficulty is a point.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any

import nbformat

Notebook = Any  # nbformat's NotebookNode, whose attributes depend on its contents
HEADING = re.compile(r"^### Exercise (?:\d+\.)?(\d+): (.+?) \((?:optional, )?(•+), \d+ minutes\)$", re.MULTILINE)
SECTION = re.compile(r"^##+ ", re.MULTILINE)


@dataclass
class Exercise:
    """What its heading says, and what is to be completed so far."""

    number: str
    title: str
    points: int
    answers: list[str] = field(default_factory=list)


def mark(notebook: Notebook, lab: str, placeholder: str) -> None:
    """Mark the exercises of a learner's notebook, and give their cells ids of their own.

    Args:
        notebook: changed in place.
        lab: the notebook's name, which begins with the lab's number.
        placeholder: what stands in a cell to complete.
    """
    exercise: Exercise | None = None
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and SECTION.search(cell.source):
            exercise = _read_heading(cell.source, lab) or exercise
        elif cell.cell_type == "code" and placeholder in cell.source:
            answers = _defined(cell.source, placeholder)
            if exercise:
                exercise.answers += answers
            _set(cell, f"answer-{answers[0]}", solution=True)
        elif cell.cell_type == "code" and exercise and (answer := _judged(cell.source, exercise.answers)):
            _set(cell, f"check-{answer}", points=exercise.points)
            about = {"exercise": answer, "number": exercise.number, "title": exercise.title}
            cell.metadata.labkit = nbformat.from_dict(about)
            exercise = None
    if key := _lab_key(notebook):
        notebook.metadata.labkit = nbformat.from_dict({"lab": key})


def _read_heading(text: str, lab: str) -> Exercise | None:
    headings = HEADING.findall(text)
    if not headings:
        return None
    number, title, dots = headings[-1]
    return Exercise(f"{lab.partition('_')[0].removeprefix('0')}.{number}", title, len(dots))


def _set(cell: Notebook, name: str, *, solution: bool = False, points: int = 0) -> None:
    kind = {"grade": bool(points), "solution": solution, "locked": bool(points), "task": False}
    about = {"grade_id": name, "schema_version": 3, **kind, **({"points": points} if points else {})}
    cell.id, cell.metadata.nbgrader = name, nbformat.from_dict(about)


def _defined(source: str, placeholder: str) -> list[str]:
    """The functions and classes of a cell whose body is to be written, in order."""
    lines = source.split("\n")
    nodes = [node for node in _parse(source) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    bodies = {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes}
    return [name for name, body in bodies.items() if placeholder in body]


def _judged(source: str, answers: list[str]) -> str:
    """Which of these answers a cell hands to a check first; "" for none."""
    calls = [node for top in _parse(source) for node in ast.walk(top) if isinstance(node, ast.Call) and node.args]
    for call in calls:
        checks = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "checks"
        if checks and getattr(call.args[0], "id", "") in answers:
            return str(getattr(call.args[0], "id", ""))
    return ""


def _lab_key(notebook: Notebook) -> str:
    """The lab's name in every folder, as its last cell says it: ``so_far("fsdp")``; "" without one."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    found = re.findall(r'^so_far\("(\w+)"\)$', code, flags=re.MULTILINE)
    return found[-1] if found else ""


def _parse(source: str) -> list[ast.stmt]:
    """The statements of a cell; none of one that is not plain Python, as with a magic."""
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []
