"""Recorded runs: listed newest first, set side by side, and removed only where they are runs and over."""

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import datetime, timedelta

import pytest
from fixture_processes import wait_for

import labkit
from labkit import __main__ as command_line
from labkit.__main__ import main
from labkit.errors import ParameterError
from labkit.runs import history
from labkit.runs.records import RecordWriter
from labkit.runs.result import RunFileNotFound

NOW = datetime.now().astimezone()
SESSION = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "2.13.0", "note": ""}
INFO = {
    "version": 2,
    "program": "strips",
    "program_path": "/somewhere/launch/strips.py",
    "params": {"width": 8},
    "given_params": {"width": 8},
    "nproc": 2,
    "device": "auto",
    "timeout_s": 300,
    "exit": "ok",
    "duration_s": 1.5,
    "session": SESSION,
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A runs folder of this test's own."""
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def recorded(place, number, *, days=1.0, name=None, **changed):
    """The folder of a run that began so many days ago."""
    start = (NOW - timedelta(days=days)).isoformat(timespec="milliseconds")
    folder = place / (name or f"20260102-030405-strips-{number:06x}")
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(INFO | {"start": start} | changed))
    (folder / "rank_00000.log").write_text("hello\n")
    return folder


def names(entries):
    return [entry.folder.name for entry in entries]


def test_runs_are_listed_the_newest_first_whatever_their_folders_are_called(place):
    old = recorded(place, 3, days=9)
    new = recorded(place, 1, days=1)
    renamed = recorded(place, 0, days=5, name="my best run")
    other = recorded(place, 2, days=2, program="two_dim")
    assert names(history.find_runs()) == names(map(history.HistoryEntry, [new, other, renamed, old], [{}] * 4))
    assert names(history.find_runs(program="strips", limit=2)) == [new.name, renamed.name]


def test_what_is_no_run_is_not_listed(place, tmp_path, capsys):
    run = recorded(place, 1)
    elsewhere = recorded(tmp_path, 2)
    (place / "notes.txt").write_text("run.json")
    (place / "empty").mkdir()
    (place / "linked").symlink_to(elsewhere)
    (place / "linked_json").mkdir()
    (place / "linked_json" / "run.json").symlink_to(run / "run.json")
    (place / "pipe").mkdir()
    os.mkfifo(place / "pipe" / "run.json")
    (place / "folder" / "run.json").mkdir(parents=True)
    assert names(history.find_runs()) == [run.name]
    assert main(["runs"]) == 0
    line, total = capsys.readouterr().out.splitlines()
    assert line.split() == [
        *(NOW - timedelta(days=1)).strftime("%Y-%m-%d %H:%M:%S").split(),
        *("strips", "2", "ranks", "ok", "1.5", "s", "width=8"),
        run.name,
    ]
    assert total == f"1 of 1 runs in {place}"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"program": "st', '{"program": 1, "params": 2, "nproc": 3}'])
def test_a_damaged_run_is_listed_last_and_named_and_stays(place, content):
    damaged, sound = recorded(place, 9), recorded(place, 1)
    (damaged / "run.json").write_text(content)
    found = history.find_runs()
    assert names(found) == [sound.name, damaged.name]
    *_, second, problem = history.format_table(found).splitlines()
    assert "damaged" in second and problem.startswith(f"{damaged / 'run.json'}: ")
    assert names(history.find_prunable_runs(keep=0)) == [sound.name]


def test_no_runs_folder_is_no_run(place, capsys):
    place.rmdir()
    assert main(["runs", "--limit", "3"]) == 0
    assert capsys.readouterr().out == f"0 of 0 runs in {place}\n"
    place.write_text("a file")
    assert main(["runs"]) == 1
    assert f"cannot list {place} (Not a directory): set LABKIT_RUNS" in capsys.readouterr().err


@pytest.fixture
def process_of():
    """Starts a process that belongs to a run."""
    started = []

    def start(folder):
        begun = subprocess.Popen(["sleep", "600"], env=os.environ | {"LABKIT_RUN_FOLDER": str(folder)})
        started.append(begun)
        wait_for(lambda: str(folder) in history.folders_in_use())

    yield start
    for each in started:
        each.kill()
        each.wait()


def test_a_run_that_wrote_no_end_is_broken_off_once_its_limit_has_passed(place, process_of):
    within, beyond, alive = (
        recorded(place, number, days=days, exit="running") for number, days in enumerate([0, 3, 3])
    )
    tomorrow = recorded(place, 7, days=-1, exit="running")
    endless = recorded(place, 8, exit="running", timeout_s=float("inf"))
    process_of(alive)
    states = {entry.folder: entry.state(history.folders_in_use()) for entry in history.find_runs()}
    broken = states.pop(beyond)
    assert broken == "broken off"
    assert states == dict.fromkeys([tomorrow, within, endless, alive], "running")
    assert names(history.find_prunable_runs(keep=0)) == [beyond.name]


def test_only_what_is_certainly_a_run_and_over_is_removed(place, tmp_path, process_of):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    kept = [
        recorded(place, 1, name="my best run"),
        recorded(place, 2, exit="running", timeout_s=10 * history.DAY_S),
        recorded(place, 3, exit="queued"),
        recorded(place, 4),
        recorded(place, 5, start="yesterday"),
        recorded(place, 6, days=-1),
    ]
    process_of(kept[3])
    linked = place / "20260102-030405-strips-00000a"
    linked.symlink_to(recorded(tmp_path, 11))
    no_run = place / "20260102-030405-strips-00000b"
    (no_run / "deep").mkdir(parents=True)
    nested = recorded(no_run / "deep", 12)
    gone = [recorded(place, number, exit=end) for number, end in enumerate(("ok", "failed", "interrupted"), 20)]
    (gone[0] / "link").symlink_to(outside)
    (gone[0] / "torchrun" / "0").mkdir(parents=True)
    (gone[0] / "torchrun" / "link").symlink_to(outside / "precious")
    assert main(["runs", "prune", "--keep", "0", "--yes"]) == 0
    assert sorted(place.iterdir()) == sorted([*kept, linked, no_run])
    assert all((folder / "rank_00000.log").exists() for folder in [*kept, linked, nested])
    assert (outside / "precious").read_text() == "kept"


def test_both_limits_must_be_passed(place):
    folders = [recorded(place, days, days=days) for days in range(1, 6)]
    recorded(place, 9, days=9, program="other")
    found = [
        names(history.find_prunable_runs(**limits, program="strips"))
        for limits in ({"keep": 2}, {"older_than_days": 2.5}, {"keep": 4, "older_than_days": 2.5}, {"keep": 9})
    ]
    assert found == [names(map(history.HistoryEntry, folders[first:], [{}] * 5)) for first in (2, 2, 4, 5)]


@pytest.mark.parametrize("words", [[], ["--keep=-1"], ["--older-than=-1"], ["--older-than=nan"], ["--program=strips"]])
def test_prune_refuses_what_means_nothing(place, capsys, words):
    recorded(place, 1)
    assert main(["runs", "prune", "--yes", *words]) == 2
    assert capsys.readouterr().out == "" and len(history.find_runs()) == 1


@pytest.mark.parametrize(("answer", "left"), [("y", 0), ("", 1), ("no", 1), (EOFError, 1)])
def test_prune_asks(place, capsys, monkeypatch, answer, left):
    recorded(place, 1)

    def reply(question):
        if answer is EOFError:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", reply)
    assert main(["runs", "prune", "--keep", "0"]) == 2, "pytest's input is no terminal"
    assert "nobody can be asked here: --yes removes them" in capsys.readouterr().err
    monkeypatch.setattr(command_line.sys.stdin, "isatty", lambda: True)
    assert main(["runs", "prune", "--keep", "0"]) == 0
    assert len(history.find_runs()) == left
    said = capsys.readouterr().out
    assert f" in {place}; the newest of them are above" in said
    assert said.splitlines()[-1] == ("nothing was removed" if left else "removed 1 runs")


def test_a_run_is_looked_at_again_before_it_is_removed(place):
    begins, renamed, replaced = (recorded(place, number) for number in range(3))
    entries = history.find_prunable_runs(keep=0)
    (begins / "run.json").write_text(json.dumps(INFO | {"start": NOW.isoformat(), "exit": "running"}))
    renamed.rename(place / "best")
    shutil.rmtree(replaced)
    replaced.symlink_to(place / "best")
    said = history.prune(entries)
    assert [line.partition(": left as it is: ")[2] for line in sorted(said)] == [
        "it may still go on (running)",
        "it is gone, or no run any more",
        "it is not certainly a run",
    ]
    assert (place / "best" / "run.json").exists() and begins.exists()


def test_a_removal_that_is_interrupted_leaves_a_run_that_can_be_removed(place, monkeypatch):
    folder = recorded(place, 1)
    (folder / "torchrun").mkdir()
    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(history.shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        history.prune(history.find_prunable_runs(keep=0))
    assert names(history.find_prunable_runs(keep=0)) == [folder.name]
    assert history.prune(history.find_prunable_runs(keep=0)) == []
    assert not folder.exists()


def test_a_run_is_found_by_its_name_its_end_and_its_path(place, tmp_path):
    one, two = recorded(place, 0xABC123), recorded(place, 0xDEF123)
    elsewhere = recorded(tmp_path, 5)
    assert [history.find_run_folder(name) for name in (one.name, "def123", str(elsewhere))] == [one, two, elsewhere]
    with pytest.raises(RunFileNotFound, match=r"2 runs in .* end with '123': give more of the name"):
        history.find_run_folder("123")
    for name in ("", "nothing", ".."):
        with pytest.raises(RunFileNotFound, match=r"is called .*, nor ends so: `python -m labkit runs` lists them"):
            history.find_run_folder(name)


def with_loss(folder, loss):
    writer = RecordWriter(folder, 0)
    writer.write("scalar", "loss", 1, value=loss, unit="")
    writer.write("memory", "peak", 1, bytes=1_234_567)
    writer.close()
    return folder


def test_runs_are_set_side_by_side(place, capsys):
    one = with_loss(recorded(place, 0xA), 0.5)
    two = with_loss(recorded(place, 0xB, nproc=4, params={"width": 16, "depth": 2}), 0.25)
    table = history.compare([labkit.load(one), labkit.load(two)])
    assert list(table.columns) == [one.name, two.name]
    assert {name: list(row) for name, row in table.iterrows()} == {
        "nproc": [2, 4],
        "width": [8, 16],
        "depth": ["", 2],
        "loss": [0.5, 0.25],
        "peak_bytes": [1_234_567, 1_234_567],
    }
    assert main(["runs", "compare", "00000a", two.name]) == 0
    assert "loss" in capsys.readouterr().out
    with pytest.raises(ParameterError, match="compare needs two runs or more, each once"):
        history.compare([labkit.load(one), labkit.load(one)])
    assert main(["runs", "compare", "00000a"]) == 2
    assert main(["runs", "show", "00000a"]) == 0
    assert f"{one}\nstrips: CPU · 2 ranks" in capsys.readouterr().out
    assert main(["runs", "show", "00000c"]) == 1


def test_an_older_run_shows_its_command_line(place):
    folder = recorded(place, 1)
    old = {name: value for name, value in INFO.items() if name != "given_params"}
    (folder / "run.json").write_text(json.dumps(old | {"arguments": ["--width=8", "--dims", "1"]}))
    (line,) = history.format_table(history.find_runs()).splitlines()
    assert " --width=8 --dims 1 " in line


def test_signs_that_a_terminal_obeys_are_not_shown(place):
    recorded(place, 1, program="a\x1b[2Jb\nc", given_params={"x" * 100: 1})
    (line,) = history.format_table(history.find_runs()).splitlines()
    assert "a?[2Jb?c" in line and len(line) < 200


@pytest.mark.long  # seconds to make them
def test_ten_thousand_runs_are_listed_in_little_more_than_it_takes_to_read_them(place):
    """Measured on files as a run leaves them; those that no list needs are links, which are quicker to make."""
    first = recorded(place, 0)
    text = (first / "run.json").read_text()
    (first / "run.json").write_text(json.dumps(json.loads(text) | {"error": "x" * 500}))
    for number in range(1, 10_000):
        folder = f"{place}/20260102-030405-strips-{number:06x}"
        os.mkdir(folder)
        with open(f"{folder}/run.json", "w") as file:
            file.write(text.replace('"width": 8', f'"width": {number}'))
        os.link(first / "rank_00000.log", f"{folder}/rank_00000.log")
    times_s, reading_s = [], []
    for _ in range(3):  # in turn, and of the processor alone, since others run beside this test
        begun = time.process_time()
        found = history.find_runs()
        times_s.append(time.process_time() - begun)
        for each in found:
            json.loads((each.folder / "run.json").read_bytes())
        reading_s.append(time.process_time() - begun - times_s[-1])
    assert len(found) == 10_000
    assert min(times_s) < 3 * min(reading_s), (times_s, reading_s)
    command = [sys.executable, "-m", "labkit", "runs", "--limit", "5"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.stdout.splitlines()[-1] == f"5 of 10,000 runs in {place}"
    shutil.rmtree(place)
