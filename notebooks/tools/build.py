"""Make the notebooks from their sources.

    python -m notebooks.tools.build                          # all of notebooks/src
    python -m notebooks.tools.build 01_spatial_sharding      # one
    python -m notebooks.tools.build --check                  # is everything up to date? executes nothing

`src/NN_topic.py` (jupytext's percent format) is the only form that is edited. It gives `NN_topic.ipynb` for learners,
with the bodies between `### BEGIN SOLUTION` and `### END SOLUTION` taken out, and `solved/NN_topic.ipynb`, executed and
with its outputs, which nbval compares.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import tyro

from labkit.environment import ENV_RUNS_FOLDER, ENV_STRICT_CLAIMS, ENV_WARM
from labkit.errors import LabError
from labkit.runs.history import find_runs
from labkit.runs.result import load
from notebooks.tools import minutes
from notebooks.tools.execute import CellFailed, execute, strip
from notebooks.tools.source import (
    PYPROJECT,
    Lab,
    Notebook,
    SourceError,
    as_text,
    badges,
    find_labs,
    inputs,
    learner_notebook,
    read_source,
    solved_notebook,
    source_address,
)

FOLDER = Path(__file__).resolve().parents[1]
README = FOLDER.parent / "README.md"
MAX_BYTES = 1_000_000
REGENERATE = "run: make notebooks"
QUIET = "end them, and build again"


def main(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    check: bool = False,
    learner: bool = False,
    folder: Path = FOLDER,
) -> int:
    """Make the notebooks from their sources.

    Args:
        names: sources to do, without .py; all where none is named.
        check: only say which notebooks are not up to date; exit status 1 if any.
        learner: write the learners' notebooks only, which takes no execution.
        folder: the folder that holds src/.
    """
    try:
        labs = find_labs(folder, names)
        if check:
            found = [line for lab in labs for line in stale(lab)] + stale_readme(labs)
            print("\n".join(found) or f"up to date: {', '.join(lab.name for lab in labs) or 'nothing to do'}")
            return 1 if found else 0
        for lab in labs:
            write_learner(lab)
            if not learner:
                write_solved(lab)
        write_readme(labs)
    except (SourceError, CellFailed) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the kernel has gone by now, and its ranks with it
        return 130
    return 0


def write_learner(lab: Lab) -> None:
    """Write the learner's notebook."""
    lab.learner.write_text(as_text(learner_notebook(lab.source)))
    print(f"wrote {lab.learner}")


def write_solved(lab: Lab) -> None:
    """Execute the solutions, with progress on the terminal, and write the solved notebook.

    Raises:
        SourceError: the outputs name a folder of this machine, the file would be too big, or other
            programs disturbed its timings.
        CellFailed: a cell raised an error; the notebook up to there is kept beside, as .failed.ipynb.
    """
    start_s = time.perf_counter()
    partial = lab.solved.with_suffix(".failed.ipynb")
    # In the kernel, a claim that does not hold is an error. The first run waits until the process from which ranks are
    # forked has imported torch, which would take it a core.
    kernel = {ENV_STRICT_CLAIMS: "1", ENV_WARM: "1"}
    with tempfile.TemporaryDirectory() as runs, patch.dict(os.environ, kernel | {ENV_RUNS_FOLDER: runs}):
        notebook = execute(solved_notebook(lab.source), partial, title=lab.name)
        disturbed = disturbed_runs()
    strip(notebook)
    notebook.metadata = solved_notebook(lab.source).metadata
    text = as_text(notebook)
    problems = problems_with_outputs(notebook) + disturbed
    if len(text.encode()) > MAX_BYTES:
        problems.append(f"{len(text.encode())} bytes are more than {MAX_BYTES}; draw figures at a lower dpi")
    if problems:
        raise SourceError("\n".join(f"{partial}: {problem}" for problem in problems))
    lab.solved.write_text(text)
    partial.unlink()
    print(f"wrote {lab.solved}: {len(text) / 1024:.0f} KiB, {time.perf_counter() - start_s:.0f} s")


def write_readme(labs: list[Lab]) -> None:
    """Write into the README what the build knows: these labs' minutes, and the repository's address."""
    readme = README.read_text()
    if (changed := as_built(readme, labs)) != readme:
        README.write_text(changed)


def as_built(readme: str, labs: list[Lab]) -> str:
    """The README with what the build knows."""
    return with_address(with_minutes(readme, labs), tomllib.loads(PYPROJECT.read_text())["project"])


def with_address(readme: str, project: dict[str, Any]) -> str:
    """The README with the repository's address where it is cloned, and badges that open lab 0 below the title.

    Args:
        readme: its text, with another address or none.
        project: that table of pyproject.toml; without an address there, the README has no badges.
    """
    line = badges(project, "notebooks/00_ranks.ipynb")
    readme = re.sub(r"^(# .*\n)(\n\[!\[.*\n)?", rf"\g<1>\n{line}\n" if line else r"\g<1>", readme)
    address = source_address(project) or "<this repository>"
    return re.sub(r"git clone (<.*?>|\S+) labkit", f"git clone {address} labkit", readme)


def with_minutes(readme: str, labs: list[Lab]) -> str:
    """The README with each lab's minutes in the column behind its notebook."""
    for lab in labs:
        core, _ = minutes.core_and_optional(minutes.split_into_parts(read_source(lab.source)))
        readme = re.sub(rf"(\(notebooks/{lab.name}\.ipynb\) \|) \d+ \|", rf"\g<1> {core} |", readme)
    return readme


def stale_readme(labs: list[Lab]) -> list[str]:
    """A line if the README says something else than the build would write."""
    readme = README.read_text()
    return [] if readme == as_built(readme, labs) else [f"{README} is not as built; {REGENERATE}"]


def disturbed_runs() -> list[str]:
    """Of the runs on record, those whose timings other programs have disturbed, each with the fix."""
    problems = []
    for entry in find_runs():
        with contextlib.suppress(LabError):  # some labs break runs on purpose
            if cores := load(entry.folder).cores_of_others:
                problems.append(f"{entry.folder.name} was disturbed: other programs used {cores:.1f} cores; {QUIET}")
    return problems


def problems_with_outputs(notebook: Notebook) -> list[str]:
    """What must not stand in the outputs of a notebook that others will read."""
    places = {str(FOLDER.parent), str(Path.home()), sys.prefix} - {"/"}
    problems = []
    for number, cell in enumerate(notebook.cells, start=1):
        for output in cell.get("outputs", []):
            text = str(output.get("text", "")) + "".join(str(value) for value in output.get("data", {}).values())
            named = sorted(place for place in places if place in text)
            problems += [f"cell {number} prints a folder of this machine: {place}" for place in named]
    return problems


def stale(lab: Lab) -> list[str]:
    """The notebooks of a lab that are not what its source gives, each with the fix. Executes nothing."""
    found = []
    if not lab.learner.exists() or lab.learner.read_text() != as_text(learner_notebook(lab.source)):
        found.append(f"{lab.learner} is not what {lab.source.name} gives; {REGENERATE}")
    if not lab.solved.exists():
        return [*found, f"{lab.solved} is missing; {REGENERATE}"]
    solved = nbformat.read(lab.solved, as_version=4)
    if inputs(solved) != inputs(solved_notebook(lab.source)):
        found.append(f"{lab.solved} is not what {lab.source.name} gives; {REGENERATE}")
    elif any(cell.cell_type == "code" and cell.source and not cell.execution_count for cell in solved.cells):
        found.append(f"{lab.solved} was not executed to its end; {REGENERATE}")
    return found + [f"{lab.solved}: {problem}" for problem in problems_with_outputs(solved)]


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
