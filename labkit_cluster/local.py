"""Several hosts on one machine, to try out and to test what happens among hosts.

    with hosts_on_this_machine(2) as hosts:
        print(hosts.kind)
        result = labkit.run("fsdp_wrap", nproc=2, hosts=hosts)

As root on Linux each is a network namespace: it has a network interface and a loopback of its own, joined to the others
by a cable (veth) to a switch (a bridge), which lies in a namespace, too. So the machine's own network is not touched,
and a cable can be pulled. Elsewhere they are processes that meet on loopback.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import overload

import psutil

from labkit.errors import LabError, ParameterError
from labkit.launcher.process import loopback_interface
from labkit_cluster.hosts import Host
from labkit_cluster.meeting import LOOPBACK

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
NAMESPACES, PROCESSES = "network namespaces joined by a bridge", "processes that meet on loopback"
MARK = "LABKIT_HOST_ON_THIS_MACHINE"
"""Environment variable of all that runs on such a host: whose it is, and which one."""
PREFIX = "labkit-"
SWITCH = "switch"
CABLE = "eth0"


class HostsHere(Sequence[Host]):
    """Hosts on this machine, for ``labkit.run(hosts=…)``.

    Attributes:
        kind: what they are, in words.
    """

    def __init__(self, hosts: Sequence[Host], kind: str):
        self._hosts, self.kind = list(hosts), kind

    @overload
    def __getitem__(self, index: int) -> Host: ...
    @overload
    def __getitem__(self, index: slice) -> list[Host]: ...
    def __getitem__(self, index: int | slice) -> Host | list[Host]:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __repr__(self) -> str:
        return f"{', '.join(host.name for host in self)}: {self.kind}"

    @property
    def interface(self) -> str:
        """The network interface by which a host reaches the others."""
        return CABLE if self.kind == NAMESPACES else loopback_interface()

    def address(self, name: str) -> str:
        """The address of a host on that interface."""
        return _address(NAMES.index(name)) if self.kind == NAMESPACES else LOOPBACK

    def kill(self, name: str) -> None:
        """End everything that runs on a host at once, as a power cut would."""
        _kill(_mark(name))

    def cut_off(self, name: str) -> None:
        """Pull the network cable of a host: what runs there goes on, and nothing comes in or out.

        Raises:
            LabError: these hosts have no cables.
        """
        self._set_cable(name, "down")

    def plug_in(self, name: str) -> None:
        """Put the cable in again."""
        self._set_cable(name, "up")

    def _set_cable(self, name: str, state: str) -> None:
        if self.kind != NAMESPACES:
            raise LabError(f"{name} has no network cable, these hosts are {self.kind}: that needs root on Linux")
        _ip("-n", _namespace(name), "link", "set", CABLE, state)


@contextlib.contextmanager
def hosts_on_this_machine(count: int = 2) -> Iterator[HostsHere]:
    """Hosts called alpha, beta, gamma and so on, which end with the block, and all that runs on them with them.

    Args:
        count: how many, at most eight.
    """
    if not 1 <= count <= len(NAMES):
        raise ParameterError(f"count = {count} hosts are not between 1 and {len(NAMES)}")
    names = NAMES[:count]
    plain = [Host(name, LOOPBACK, command=("env", f"{MARK}={_mark(name)}")) for name in names]
    with contextlib.ExitStack() as at_end:
        for name in names:
            at_end.callback(_kill, _mark(name))
        if not namespaces_work():
            yield HostsHere(plain, PROCESSES)
            return
        _remove_what_crashed()
        at_end.callback(_remove, os.getpid())
        _join(names)
        yield HostsHere([_inside_its_namespace(host) for host in plain], NAMESPACES)


def _inside_its_namespace(host: Host) -> Host:
    return replace(host, address="", command=("ip", "netns", "exec", _namespace(host.name), *(host.command or ())))


def namespaces_work() -> bool:
    """Whether this process may make network namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        return False
    trial = _namespace("trial")
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, check=False).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", trial], capture_output=True, check=False).returncode == 0


def _join(names: Sequence[str]) -> None:
    """Make a namespace for each host, and one for the switch into which all are plugged."""
    switch = _namespace(SWITCH)
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "name", SWITCH, "type", "bridge")
    _ip("-n", switch, "link", "set", SWITCH, "up")
    for index, name in enumerate(names):
        host = _namespace(name)
        _ip("netns", "add", host)
        _ip("-n", host, "link", "add", "name", CABLE, "type", "veth", "peer", "name", name, "netns", switch)
        _ip("-n", host, "address", "add", f"{_address(index)}/24", "dev", CABLE)
        _ip("-n", switch, "link", "set", name, "master", SWITCH, "up")
        for each in ("lo", CABLE):
            _ip("-n", host, "link", "set", each, "up")


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def _namespace(name: str, owner: int | None = None) -> str:
    return f"{PREFIX}{owner or os.getpid()}-{name}"


def _mark(name: str) -> str:
    return f"{os.getpid()}-{name}"


def _kill(mark: str) -> None:
    """End the processes with this mark, until there are none."""
    while found := [each for each in psutil.process_iter() if _has(each, mark)]:
        for each in found:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(found, 0.1)


def _has(each: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return each.status() != psutil.STATUS_ZOMBIE and each.environ().get(MARK) == mark
    return False


def _remove_what_crashed() -> None:
    """Remove the hosts of processes that are gone."""
    for name in _ip("netns", "list").split():
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and owner.isdigit() and not psutil.pid_exists(int(owner)):
            _remove(int(owner))


def _remove(owner: int) -> None:
    """Remove the namespaces that this process made, and end what still runs in them."""
    for name in _ip("netns", "list").split():
        if name.startswith(_namespace("", owner)):
            for pid in _ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(LabError):  # another process has removed it
                _ip("netns", "del", name)
