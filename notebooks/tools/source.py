"""A lab's source as a notebook: for learners without the solutions, and with them. Nothing is executed here.

The same source always gives the same bytes: cell ids come from the cells' text, those of exercises from their answer's
name, and metadata is reduced to the kernel's name, the cells' tags and what marks exercises.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat

from notebooks.tools import exercises, minutes

Notebook = Any  # nbformat's NotebookNode, whose attributes depend on its contents
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
PLACEHOLDER = "...  # your code here"
COMMIT, CLAIM, LOOK = "commit", "claim", "look"
"""Tags: a cell with the learner's own predictions, which lose the solution without a trace; one that holds sentences
about a figure against its numbers, and is folded away; one in which the learner looks around for an exercise, which
has the minutes, and whose solution goes without a trace, too."""
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
INSTALL = """\
# Where labkit is missing, as on Google Colab, this installs it {whence}. Elsewhere it does nothing.
from importlib.util import find_spec

if not find_spec("labkit"):
    get_ipython().run_line_magic("pip", "install --quiet {what}")"""
INSTALL_ID, BADGES_ID = "install-labkit", "badges"
# Who opens a notebook of a repository on GitHub: name, picture, and address with the repository's and notebook's names.
SERVICES = (
    ("Colab", "colab.research.google.com/assets/colab-badge.svg", "colab.research.google.com/github/{}/blob/main/{}"),
    ("Binder", "mybinder.org/badge_logo.svg", "mybinder.org/v2/gh/{}/main?labpath={}"),
    ("Codespaces", "github.com/codespaces/badge.svg", "codespaces.new/{}"),
)
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


class SourceError(ValueError):
    """A source, or what it gave, breaks a rule; the message names file and cell."""


@dataclass(frozen=True)
class Lab:
    """One source, ``src/NN_topic.py``, and the two notebooks that it gives."""

    source: Path

    @property
    def name(self) -> str:
        return self.source.stem

    @property
    def learner(self) -> Path:
        """The notebook whose exercises are empty."""
        return self.source.parents[1] / f"{self.name}.ipynb"

    @property
    def solved(self) -> Path:
        """The executed notebook."""
        return self.source.parents[1] / "solved" / f"{self.name}.ipynb"


def find_labs(folder: Path, names: tuple[str, ...] = ()) -> list[Lab]:
    """The labs of a notebooks folder, all or those named.

    Raises:
        SourceError: a named one has no source.
    """
    labs = {path.stem: Lab(path) for path in sorted((folder / "src").glob("*.py"))}
    unknown = set(names) - labs.keys()
    if unknown:
        there = ", ".join(labs) or "none at all"
        raise SourceError(f"no source {', '.join(sorted(unknown))} in {folder / 'src'}; there: {there}")
    return [lab for name, lab in labs.items() if name in names or not names]


def learner_notebook(path: Path) -> Notebook:
    """The notebook with a placeholder for every solution, which can be opened below the check of the exercise."""
    notebook = _read(path, without_solutions)
    solved = _read(path, without_markers)
    cells, answer = [], None
    for cell, whole in zip(notebook.cells, solved.cells, strict=True):
        cells.append(cell)
        if answer and cell.cell_type == "code":
            cells.append(answer)
            answer = None
        if cell.cell_type == "code" and PLACEHOLDER in cell.source:
            answer = to_be_opened(whole.source)
    notebook.cells = [*cells, *filter(None, [answer])]
    set_ids(notebook)
    exercises.mark(notebook, path.stem, PLACEHOLDER)
    first_code = next((place for place, cell in enumerate(cells) if cell.cell_type == "code"), len(cells))
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    notebook.cells.insert(first_code, install_cell(project))
    if line := badges(project, f"notebooks/{path.stem}.ipynb"):
        notebook.cells.insert(min(1, first_code), nbformat.v4.new_markdown_cell(line, id=BADGES_ID))
    return notebook


def install_cell(project: dict[str, Any]) -> Notebook:
    """A learner's first cell of code, which installs labkit where it is missing.

    Args:
        project: that table of pyproject.toml. Without an address there, the cell takes a wheel that lies beside the
            notebook; by its name alone, pip might find a stranger's package.
    """
    address = source_address(project)
    whence, what = (
        ("from its repository", f"git+{address}") if address else ("from a wheel in this folder", "labkit-*.whl")
    )
    text = INSTALL.format(whence=whence, what=what)
    return nbformat.v4.new_code_cell(text, id=INSTALL_ID, metadata={"jupyter": {"source_hidden": True}})


def badges(project: dict[str, Any], notebook: str) -> str:
    """Badges that open a notebook on services which run it, as one line of Markdown, or "" without an address.

    Args:
        project: that table of pyproject.toml.
        notebook: its path in the repository.
    """
    on_github = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", source_address(project))
    if not on_github:  # the services know repositories by their names there
        return ""
    return " ".join(
        f"[![Open in {name}](https://{image})](https://{link.format(on_github[1], notebook)})"
        for name, image, link in SERVICES
    )


def source_address(project: dict[str, Any]) -> str:
    """The repository's address in pyproject.toml's table of the project, or "" while it has none."""
    return str(project.get("urls", {}).get("Source", ""))


def to_be_opened(answer: str) -> Notebook:
    """A cell of text with an answer folded away."""
    return nbformat.v4.new_markdown_cell(
        f"<details><summary>An answer (try the check first)</summary>\n\n```python\n{answer.strip()}\n```\n\n</details>"
    )


def solved_notebook(path: Path) -> Notebook:
    """The notebook with its solutions, not executed."""
    return _read(path, without_markers)


def read_source(path: Path) -> Notebook:
    """The source as a notebook, its markers included.

    Raises:
        SourceError: it begins with a header that is no notebook's.
    """
    try:
        return jupytext.read(path, fmt="py:percent")
    except nbformat.ValidationError as error:
        raise SourceError(f"{path}: its header is no notebook metadata ({error.message}); it needs no header") from None


def _read(path: Path, change: Callable[[str, str], str]) -> Notebook:
    notebook = read_source(path)
    minutes.write_minutes(notebook)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells, start=1):
        try:
            check_last_line(cell)
            tags = cell.metadata.get("tags", [])
            cell.source = change(cell.source, "" if {COMMIT, LOOK} & set(tags) else PLACEHOLDER)
        except SourceError as error:
            raise SourceError(f"{path}: cell {number}: {error}") from None
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if CLAIM in tags:
            cell.metadata.jupyter = nbformat.from_dict({"source_hidden": True})
    set_ids(notebook)
    return notebook


def check_last_line(cell: Notebook) -> None:
    """Refuse a code cell that hides its value with a semicolon, which has no effect on nbval's way of executing it.

    Raises:
        SourceError: the cell ends in a semicolon.
    """
    if cell.cell_type == "code" and cell.source.rstrip().endswith(";"):
        raise SourceError("nbval does not honour a semicolon at the end; write _ = ... to hide a value")


def without_solutions(source: str, placeholder: str = PLACEHOLDER) -> str:
    """Each marked body replaced by one placeholder, if any, as far to the right as its BEGIN marker."""
    kept: list[str] = []
    for line, place in marked_lines(source):
        if place == "begin" and placeholder:
            kept.append(line[: line.index("#")] + placeholder)
        elif place == "outside":
            kept.append(line)
    return "\n".join(kept)


def without_markers(source: str, placeholder: str = PLACEHOLDER) -> str:
    """The source with its solutions, and the marker lines gone."""
    return "\n".join(line for line, place in marked_lines(source) if place in ("outside", "inside"))


def marked_lines(source: str) -> list[tuple[str, str]]:
    """Each line with its place: outside, begin, inside or end.

    Raises:
        SourceError: a marker without its partner, or one that shares its line.
    """
    lines, inside = [], False
    for line in source.split("\n"):
        marker = line.strip()
        if marker == (BEGIN if inside else END):
            raise SourceError(f"{marker} where {END if inside else BEGIN} should come first")
        if marker in (BEGIN, END):
            inside = not inside
            lines.append((line, "begin" if inside else "end"))
        elif "BEGIN SOLUTION" in marker or "END SOLUTION" in marker:
            raise SourceError(f"write a marker as {BEGIN} or {END}, alone on its line, not as {marker!r}")
        else:
            lines.append((line, "inside" if inside else "outside"))
    if inside:
        raise SourceError(f"{BEGIN} without {END}")
    return lines


def set_ids(notebook: Notebook) -> None:
    """Give each cell an id made from its text, so that a change elsewhere leaves it alone."""
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def inputs(notebook: Notebook) -> list[tuple[str, str, str, list[str]]]:
    """What a notebook holds apart from outputs: type, id, text and tags of each cell."""
    return [(cell.cell_type, cell.id, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def as_text(notebook: Notebook) -> str:
    """The contents of an .ipynb file, after a check that the notebook is a valid one."""
    nbformat.validate(notebook)
    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"
