"""Every mutant of the table is noticed by the tests of its row; see tests/mutants."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import mutated

ROOT = Path(__file__).resolve().parents[1]
RUNNER = Path(__file__).with_name("mutants") / "runner.py"
SECTIONS = sorted(path.stem for path in RUNNER.parent.glob("s[0-9]*.py"))
MUTANTS = [each for name in SECTIONS for each in importlib.import_module(f"mutants.{name}").MUTANTS]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what git tracks and of what is new, as it stands now, without notebooks and pages."""
    folder = tmp_path_factory.mktemp("mutants") / "labkit"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file() and not name.endswith(".ipynb"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def run_tests(checkout):
    """Runs pytest on tests of the copy, up to the first failure; its status and what it said."""
    tier = {"LABKIT_TEST": "" if os.environ.get("TIER") == "daily" else "all"}
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"} | tier
    # pytest-xdist's own variables would make a worker of each child
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    runner = subprocess.Popen([sys.executable, RUNNER, checkout], **how)

    def run(tests):
        runner.stdin.write(json.dumps(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]) + "\n")
        runner.stdin.flush()
        return json.loads(runner.stdout.readline())

    yield run
    runner.stdin.close()
    runner.wait(30)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.row}: {mutant.change}")
def test_a_mutant_is_noticed(mutant, checkout, run_tests):
    path = checkout / mutant.file
    right = path.read_text()
    path.write_text(mutated(right, mutant))
    try:
        status, said = run_tests(mutant.test.split())
    finally:
        path.write_text(right)
    # 1 says that tests failed; any other status is an error of pytest's own, such as a test that is not there
    assert status == 1, f"status {status}: {mutant.change}\n{said}"


def test_each_mutant_changes_a_text_that_is_there_once():
    for mutant in MUTANTS:
        mutated((ROOT / mutant.file).read_text(), mutant)


def test_the_table_breaks_logic_more_often_than_it_switches_off():
    assert len(MUTANTS) >= 150
    assert 3 * sum(mutant.off for mutant in MUTANTS) <= len(MUTANTS)
