"""Type commands on local hosts, as on machines that one has logged in to.

    with start_local_hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        terminals = Terminals(hosts, Path(folder))
        said = terminals.run('echo "I am $(hostname), my name leads to $(hostname -i)"')
        print(said["host0"])

Where hosts are network namespaces, each gets what a real machine has: a name of its own, a file
/etc/hosts in which this name leads to 127.0.1.1, as Debian's installer writes it, and an interface
docker0, as Docker makes it, with the same address on every host. The machine's own name and files
are not touched.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from labkit_cluster.local_hosts import NAMESPACE_KIND, LocalHosts

OWN_NAME_ADDRESS = "127.0.1.1"
DOCKER_INTERFACE, DOCKER_ADDRESS = "docker0", "172.17.0.1/16"
# In a host's namespaces: its name, and its file /etc/hosts. Both end with the command.
AS_MACHINE = ("unshare", "--mount", "--uts", "sh", "-c")
NAME_AND_RUN = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
POLL_S = 0.05


class Terminals:
    """A terminal on each host; what is typed runs in one folder, which all hosts share.

    The shell has ADDRESS, the host's own address, and IS_HOST, 1 on the first host and 0 elsewhere.
    """

    def __init__(self, hosts: LocalHosts, folder: Path):
        self.hosts, self.folder = hosts, folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        if self.are_machines:
            self._make_machines()

    @property
    def are_machines(self) -> bool:
        """Whether the hosts have networks and names of their own, and have not been closed."""
        return self.hosts.kind == NAMESPACE_KIND and self.folder.exists()

    def start(self, line: str, *names: str) -> None:
        """Type a line on these hosts, or on all, without waiting."""
        self._running = {}
        for index, host in enumerate(self.hosts):
            if names and host.name not in names:
                continue
            assert host.command is not None, "local hosts have a command"
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            own = {"ADDRESS": self.hosts.host_address(host.name), "IS_HOST": int(index == 0)}
            variables = {"PATH": path, "OMP_NUM_THREADS": 1, **own}
            words = [f"{name}={value}" for name, value in variables.items()]
            machine = (
                [*AS_MACHINE, NAME_AND_RUN, "sh", host.name, str(self._hosts_file(host.name))]
                if self.are_machines
                else []
            )
            command = [*host.command, *machine, "env", *words, "bash", "-c", line]
            with self._output(host.name).open("wb") as output:
                self._running[host.name] = subprocess.Popen(
                    command, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT
                )

    def wait(self, limit_s: float = 60) -> dict[str, str]:
        """Return what each host has printed; after the limit, kill what still runs."""
        give_up = time.monotonic() + limit_s
        while any(each.poll() is None for each in self._running.values()):
            if time.monotonic() > give_up:
                self.stop()
            time.sleep(POLL_S)
        return {name: self._output(name).read_text(errors="replace") for name in self._running}

    def wait_for(self, words: str, name: str, limit_s: float = 60) -> None:
        """Wait until a host has printed these words, or what was typed there has ended."""
        give_up = time.monotonic() + limit_s
        while words not in self._output(name).read_text(errors="replace"):
            if self._running[name].poll() is not None or time.monotonic() > give_up:
                return
            time.sleep(POLL_S)

    def run(self, line: str, *names: str, limit_s: float = 60) -> dict[str, str]:
        """Type a line on these hosts, or on all, and return what each has printed."""
        self.start(line, *names)
        return self.wait(limit_s)

    def stop(self) -> None:
        """Kill whatever runs on the hosts."""
        for host in self.hosts:
            self.hosts.kill_host(host.name)

    def _make_machines(self) -> None:
        addresses = {host.name: self.hosts.host_address(host.name) for host in self.hosts}
        for name in addresses:
            known = addresses | {"localhost": "127.0.0.1", name: OWN_NAME_ADDRESS}
            lines = [f"{address} {each}\n" for each, address in known.items()]
            self._hosts_file(name).write_text("".join(lines))
            for command in (
                f"link add name {DOCKER_INTERFACE} type bridge",
                f"address add {DOCKER_ADDRESS} dev {DOCKER_INTERFACE}",
                f"link set {DOCKER_INTERFACE} up",
            ):
                self.hosts.run_ip(name, command)

    def _hosts_file(self, name: str) -> Path:
        return self.folder / f"hosts_of_{name}"

    def _output(self, name: str) -> Path:
        return self.folder / f"{name}.out"
