"""labkit_cluster.local_hosts: hosts on this machine, as root and without, and that nothing is left of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixture_processes import is_alive, wait_for

import labkit
from labkit.errors import HostLost, LabError, ParameterError
from labkit.launcher.progress import Display, use_display
from labkit_cluster import local_hosts
from labkit_cluster.local_hosts import NAMESPACE_KIND, PROCESS_KIND, can_make_namespaces, start_local_hosts

RECORDS = Path(__file__).resolve().parents[1] / "programs" / "records.py"
needs_root = pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root on Linux and iproute2")
pytestmark = [pytest.mark.calm, pytest.mark.xdist_group("hosts")]
CRASHES = """
import os, signal, subprocess, sys
from labkit_cluster.local_hosts import start_local_hosts
with start_local_hosts(2) as hosts:
    sleep = [*hosts[1].command, "env", "-u", "LABKIT_HOST_ON_THIS_MACHINE", "sleep", "600"]
    left = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(hosts[1].command[3], left.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def network():
    """What this machine has by way of interfaces, addresses, routes and namespaces."""
    return [subprocess.check_output(["ip", *what.split()], text=True) for what in ("-o a", "-o l", "route", "netns")]


@needs_root
def test_the_machines_own_network_is_not_touched_and_nothing_is_left():
    with start_local_hosts(1):  # removes what others have left
        pass
    before = network()
    with start_local_hosts(3) as hosts:
        assert network()[:3] == before[:3]
        assert [host.name for host in hosts] == ["host0", "host1", "host2"]
        reached = subprocess.run(
            [*hosts[2].command, "ping", "-c1", "-W2", "10.77.0.1"], capture_output=True, check=False
        )
        assert reached.returncode == 0 or b"ping" in reached.stderr, reached
        left = subprocess.Popen([*hosts[1].command, "sleep", "600"])
        assert str(hosts) == f"host0, host1, host2: {NAMESPACE_KIND}"
    assert left.wait(5) == -9
    assert network() == before


@needs_root
def test_what_a_crash_has_left_is_removed_by_the_next():
    crashed = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True, timeout=60, check=False)
    name, pid = crashed.stdout.split()
    assert crashed.returncode == -9 and is_alive(int(pid)) and name in network()[-1]
    with start_local_hosts(1):
        assert name not in network()[-1]
        wait_for(lambda: not is_alive(int(pid)), 5)


def test_hosts_agree_on_a_device_before_their_ranks_join():
    """One has GPUs, the other has not: NCCL here and gloo there would wait for each other."""
    with start_local_hosts(2) as hosts:
        result = labkit.run(RECORDS.with_name("gpus_on_one_host.py"), nproc=2, hosts=hosts, timeout_s=60)
    assert result.value("ranks") == 4
    assert result.session["device"] == "cpu"
    assert re.fullmatch(r"ran on CPU, as on \S+ \(the driver is too old\)", result.session["note"])


class KillsAtStart(Display):
    """Ends a host as soon as its ranks have begun."""

    def __init__(self, hosts):
        self._hosts = hosts

    def show(self, state, lines):
        if state.started_ranks == state.nproc:
            self._hosts.kill_host("host1")


def test_without_root_hosts_are_processes_that_meet_on_loopback(monkeypatch):
    monkeypatch.setattr(local_hosts, "can_make_namespaces", lambda: False)
    with start_local_hosts(2) as hosts:
        assert hosts.kind == PROCESS_KIND
        result = labkit.run(RECORDS, nproc=1, hosts=hosts)
        assert result.hosts == ("host0", "host1")
        with pytest.raises(
            LabError, match="host1 has no network cable, these hosts are processes that meet on loopback"
        ):
            hosts.disconnect_host("host1")
        with use_display(KillsAtStart(hosts)), pytest.raises(HostLost, match=r"^host1 was lost"):
            labkit.run(RECORDS, nproc=1, hosts=hosts, pause_s=60)


@pytest.mark.parametrize("count", [0, 9])
def test_a_number_of_hosts_that_cannot_be(count):
    with (
        pytest.raises(ParameterError, match=f"count = {count} hosts are not between 1 and 8"),
        start_local_hosts(count),
    ):
        pass
