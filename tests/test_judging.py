"""The command that executes a notebook and fails unless its exercises pass."""

import nbformat
import pytest

from labkit.__main__ import main
from labkit_course import verdict_store

RIGHT = """
def fewest_ranks(parameters, largest_unit, memory_bytes):
    left = memory_bytes - 8 * largest_unit
    return -(-16 * parameters // left) if left > 0 else 0
"""


@pytest.fixture
def notebook(tmp_path):
    """Writes lab 2 with one exercise, this answer, and a last cell; and returns its file."""

    def write(answer, last="1 + 1"):
        cells = [
            nbformat.v4.new_code_cell("from labkit_course.checks import fsdp as checks"),
            nbformat.v4.new_code_cell(answer),
            nbformat.v4.new_code_cell("checks.fewest_ranks(fewest_ranks)"),
            nbformat.v4.new_code_cell(last),
        ]
        cells[1].metadata["labkit"] = {"exercise": "fewest_ranks", "number": "2.1", "title": "the fewest ranks"}
        content = nbformat.v4.new_notebook(cells=cells, metadata={"labkit": {"lab": "fsdp"}})
        content.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = tmp_path / "02.ipynb"
        nbformat.write(content, path)
        return path

    return write


@pytest.mark.parametrize(
    ("answer", "last", "status", "says"),
    [
        pytest.param(RIGHT, "1 + 1", 0, "1 of 1 passed", marks=pytest.mark.long),
        (RIGHT.replace("8 *", "4 *"), "1 + 1", 1, "0 of 1 passed\n  2.1 the fewest ranks: wrong"),
        pytest.param(RIGHT, "1 / 0", 1, "ZeroDivisionError: division by zero", marks=pytest.mark.long),
    ],
)
def test_the_status_says_whether_the_exercises_pass(notebook, answer, last, status, says, monkeypatch, capsys):
    path = notebook(answer, last)
    kept = path.with_name("kept.json")
    # An earlier pass does not count, and nothing is added to it.
    monkeypatch.setenv("LABKIT_VERDICTS", str(kept))
    verdict_store.store_verdict("fsdp", "fewest_ranks", "passed")
    before = path.read_bytes(), kept.read_bytes()
    assert main(["judge", str(path)]) == status
    shown = capsys.readouterr().out
    assert shown.startswith(f"{path}: ") and says in shown and "\x1b" not in shown
    assert (path.read_bytes(), kept.read_bytes()) == before


def test_what_is_no_lab_is_refused(tmp_path, capsys):
    assert main(["judge"]) == 2
    assert "name copies of labs" in capsys.readouterr().err
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "empty.ipynb")
    for name, says in {"empty.ipynb": "has no exercises", "missing.ipynb": "is no learner's notebook"}.items():
        assert main(["judge", str(tmp_path / name)]) == 1
        assert f"{name} {says}" in capsys.readouterr().err
