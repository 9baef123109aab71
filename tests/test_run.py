"""labkit.run: what it refuses, what it gives back, and which failure it reports."""

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from fixture_long import WARM_DAILY
from fixture_messages import words
from fixture_time import within

import labkit
from labkit import requirements
from labkit.errors import LabError, ParameterError, RankFailed, RunTimedOut
from labkit.launcher import failure, process, worker
from labkit.launcher.worker import is_echo
from labkit.runs.folder import RunFolder, read_json, write_json

PROGRAMS = Path(__file__).parent / "programs"
MISBEHAVE, RECORDS, SMALL = (PROGRAMS / f"{name}.py" for name in ("misbehave", "records", "small"))


@pytest.fixture(autouse=True)
def main_stays(monkeypatch):
    """Some tests run a program in this process, as a rank does, where it becomes ``__main__``."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """Fails the test that starts a process or makes a run's folder."""
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(process, "start_torchrun", lambda *arguments: pytest.fail("a run was started"))
    yield
    assert not (tmp_path / "runs").exists()


BAD_ARGUMENTS = [
    ({"nproc": 0}, "nproc = 0"),
    ({"nproc": -2}, "nproc = -2"),
    ({"nproc": 2.0}, "nproc = 2.0"),
    ({"nproc": True}, "nproc = True"),
    ({"nproc": "2"}, "nproc = '2'"),
    ({"nproc": numpy.float64(2)}, "nproc = "),
    ({"nproc": numpy.array([2, 3])}, "nproc = array([2, 3])"),
    ({"nproc": 10**6}, "nproc = 1000000 … 64"),
    ({"device": ["cpu"]}, "device = ['cpu'] … auto, cpu, cuda"),
    ({"timeout_s": True}, "timeout_s = True"),
    ({"timeout_s": numpy.int64(-1)}, "timeout_s = "),
    ({"device": "gpu"}, "device = 'gpu' … auto, cpu, cuda"),
    ({"timeout_s": 0}, "timeout_s = 0"),
    ({"timeout_s": float("nan")}, "timeout_s = nan"),
    ({"timeout_s": "long"}, "timeout_s = 'long'"),
    ({"stpes": 3}, "records … 'stpes' … 'steps'"),
    ({"steps": "many"}, "records … steps = 'many' … int … steps: int = 4  # How many timed steps."),
]


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_a_bad_argument_is_refused_at_once(arguments, message):
    with within(1), pytest.raises(ParameterError, match=words(message)):
        labkit.run(RECORDS, **arguments)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("no_such_program", "'no_such_program' … .py … all_reduce"),
        ("../labkit/run", "'../labkit/run'"),
        ("nowhere/program.py", "there is no program /"),
        ("~nosuchuser/program.py", "there is no program /"),
        ("__init__", "'__init__' … .py … all_reduce"),
        (3, "'3'"),
    ],
)
def test_an_unknown_program_is_refused(program, message):
    with pytest.raises(ParameterError, match=words(message)):
        labkit.run(program)


@pytest.mark.usefixtures("nothing_starts")
def test_a_program_without_config_takes_no_parameters(tmp_path):
    program = tmp_path / "plain.py"
    program.write_text("print('hello')\n")
    with pytest.raises(ParameterError, match=words("plain … Config … width")):
        labkit.run(program, width=3)


def test_a_bad_argument_is_refused_in_under_a_second_by_a_fresh_interpreter(tmp_path):
    command = [sys.executable, "-c", f"import labkit; labkit.run({str(RECORDS)!r}, stpes=3)"]
    environment = os.environ | {"LABKIT_RUNS": str(tmp_path / "runs")}
    with within(1):
        answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert re.search(words("labkit.errors.ParameterError: records … 'stpes'"), answer.stderr)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "file" / "runs"))
    with pytest.raises(LabError, match=words("file/runs … LABKIT_RUNS")):
        labkit.run(RECORDS)


@pytest.mark.usefixtures("nothing_starts")
def test_a_runs_folder_of_nobody(monkeypatch):
    with monkeypatch.context() as changed:
        changed.setenv("LABKIT_RUNS", "~nosuchuser/x")
        with pytest.raises(LabError, match=words("LABKIT_RUNS=~nosuchuser/x … user … folder")):
            labkit.run(RECORDS)


def test_a_disk_that_is_full_before_the_start(small_disk, monkeypatch):
    monkeypatch.setattr(process, "start_torchrun", lambda *arguments: pytest.fail("a run was started"))
    (small_disk / "other").write_bytes(bytes(1024 * 1024 - 4096))
    with pytest.raises(LabError, match=words(f"{small_disk} is full … delete … LABKIT_RUNS")):
        labkit.run(RECORDS)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("both_ways", WARM_DAILY, indirect=True)
def test_a_disk_that_the_output_fills(small_disk, tmp_path):
    program = tmp_path / "wordy.py"
    program.write_text("while True:\n    print(1000 * 'word ')\n")
    with pytest.raises(LabError, match=words(f"{small_disk}/ … is full … delete")) as caught:
        labkit.run(program, timeout_s=60)
    assert not isinstance(caught.value, RunTimedOut)


DELETES_ITS_FOLDER = """
import os, shutil, time
while os.path.isdir(os.environ["LABKIT_RUN_FOLDER"]):  # the other rank deletes and writes at the same time
    shutil.rmtree(os.environ["LABKIT_RUN_FOLDER"], ignore_errors=True)
if os.environ["RANK"] == "0":
    raise ValueError("after the folder was deleted")
time.sleep(600)
"""


@pytest.mark.usefixtures("both_ways")
def test_a_program_that_deletes_the_folder_of_its_run(tmp_path):
    program = tmp_path / "deletes.py"
    program.write_text(DELETES_ITS_FOLDER)
    begun = time.monotonic()
    with pytest.raises(LabError, match="was deleted during the run"):
        labkit.run(program, timeout_s=100)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RunTimedOut(1, {}, {}), RankFailed(0, "ValueError", "theirs", "", Path("log"))]
)
def test_what_ended_a_run_is_raised_although_its_folder_is_gone(monkeypatch, error):
    def end(plan, folder, *others):
        shutil.rmtree(folder.path)
        raise error

    monkeypatch.setattr(sys.modules["labkit.launcher.run"], "_run_ranks", end)
    with pytest.raises(type(error)) as caught:
        labkit.run(RECORDS)
    assert caught.value is error


def test_a_folder_that_is_gone_after_a_good_end(monkeypatch):
    gone = lambda plan, folder, *others: shutil.rmtree(folder.path)  # noqa: E731
    monkeypatch.setattr(sys.modules["labkit.launcher.run"], "_run_ranks", gone)
    with pytest.raises(LabError, match="was deleted during the run"):
        labkit.run(RECORDS)


def test_no_public_name_hides_a_module():
    for name in labkit.__all__:
        found = importlib.util.find_spec(f"labkit.{name}")
        assert found is None or getattr(labkit, name) is sys.modules[found.name]
    assert inspect.ismodule(labkit.launcher.run)


@pytest.mark.usefixtures("both_ways")
def test_a_run_gives_back_what_its_ranks_measured(capsys):
    result = labkit.run(RECORDS, nproc=numpy.int64(2), timeout_s=numpy.float32(300), steps=8)
    assert (result.ok, result.world_size, result.device, len(result.frame)) == (True, 2, "cpu", 23)
    assert result.value("step_ms") == 2.0  # the slower rank, without the warm-up
    assert result.params == {"steps": 8, "pause_s": 0.0, "cut": False}
    threads = max(1, len(requirements.usable_cores()) // 2)
    assert [rank.log() for rank in result.ranks] == [f"<rank> {rank} has {threads} threads\n" for rank in range(2)]
    info = json.loads((result.folder / "run.json").read_text())
    assert info["exit"] == "ok"
    assert info["session"]["torch"] == "9.9"
    assert info["duration_s"] > 0
    assert info["version"] == 2
    assert info.keys() >= {"program", "program_path", "python", "labkit", "git_revision", "start", "device", "nproc"}
    again = labkit.load(result.folder)
    assert again.frame.equals(result.frame)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\n[rank 1] <rank> 1 has" in f"\n{shown.err}"
    assert {path.name.split(".", 1)[1] for path in result.folder.iterdir()} == {"json", "jsonl", "log", "pid", "stack"}
    assert "records: ranks started 2/2, step 8 of 8" in shown.err
    assert shown.err.endswith(" s: ok\n")


@pytest.mark.usefixtures("both_ways")
def test_a_process_group_works_from_any_folder(tmp_path, monkeypatch):
    for name in ("random.py", "torch.py", "labkit.py"):  # the folder of a notebook may hold anything
        (tmp_path / name).write_text("raise RuntimeError('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    program = tmp_path / f"{248 * 'n'}.py"  # with a long name
    program.write_text(SMALL.read_text())
    result = labkit.run(program, nproc=2, steps=4)
    assert result.info["program"] == program.stem
    assert result.folder.name[16:-7] == 100 * "n"
    assert [rank.log() for rank in result.ranks] == [f"rank {rank} of 2 has 16\n" for rank in range(2)]
    assert result.device == "unknown"
    with pytest.raises(KeyError, match=words("'step_ms' … no records")):
        result.value("step_ms")


def test_a_rank_that_leaves_early_breaks_no_connection_that_others_still_make(tmp_path):
    leaving = tmp_path / "leaving.py"
    leaving.write_text(
        "import os\nimport torch.distributed as dist\n\n"
        'dist.init_process_group("gloo")\nif dist.get_rank() < 6:\n    os._exit(0)\n'
    )
    for _ in range(6):  # without TORCH_DIST_INIT_BARRIER about half of them fail
        labkit.run(leaving, nproc=8)


@pytest.mark.usefixtures("both_ways")
def test_a_truncated_record_file_is_reported():
    result = labkit.run(RECORDS, nproc=2, cut=True)
    assert [path.name for path in result.incomplete_files] == ["rank_00001.jsonl"]
    assert "rank_00001.jsonl: the last line is cut off" in repr(result)
    assert "rank_00001.jsonl: the last line is cut off" in result._repr_html_()


@pytest.mark.usefixtures("both_ways")
def test_the_first_failure_is_reported_and_not_its_echo():
    with pytest.raises(RankFailed) as caught:
        labkit.run(MISBEHAVE, how="raise", group=True)
    failed = caught.value
    assert (failed.rank, failed.exc_type, failed.message) == (1, "ValueError", "width 3 is not width 4")
    assert "in widths_must_agree" in failed.traceback
    assert "worker.py" not in failed.traceback
    assert "runpy" not in failed.traceback
    assert "rank 1 is ready" in failed.log.read_text()
    result = labkit.load(failed.log.parent)
    assert not result.ok
    assert result.info["exit"] == "failed"
    assert result.info["error"].startswith("RankFailed: rank 1 failed: ValueError")
    assert "rank 0 is ready" in result.ranks[0].log()
    assert "misbehave [failed]: " in repr(result)


@pytest.mark.usefixtures("both_ways")
def test_a_rank_that_ends_well_while_another_waits_for_it():
    with pytest.raises(RankFailed) as caught:
        labkit.run(MISBEHAVE, how="finish", group=True)
    assert caught.value.rank == 0
    assert "(rank 1 had already ended, with status 0: every rank must take part to the end)" in caught.value.message


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("both_ways", WARM_DAILY, indirect=True)
@pytest.mark.parametrize(
    ("how", "group", "exc_type", "message"),
    [
        ("exit", True, "exit status 3", "without an exception"),
        ("kill", True, "SIGKILL", "kill -9, or the system ran out of memory"),
        ("abort", False, "SIGABRT", "native code gave up"),
        ("sys.exit", False, "SystemExit", "exit status 4"),
    ],
)
def test_a_rank_that_ends_in_another_way(how, group, exc_type, message):
    with pytest.raises(RankFailed) as caught:
        labkit.run(MISBEHAVE, how=how, group=group)
    failed = caught.value
    assert (failed.rank, failed.exc_type) == (1, exc_type)
    assert message in failed.message
    assert ("in misbehave" in failed.traceback) == (how in ("abort", "sys.exit"))
    assert "rank 1 is ready" in failed.log.read_text()


def reported(tmp_path, monkeypatch, text):
    """What the worker reports of a program, and its exit status."""
    program = tmp_path / "program.py"
    program.write_text(text)
    monkeypatch.setattr(sys, "argv", ["worker", str(program)])
    status = worker._run_to_exit_status(tmp_path / "error.json", 0)
    return status, read_json(tmp_path / "error.json")


def test_an_exception_whose_text_cannot_be_had_is_reported(tmp_path, monkeypatch):
    silent = "class Silent(RuntimeError):\n    def __str__(self):\n        raise KeyError('text')\n\nraise Silent\n"
    status, error = reported(tmp_path, monkeypatch, silent)
    assert (status, error["exc_type"], error["message"]) == (1, "Silent", "(no text: its __str__ raises KeyError)")
    assert 'program.py", line 5' in error["traceback"]


def test_a_long_message_is_cut_and_its_whole_text_is_in_the_output(tmp_path, monkeypatch, capsys):
    status, error = reported(tmp_path, monkeypatch, "raise ValueError('begin' + 5_000_000 * 'x' + 'end')\n")
    assert status == 1
    assert "... 4,980,008 characters left out here; they are in the output of the run ..." in error["message"]
    assert error["message"].startswith("begin")
    assert error["message"].endswith("end")
    assert len(error["message"]) + len(error["traceback"]) < 50_000
    assert capsys.readouterr().err.count("x") >= 5_000_000


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("leaving", "status"),
    [("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(-1)", 255), ("sys.exit('so')", 1), ("sys.exit(256)", 0)],
)
def test_exit_statuses_are_those_that_python_gives(tmp_path, monkeypatch, leaving, status):
    found, error = reported(tmp_path, monkeypatch, f"import sys\n{leaving}\n")
    bare = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, check=False)
    assert found == status == bare.returncode
    assert bool(error) == bool(status)


@pytest.mark.usefixtures("both_ways")
def test_a_run_whose_torchrun_fails_shows_its_log(monkeypatch):
    monkeypatch.setattr(process, "WORKER_ARGUMENTS", ("--no-such-option",))
    with pytest.raises(RankFailed) as caught:
        labkit.run(MISBEHAVE)
    assert (caught.value.rank, caught.value.exc_type) == (-1, "exit status 2")
    assert str(caught.value).startswith("torchrun failed: exit status 2")
    assert "--no-such-option" in caught.value.traceback


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("both_ways", WARM_DAILY, indirect=True)
def test_a_child_of_a_rank_can_use_multiprocessing(tmp_path):
    labkit.run(MISBEHAVE, how="spawn", pids=str(tmp_path / "pids"))
    assert len((tmp_path / "pids").read_text().split()) == 5  # torchrun and rank, twice, and the child


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:38588"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (BrokenPipeError("[Errno 32] Broken pipe"), True),
        (type("DistBackendError", (type("DistError", (RuntimeError,), {}),), {})("NCCL error"), True),
        (ValueError("connection closed by peer is a text"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_exceptions_look_like_an_echo(error, echo):
    assert is_echo(error) == echo


def leave(folder, rank, time_s, echo, exc_type="RuntimeError"):
    content = {"rank": rank, "time": time_s, "exc_type": exc_type, "message": "", "traceback": "", "echo": echo}
    write_json(folder.error(rank), content)


def ended(rank, exitcode=-9, signal="SIGKILL"):
    return {"rank": rank, "pid": 1, "exitcode": exitcode, "signal": signal, "time": 0}


@pytest.mark.parametrize(
    ("raised", "ends", "status", "first"),
    [
        ([(0, 5, False), (1, 4, False), (2, 3, True)], [], 1, (1, "RuntimeError")),
        ([(0, 5, False), (1, 4, True)], [ended(2)], 1, (0, "RuntimeError")),
        ([(0, 5, True)], [ended(0, 1, ""), ended(1, 7, "")], 1, (1, "exit status 7")),
        ([(0, 5, True)], [ended(1, -15, "SIGTERM"), ended(2)], 1, (2, "SIGKILL")),
        ([(0, 5, True), (2, 4, True)], [ended(0, 1, ""), ended(1, -15, "SIGTERM")], 1, (2, "RuntimeError")),
        ([(0, 5, True)], [ended(1, -15, "SIGTERM"), ended(0, 1, "")], 1, (1, "SIGTERM")),
        ([(0, 5, True)], [], -9, (-1, "SIGKILL")),
        ([(0, 5, True)], [], 1, (0, "RuntimeError")),
        ([], [], 1, (-1, "exit status 1")),
    ],
)
def test_which_failure_is_the_first(tmp_path, raised, ends, status, first):
    folder = RunFolder(tmp_path)
    for rank, time_s, echo in raised:
        leave(folder, rank, time_s, echo)
    if ends:
        write_json(folder.exit_json(), {"failures": ends})
    found = failure.first_failure(folder, status)
    assert (found.rank, found.exc_type) == first
