"""However a run ends, none of its processes is alive five seconds later, and no other process is touched.

The programs note the ids of all their processes themselves, so that these tests do not rest on labkit's own search.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import psutil
import pytest
from fixture_long import WARM_DAILY
from fixture_processes import is_alive, wait_for

import labkit
from labkit.errors import RankFailed, RunTimedOut
from labkit.launcher import process, torchrun, watch

MISBEHAVE = Path(__file__).parent / "programs" / "misbehave.py"
LIMIT_S = 5.0
pytestmark = pytest.mark.calm


class Pids:
    """The file in which a program notes the ids of its processes."""

    def __init__(self, path):
        self.path = path

    def read(self):
        return {int(word) for word in self.path.read_text().split()} if self.path.exists() else set()

    def wait(self, count):
        """Wait until this many processes are noted: torchrun, each rank, what ranks started. All must be alive."""
        pids = wait_for(lambda: len(self.read()) >= count and self.read())
        assert all(map(is_alive, pids)), pids
        return pids

    def assert_gone(self, limit_s=LIMIT_S):
        pids = self.read()
        assert pids
        wait_for(lambda: not any(map(is_alive, pids)), limit_s)


@pytest.fixture
def pids(tmp_path, both_ways):
    return Pids(tmp_path / "pids")


@pytest.fixture
def notebook(pids):
    """Starts a Python process that runs labkit.run, as a notebook would; killed at the end of the test."""
    started = []

    def start(how, **arguments):
        code = f"import labkit; labkit.run({str(MISBEHAVE)!r}, how={how!r}, pids={str(pids.path)!r}, **{arguments!r})"
        heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # ignored in what a shell's & started
        running = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, preexec_fn=heed)
        started.append(running)
        return running

    yield start
    for running in started:
        running.kill()
        running.wait()
        running.stderr.close()


@pytest.fixture
def time_flies(monkeypatch, pids):
    """Lets an hour pass for labkit.run once so many processes have been at work for half a second."""

    def when(count):
        def monotonic():
            noted = len(pids.read()) >= count and time.time() - pids.path.stat().st_mtime > 0.5
            return time.monotonic() + 3600 * noted

        monkeypatch.setattr(watch, "time", types.SimpleNamespace(monotonic=monotonic))

    return when


@pytest.mark.parametrize("both_ways", WARM_DAILY, indirect=True)
@pytest.mark.parametrize(("how", "deaf"), [("exit", True), ("linger", False)])
def test_nothing_is_left_of_a_run_that_failed(pids, how, deaf):
    begun = time.monotonic()
    with pytest.raises(RankFailed):
        labkit.run(MISBEHAVE, pids=str(pids.path), how=how, deaf=deaf)
    assert time.monotonic() - begun < 20  # torchrun alone waits 30 s for a rank that ignores SIGTERM
    assert len(pids.read()) == 3
    pids.assert_gone(limit_s=0.1)


def test_nothing_is_left_of_a_run_that_ended_well(pids):
    labkit.run(MISBEHAVE, how="finish", orphan=True, bare=True, stray=True, pids=str(pids.path))
    assert len(pids.read()) == 6
    pids.assert_gone(limit_s=0.1)


def test_a_hanging_run_times_out_with_the_stacks_of_every_rank(pids, time_flies):
    """Rank 1 comes to its end, but a thread of it does not; rank 0 waits for it."""
    time_flies(5)
    with pytest.raises(RunTimedOut) as caught:
        labkit.run(
            MISBEHAVE, how="stay", group=True, deaf=True, bare=True, orphan=True, pids=str(pids.path), timeout_s=300
        )
    late = caught.value
    assert late.timeout_s == 300
    assert "in wait_for_godot" in late.stacks[1]
    assert "in all_reduce" in late.stacks[0]
    assert "not done: gloo:all_reduce of float[1], call 2 of default_pg" in late.stacks[0]
    assert "not done" not in late.stacks[1] and "pending_calls" not in str(late)
    assert "frozen runpy" not in late.stacks[0]
    assert late.output == {0: "rank 0 is ready", 1: "rank 1 is ready"}
    assert "no end after 300 s" in str(late)
    assert "in wait_for_godot" in str(late)
    assert len(pids.read()) == 5
    pids.assert_gone(limit_s=0.1)


def test_a_timeout_before_the_ranks_have_started():
    begun = time.monotonic()
    with pytest.raises(RunTimedOut) as caught:
        labkit.run(MISBEHAVE, timeout_s=0.2, warm=False)
    assert 0.2 < time.monotonic() - begun < LIMIT_S
    assert caught.value.stacks == {rank: "(this rank had not started its program yet)" for rank in range(2)}


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_ends_the_run_which_can_still_be_read(notebook, pids, tmp_path, monkeypatch, times):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    running = notebook("wait", bare=True, orphan=True)
    pids.wait(5)
    for _ in range(times):
        running.send_signal(signal.SIGINT)
    assert running.wait(LIMIT_S) != 0
    assert "KeyboardInterrupt" in running.stderr.read()
    pids.assert_gone()
    (folder,) = (tmp_path / "runs").iterdir()
    result = labkit.load(folder)
    assert result.info["exit"] == "interrupted"
    assert "rank 0 is ready" in result.ranks[0].log()


def test_kill_9_of_the_notebook_ends_the_run(notebook, pids):
    running = notebook("wait", deaf=True, bare=True, orphan=True, stray=True)
    pids.wait(6)
    running.kill()
    pids.assert_gone()


def test_kill_9_of_the_notebook_while_torchrun_starts(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    running = notebook("wait")
    (folder,) = wait_for(lambda: list((tmp_path / "runs").glob("*")))
    started = wait_for(lambda: process.find_run_processes(folder))
    running.kill()
    wait_for(lambda: not any(is_alive(each.pid) for each in started), LIMIT_S)
    wait_for(lambda: not process.find_run_processes(folder), LIMIT_S)


def torchrun_among(pids):
    """The parent of ranks."""
    (torchrun,) = {psutil.Process(pid).ppid() for pid in pids} & pids
    return torchrun


def test_kill_9_of_the_notebook_and_of_torchrun_ends_the_ranks(notebook, pids):
    running = notebook("wait")
    torchrun = torchrun_among(pids.wait(3))
    running.kill()
    os.kill(torchrun, signal.SIGKILL)
    pids.assert_gone()


def test_kill_9_of_torchrun_ends_the_run(pids):
    failures = []

    def run():
        try:
            labkit.run(MISBEHAVE, pids=str(pids.path), how="wait", group=True, orphan=True)
        except RankFailed as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    started = pids.wait(4)
    os.kill(torchrun_among(started), signal.SIGKILL)
    thread.join(LIMIT_S)
    assert [(error.rank, error.exc_type) for error in failures] == [(-1, "SIGKILL")]
    pids.assert_gone()


def test_processes_are_found_by_the_folder_in_their_environment(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    marked, other, neighbour = (
        subprocess.Popen(sleep, env={"LABKIT_RUN_FOLDER": folder}) for folder in (str(tmp_path), "", f"{tmp_path}-2")
    )
    try:
        wait_for(lambda: [found.pid for found in process.find_run_processes(tmp_path)] == [marked.pid])
        process.kill_run_processes(tmp_path)
        assert marked.wait(LIMIT_S) == -signal.SIGKILL
        assert other.poll() is None
        assert neighbour.poll() is None
    finally:
        for each in (marked, other, neighbour):
            each.kill()
            each.wait()


class Dying:
    """A process that was killed and is no longer found by its environment, but takes a while to end."""

    pid, statuses = 7, ["running", "disk-sleep", "zombie", "zombie"]

    def is_running(self):
        return True

    def kill(self):
        pass

    def status(self):
        return self.statuses.pop(0)


def test_a_killed_process_is_waited_for_until_it_has_ended(tmp_path, monkeypatch):
    found, dying = iter([[Dying()]]), Dying.statuses
    monkeypatch.setattr(process, "find_run_processes", lambda *run: next(found, []))
    assert process.kill_run_processes(tmp_path) == []
    assert dying == ["zombie"]


def test_of_hosts_that_share_a_machine_one_is_stopped_alone(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    first, second = (
        subprocess.Popen(sleep, env={"LABKIT_RUN_FOLDER": str(tmp_path), "LABKIT_NODE": node}) for node in "01"
    )
    try:
        wait_for(lambda: len(process.find_run_processes(tmp_path)) == 2)
        process.kill_run_processes(tmp_path, node="1")
        assert second.wait(LIMIT_S) == -signal.SIGKILL
        assert first.poll() is None
    finally:
        for each in (first, second):
            each.kill()
            each.wait()


@pytest.mark.parametrize("both_ways", WARM_DAILY, indirect=True)
def test_ranks_talk_on_loopback_only_and_a_bystander_is_not_touched(notebook, pids, tmp_path):
    other = notebook("wait", group=True, nproc=3)
    started = pids.wait(4)
    connections = [found for pid in started for found in psutil.Process(pid).net_connections("inet")]
    established = [found for found in connections if found.status == psutil.CONN_ESTABLISHED]
    assert len(established) >= 6  # each of three ranks with the two others
    addresses = {address.ip for found in established for address in (found.laddr, found.raddr)}
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    listening = {(found.laddr.ip, found.laddr.port) for found in connections if found.status == psutil.CONN_LISTEN}
    assert listening and {ip for ip, _ in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

    mine = Pids(tmp_path / "mine")
    with pytest.raises(RankFailed):
        labkit.run(MISBEHAVE, how="raise", pids=str(mine.path))
    mine.assert_gone(limit_s=0.1)
    assert other.poll() is None
    assert all(map(is_alive, started))


def test_the_environment_of_the_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(process.requirements, "usable_cores", lambda: list(range(8)))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PET_NNODES", "3")  # an option of torchrun, as Kubeflow sets it
    monkeypatch.setenv("LABKIT_SIMULATED", "junk")
    monkeypatch.setenv("LABKIT_PROCESS_RANKS", "junk")
    folder = process.RunFolder(tmp_path)
    environment = process.rank_environment(folder, 3, "cuda")
    assert environment["OMP_NUM_THREADS"] == "2"
    assert process.rank_environment(folder, 9, "cpu")["OMP_NUM_THREADS"] == "1"
    assert environment["LABKIT_DEVICE"] == "cuda"
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == process.loopback_interface()
    assert environment["PYTHONPATH"] == f"{Path(labkit.__file__).parents[1]}:/somewhere"
    outer = {"MPLBACKEND", "PET_NNODES", "LABKIT_SIMULATED", "LABKIT_PROCESS_RANKS"}
    assert not outer & environment.keys()


@pytest.mark.parametrize("both_ways", WARM_DAILY, indirect=True)
def test_a_kernel_that_is_interrupted_and_one_that_is_restarted(pids, tmp_path):
    jupyter_client = pytest.importorskip("jupyter_client", reason="needs Jupyter")
    pytest.importorskip("ipykernel", reason="needs Jupyter")
    manager = jupyter_client.KernelManager()
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        cell = f"import labkit; labkit.run({str(MISBEHAVE)!r}, how='wait', bare=True, pids={str(pids.path)!r})"
        asked = client.execute(cell, stop_on_error=False)  # else a cell that comes just after the error is aborted
        pids.wait(4)
        manager.interrupt_kernel()
        reply = {"parent_header": {"msg_id": ""}}
        while reply["parent_header"]["msg_id"] != asked:  # a slow answer to wait_for_ready may come first
            reply = client.get_shell_msg(timeout=LIMIT_S)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        pids.assert_gone(limit_s=0.1)

        pids.path.unlink()
        client.execute(cell)
        pids.wait(4)
        manager.restart_kernel(now=True)  # SIGKILL
        pids.assert_gone()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_nothing_is_forked_outside_linux_or_beside_a_gpu(monkeypatch):
    assert torchrun.can_fork()
    with monkeypatch.context() as patched:
        patched.setattr(torchrun.os, "readlink", lambda path: "/dev/nvidiactl")
        assert not torchrun.can_fork()
    monkeypatch.setattr(torchrun.sys, "platform", "darwin")
    assert not torchrun.can_fork()


def test_the_stacks_of_a_run_whose_folder_is_gone(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "read_pid", lambda folder, rank: 7)
    monkeypatch.setattr(process, "find_run_processes", lambda folder: [types.SimpleNamespace(pid=7)])
    monkeypatch.setattr(process.os, "kill", lambda pid, number: None)
    assert process.collect_stacks(process.RunFolder(tmp_path / "gone"), range(1)) == {0: "(no answer)"}
