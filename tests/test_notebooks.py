"""Every lab's notebooks: up to date, run from top to bottom, and say again what they said when they were made."""

import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest

from notebooks.build import FOLDER, MAX_BYTES, stale
from notebooks.pipeline.source import BEGIN, find_labs

LABS = find_labs(FOLDER)
NBVAL_OPTIONS = [
    *("--nbval", "--nbval-current-env", "--nbval-cell-timeout=120", "--nbval-kernel-startup-timeout=120"),
    # nothing of this project's own pytest settings
    *("-p", "no:cacheprovider", "-p", "no:timeout", "-c", "/dev/null", "-q", "--rootdir"),
]
each_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)


def test_there_are_labs():
    assert LABS, f"no source in {FOLDER / 'src'}"


@each_lab
def test_notebooks_are_what_the_source_gives(lab):
    assert stale(lab) == []


@each_lab
def test_sizes(lab):
    for path in (lab.learner, lab.solved):
        assert path.stat().st_size < MAX_BYTES, f"{path.name}: draw its figures at a lower dpi"


@each_lab
def test_both_notebooks_name_a_kernel_and_one_cell_of_parameters(lab):
    for path in (lab.learner, lab.solved):
        notebook = nbformat.read(path, as_version=4)
        assert (notebook.metadata.kernelspec.name, notebook.metadata.kernelspec.language) == ("python3", "python")
        tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        assert len(tagged) == 1, path
        for line in tagged[0].source.splitlines():
            assert not line or line.startswith("#") or (": " in line.split("=")[0] and "#" in line), (
                f"a parameter has a type and a comment: {line}"
            )


@each_lab
def test_there_are_at_least_four_exercises_and_their_answers_are_gone(lab):
    assert lab.source.read_text().count(BEGIN) >= 4
    assert "SOLUTION" not in lab.learner.read_text()
    assert any(cell.get("outputs") for cell in nbformat.read(lab.solved, as_version=4).cells)


@each_lab
def test_learner_notebook_is_stored_without_outputs(lab):
    assert not any(cell.get("outputs") for cell in nbformat.read(lab.learner, as_version=4).cells)


@each_lab
@pytest.mark.notebook
@pytest.mark.timeout(300)
def test_unsolved_notebook_runs_from_top_to_bottom_in_any_folder(lab, tmp_path):
    papermill.execute_notebook(
        lab.learner, tmp_path / "done.ipynb", cwd=tmp_path, progress_bar=False, execution_timeout=120
    )


@each_lab
@pytest.mark.notebook
@pytest.mark.timeout(300)
def test_solved_notebook_gives_its_outputs_again(lab, tmp_path):
    command = [sys.executable, "-m", "pytest", *NBVAL_OPTIONS, str(Path(lab.solved).parent), str(lab.solved)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=290, cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout[-8000:] + answer.stderr[-2000:]
    assert "passed" in answer.stdout
