"""labkit.run(hosts=…) on network namespaces: as one host, and what goes wrong among hosts. As root on Linux."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fixture_long import long_but
from fixture_processes import is_alive, wait_for
from matplotlib import pyplot

import labkit
from labkit import plots
from labkit.errors import HostLost, NotAllHosts, RankFailed, RunTimedOut
from labkit.launcher import watch
from labkit.launcher.progress import Display, use_display
from labkit_cluster.host_rendezvous import labkit_versions
from labkit_cluster.local_hosts import NAMESPACE_KIND, can_make_namespaces, start_local_hosts

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
MISBEHAVE, RECORDS = PROGRAMS / "misbehave.py", PROGRAMS / "records.py"
LAB_2 = {"model": "mlp_stack", "device": "cpu"}
ENDS_WITHIN_S, TOLD_WITHIN_S = 5.0, 15.0
pytestmark = [
    pytest.mark.calm,
    pytest.mark.xdist_group("hosts"),
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root on Linux and iproute2"),
]


@pytest.fixture(scope="module")
def hosts():
    with start_local_hosts(6) as made:
        assert made.kind == NAMESPACE_KIND
        yield made


def error_of(hosts, **how):
    """What ended a run, and at which moment."""
    try:
        labkit.run(MISBEHAVE, nproc=1, hosts=hosts, **how)
    except labkit.LabError as error:
        return error, time.monotonic()


def does_not_come(hosts, folder):
    begun = time.monotonic()
    error, at = error_of([hosts[2], replace(hosts[3], command=("sh", "-c", "sleep 60"))])
    return error, at - begun


def behind_a_firewall(hosts, folder):
    """Nothing comes from host2 to host5, as where a firewall drops what it does not let pass."""
    host2, begun = hosts[2].command[3], time.monotonic()
    subprocess.run(["ip", "-n", host2, "route", "add", "blackhole", "10.77.0.6/32"], check=True)
    error, at = error_of([hosts[2], hosts[5]])
    return error, at - begun


def cut_off(hosts, folder):
    """The cable of host4 is pulled while all ranks wait for each other."""
    noted = folder / "pids"
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(error_of, hosts[2:5], how="wait", group=True, pids=str(noted))
        wait_for(lambda: noted.exists() and len(noted.read_text().split()) == 6)
        begun = time.monotonic()
        hosts.disconnect_host("host4")
        error, at = run.result()
    return error, at - begun


@pytest.fixture(scope="module", autouse=True)
def meanwhile(hosts, tmp_path_factory):
    """What takes long, and little else: it is tried beside the other tests, on hosts of its own."""
    with ThreadPoolExecutor(3) as threads:
        folder = tmp_path_factory.mktemp("meanwhile")
        yield {act: threads.submit(act, hosts, folder) for act in (does_not_come, behind_a_firewall, cut_off)}


def processes_on(hosts):
    """The ids of all processes that run on these hosts."""
    pids = [subprocess.check_output(["ip", "netns", "pids", host.command[3]], text=True).split() for host in hosts]
    return {int(pid) for each in pids for pid in each}


@pytest.fixture(autouse=True)
def nothing_is_left(hosts):
    yield
    wait_for(lambda: not processes_on(hosts[:2]), ENDS_WITHIN_S)


def losses(result):
    """The mean loss over all ranks by step, of those steps that are known of all ranks."""
    found = result.frame.query("kind == 'scalar' and name == 'loss'").groupby("step").value
    return found.mean()[found.size() == result.world_size].to_dict()


def is_unit(module):
    return type(module).__name__ == UNIT


UNIT = "MLP"


@pytest.mark.parametrize("hybrid", long_but([None], [None, 2]))
def test_two_hosts_of_two_ranks_equal_one_of_four(hosts, hybrid):
    how = LAB_2 | {"steps": 1, "timeline": True}
    how |= {"hybrid": hybrid} if hybrid else {"wrap": "yours", "use": {"is_unit": is_unit}}
    program = "fsdp_matrix" if hybrid else "fsdp_wrap"
    here = labkit.run(program, nproc=4, **how)
    there = labkit.run(program, nproc=2, hosts=hosts[:2], **how)
    assert losses(there) == pytest.approx(losses(here), rel=1e-6) and len(losses(there)) == 3
    sent = [name for name in here.summary() if name.endswith(("_count", "_bytes")) and "resident" not in name]
    assert {name: there.value(name) for name in sent} == {name: here.value(name) for name in sent}
    assert here.hosts == () and "host" not in here.summary()
    assert there.hosts == tuple(there.summary().host) == ("host0", "host0", "host1", "host1")
    for name in ("all_gather", "reduce_scatter"):
        assert there.value(f"{name}_bytes") > 0
        assert there.value(f"{name}_between_hosts_bytes") == (0 if hybrid else there.value(f"{name}_bytes"))
    if hybrid:
        assert there.value("all_reduce_between_hosts_count") == there.value("all_reduce_count") > 0
    ax = plots.timeline(there)
    names = [label.get_text() for label in ax.get_yticklabels() if "rank" in label.get_text()]
    pyplot.close(ax.figure)
    wanted = ["host0: rank 0 compute", "rank 1 compute", "host1: rank 2 compute", "rank 3 compute"]
    assert names == wanted
    assert "4 ranks on 2 hosts with 2 cores" in there.stamp or "cores" not in here.stamp


class AtStep(Display):
    """Does something once, when this many steps are done; notes how far the run had come each time it was shown."""

    def __init__(self, steps, act=lambda: None):
        self.seen, self._steps, self._act = [], steps, act

    def show(self, state, lines):
        self.seen.append((state.started_ranks, state.done_steps, *lines))
        if state.done_steps >= self._steps:
            self._steps = float("inf")
            self._act()


@pytest.mark.long
def test_training_goes_on_where_a_killed_host_left_it_on_another_number_of_ranks(hosts, tmp_path, monkeypatch):
    how = LAB_2 | {"steps": 12}
    unbroken = losses(labkit.run("fsdp_matrix", nproc=4, **how))
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "killed"))
    how["checkpoints"] = str(tmp_path / "checkpoints")
    # Steps that are longer than the period in which records are copied: host1's first ones have come.
    with (
        use_display(AtStep(4, partial(hosts.kill_host, "host1"))),
        pytest.raises(HostLost, match=r"^host1 was lost: its part"),
    ):
        labkit.run("fsdp_matrix", nproc=2, hosts=hosts[:2], delay_ms=30, **how)
    (folder,) = (tmp_path / "killed").iterdir()
    killed = labkit.load(folder)
    assert killed.info["exit"] == "failed" and 0 <= max(losses(killed)) < 11
    resumed = labkit.run("fsdp_matrix", nproc=1, hosts=hosts[:2], accumulate=2, **how)
    assert min(losses(resumed)) > 0, "it began anew"
    joined = losses(killed) | losses(resumed)
    assert joined == pytest.approx({step: unbroken[step] for step in joined}, rel=1e-5) and max(joined) == max(unbroken)
    ax = plots.loss_curves({"killed": killed, "resumed": resumed})
    drawn = {step for line in ax.lines for step in line.get_xdata()}
    pyplot.close(ax.figure)
    assert drawn == joined.keys() - {-1}


def blind(host, folder):
    """A host that does not see what lies in this folder, and whose shell says hello."""
    hide = f'echo "Hello from {{}}"; mount -t tmpfs none {folder} && exec "$@"'
    return replace(host, command=(*host.command, "unshare", "-m", "sh", "-c", hide, "sh"))


def test_progress_and_files_come_home_from_hosts_that_do_not_see_the_folder_of_the_run(hosts, runs_folder):
    display, blinded = AtStep(9), [blind(host, runs_folder) for host in hosts[:2]]
    with use_display(display):
        result = labkit.run(RECORDS, nproc=2, hosts=blinded, steps=3, pause_s=0.4)
    assert {1, 2} & {done for _, done, *_ in display.seen if done < 3}, display.seen
    assert any("[rank 3] <rank> 3 has 1 threads" in lines for _, _, *lines in display.seen)
    here = labkit.run(RECORDS, nproc=4, steps=3)
    assert result.frame.equals(here.frame)
    extra = {*(f"rank_{rank:05d}.host" for rank in range(4)), "torchrun_1.log"}
    assert {path.name for path in result.folder.iterdir()} == {path.name for path in here.folder.iterdir()} | extra
    assert not list(Path("/tmp").glob(f"labkit-*/{result.folder.name}"))


@pytest.mark.parametrize(
    ("how", "exc_type", "message"), [("raise", "ValueError", "width 3 is not width 4"), ("kill", "SIGKILL", "kill -9")]
)
def test_the_first_failure_on_any_host_is_reported(hosts, how, exc_type, message):
    begun = time.monotonic()
    with pytest.raises(RankFailed, match=message) as caught:
        labkit.run(MISBEHAVE, nproc=2, hosts=hosts[:2], how=how, rank=3, group=True)
    failed = caught.value
    assert (failed.rank, failed.exc_type) == (3, exc_type)
    assert failed.log.read_text().startswith("rank 3 is ready")
    assert time.monotonic() - begun < TOLD_WITHIN_S


@pytest.fixture
def noted(tmp_path):
    """A file in which ranks note the ids of their processes, once they are ready."""
    path = tmp_path / "pids"
    return path, lambda: {int(word) for word in path.read_text().split()} if path.exists() else set()


def test_a_hanging_run_times_out_with_the_stacks_of_every_rank(hosts, noted, monkeypatch):
    path, pids = noted

    def monotonic():
        return time.monotonic() + 3600 * (len(pids()) == 6 and time.time() - path.stat().st_mtime > 0.5)

    monkeypatch.setattr(watch, "time", types.SimpleNamespace(monotonic=monotonic))
    with pytest.raises(RunTimedOut) as caught:
        labkit.run(MISBEHAVE, nproc=2, hosts=hosts[:2], how="wait", rank=2, group=True, pids=str(path))
    stacks = caught.value.stacks
    assert ["wait_for_godot" in stacks[rank] for rank in range(4)] == [False, False, True, False]
    assert ["in all_reduce" in stacks[rank] for rank in range(4)] == [True, True, False, True]
    assert caught.value.output == {rank: f"rank {rank} is ready" for rank in range(4)}
    assert not any(map(is_alive, pids()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_on_any_host_when_the_notebooks_process_is_interrupted_or_killed(hosts, noted, number):
    path, pids = noted
    how = {"how": "wait", "deaf": True, "orphan": True, "rank": 3, "pids": str(path), "nproc": 2}
    code = f"import labkit\nfrom labkit import Host\nlabkit.run({str(MISBEHAVE)!r}, hosts={hosts[:2]}, **{how})"
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    notebook = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    try:
        started = wait_for(lambda: len(pids()) >= 7 and pids())
        assert all(map(is_alive, started)) and started <= processes_on(hosts[:2])
        notebook.send_signal(number)
        wait_for(lambda: not any(map(is_alive, started)) and not processes_on(hosts[:2]), ENDS_WITHIN_S)
        assert notebook.wait(ENDS_WITHIN_S)
        assert ("KeyboardInterrupt" in notebook.stderr.read()) == (number == signal.SIGINT)
    finally:
        notebook.kill()
        notebook.wait()
        notebook.stderr.close()


def test_a_host_that_hears_no_more_of_the_notebooks_process_ends_its_part(noted):
    """As where its machine was switched off, and no end of the connection was ever seen."""
    path, pids = noted
    agent = "from labkit_cluster import host_agent; host_agent.NOTEBOOK_SILENCE_LIMIT_S = 2; host_agent.main()"
    member = {"index": 0, "hosts": 1, "name": "host0", "token": "secret"}
    request = {"target": str(MISBEHAVE), "params": {"pids": str(path)}, "nproc": 1, "device": "cpu", "name": "run"}
    request |= {"working_folder": "/", "given": "", "versions": labkit_versions(), "sum": "", "environment": {}}
    alone = subprocess.Popen([sys.executable, "-P", "-c", agent], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with alone.stdin as pipe:
        pipe.write(json.dumps(request | {"member": member}).encode() + b"\n")
        pipe.flush()
        while len(pids()) < 2:
            pipe.write(b"{}\n")
            pipe.flush()
            time.sleep(0.1)
        assert all(map(is_alive, pids()))
        assert alone.wait(2 + ENDS_WITHIN_S) == -signal.SIGKILL
        assert not any(map(is_alive, pids()))


def script(folder, *lines):
    """A program that takes the place of a host's Python."""
    path = folder / "python"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


def another_python(host, folder):
    pretend = "import platform, runpy, sys; platform.python_version_tuple = lambda: ('3', '9', '1'); sys.argv[1:] = []"
    agent = "runpy.run_module('labkit_cluster.host_agent', run_name='__main__')"
    return replace(host, python=script(folder, f"#!{sys.executable} -P", pretend, agent))


def an_old_python(host, folder):
    return replace(host, python=script(folder, "#!/bin/sh", "echo Unknown option: -P >&2", "exit 2"))


def another_torch(host, folder):
    (folder / "torch-9.9.dist-info").mkdir()
    (folder / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    change = f"PYTHONPATH={folder}:$PYTHONPATH"
    return replace(host, python=script(folder, "#!/bin/sh", f'{change} exec {sys.executable} "$@"'))


def another_labkit(host, folder):
    root = Path(labkit.__file__).parents[1]
    for name in ("labkit", "labkit_cluster", "launch"):
        subprocess.run(["cp", "-r", root / name, folder], check=True)
    with (folder / "labkit" / "__init__.py").open("a") as file:
        file.write("# changed\n")
    return replace(host, python=script(folder, "#!/bin/sh", f'PYTHONPATH={folder} exec {sys.executable} "$@"'))


def no_labkit(host, folder):
    return replace(host, python=script(folder, "#!/bin/sh", f'unset PYTHONPATH; exec {sys._base_executable} "$@"'))


def no_python(host, folder):
    return replace(host, python="/nowhere/python")


def dies_at_once(host, folder):
    return replace(host, command=("sh", "-c", "echo out of memory >&2; exit 9"))


def of_another(host, folder):
    return replace(host, address="10.77.0.99")


def without_a_number(host, folder):
    return replace(host, address="no-such-host.invalid")


def on_loopback(host, folder):
    return replace(host, address="127.0.0.1")


def without_the_program(host, folder):
    return blind(host, PROGRAMS)


AGAIN = "install the same on all hosts"
FAILURES = [
    ("host1", another_python, NotAllHosts, f"the notebook has Python 3.11 and host1 has 3.9: {AGAIN}"),
    ("host1", an_old_python, HostLost, "host1 has a Python before 3.11 as .*: give Host.'host1', python='…'."),
    ("host1", another_torch, NotAllHosts, f"host0 has torch .* and host1 has 9.9: {AGAIN}"),
    ("host1", another_labkit, NotAllHosts, f"the notebook has labkit .* and host1 has .*: {AGAIN}"),
    ("host1", no_labkit, HostLost, "labkit cannot start on host1 .*No module named 'labkit.*: install there what"),
    ("host1", no_python, HostLost, "host1 has no Python at /nowhere/python .*: give Host.'host1', python='…'."),
    ("host1", dies_at_once, HostLost, "host1 was lost: its part of the run ended with 'out of memory'. Is it up"),
    ("host1", without_the_program, NotAllHosts, "host1 has no .*misbehave.py: copy it there, or keep it in a folder"),
    ("host0", of_another, NotAllHosts, "the address 10.77.0.99 of host0 is not its own, .*: give one of 10.77.0.1"),
    ("host0", without_a_number, NotAllHosts, "the address 'no-such-host.invalid' of host0 does not resolve there: g"),
    ("host0", on_loopback, NotAllHosts, "host1 cannot reach host0 .it names only its loopback.: let the firewall"),
]


@pytest.mark.parametrize(("name", "make", "kind", "message"), FAILURES, ids=[make.__name__ for _, make, *_ in FAILURES])
def test_what_goes_wrong_among_hosts_is_told_in_a_line(hosts, tmp_path, name, make, kind, message):
    chosen = {host.name: host for host in hosts[:2]}
    chosen[name] = make(chosen[name], tmp_path)
    begun = time.monotonic()
    with pytest.raises(kind, match=f"^{message}") as caught:
        labkit.run(MISBEHAVE, nproc=1, hosts=list(chosen.values()))
    assert time.monotonic() - begun < TOLD_WITHIN_S
    assert "\n" not in str(caught.value)


SLOW = [
    (does_not_come, NotAllHosts, "host3 did not come within 12 s, and no rank was started: is it up"),
    (behind_a_firewall, NotAllHosts, "host5 cannot reach host2 .10.77.0.3: no answer.: let the firewall of host2 pass"),
    (cut_off, HostLost, "host4 and the other hosts no longer hear each other: are both up, and the network between"),
]


@pytest.mark.parametrize(("act", "kind", "message"), SLOW, ids=[act.__name__ for act, *_ in SLOW])
def test_what_only_time_tells_is_told_in_a_line_too(meanwhile, act, kind, message):
    error, seconds = meanwhile[act].result(60)
    assert isinstance(error, kind) and re.match(message, str(error)), error
    assert seconds < TOLD_WITHIN_S
    assert "\n" not in str(error)


def test_a_world_smaller_than_asked_for_never_trains(tmp_path):
    """A host that falls back to itself, as with another way to start torchrun."""
    own = {"RANK": "0", "WORLD_SIZE": "2", "LABKIT_RANKS": "4", "LABKIT_HOST": "host1"}
    worker = [sys.executable, "-P", "-m", "labkit.launcher.worker", str(RECORDS)]
    own |= {"LABKIT_AHEAD_S": "5000.5", "LABKIT_RUN_FOLDER": str(tmp_path)}
    ended = subprocess.run(worker, env=os.environ | own, check=False)
    assert ended.returncode == 1 and not (tmp_path / "rank_00000.jsonl").exists()
    error = json.loads((tmp_path / "rank_00000.error.json").read_text())
    assert error["message"].startswith("host1 is in a world of 2 ranks, and 4 were asked for: it went on alone, or")
    assert 5000 < error["time"] - time.time() < 5001, "the time is not that of host 0"
