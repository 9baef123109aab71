"""Runs of one machine take turns: in the order of arrival, as many at a time as there is room for."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from fixture_processes import wait_for

import labkit
from labkit.environment import ENV_QUEUE
from labkit.errors import LabError, ParameterError
from labkit.launcher import run_queue
from labkit.launcher.run_queue import ResourceNeeds, Ticket

PROGRAMS = Path(__file__).parent / "programs"
GIB = 2**30


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A queue of this test's own, on a machine of four cores."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(ENV_QUEUE)
    monkeypatch.setattr(run_queue.requirements, "usable_cores", lambda: [0, 1, 2, 3])
    return tmp_path / f"labkit-queue-{os.getuid()}"


def ticket(place, cores, *, memory=0, gpus=False):
    place.mkdir(exist_ok=True)
    return Ticket(place, len(list(place.glob("*-*"))) + 1, ResourceNeeds(cores, memory, gpus))


def test_as_many_run_as_there_are_cores_and_nobody_overtakes(place):
    first, second, large, small = (ticket(place, cores) for cores in (2, 1, 4, 1))
    assert [each.count_runs_ahead() for each in (first, second)] == [0, 0]
    assert large.count_runs_ahead() == 2
    assert small.count_runs_ahead() == 3, "there is a core, but the large one came first"
    first.release()
    assert (large.count_runs_ahead(), small.count_runs_ahead()) == (1, 2)
    second.release()
    assert (small.count_runs_ahead(), large.count_runs_ahead()) == (1, 0)
    large.release()
    assert small.count_runs_ahead() == 0


def test_a_run_that_is_larger_than_the_machine_runs_alone(place):
    alone, other = ticket(place, ResourceNeeds.for_run(64, "cpu").cores, memory=2**60), ticket(place, 1)
    assert (alone.count_runs_ahead(), other.count_runs_ahead()) == (0, 1)


def test_memory_and_gpus_are_shared_out_too(place, monkeypatch):
    free = {"available": 3 * GIB}
    monkeypatch.setattr(run_queue.psutil, "virtual_memory", lambda: type("Memory", (), free))
    first, second, third = ticket(place, 1), ticket(place, 1, memory=4 * GIB), ticket(place, 1)
    assert (first.count_runs_ahead(), second.count_runs_ahead()) == (0, 1)
    free["available"] = 5 * GIB
    assert (second.count_runs_ahead(), third.count_runs_ahead()) == (0, 0)
    for each in (first, second, third):
        each.release()
    on_gpu, another, on_cpu = ticket(place, 1, gpus=True), ticket(place, 1, gpus=True), ticket(place, 1)
    assert (on_gpu.count_runs_ahead(), another.count_runs_ahead(), on_cpu.count_runs_ahead()) == (0, 1, 2)
    on_gpu.release()
    assert (another.count_runs_ahead(), on_cpu.count_runs_ahead()) == (0, 0)


def test_a_place_of_a_process_that_was_killed_is_free(place):
    code = (
        "import sys, time; from pathlib import Path; from labkit.launcher.run_queue import ResourceNeeds, Ticket;"
        "ticket = Ticket(Path(sys.argv[1]), 1, ResourceNeeds(4, 0, False));"
        "print(ticket.count_runs_ahead(), flush=True); time.sleep(600)"
    )
    place.mkdir()
    with subprocess.Popen([sys.executable, "-c", code, str(place)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "0\n"
        mine = ticket(place, 1)
        assert mine.count_runs_ahead() == 1
        other.kill()
        other.wait()
        assert mine.count_runs_ahead() == 0
    mine.release()
    assert [path.name for path in place.iterdir()] == ["lock"]


def test_a_run_waits_says_so_and_leaves_no_trace_when_it_is_interrupted(place, tmp_path, monkeypatch, capsys):
    runs = tmp_path / "runs"
    runs.mkdir()
    monkeypatch.setenv("LABKIT_RUNS", str(runs))
    # All is imported then, so that the interrupt comes while a run waits.
    labkit.run(PROGRAMS / "small.py", device="cpu")
    shutil.rmtree(runs)
    runs.mkdir()
    earlier = ticket(place, 4)
    assert earlier.count_runs_ahead() == 0
    has_ended = threading.Event()

    def interrupt_until_it_ends():
        # Python drops an interrupt that arrives while it runs a finaliser.
        while not has_ended.wait(0.5):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_until_it_ends).start()
    with pytest.raises(KeyboardInterrupt):
        try:
            labkit.run(PROGRAMS / "small.py", device="cpu")
        finally:
            has_ended.set()
    assert "small: waits for 1 run of this machine to end (LABKIT_QUEUE=0 does not wait)" in capsys.readouterr().err
    assert not list(runs.iterdir()) and len(list(place.glob("*-*"))) == 1
    threading.Timer(1.0, earlier.release).start()
    begun = time.monotonic()
    result = labkit.run(PROGRAMS / "small.py", device="cpu", timeout_s=60)
    assert time.monotonic() - begun > 1.0 > result.info["duration_s"], "time counts from the run's start"


def test_a_run_within_a_run_does_not_wait_for_it(place, monkeypatch):
    earlier = ticket(place, 4)
    assert earlier.count_runs_ahead() == 0
    monkeypatch.setenv("LABKIT_RUN_FOLDER", "of the outer run")
    with run_queue.wait_for_turn(ResourceNeeds(1, 0, False), pytest.fail):
        pass
    monkeypatch.delenv("LABKIT_RUN_FOLDER")
    monkeypatch.setenv(ENV_QUEUE, "0")
    with run_queue.wait_for_turn(ResourceNeeds(1, 0, False), pytest.fail):
        pass


def test_what_stands_in_the_way_is_named(place, monkeypatch):
    monkeypatch.setenv(ENV_QUEUE, "no")
    with pytest.raises(ParameterError, match="LABKIT_QUEUE='no' is none of 0"):
        labkit.run(PROGRAMS / "small.py")
    monkeypatch.delenv(ENV_QUEUE)
    place.write_text("a file")
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/nowhere/at/all")
    with pytest.raises(LabError, match=rf"no queue: .*{place}: it belongs to another user, .* set LABKIT_QUEUE=0"):
        labkit.run(PROGRAMS / "small.py")


def test_whoever_tidies_up_the_folder_stops_nobody(place):
    earlier = ticket(place, 4)
    assert earlier.count_runs_ahead() == 0
    (place / "a-b-c-d").touch()
    threading.Timer(0.3, lambda: [path.unlink() for path in place.iterdir()]).start()
    with run_queue.wait_for_turn(ResourceNeeds(4, 0, False), lambda before: None):
        assert len(run_queue.live_tickets(place)) == 1


def test_a_runtime_folder_that_is_not_there_is_not_used(place, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(place.parent))
    with run_queue.wait_for_turn(ResourceNeeds(1, 0, False), pytest.fail):
        assert len(run_queue.live_tickets(place)) == 1


def test_a_stopped_process_keeps_nobody_waiting_and_a_fork_no_place(place):
    first, stopped, mine = ticket(place, 4), ticket(place, 4), ticket(place, 4)
    assert first.count_runs_ahead() == 0
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        stopped.path = stopped.path.rename(
            stopped.path.with_name(stopped.path.name.replace(str(os.getpid()), str(sleeper.pid)))
        )
        first.release()
        assert mine.count_runs_ahead() == 1
        sleeper.send_signal(signal.SIGSTOP)
        wait_for(lambda: not mine.count_runs_ahead(), 5)
    finally:
        sleeper.kill()
        sleeper.wait()
    stopped.release()
    child = os.fork()
    if child == 0:
        time.sleep(3)
        os._exit(0)
    mine._lock.close()  # as when this process is killed
    after = ticket(place, 4)
    wait_for(lambda: not after.count_runs_ahead(), 2)  # the fork closes it as soon as it begins, and lives for 3 s
    os.waitpid(child, 0)


CROWD = """
import json, sys, time, labkit
begun = time.time()
result = labkit.run(sys.argv[1], device="cpu", warm=False)
print(json.dumps({"asked": begun, "begun": result.info["start"], "logs": [rank.log() for rank in result.ranks]}))
"""


def test_processes_that_all_ask_at_once_are_served_one_by_one_in_order(place, monkeypatch):
    monkeypatch.setenv("LABKIT_PROGRESS", "off")
    monkeypatch.setattr(run_queue.requirements, "usable_cores", lambda: [0, 1])
    crowd = []
    for _ in range(6):
        command = [sys.executable, "-c", CROWD, str(PROGRAMS / "small.py")]
        crowd.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    answers = [json.loads(each.communicate(timeout=100)[0]) for each in crowd]
    assert all(len(answer["logs"]) == 2 and all(answer["logs"]) for answer in answers)
    by_start = sorted(answers, key=lambda answer: answer["begun"])
    late = [max(0.0, one["asked"] - next_one["asked"]) for one, next_one in pairwise(by_start)]
    assert max(late) < 1, "in the order of arrival, but for the moment between asking and taking a ticket"
    assert [path.name for path in place.iterdir()] == ["lock"]
