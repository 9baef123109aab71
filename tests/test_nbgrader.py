"""nbgrader takes a lab: it makes an assignment of it, validates and grades what a learner hands in.

It adds menus and server extensions to every JupyterLab of its environment, so `make test TODAY=1` gives it another one.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import nbformat
import pytest
from answers import solution

from labkit_course.checks.judge import ENV_NBGRADER
from notebooks.tools.build import FOLDER
from notebooks.tools.source import read_source

PYTHON = Path(sys.prefix, "grade", "bin", "python")
LAST = "check-gather_and_free"
SCORES = """
import json, sys
from nbgrader.api import Gradebook
with Gradebook("sqlite:///gradebook.db") as book:
    notebook = book.find_submission_notebook("02_fsdp_wrapping", "lab2", "ada")
    print(json.dumps({each.name: [each.auto_score, each.max_score] for each in notebook.grades}))
"""


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def nbgrader(repository, tmp_path_factory):
    """Runs nbgrader in the folder of a course."""
    if not PYTHON.with_name("nbgrader").exists():
        pytest.skip("no nbgrader in an environment of its own: make .venv/grade/.installed")
    folder = tmp_path_factory.mktemp("course")
    plain = {name: value for name, value in os.environ.items() if name != ENV_NBGRADER}
    ours = {f"JUPYTER_{name}_DIR": str(folder / "jupyter" / name) for name in ("CONFIG", "DATA", "RUNTIME")}

    def run(*words):
        command = [PYTHON, *map(str, words)]
        path = os.pathsep.join([str(PYTHON.parent), os.environ["PATH"]])  # it calls its database's tool by name
        environment = plain | ours | {"PYTHONPATH": str(repository), "PATH": path}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def released(nbgrader, repository):
    """The assignment that learners get: the beginning of lab 2 but for its runs, which take time and are not judged."""
    notebook = nbformat.read(repository / "notebooks" / "02_fsdp_wrapping.ipynb", as_version=4)
    end = [cell.id for cell in notebook.cells].index(LAST) + 1
    first = [cell.id for cell in notebook.cells if cell.cell_type == "code"][:4]
    cells = [
        cell
        for cell in notebook.cells[:end]
        if cell.cell_type == "markdown" or "nbgrader" in cell.metadata or cell.id in first
    ]
    notebook.cells = cells
    (nbgrader.folder / "source" / "lab2").mkdir(parents=True)
    nbformat.write(notebook, nbgrader.folder / "source" / "lab2" / "02_fsdp_wrapping.ipynb")
    shutil.copy(repository / "docs" / "nbgrader_config.py", nbgrader.folder)
    made = nbgrader("-m", "nbgrader", "generate_assignment", "lab2")
    assert made.returncode == 0, made.stderr[-3000:]
    return nbgrader.folder / "release" / "lab2" / "02_fsdp_wrapping.ipynb"


def test_an_assignment_has_the_heads_of_functions_and_no_answers(released):
    notebook = nbformat.read(released, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells)
    assert (
        "def fewest_ranks(parameters: int, largest_unit: int, memory_bytes: int) -> int:\n    ...  # your code here"
        in text
    )
    assert "An answer" not in text
    locked = [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade")]
    assert len(locked) == 3 and all(cell.metadata.editable is False for cell in locked)


def lab_answer(head):
    """The lab's own answer to the exercise that begins so, for the place of an empty one."""
    source = read_source(FOLDER / "src" / "02_fsdp_wrapping.py")
    (cell,) = (cell for cell in source.cells if cell.source.startswith(head))
    return textwrap.indent(solution(cell.source), "    ").strip()


def hand_in(nbgrader, released, cheating):
    """A learner's work: a right answer, a wrong one, none; and, cheating, a check that says what one likes to hear."""
    answers = {"answer-shard_parameters": lab_answer("def shard_parameters"), "answer-fewest_ranks": "return 2"}
    notebook = nbformat.read(released, as_version=4)
    for cell in notebook.cells:
        if cell.id in answers:
            cell.source = cell.source.replace("...  # your code here", answers[cell.id])
        if cheating and cell.id == LAST:
            cell.source = "print('passed')"
    path = nbgrader.folder / "submitted" / "ada" / "lab2" / released.name
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path


def test_autograde_gives_points_for_what_is_right_and_runs_its_own_checks(nbgrader, released):
    hand_in(nbgrader, released, cheating=True)
    graded = nbgrader("-m", "nbgrader", "autograde", "lab2")
    assert graded.returncode == 0, graded.stderr[-3000:]
    assert "partial credit" not in graded.stderr, "nbgrader took a verdict that is shown for a number of points"
    scores = json.loads(nbgrader("-c", SCORES).stdout)
    assert scores == {
        "check-fewest_ranks": [0.0, 1.0],
        "check-shard_parameters": [2.0, 2.0],
        "check-gather_and_free": [0.0, 2.0],
    }


def test_validate_says_which_check_fails_and_why(nbgrader, released):
    path = hand_in(nbgrader, released, cheating=False)
    said = nbgrader("-m", "nbgrader", "validate", path)
    assert "VALIDATION FAILED ON 2 CELL" in said.stdout, said.stdout + said.stderr[-3000:]
    assert "NotPassed: not attempted" in said.stdout
    assert "NotPassed: wrong: fewest_ranks(" in said.stdout
