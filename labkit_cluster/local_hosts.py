"""Make several hosts on one machine, to try and test runs on several hosts.

    with start_local_hosts(2) as hosts:
        print(hosts.kind)
        result = labkit.run("fsdp_wrap", nproc=2, hosts=hosts)

For root on Linux each is a network namespace: it has a network interface and a loopback of its own,
joined to the others by a cable (veth) to a switch (a bridge), which is in a namespace too. So the
machine's own network is not touched, and a cable can be pulled. Otherwise they are processes that
meet on loopback.
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

from labkit.environment import ENV_LOCAL_HOST
from labkit.errors import LabError, ParameterError
from labkit.launcher.process import loopback_interface
from labkit_cluster.host_rendezvous import LOOPBACK
from labkit_cluster.hosts import Host

HOST_NAMES = tuple(f"host{index}" for index in range(8))
NAMESPACE_KIND, PROCESS_KIND = (
    "network namespaces joined by a bridge",
    "processes that meet on loopback",
)
NAMESPACE_PREFIX = "labkit-"
SWITCH_NAME = "switch"
HOST_INTERFACE = "eth0"


class LocalHosts(Sequence[Host]):
    """Hosts on this machine, for ``labkit.run(hosts=…)``.

    Attributes:
        kind: a description of them.
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
        return HOST_INTERFACE if self.kind == NAMESPACE_KIND else loopback_interface()

    def host_address(self, name: str) -> str:
        """The address of a host on that interface."""
        return _host_address(HOST_NAMES.index(name)) if self.kind == NAMESPACE_KIND else LOOPBACK

    def kill_host(self, name: str) -> None:
        """Kill everything that runs on a host at once; the kernel closes its connections."""
        _kill_by_tag(_host_tag(name))

    def disconnect_host(self, name: str) -> None:
        """Pull the network cable of a host: its processes go on, and nothing comes in or out.

        Raises:
            LabError: these hosts have no cables.
        """
        self._set_link_state(name, "down")

    def reconnect_host(self, name: str) -> None:
        """Put the cable in again."""
        self._set_link_state(name, "up")

    def _set_link_state(self, name: str, state: str) -> None:
        if self.kind != NAMESPACE_KIND:
            raise LabError(
                f"{name} has no network cable, these hosts are {self.kind}: that needs root on"
                " Linux"
            )
        self.run_ip(name, f"link set {HOST_INTERFACE} {state}")

    def run_ip(self, name: str, command: str) -> None:
        """Change the network of a host that is a network namespace, by a command of ip(8)."""
        _run_ip_command("-n", _namespace_name(name), *command.split())


@contextlib.contextmanager
def start_local_hosts(count: int = 2) -> Iterator[LocalHosts]:
    """Start up to eight hosts called host0, host1 and so on; they end with the block."""
    if not 1 <= count <= len(HOST_NAMES):
        raise ParameterError(f"count = {count} hosts are not between 1 and {len(HOST_NAMES)}")
    names = HOST_NAMES[:count]
    plain = [
        Host(name, LOOPBACK, command=("env", f"{ENV_LOCAL_HOST}={_host_tag(name)}"))
        for name in names
    ]
    with contextlib.ExitStack() as at_end:
        for name in names:
            at_end.callback(_kill_by_tag, _host_tag(name))
        if not can_make_namespaces():
            yield LocalHosts(plain, PROCESS_KIND)
            return
        _remove_stale_namespaces()
        at_end.callback(_remove_namespaces, os.getpid())
        _create_namespaces(names)
        yield LocalHosts([_host_in_namespace(host) for host in plain], NAMESPACE_KIND)


def _host_in_namespace(host: Host) -> Host:
    return replace(
        host,
        address="",
        command=("ip", "netns", "exec", _namespace_name(host.name), *(host.command or ())),
    )


def can_make_namespaces() -> bool:
    """Tell whether this process may create network namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        return False
    try:
        _run_ip_command("netns", "add", _namespace_name("trial"))
        _run_ip_command("netns", "del", _namespace_name("trial"))
    except LabError:
        return False
    return True


def _create_namespaces(names: Sequence[str]) -> None:
    """Create a namespace for each host, and one for the switch that connects them."""
    switch = _namespace_name(SWITCH_NAME)
    commands = [
        f"netns add {switch}",
        f"-n {switch} link add name {SWITCH_NAME} type bridge",
        f"-n {switch} link set {SWITCH_NAME} up",
    ]
    for index, name in enumerate(names):
        host = _namespace_name(name)
        commands += [
            f"netns add {host}",
            f"-n {host} link add name {HOST_INTERFACE} type veth peer name {name} netns {switch}",
            f"-n {host} address add {_host_address(index)}/24 dev {HOST_INTERFACE}",
            f"-n {switch} link set {name} master {SWITCH_NAME} up",
            f"-n {host} link set lo up",
            f"-n {host} link set {HOST_INTERFACE} up",
        ]
    for command in commands:
        _run_ip_command(*command.split())


def _host_address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _run_ip_command(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def _namespace_name(name: str, owner: int | None = None) -> str:
    return f"{NAMESPACE_PREFIX}{owner or os.getpid()}-{name}"


def _host_tag(name: str) -> str:
    return f"{os.getpid()}-{name}"


def _kill_by_tag(mark: str) -> None:
    """Kill the processes with this tag until there are none."""
    while found := [each for each in psutil.process_iter() if _has_tag(each, mark)]:
        for each in found:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(found, 0.1)


def _has_tag(each: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return each.status() != psutil.STATUS_ZOMBIE and each.environ().get(ENV_LOCAL_HOST) == mark
    return False


def _remove_stale_namespaces() -> None:
    """Remove the hosts of processes that have ended."""
    for name in _run_ip_command("netns", "list").split():
        owner = name.removeprefix(NAMESPACE_PREFIX).partition("-")[0]
        if (
            name.startswith(NAMESPACE_PREFIX)
            and owner.isdigit()
            and not psutil.pid_exists(int(owner))
        ):
            _remove_namespaces(int(owner))


def _remove_namespaces(owner: int) -> None:
    """Remove the namespaces of this process, and kill what still runs in them."""
    for name in _run_ip_command("netns", "list").split():
        if name.startswith(_namespace_name("", owner)):
            for pid in _run_ip_command("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            # Another process has removed it.
            with contextlib.suppress(LabError):
                _run_ip_command("netns", "del", name)
