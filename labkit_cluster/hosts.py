"""Start an agent (host_agent.py) on each host through ssh: the notebook's side of a run.

    labkit.run("fsdp_wrap", nproc=2, hosts=["host0", "host1"])  # two ranks each, through ssh

Nothing listens here. Each agent uses the stdin and stdout of its ssh, and ends with it. It sends
the files of its ranks here while they grow: no folder has to be shared.
"""

import math
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.environment import ENV_SSH
from labkit.errors import HostLost, LabError, NotAllHosts, ParameterError
from labkit.runs.folder import ROOT, RunFolder
from labkit_cluster.agent_link import AgentLink
from labkit_cluster.host_rendezvous import RendezvousMember, files_digest, labkit_versions

# Environment variables with these prefixes are set on the other hosts, too.
ENV_PREFIXES_TO_FORWARD = ("NCCL_", "GLOO_", "TORCH_")
# ssh waits this long for a connection, and later for keepalives.
SSH_TIMEOUT_S = 10
END_TIMEOUT_S = 5.0
# After a failure on one host, the others get this long to end by themselves.
PEER_END_TIMEOUT_S = 3.0
# After one host has lost another, the others get this long to report whom they have lost.
PEER_LOSS_TIMEOUT_S = 1.5


@dataclass(frozen=True)
class Host:
    """A host for ``labkit.run(hosts=…)``.

    Attributes:
        name: its name for ssh, and in tables.
        address: the one the other hosts must use; "" for the first that all of them reach.
        python: its Python; "" for the same path as here.
        command: runs a command there, instead of ssh: such as ``("ip", "netns", "exec", "host1")``;
            None for ssh.
    """

    name: str
    address: str = ""
    python: str = ""
    command: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        is_text = isinstance(self.name, str) and self.name.isprintable()
        # ssh would take a name with a dash for an option.
        if not is_text or not self.name or self.name.startswith("-"):
            raise ParameterError(
                f"host {self.name!r} is no name that ssh could reach: give one as in `ssh NAME"
                " true`"
            )

    def agent_command(self) -> list[str]:
        """Return the command that starts the agent there."""
        agent = f"env PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(self._python_path)}"
        agent += " -P -m labkit_cluster.host_agent"
        if self.command is not None:
            return [*self.command, *shlex.split(agent)]
        options = f"-T -o BatchMode=yes -o ConnectTimeout={SSH_TIMEOUT_S}"
        options += f" -o ServerAliveInterval={SSH_TIMEOUT_S // 2} -o ServerAliveCountMax=2"
        # ssh passes its words to a shell, so the agent's command stays quoted.
        return [*_ssh_command(), *options.split(), "--", self.name, agent]

    def loss_reason(self, status: int | None, stderr: str) -> str:
        """Explain why an agent disappeared, from its command's exit status (None while it runs) and
        stderr.
        """
        last = (stderr.strip().splitlines() or [""])[-1]
        give_python = f"give Host({self.name!r}, python='…')"
        if self.command is None and status == 255:
            return (
                f"{self.name} cannot be reached by ssh any more, or never could ({last}): "
                f"mend `{self._ssh_test_command}`"
            )
        if "Unknown option: -P" in stderr:
            return f"{self.name} has a Python before 3.11 as {self._python_path}: {give_python}"
        if status in (126, 127):
            return f"{self.name} has no Python at {self._python_path} ({last}): {give_python}"
        if "No module named" in stderr:
            return (
                f"labkit cannot start on {self.name} ({last}): install there what is installed"
                f" here, at {ROOT}"
            )
        how = f"with {last!r}" if last else "without output"
        return f"{self.name} was lost: its part of the run ended {how}. Is it up? Then run again"

    @property
    def _python_path(self) -> str:
        return self.python or sys.executable

    @property
    def _ssh_test_command(self) -> str:
        return shlex.join([*_ssh_command(), self.name, "true"])


def _ssh_command() -> list[str]:
    try:
        return shlex.split(os.environ.get(ENV_SSH, "")) or ["ssh"]
    except ValueError as error:
        raise ParameterError(f"{ENV_SSH}={os.environ[ENV_SSH]!r} is no command: {error}") from None


def parse_hosts(hosts: Any) -> list[Host]:
    """Return the hosts of a run; raise ParameterError unless they are distinct names or Hosts."""
    if isinstance(hosts, str | Host) or not isinstance(hosts, Sequence) or not hosts:
        raise ParameterError(
            f"hosts = {hosts!r} is no list of hosts: give their names, such as ['host0', 'host1']"
        )
    found = [each if isinstance(each, Host) else Host(each) for each in hosts]
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ParameterError(f"hosts = {names} names one twice: its ranks are set by nproc")
    return found


class MultiHostBackend:
    """Run one torchrun per host as a ``Backend``.

    Args:
        folder: of the run, on this machine.
        hosts: where each torchrun runs.
        request: what each runs, in the format of host_agent.py.
    """

    def __init__(self, folder: RunFolder, hosts: Sequence[Host], request: Mapping[str, Any]):
        self._folder, self._request = folder, request
        self._change = threading.Condition()
        self._agents = {
            host: AgentLink(
                host.agent_command(), folder, index, self._change, self._broadcast_message
            )
            for index, host in enumerate(hosts)
        }
        self._failed_at, self._has_ended = math.inf, False

    @property
    def is_warm(self) -> bool:
        """False: torchrun starts as a new Python on each host."""
        return False

    def start(self) -> None:
        """Start an agent on each host, without waiting."""
        token, names = secrets.token_hex(16), [host.name for host in self._agents]
        program, payload = Path(self._request["target"]), self._folder.payload
        forwarded = [name for name in os.environ if name.startswith(ENV_PREFIXES_TO_FORWARD)]
        request = {
            **self._request,
            "name": self._folder.path.name,
            "working_folder": os.getcwd(),
            "given": payload.read_bytes().hex() if payload.exists() else "",
            "versions": labkit_versions(),
            "sum": files_digest(program) if program.suffix == ".py" else "",
            "environment": {name: os.environ[name] for name in forwarded},
        }
        for index, (host, agent) in enumerate(self._agents.items()):
            member = RendezvousMember(index, len(names), host.name, token, host.address, names)
            agent.send_message({**request, "member": asdict(member)})
        # Start only now, because the first agent's messages go to all.
        for agent in self._agents.values():
            agent.start()

    def _broadcast_message(self, message: Mapping[str, Any]) -> None:
        for agent in self._agents.values():
            agent.send_message(message)

    def wait(self, timeout_s: float) -> int:
        """Return the exit status once all hosts have ended.

        After a failure on one host, the others get a moment, because one may know the cause.

        Raises:
            subprocess.TimeoutExpired: some had not ended after ``timeout_s`` seconds.
            NotAllHosts: they did not find each other.
            HostLost: one was lost.
            LabError: a file of a host cannot be written here.
        """
        agents, give_up = self._agents.values(), time.monotonic() + timeout_s
        with self._change:
            while True:
                self._raise_failure()
                if all(agent.status is not None for agent in agents):
                    return max(agent.status or 0 for agent in agents)
                now = time.monotonic()
                if any(agent.status for agent in agents):
                    self._failed_at = min(self._failed_at, now)
                if now > self._failed_at + PEER_END_TIMEOUT_S:
                    self.end_ranks()
                if now > give_up:
                    raise subprocess.TimeoutExpired("torchrun", timeout_s)
                self._change.wait(min(give_up - now, PEER_END_TIMEOUT_S))

    def _raise_failure(self) -> None:
        agents = self._agents.values()
        if reason := next((agent.start_failure for agent in agents if agent.start_failure), ""):
            raise NotAllHosts(reason)
        # Its agent may have ended, and the agent's exit status says more.
        if any(agent.unreachable_peers for agent in agents):
            self._change.wait_for(self._hosts_without_status, PEER_LOSS_TIMEOUT_S)
        for host in self._hosts_without_status():
            raise HostLost(host.loss_reason(*self._agents[host].exit_status_and_stderr()))
        if any(agent.unreachable_peers for agent in agents):
            raise HostLost(
                _link_loss_text(
                    {host.name: agent.unreachable_peers for host, agent in self._agents.items()}
                )
            )
        for host, agent in self._agents.items():
            if agent.status and agent.status < 0:
                name = signal.Signals(-agent.status).name
                raise HostLost(
                    f"torchrun on {host.name} was ended by {name}: is that host short of memory?"
                )
            if agent.problem:
                raise LabError(f"{host.name}: {agent.problem}")

    def _hosts_without_status(self) -> list[Host]:
        return [
            host for host, agent in self._agents.items() if agent.is_closed and agent.status is None
        ]

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the stacks of these ranks, which continue until ``end_ranks``."""
        agents = self._agents.values()
        self._broadcast_message({"end": "stacks"})
        with self._change:
            self._change.wait_for(
                lambda: all(agent.stacks or agent.has_ended for agent in agents), END_TIMEOUT_S
            )
        answers = {rank: stack for agent in agents for rank, stack in agent.stacks.items()}
        return dict.fromkeys(ranks, "(its host does not answer)") | answers

    def end_ranks(self) -> None:
        """Stop the ranks on every host, and receive the rest of their files."""
        if not self._has_ended:
            self._has_ended = True
            self._broadcast_message({"end": "now"})

    def stop(self) -> list[int]:
        """Stop all processes; a host itself reports one that does not die, so the list is empty."""
        self.end_ranks()
        agents = self._agents.values()
        with self._change:
            self._change.wait_for(lambda: all(agent.has_ended for agent in agents), END_TIMEOUT_S)
        for agent in agents:
            agent.close_stdin()
        for agent in agents:
            agent.close()
        return []


def _link_loss_text(lost: Mapping[str, Sequence[str]]) -> str:
    """Describe lost connections between the first host and the others."""
    first, *others = lost
    unheard = lost[first] or [name for name in others if lost[name]]
    advice = "are both up, and the network between them? Then run again"
    if len(others) == 1:
        return f"{first} and {others[0]} no longer hear each other: {advice}"
    alone = [first] if set(unheard) == set(others) else unheard
    return f"{' and '.join(alone)} and the other hosts no longer hear each other: {advice}"
