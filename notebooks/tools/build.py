"""Make the notebooks from their sources.

    python -m notebooks.tools.build                          # all of notebooks/src
    python -m notebooks.tools.build 01_spatial_sharding      # one
    python -m notebooks.tools.build --check                  # is everything up to date? executes nothing

`src/NN_topic.py` (jupytext's percent format) is the only form that is edited. It gives `NN_topic.ipynb` for learners,
with the bodies between `### BEGIN SOLUTION` and `### END SOLUTION` taken out, and `solved/NN_topic.ipynb`, executed and
with its outputs, which nbval compares.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
import tyro

from labkit.environment import ENV_STRICT_CLAIMS
from notebooks.tools.execute import CellFailed, execute, strip
from notebooks.tools.source import (
    Lab,
    Notebook,
    SourceError,
    as_text,
    find_labs,
    inputs,
    learner_notebook,
    solved_notebook,
)

FOLDER = Path(__file__).resolve().parents[1]
MAX_BYTES = 1_000_000
REGENERATE = "run: make notebooks"


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
            found = [line for lab in labs for line in stale(lab)]
            print("\n".join(found) or f"up to date: {', '.join(lab.name for lab in labs) or 'nothing to do'}")
            return 1 if found else 0
        for lab in labs:
            write_learner(lab)
            if not learner:
                write_solved(lab)
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
        SourceError: the outputs name a folder of this machine, or the file would be too big.
        CellFailed: a cell raised an error; the notebook up to there is kept beside, as .failed.ipynb.
    """
    start_s = time.perf_counter()
    os.environ[ENV_STRICT_CLAIMS] = "1"  # in its kernel, a claim that does not hold is an error
    partial = lab.solved.with_suffix(".failed.ipynb")
    notebook = execute(solved_notebook(lab.source), partial, title=lab.name)
    strip(notebook)
    notebook.metadata = solved_notebook(lab.source).metadata
    text = as_text(notebook)
    problems = problems_with_outputs(notebook)
    if len(text.encode()) > MAX_BYTES:
        problems.append(f"{len(text.encode())} bytes are more than {MAX_BYTES}; draw figures at a lower dpi")
    if problems:
        raise SourceError("\n".join(f"{partial}: {problem}" for problem in problems))
    lab.solved.write_text(text)
    partial.unlink()
    print(f"wrote {lab.solved}: {len(text) / 1024:.0f} KiB, {time.perf_counter() - start_s:.0f} s")


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
