"""Every mutant of the table is noticed by the tests of its row; see tests/mutants."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import mutated

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300
SECTIONS = sorted(path.stem for path in Path(__file__).with_name("mutants").glob("[!_]*.py"))
MUTANTS = [each for name in SECTIONS for each in importlib.import_module(f"mutants.{name}").MUTANTS]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what git tracks and of what is new, as it stands now."""
    folder = tmp_path_factory.mktemp("mutants") / "labkit"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.row}: {mutant.change}")
def test_a_mutant_is_noticed(mutant, checkout):
    path = checkout / mutant.file
    right = path.read_text()
    path.write_text(mutated(right, mutant))
    try:
        ran = run_tests(checkout, mutant.test.split())
    finally:
        path.write_text(right)
    # 1 says that tests failed; any other status is an error of pytest's own, such as a test that is not there
    assert ran.returncode == 1, f"status {ran.returncode}: {mutant.change}\n{ran.stdout[-2000:]}{ran.stderr[-500:]}"


def run_tests(checkout, tests):
    """Pytest on these tests of a copy, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]
    tier = {"LABKIT_TEST": "" if os.environ.get("TIER") == "daily" else "all"}
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"} | tier
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_each_mutant_changes_a_text_that_is_there_once():
    for mutant in MUTANTS:
        mutated((ROOT / mutant.file).read_text(), mutant)


def test_the_table_breaks_logic_more_often_than_it_switches_off():
    assert len(MUTANTS) >= 150
    assert 3 * sum(mutant.off for mutant in MUTANTS) <= len(MUTANTS)
