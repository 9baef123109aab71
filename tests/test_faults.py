"""What goes wrong with a machine, provoked for real: a clear message tells it, and nothing on disk is lost.

docs/faults.md is the list; a test here holds it to tests that there are. Namespaces, small disks and other users need
root; elsewhere these tests are skipped.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import pytest
from fixture_processes import wait_for

import labkit
from labkit.errors import LabError, RankFailed, RecordError
from labkit.launcher import failure, process, resource_limits
from labkit.launcher.progress import TextDisplay
from labkit.runs import history
from labkit.runs.folder import RunFolder, write_json
from labkit.runs.records import RecordWriter, record_path

TESTS = Path(__file__).resolve().parent
PROGRAMS = TESTS / "programs"
RECORDS, SMALL = PROGRAMS / "records.py", PROGRAMS / "small.py"
OTHER_USER = 61234
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root on Linux")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A runs folder of this test's own, and ranks that begin as new Pythons."""
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("LABKIT_WARM", "0")
    return tmp_path / "runs"


def run_as(words, program, before="", **options):
    """Run a program as a notebook would, under some command that sets the stage; what it says and its exit status."""
    code = f"import labkit; {before}\ntry: labkit.run({str(program)!r}, timeout_s=100)\n"
    code += "except labkit.LabError as error: raise SystemExit(f'LabError: {error}')\nprint('ran')"
    command = [*words, sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=110, **options)
    return answer.stdout + answer.stderr, answer.returncode


def stage(*commands, flags):
    """A command that sets a stage in namespaces of its own."""
    script = " && ".join([*commands, 'exec "$@"'])
    can = subprocess.run(["unshare", *flags, "sh", "-c", script, "sh", "true"], capture_output=True, check=False)
    if can.returncode:
        pytest.skip(f"no such namespaces here: {can.stderr.decode().strip()}")
    return ["unshare", *flags, "sh", "-c", script, "sh"]


@NEEDS_ROOT
def test_a_machine_whose_loopback_is_down_is_told_at_once(place):
    said, status = run_as(stage("true", flags=["--net"]), SMALL)
    assert status == 1
    assert "LabError: 127.0.0.1 does not answer (" in said
    assert "and ranks of one machine talk over it: ip link set lo up" in said
    assert not place.exists(), "nothing was started"


@NEEDS_ROOT
def test_a_machine_without_ipv4_on_its_loopback_is_told_the_same(place):
    ipv6 = stage("ip link set lo up", "ip addr del 127.0.0.1/8 dev lo", flags=["--net"])
    said, status = run_as(ipv6, SMALL)
    assert status == 1
    assert "LabError: 127.0.0.1 does not answer (" in said and not place.exists()


@NEEDS_ROOT
def test_a_bare_machine_is_enough(place, tmp_path):
    """No network, a hostname that nobody knows, a localhost that is IPv6 alone, and a /dev/shm without room."""
    (tmp_path / "hosts").write_text("::1 localhost\n")
    (tmp_path / "resolv.conf").write_text("nameserver 192.0.2.1\n")
    bare = stage(
        "ip link set lo up",
        "hostname nosuch.invalid",
        f"mount --bind {tmp_path}/hosts /etc/hosts",
        f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf",
        "mount -t tmpfs -o ro tmpfs /dev/shm",
        flags=["--net", "--uts", "--mount"],
    )
    said, status = run_as(bare, SMALL)
    assert status == 0, said
    assert "rank 1 of 2 has 8" in said


def limited(limit, number):
    resource.setrlimit(limit, (number, number))


def test_too_few_files_may_be_opened(place):
    few = partial(limited, resource.RLIMIT_NOFILE, 11)
    said, status = run_as([], SMALL, preexec_fn=few)
    assert status == 1
    assert "no more files may be opened here: raise the limit, now 11, with `ulimit -n 1024` or more" in said


@NEEDS_ROOT
def test_too_few_processes_may_be_started(place):
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    other = ["setpriv", f"--reuid={OTHER_USER}", "--clear-groups", *all_of("dac_override"), "prlimit", "--nproc=3"]
    said, status = run_as(other, SMALL)
    assert status == 1
    assert "no more processes or threads may be started here: take fewer ranks" in said
    assert not process.find_run_processes(next(place.iterdir()))


def all_of(capability):
    """Options of setpriv that let another user read, or write, what only root may, as the folders above this one."""
    return [f"--inh-caps=+{capability}", f"--ambient-caps=+{capability}"]


class NoThread(threading.Thread):
    """What threading has to offer where the limit of processes is reached."""

    def start(self):
        raise RuntimeError("can't start new thread")


def test_the_processes_of_a_run_are_ended_also_where_no_thread_may_be_started(monkeypatch):
    monkeypatch.setattr(sys.modules["labkit.launcher.run"], "threading", types.SimpleNamespace(Thread=NoThread))
    ended = []
    monkeypatch.setattr(process, "kill_run_processes", lambda folder, pid: ended.append(folder) or [])
    with pytest.raises(RankFailed) as caught:
        labkit.run(PROGRAMS / "misbehave.py", how="exit")
    assert ended == [caught.value.log.parent]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("OSError: [Errno 24] Too many open files", "ulimit -n 1024"),
        ("DistStoreError: Failed to init uv loop", "ulimit -n 1024"),
        ("RuntimeError: can't start new thread", "--pids-limit"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "--pids-limit"),
        ("terminate called after throwing an instance of 'std::system_error'", "--pids-limit"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", "ulimit -v"),
        ("MemoryError: ", "ulimit -v"),
        ("OSError: [Errno 28] No space left on device", "a disk is full"),
        ("RuntimeError: PytorchStreamWriter failed writing file data/0: file write failed", "a disk is full"),
        ("InductorError: ImportError: /tmp/torchinductor_me/ab/cab.main.so: file too short", "delete the file"),
        ("CppCompileError: cab.main.o: file not recognized: file truncated", "delete the file"),
        ("Last error: failed to extend /dev/shm/nccl-a to 9637892 bytes, No space left on device (28)", "--shm-size"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "nvidia-smi"),
        ("AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "nvidia-smi"),
        ("MemoryCapExceeded: more than its cap of 5 MiB was needed (can't allocate memory)", ""),
        ("ValueError: width 3 is not width 4", ""),
    ],
)
def test_a_shortage_is_known_by_its_words(text, says):
    found = resource_limits.shortage_fix(text)
    assert says in found
    assert bool(found) == bool(says)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("", "the rank left without an exception or a word: does its program .* close descriptors"),
        ("OSError: [Errno 24] Too many open files", r"the rank left without an exception\nno more files .* `ulimit -n"),
    ],
)
def test_a_rank_that_could_not_tell_its_exception(tmp_path, output, says):
    """As after os.closerange, which closes its output, or with a limit of no files."""
    folder = RunFolder(tmp_path)
    write_json(folder.exit_json(), {"failures": [{"rank": 0, "exitcode": 1, "time": 0}]})
    folder.log(0).write_text(output)
    assert re.match(says, failure.first_failure(folder, 1).message)


def test_a_shortage_is_found_however_long_torchrun_s_traceback_goes_on(tmp_path):
    """Of children that had ended already, torchrun reports with a second exception, behind the one that tells."""
    lines = [
        "OSError: [Errno 24] Too many open files",
        *["  a frame"] * 60,
        "ProcessLookupError: [Errno 3] No such process",
    ]
    folder = RunFolder(tmp_path)
    folder.torchrun_log.write_text("\n".join(lines))
    assert "`ulimit -n 1024`" in failure.first_failure(folder, 1).message


def test_a_rank_that_is_out_of_memory_says_what_helps(tmp_path):
    program = tmp_path / "greedy.py"
    program.write_text("import os\nif os.environ['RANK'] == '1':\n    bytes(10**18)\n")
    with pytest.raises(RankFailed) as caught:
        labkit.run(program)
    assert (caught.value.rank, caught.value.exc_type) == (1, "MemoryError")
    assert "there was no more memory: take fewer ranks" in caught.value.message


def test_a_current_folder_that_was_deleted_is_told_at_once(place, tmp_path):
    (tmp_path / "gone").mkdir()
    leave = "import os; os.rmdir(os.getcwd())"
    said, status = run_as([], SMALL, before=leave, cwd=tmp_path / "gone")
    assert status == 1
    assert "LabError: the current folder was deleted, and PyTorch cannot be loaded from there: go to another" in said
    assert not place.exists()


CLOSES_ITS_FOLDER = """
import os, time
folder = os.environ["LABKIT_RUN_FOLDER"]
while os.environ["RANK"] == "0" and os.stat(folder).st_mode & 0o200:
    if os.path.exists(f"{folder}/rank_00001.pid"):
        os.chmod(folder, 0o500)
    time.sleep(0.02)
"""


@NEEDS_ROOT
def test_a_folder_that_becomes_read_only_in_mid_run(place, tmp_path):
    program = tmp_path / "closes.py"
    program.write_text(CLOSES_ITS_FOLDER)
    place.mkdir()
    os.chown(place, OTHER_USER, OTHER_USER)
    other = ["setpriv", f"--reuid={OTHER_USER}", "--clear-groups", *all_of("dac_read_search")]
    said, status = run_as(other, program)
    (folder,) = place.iterdir()
    assert status == 1
    assert f"LabError: cannot write to {folder}: make it writable again" in said
    assert json.loads((folder / "run.json").read_text())["exit"] == "running", "whole, as it was"
    assert labkit.load(folder).info["program"] == "closes"


CLOCK = """
#include <dlfcn.h>
#include <stdio.h>
#include <sys/time.h>
#include <time.h>
static long shift() {
    long seconds = 0;
    FILE *file = fopen(SHIFT, "r");
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += shift();
    return status;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
"""
CHANGES_THE_CLOCK = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for seconds in (86400, -86400):
    if dist.get_rank() == 0:
        with open(os.environ["SHIFT"], "w") as file:
            file.write(str(seconds))
    dist.barrier()
    assert abs(time.time() - time.clock_gettime(time.CLOCK_TAI) - seconds) < 3600
    dist.all_reduce(torch.ones(4))
    time.sleep(0.3)  # several looks of whoever watches the time limit
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="needs Linux and a C compiler")
def test_a_clock_that_jumps_a_day_ahead_and_two_back_changes_nothing(place, tmp_path):
    shift, library = tmp_path / "shift", tmp_path / "clock.so"
    (tmp_path / "clock.c").write_text(CLOCK)
    compiled = ["gcc", "-shared", "-fPIC", "-D_GNU_SOURCE", f'-DSHIFT="{shift}"', "-o", library, tmp_path / "clock.c"]
    subprocess.run([*compiled, "-ldl"], check=True)
    program = tmp_path / "changes.py"
    program.write_text(CHANGES_THE_CLOCK)
    said, status = run_as([], program, env=os.environ | {"LD_PRELOAD": str(library), "SHIFT": str(shift)})
    assert status == 0, said
    (folder,) = place.iterdir()
    result = labkit.load(folder)
    assert result.ok and 0 < result.info["duration_s"] < 100


def test_paths_and_parameters_may_hold_anything(tmp_path, monkeypatch):
    odd = "Über maß 'it''s' \"quoted\" $(touch x) `y` 🙂\n;&|"
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / odd / "runs"))
    program = tmp_path / f"{odd}.py"
    program.write_text(
        "from dataclasses import dataclass\nfrom labkit.rank import load_config\n\n"
        "@dataclass\nclass Config:\n    text: str = ''\n    names: tuple[str, ...] = ()\n\n"
        "print(repr(load_config(Config)))\n"
    )
    given = {"text": f"--text={odd}", "names": ("-a", "--text", "", odd, "None", "\\")}
    result = labkit.run(program, nproc=1, **given)
    assert result.ranks[0].log() == f"Config(text={given['text']!r}, names={given['names']!r})\n"
    assert labkit.load(history.find_run_folder(result.folder.name)).params["text"] == given["text"]
    assert len(history.format_table(history.find_runs()).splitlines()) == 1


FILLS_THE_DISK = f"""
import os, sys
sys.path.insert(0, {str(TESTS.parent)!r})
from pathlib import Path
from labkit.runs.records import RecordWriter
writer = RecordWriter(Path(os.environ["LABKIT_RUN_FOLDER"]), int(os.environ["RANK"]))
while True:
    writer.write("scalar", "loss", len(writer.lines), value=0.5, unit=1000 * "x")
"""


@pytest.mark.usefixtures("both_ways")
def test_a_disk_that_the_records_fill(small_disk, tmp_path):
    program = tmp_path / "fills.py"
    program.write_text(FILLS_THE_DISK)
    with pytest.raises(LabError, match=f"the disk of {small_disk}/.* is full: delete old runs or other files"):
        labkit.run(program, timeout_s=60)
    (folder,) = small_disk.iterdir()
    result = labkit.load(folder)
    assert result.info["exit"] == "failed" and "is full" in result.info["error"], "its end was written all the same"
    assert len(result.lines) > 500 and result.value("loss") == 0.5
    assert not list(folder.glob(".*")), "no half-written files"


def test_a_second_process_may_not_write_into_a_runs_records(tmp_path):
    code = (
        "import sys; from pathlib import Path; from labkit.runs.records import RecordWriter\n"
        "writer = RecordWriter(Path(sys.argv[1]), 0)\nprint('holds', flush=True)\nsys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "holds\n"
        fix = "give each run a folder of its own, or unset LABKIT_RUN_FOLDER"
        with pytest.raises(
            RecordError, match=f"^{record_path(tmp_path, 0)}: another process is writing records here: {fix}"
        ):
            RecordWriter(tmp_path, 0)
        RecordWriter(tmp_path, 1).close()
        other.kill()
        other.communicate()
    RecordWriter(tmp_path, 0).close()


WORDY = """
import os
if os.environ["RANK"] == "0":
    for line in range(5000):
        print(f"{line:06} " + 90 * "x")
"""


def end_of(place):
    """How the one run here ended; "" while it goes on."""
    runs = list(place.glob("*/run.json"))
    said = json.loads(runs[0].read_text())["exit"] if runs else "running"
    return "" if said == "running" else said


def test_a_pipe_that_nobody_reads_does_not_hold_up_a_run(place, tmp_path):
    program = tmp_path / "wordy.py"
    program.write_text(WORDY)
    words = [sys.executable, "-m", "labkit", "run", str(program)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert wait_for(lambda: end_of(place)) == "ok"
            assert running.poll() is None, "what is unsaid waits for its reader"
            lines = running.stderr.read().splitlines()
        finally:
            running.kill()
    assert [line[:6] for line in lines if line.endswith("x")] == [f"{line:06}" for line in range(5000)]
    assert lines[-1].endswith(": ok")


def test_a_pipe_whose_reader_has_gone_does_not_end_a_run(place):
    words = [sys.executable, "-m", "labkit", "run", str(RECORDS), "--pause-s", "0.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert "ranks started" in running.stderr.readline()
        running.stderr.close()
        running.stdout.close()
        assert running.wait(60) == 1, "its table could not be written"
    assert end_of(place) == "ok"
    words = [sys.executable, "-m", "labkit", "runs"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listing:
        listing.stdout.close()
        assert (listing.wait(60), listing.stderr.read()) == (1, "")


def test_of_very_much_that_is_unsaid_the_end_is_kept(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file, os.fdopen(reading) as reader:
        monkeypatch.setattr(sys, "stderr", file)
        text = TextDisplay()
        begun = time.monotonic()
        text._print_lines(*(f"{line:07}" for line in range(100_000)))
        assert time.monotonic() - begun < 5
        threading.Thread(target=text._print_lines, args=["the end"], kwargs={"wait_for_reader": True}).start()
        lines = [line.rstrip() for line in iter(reader.readline, "the end\n")]
    (remark,) = [line for line in lines if not line.isdecimal()]
    shown = [line for line in lines if line != remark]
    assert remark == f"... {100_000 - len(shown):,} lines left out here; they are in the output of the run ..."
    assert shown[0] == "0000000" and shown[-9_999:] == [f"{line:07}" for line in range(90_001, 100_000)]


def rows():
    """Each fault of docs/faults.md with its tests."""
    text = (TESTS.parent / "docs" / "faults.md").read_text()
    lines = [line[2:-2] for line in text.splitlines() if line.startswith("| ") and "**" not in line]
    table = [line.split(" | ") for line in lines[1:]]
    return {fault: re.findall(r"`(\w+)::(\w+)`", tests) for fault, _, tests in table}


def where(name):
    """Where a file of tests lies."""
    (found,) = TESTS.rglob(f"{name}.py")
    return found


def test_every_fault_in_the_docs_is_held_by_tests_that_there_are():
    assert len(rows()) > 30
    for fault, tests in rows().items():
        assert tests, fault
        for file, name in tests:
            assert re.search(rf"^def {name}\(", where(file).read_text(), re.MULTILINE), (fault, name)


if __name__ == "__main__":
    named = {(where(file).relative_to(TESTS.parent), name) for tests in rows().values() for file, name in tests}
    print(*sorted(f"{file}::{name}" for file, name in named))
