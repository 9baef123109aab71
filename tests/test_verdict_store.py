"""What checks said is kept beside the copies, and nowhere else; how far a learner is."""

import json
import os
import subprocess
import sys
import time
import warnings

import pytest

from labkit.__main__ import main
from labkit.environment import ENV_VERDICTS
from labkit.errors import LabError, ParameterError
from labkit_course import lab_catalog, verdict_store
from labkit_course.checks import fsdp
from labkit_course.checks import simulation as simulation_checks
from labkit_course.checks.judge import ENV_NBGRADER, NotPassed
from labkit_course.verdict_store import ExerciseProgress, read_verdicts, so_far

KERNEL = (
    "from labkit_course.verdict_store import store_verdict, so_far; "
    "store_verdict('fsdp', 'fewest_ranks', {!r}); print(so_far('fsdp'))"
)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The file of this test's verdicts, and nothing from earlier ones."""
    monkeypatch.setattr(verdict_store, "_process_verdicts", {})
    monkeypatch.setenv(ENV_VERDICTS, str(tmp_path / "kept.json"))
    return tmp_path / "kept.json"


def fewest_ranks(parameters, largest_unit, memory_bytes):
    left = memory_bytes - 8 * largest_unit
    return -(-16 * parameters // left) if left > 0 else 0


def wrong(function):
    """A wrong answer to the same exercise."""

    def answer(**arguments):
        return -1

    answer.__name__ = function.__name__
    return answer


def test_a_pass_is_never_taken_back_and_tries_are_counted(kept):
    for answer in (wrong(fewest_ranks), wrong(fewest_ranks), fewest_ranks, wrong(fewest_ranks)):
        fsdp.fewest_ranks(answer)
    one = read_verdicts(kept)["fsdp"]["fewest_ranks"]
    assert (one.verdict, one.state, one.tries) == ("wrong", "passed", 4)
    assert one.first_passed and one.first_passed <= one.when


def test_a_pass_counts_in_the_lab_to_which_its_exercise_has_moved(kept):
    passed, wrong_now = ExerciseProgress("passed", "1", 1, "1"), ExerciseProgress("wrong", "2", 1)
    lab = lab_catalog.find_lab("step_time")
    moved = verdict_store.lab_progress(
        lab, {"simulation": {"forward_s": passed, "peak_bytes": passed}, "step_time": {"forward_s": wrong_now}}
    )
    assert moved.states == {"forward_s": "passed"}
    assert verdict_store.lab_progress(lab, {"simulation": {"forward_s": wrong_now}}).states == {}


def test_an_empty_answer_is_no_try(kept):
    def fewest_ranks(parameters, largest_unit, memory_bytes): ...

    fsdp.fewest_ranks(fewest_ranks)
    assert read_verdicts(kept)["fsdp"]["fewest_ranks"].tries == 0
    assert read_verdicts(kept)["fsdp"]["fewest_ranks"].state == "not attempted"


def test_a_broken_function_that_the_notebook_shows_to_a_check_is_no_try(kept):
    def forgetful(parameters, largest_unit, memory_bytes):
        return 2 * parameters

    assert fsdp.fewest_ranks(forgetful).state == "wrong"
    assert not kept.exists()


def test_a_verdict_of_a_lab_whose_checks_stand_in_a_package_of_their_own_counts_for_that_lab(kept):
    def fewest_hosts(shared_bytes, own_bytes, budget_bytes):
        return 7

    assert simulation_checks.fewest_hosts(fewest_hosts).state == "wrong"
    assert read_verdicts(kept)["simulation"]["fewest_hosts"].state == "wrong"


class Odd:
    def __getattr__(self, name):
        return 1 / 0


def test_whatever_is_handed_to_a_check_gives_a_verdict(kept):
    for odd in (7, None, [], lambda **arguments: 1, Odd):
        assert not fsdp.fewest_ranks(odd).ok
    with pytest.raises(ZeroDivisionError):  # in the check itself, as ever; its name is asked for nowhere else
        fsdp.fewest_ranks(Odd())
    assert not kept.exists()


def test_the_last_cell_says_what_is_open_with_earlier_sessions(kept):
    kept.write_text(
        json.dumps(
            verdict_store.verdicts_to_json(
                {"fsdp": {"shard_parameters": ExerciseProgress("wrong", "2026-01-01", 2, "2026-01-01")}}
            )
        )
    )
    fsdp.fewest_ranks(fewest_ranks)
    standing = so_far("fsdp")
    assert repr(standing).startswith("2 of 5 passed, these are open: 2.3 gather, and free; 2.4 reduce the gradients; ")
    assert standing._repr_html_().startswith("<p><b>2 of 5 passed</b>, these are open:</p><ul><li>2.3 gather, and free")
    everything = {each.name: "passed" for each in standing.lab.exercises}
    assert repr(verdict_store.LabProgress(standing.lab, everything)) == "5 of 5 passed"
    with pytest.raises(ParameterError, match="no lab is called 'fsd'"):
        so_far("fsd")


def in_kernel(folder, verdict):
    """A check says so in a process of their own that starts in a folder, as a kernel does."""
    command = [sys.executable, "-c", KERNEL.format(verdict)]
    root = str(verdict_store.lab_catalog.ROOT)
    plain = {name: value for name, value in os.environ.items() if name != ENV_VERDICTS}
    done = subprocess.run(
        command, cwd=folder, env=plain | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_a_kernel_in_a_folder_of_copies_writes_there(tmp_path):
    mine, other = tmp_path / "my", tmp_path / "solved"
    (mine / ".labkit" / "pristine").mkdir(parents=True)
    (mine / "deeper").mkdir()
    other.mkdir()
    assert "1 of 5 passed" in in_kernel(other, "passed"), "the verdicts of this kernel"
    assert list(other.iterdir()) == []
    assert "1 of 5 passed" in in_kernel(mine, "passed")
    assert "1 of 5 passed" in in_kernel(mine / "deeper", "wrong"), "and those of earlier ones"
    one = read_verdicts(mine / "progress.json")["fsdp"]["fewest_ranks"]
    assert (one.verdict, one.state, one.tries) == ("wrong", "passed", 2)


AT_ONCE = """
import sys, time
from pathlib import Path
from labkit_course.verdict_store import store_verdict, so_far

so_far("fsdp")
Path(sys.argv[1] + ".ready").touch()
while not Path("go").exists():
    time.sleep(0.001)
for _ in range(50):
    store_verdict("fsdp", sys.argv[1], "wrong")
"""


def test_kernels_that_write_at_once_lose_nothing(kept, tmp_path):
    names = [each.name for each in lab_catalog.find_lab("fsdp").exercises][:3]
    writers = [subprocess.Popen([sys.executable, "-c", AT_ONCE, name], cwd=tmp_path) for name in names]
    while len(list(tmp_path.glob("*.ready"))) < len(names):
        assert all(writer.poll() is None for writer in writers)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert {name: each.tries for name, each in read_verdicts(kept)["fsdp"].items()} == dict.fromkeys(names, 50)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON list"),
        ('{"version": 9}', "version 9 of verdicts"),
        ('{"version": 1}', "holds no verdicts"),
        ('{"version": 1, "verdicts": {"fsdp": {"fewest_ranks": {"verdict": "great", "when": ""}}}}', "is no verdict"),
        (
            '{"version": 1, "verdicts": {"fsdp": {"fewest_ranks": {"verdict": "wrong", "when": "", "tries": "3"}}}}',
            "tries",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_kept_and_the_check_goes_on(kept, text, says):
    kept.write_text(text)
    with pytest.warns(UserWarning, match=rf"this verdict is not kept: .*kept.json: .*{says}.*move it away"):
        assert fsdp.fewest_ranks(fewest_ranks).ok
    assert kept.read_text() == text
    with pytest.raises(LabError, match=says):
        read_verdicts(kept)
    with pytest.warns(UserWarning, match=says):
        assert so_far("fsdp").pass_count_text == "1 of 5 passed"


def test_a_folder_that_is_gone_does_not_stop_a_check(kept, monkeypatch, tmp_path):
    monkeypatch.setenv(ENV_VERDICTS, str(tmp_path / "gone" / "kept.json"))
    with pytest.warns(UserWarning, match="this verdict is not kept"):
        assert fsdp.fewest_ranks(fewest_ranks).ok


def test_where_nbgrader_grades_a_check_raises_unless_it_passes(kept, monkeypatch):
    monkeypatch.setenv(ENV_NBGRADER, "autograde")
    assert fsdp.fewest_ranks(fewest_ranks).ok
    with pytest.raises(NotPassed, match=r"wrong: fewest_ranks\(.*gave -1, expected 1"):
        fsdp.fewest_ranks(wrong(fewest_ranks))

    def forgetful(parameters, largest_unit, memory_bytes):
        return 2 * parameters

    assert fsdp.fewest_ranks(forgetful).state == "wrong", "what a notebook shows is not graded"


def test_progress_prints_labs_and_exercises(tmp_path, capsys):
    known = {
        "fsdp": {
            "fewest_ranks": ExerciseProgress("passed", "x", 1, "x"),
            "shard_parameters": ExerciseProgress("wrong", "x", 1),
        }
    }
    (tmp_path / "progress.json").write_text(json.dumps(verdict_store.verdicts_to_json(known)))
    assert main(["progress", "--folder", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:4] == ["lab", "exercises", "1", "2"]
    marks = next(line for line in shown if line.startswith("02_")).split()
    assert marks == ["02_fsdp_wrapping", "1", "of", "5", "passed", "✓", "✗", *"·" * 3]
    assert len([line for line in shown if line[:1].isdigit()]) == len(lab_catalog.all_labs())
    (tmp_path / "progress.json").write_text("{")
    assert main(["progress", "--folder", str(tmp_path)]) == 1
    assert "move it away" in capsys.readouterr().err


def test_without_notebooks_nothing_is_kept_and_nothing_fails(kept, monkeypatch, tmp_path):
    monkeypatch.setattr(lab_catalog, "NOTEBOOK_FOLDER", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fsdp.fewest_ranks(fewest_ranks).ok
    assert not kept.exists()
