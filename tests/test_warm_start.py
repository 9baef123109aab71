"""Warm launching: every run is as fresh as a cold one, and nothing outlives the process that asked for it."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from fixture_processes import is_alive, wait_for

import labkit
from labkit.environment import ENV_WARM
from labkit.errors import ParameterError, RankFailed, RunTimedOut
from labkit.launcher import process, warm_start

PROGRAMS = Path(__file__).parent / "programs"
MISBEHAVE = PROGRAMS / "misbehave.py"
TELL = """
import json, os, random, sys
import numpy, torch
from pathlib import Path
rank = os.environ["RANK"]
told = {told}
Path(os.environ["LABKIT_RUN_FOLDER"], f"told_{{rank}}").write_text(json.dumps(told))
"""


@pytest.fixture(autouse=True)
def light_parents(monkeypatch):
    monkeypatch.setattr(warm_start, "FORK_SERVER_ARGUMENTS", (str(PROGRAMS / "light_parent.py"),))


def told(result, rank=0):
    return json.loads((result.folder / f"told_{rank}").read_text())


@pytest.fixture
def tell(tmp_path):
    """Writes a program that tells the value of an expression: ``tell("os.getpid()")`` is its path."""

    def write(expression):
        path = tmp_path / "tell.py"
        path.write_text(TELL.format(told=expression))
        return path

    return write


def pids_of(result):
    return {int(path.read_text()) for path in result.folder.glob("rank_*.pid")}


def test_each_run_has_processes_of_its_own_all_from_one_parent(tell):
    first, second = (labkit.run(tell("os.getppid()"), device="cpu") for _ in range(2))
    assert first.info["warm"] and second.info["warm"]
    assert len(pids_of(first) | pids_of(second)) == 4
    assert told(first) != told(second)  # torchrun, too
    assert psutil.Process(warm_start.fork_server_manager._parent.process.pid).ppid() == os.getpid()


def test_an_edited_program_takes_effect(tell):
    assert told(labkit.run(tell("'before'"))) == "before"
    assert told(labkit.run(tell("'after'"))) == "after"


def test_a_variable_of_the_notebook_arrives_by_the_same_parent(tell, monkeypatch):
    program = tell("os.environ.get('OF_THE_NOTEBOOK')")
    assert told(labkit.run(program)) is None
    parent = warm_start.fork_server_manager._parent
    monkeypatch.setenv("OF_THE_NOTEBOOK", "new \udcff")  # not UTF-8
    assert told(labkit.run(program)) == "new \udcff"
    assert warm_start.fork_server_manager._parent is parent


def test_what_counts_when_torch_is_imported_renews_the_parent(tell, monkeypatch):
    program = tell("torch._inductor.config.cpp.simdlen")
    labkit.run(program)
    parent = warm_start.fork_server_manager._parent
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    result = labkit.run(tell("hash('labkit')"))
    assert warm_start.fork_server_manager._parent is not parent
    bare = subprocess.run([sys.executable, "-c", "print(hash('labkit'))"], capture_output=True, check=True)
    assert told(result) == int(bare.stdout)
    parent.process.wait(5)


def test_a_changed_file_of_labkit_renews_the_parent(monkeypatch):
    before = warm_start.process_state()
    assert before == warm_start.process_state()
    path = Path(warm_start.__file__)
    stat = path.stat()
    try:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        assert before != warm_start.process_state()
    finally:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_the_working_folder_is_the_notebooks(tell, tmp_path, monkeypatch):
    program = tell("os.getcwd()")
    monkeypatch.chdir(tmp_path)
    assert told(labkit.run(program)) == str(tmp_path)


def test_ranks_have_the_threads_and_the_random_numbers_of_new_processes(tell, monkeypatch):
    monkeypatch.setattr(process.requirements, "usable_cores", lambda: list(range(6)))
    program = tell("[torch.get_num_threads(), torch.rand(1).item(), random.random(), numpy.random.rand()]")
    ranks = [told(result, rank) for result in (labkit.run(program), labkit.run(program)) for rank in range(2)]
    threads, of_torch, of_python, of_numpy = zip(*ranks, strict=True)
    assert threads == (3, 3, 3, 3)
    assert len(set(of_torch)) == len(set(of_python)) == len(set(of_numpy)) == 4


@pytest.mark.long
def test_a_run_of_many_good_and_bad_ones_leaves_nothing(tmp_path):
    labkit.run(PROGRAMS / "small.py", device="cpu")
    us, parent = psutil.Process(), warm_start.fork_server_manager._parent.process.pid
    files, memory = us.num_fds(), psutil.Process(parent).memory_info().rss
    for number in range(12):
        if number % 4 == 1:
            with pytest.raises(RankFailed, match=r"widths|SIGKILL"):
                labkit.run(MISBEHAVE, how="raise" if number % 8 == 1 else "kill", group=True)
        elif number == 6:
            with pytest.raises(RunTimedOut):
                labkit.run(MISBEHAVE, how="wait", timeout_s=0.5)
        else:
            assert len(pids_of(labkit.run(PROGRAMS / "small.py", device="cpu"))) == 2
    assert us.num_fds() == files
    assert warm_start.fork_server_manager._parent.process.pid == parent
    assert not psutil.Process(parent).children()
    assert psutil.Process(parent).num_fds() < 10
    assert psutil.Process(parent).memory_info().rss < memory + 20e6


@pytest.mark.long
def test_a_parent_imports_nothing_beside_a_cold_run():
    parent = warm_start.ForkServer()
    parent.send_command(warm_start.PAUSE)
    process = psutil.Process(parent.process.pid)
    give_up, used_s = time.monotonic() + 30, [0.0]
    # What it is importing when it is told, it imports to the end.
    while len(used_s) < 2 or used_s[-1] - used_s[-2] >= 0.1:
        assert time.monotonic() < give_up, used_s
        used_s.append(sum(process.cpu_times()[:2]))
        time.sleep(1.5)
    assert not parent.wait_until_ready(0)
    parent.send_command(warm_start.RESUME)
    assert parent.wait_until_ready(60)
    parent.close()
    parent.process.wait(5)


def test_a_parent_that_has_imported_everything_is_told_of_a_cold_run_too(monkeypatch):
    labkit.run(PROGRAMS / "small.py", device="cpu")
    said, say = [], warm_start.fork_server_manager._parent.send_command
    monkeypatch.setattr(
        warm_start.fork_server_manager._parent, "send_command", lambda word: [said.append(word), say(word)]
    )
    labkit.run(PROGRAMS / "small.py", device="cpu", warm=False)
    assert said == [warm_start.PAUSE, warm_start.RESUME]


def test_a_parent_that_was_killed_is_replaced(tell):
    program = tell("1")
    labkit.run(program)
    warm_start.fork_server_manager._parent.process.kill()
    results = [labkit.run(program) for _ in range(2)]
    assert [told(result) for result in results] == [1, 1]
    assert results[1].info["warm"]


def test_a_parent_that_is_killed_in_mid_run_takes_the_run_with_it(tmp_path):
    ids, failures = tmp_path / "pids", []

    def run():
        try:
            labkit.run(MISBEHAVE, how="wait", pids=str(ids))
        except RankFailed as error:
            failures.append(error.exc_type)

    labkit.run(PROGRAMS / "small.py", device="cpu")
    running = threading.Thread(target=run)
    running.start()
    wait_for(lambda: ids.exists() and len(ids.read_text().split()) >= 3)
    warm_start.fork_server_manager._parent.process.kill()
    running.join(10)
    assert failures == ["SIGKILL"]
    wait_for(lambda: not any(map(is_alive, map(int, ids.read_text().split()))), 1)  # a killed one takes a moment to go


def test_runs_of_several_threads_share_a_parent_and_one_that_is_renewed_ends_its_runs_first(tell, monkeypatch):
    program, results = tell("[__import__('time').sleep(1), os.environ['RANK']][1]"), []
    threads = [threading.Thread(target=lambda: results.append(labkit.run(program))) for _ in range(4)]
    labkit.run(PROGRAMS / "small.py", device="cpu")
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    monkeypatch.setenv("TORCH_OF_A_TEST", "1")
    assert labkit.run(PROGRAMS / "small.py", device="cpu").info["warm"]
    for thread in threads:
        thread.join()
    assert [told(result) for result in results] == ["0"] * 4


def test_a_run_whose_parent_is_renewed_before_it_forks_starts_cold_and_ends_no_other(tmp_path, tell, monkeypatch):
    began = tmp_path / "began"
    program, results = tell(f"[open({str(began)!r}, 'w'), __import__('time').sleep(2), 7][2]"), []
    labkit.run(PROGRAMS / "small.py", device="cpu")
    other = threading.Thread(target=lambda: results.append(labkit.run(program)))
    other.start()
    wait_for(began.exists)
    fork = warm_start.ForkServer.fork

    def renew_and_fork(server, request):
        monkeypatch.setattr(warm_start.ForkServer, "fork", fork)
        monkeypatch.setenv("TORCH_OF_A_TEST", "1")
        warm_start.fork_server_manager.start_in_background()
        return fork(server, request)

    monkeypatch.setattr(warm_start.ForkServer, "fork", renew_and_fork)
    labkit.run(PROGRAMS / "small.py", device="cpu")
    other.join()
    assert [told(result) for result in results] == [7]


def test_nothing_is_forked_from_a_parent_with_two_threads(tmp_path, monkeypatch):
    sleeper = "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
    (tmp_path / "sitecustomize.py").write_text(sleeper)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not labkit.run(PROGRAMS / "small.py", device="cpu").info["warm"]


@pytest.mark.parametrize(
    ("said", "wish", "in_kernel", "expected"),
    [
        ("", None, True, None),
        ("", None, False, False),
        ("", True, False, True),
        ("0", None, True, False),
        ("0", True, False, True),
        ("1", None, False, True),
        ("1", False, True, False),
    ],
)
def test_who_decides(monkeypatch, said, wish, in_kernel, expected):
    monkeypatch.setenv(ENV_WARM, said)
    monkeypatch.setattr(warm_start, "in_kernel", lambda: in_kernel)
    assert warm_start.choose_warm_start(wish) is expected
    monkeypatch.setattr(sys, "platform", "darwin")
    assert warm_start.choose_warm_start(wish) is False


def test_a_wish_that_cannot_be_understood(monkeypatch):
    with pytest.raises(ParameterError, match="warm = 1 is none of True, False and None"):
        labkit.run("all_reduce", warm=1)
    monkeypatch.setenv(ENV_WARM, "yes")
    with pytest.raises(ParameterError, match="LABKIT_WARM='yes' is none of 0"):
        labkit.run("all_reduce")


def test_an_interrupt_while_the_parent_forks_ends_nothing_but_that_run(tell):
    slow, results = tell("[__import__('time').sleep(2), 7][1]"), []
    labkit.run(PROGRAMS / "small.py", device="cpu")
    parent = warm_start.fork_server_manager._parent.process
    other = threading.Thread(target=lambda: results.append(labkit.run(slow)))
    other.start()
    time.sleep(0.5)
    parent.send_signal(signal.SIGSTOP)  # so that it has not answered when the interrupt comes
    interrupted = threading.Event()

    def interrupt():
        # Python drops an interrupt that comes within a finalizer, such as Popen.__del__, so a second one may follow.
        for after_s in (0.3, 5):
            if not interrupted.wait(after_s):
                os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        labkit.run(PROGRAMS / "small.py", device="cpu")
    interrupted.set()
    parent.send_signal(signal.SIGCONT)
    other.join()
    assert told(results[0]) == 7 and warm_start.fork_server_manager._parent.process is parent


@pytest.mark.long
def test_a_parent_that_does_not_answer_is_replaced(monkeypatch):
    labkit.run(PROGRAMS / "small.py", device="cpu")
    warm_start.fork_server_manager._parent.process.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(warm_start, "FORK_TIMEOUT_S", 0.5)
        assert not labkit.run(PROGRAMS / "small.py", device="cpu").info["warm"]
    assert labkit.run(PROGRAMS / "small.py", device="cpu").info["warm"]


def test_umask_and_a_relative_search_path_are_the_notebooks(tell, tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which.py").write_text(f"NAME = {name!r}")
    program = tell("[__import__('which').NAME, os.umask(0)]")
    monkeypatch.setenv("PYTHONPATH", ".")
    before = os.umask(0o027)
    try:
        for name in ("one", "two"):
            monkeypatch.chdir(tmp_path / name)
            assert told(labkit.run(program)) == [name, 0o027]
    finally:
        os.umask(before)


def test_a_programs_own_modules_come_before_those_that_torch_has_imported(both_ways, tell, tmp_path):
    (tmp_path / "statistics.py").write_text("NAME = 'own'")
    result = labkit.run(tell("[__import__('statistics').NAME, any('_vendor' in path for path in sys.path)]"))
    assert told(result) == ["own", False]


def test_main_is_there_to_the_very_end(both_ways, tell, tmp_path):
    program = tell("1")
    program.write_text(
        "import atexit, os, pickle\nfrom pathlib import Path\nclass Point:\n    pass\n"
        "path = Path(os.environ['LABKIT_RUN_FOLDER'], f\"at_end_{os.environ['RANK']}\")\n"
        "atexit.register(lambda: path.write_bytes(pickle.dumps(Point)))\n"
    )
    result = labkit.run(program)
    assert b"Point" in (result.folder / "at_end_0").read_bytes()


IN_A_KERNEL = """
    import time, labkit
    from labkit.launcher import warm_start
    warm_start.in_kernel = lambda: True
    for number in range(3):
        print(labkit.run({program!r}, device="cpu").info["warm"])
        if number == 0:
            print(warm_start.fork_server_manager._parent.process.pid)
    time.sleep({sleep})
"""


@pytest.mark.calm  # 5 s, and 17 beside a test that computes
@pytest.mark.parametrize("end", [pytest.param("by itself", marks=pytest.mark.long), "kill -9"])
def test_in_a_kernel_the_first_run_is_cold_and_the_parent_ends_with_the_kernel(end, monkeypatch):
    monkeypatch.delenv(ENV_WARM)
    monkeypatch.setenv("LABKIT_PROGRESS", "off")
    code = textwrap.dedent(IN_A_KERNEL).format(program=str(PROGRAMS / "small.py"), sleep=600 if end == "kill -9" else 0)
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True) as kernel:
        first, parent, *others = (kernel.stdout.readline().strip() for _ in range(4))
        assert (first, others) == ("False", ["True", "True"])
        if end == "kill -9":
            assert is_alive(int(parent))
            kernel.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_alive(int(parent)), 5)


IMPORTS_FOREVER = """
from labkit.launcher import fork_server
fork_server.MODULES_TO_PRELOAD = ("imports_forever",)
fork_server.main()
"""
FOREVER = """
import os, time
with open(os.environ["BEGUN"], "w") as file:
    file.write(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


def test_a_server_that_still_imports_ends_with_its_notebook(tmp_path):
    begun, path = tmp_path / "begun", [str(tmp_path), str(Path(labkit.__file__).parents[1])]
    (tmp_path / "imports_forever.py").write_text(FOREVER)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "BEGUN": str(begun)}
    env["LABKIT_RUN_FOLDER"] = "." * warm_start.MAX_PATH_BYTES
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = [sys.executable, "-c", IMPORTS_FOREVER, str(theirs.fileno())]
        words = ["sh", "-c", '"$@" & wait', "notebook", *server]
        notebook = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=env)
        try:
            pid = int(wait_for(lambda: begun.exists() and begun.read_text(), 20))
        finally:
            notebook.kill()
            notebook.wait()
        wait_for(lambda: not is_alive(pid), 5)
