"""Let the hosts of a run find each other while torchrun starts on each of them.

torchrun's own rendezvous trusts a name and a port. If the name is not the first host's own, no host
becomes the store and all wait for a minute; if a host falls back to itself, it trains alone
(pytorch/pytorch#67547, #73656). Here every host publishes its addresses and probes all others, and
all choose the same one for each host: an address that every other host has reached. A host that is
missing, unreachable or has another torch is named within seconds.
"""

import hashlib
import os
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import psutil

from labkit import requirements
from labkit.errors import NotAllHosts
from labkit.runs.folder import ROOT, read_json, write_json
from labkit_cluster.listeners import (
    PROBE_TIMEOUT_S,
    Endpoint,
    Heartbeats,
    Listeners,
    ProbeResult,
    probe_listeners,
)

JOIN_TIMEOUT_S = 12.0  # how long the hosts wait for each other
POLL_PERIOD_S = 0.02
LOOPBACK = "127.0.0.1"


class Mailbox(Protocol):
    """Exchange messages between the hosts of a run."""

    def put(self, name: str, content: Mapping[str, Any]) -> None:
        """Publish a message to all hosts."""

    def get(self, name: str) -> dict[str, Any]:
        """Return the message of this name, {} if there is none yet."""


class FolderMailbox:
    """A mailbox in a folder that all hosts share."""

    def __init__(self, folder: Path):
        self._folder = folder

    def put(self, name: str, content: Mapping[str, Any]) -> None:
        write_json(self._message_path(name), dict(content))

    def get(self, name: str) -> dict[str, Any]:
        # Otherwise NFS may hide a new file for a minute.
        os.utime(self._folder)
        return read_json(self._message_path(name))

    def _message_path(self, name: str) -> Path:
        return self._folder / f"meeting_{name}.json"


@dataclass(frozen=True)
class RendezvousMember:
    """One host in the rendezvous.

    Attributes:
        index: 0 to hosts - 1; torchrun's store will be on host 0.
        hosts: the number of hosts.
        name: its name in messages and tables.
        token: a secret of the run, by which hosts recognise each other.
        address: the one the others must use; "" for any that works.
        names: of all hosts, if they are known before.
    """

    index: int
    hosts: int
    name: str
    token: str
    address: str = ""
    names: Sequence[str] = ()


@dataclass(frozen=True)
class RendezvousResult:
    """What a host knows after the rendezvous.

    Attributes:
        address: of host 0.
        port: of its listening socket.
        listener: that socket, on host 0.
        local_address: this host's own address, at which the others reach it.
        heartbeats: the connections to the others.
        clock_ahead_s: how far host 0's clock is ahead of this one's.
        cores: of all hosts together; hosts on one machine share its cores.
    """

    address: str
    port: int
    listener: socket.socket | None
    local_address: str
    heartbeats: Heartbeats
    clock_ahead_s: float
    cores: int

    @property
    def interface(self) -> str:
        """The network interface of this host's address."""
        for name, found in psutil.net_if_addrs().items():
            if any(each.address == self.local_address for each in found):
                return name
        raise NotAllHosts(
            f"no network interface of this host holds its own address {self.local_address}: did it"
            " just change?"
        )


def join_rendezvous(member: RendezvousMember, mailbox: Mailbox) -> RendezvousResult:
    """Wait until all hosts have joined and reach each other; every host calls this.

    Raises:
        NotAllHosts: on every host, if one is missing, unreachable, or has other versions.
    """
    try:
        with Listeners(member.token, _usable_addresses(member)) as listeners:
            return _exchange_addresses(member, mailbox, listeners)
    except NotAllHosts as error:
        if not mailbox.get("failed"):
            mailbox.put("failed", {"message": str(error)})
        raise


def _exchange_addresses(
    member: RendezvousMember, mailbox: Mailbox, listeners: Listeners
) -> RendezvousResult:
    give_up = time.monotonic() + JOIN_TIMEOUT_S
    info = {
        "name": member.name,
        "ports": listeners.ports,
        "versions": host_versions(),
        "cores": len(requirements.usable_cores()),
        "machine": _machine_id(),
        "network": _network_namespace_id(),
    }
    mailbox.put(f"host_{member.index}", info)
    infos = _wait_for_all(member, mailbox, "host", give_up)
    names = [each["name"] for each in infos]
    refuse_version_mismatch(
        names[0], infos[0]["versions"], member.name, infos[member.index]["versions"]
    )
    probes = probe_listeners(dict(_peer_endpoints(member.index, infos)), member.token, member.index)
    mailbox.put(f"reached_{member.index}", _probe_summary(probes))
    chosen = choose_addresses(names, infos, _wait_for_all(member, mailbox, "reached", give_up))
    port = infos[0]["ports"][chosen[0]]
    cores = sum({each["machine"]: each["cores"] for each in infos}.values())
    if member.index == 0:
        listener, links = listeners.take_listener(chosen[0])
        heartbeats = Heartbeats({names[index]: link for index, link in links.items()})
        return RendezvousResult(chosen[0], port, listener, chosen[0], heartbeats, 0.0, cores)
    to_host = probes.pop((0, chosen[0]))
    for each in probes.values():
        if each.link:
            each.link.close()
    assert to_host.link
    heartbeats = Heartbeats({names[0]: to_host.link})
    return RendezvousResult(
        chosen[0], port, None, chosen[member.index], heartbeats, to_host.clock_ahead_s, cores
    )


def _wait_for_all(
    member: RendezvousMember, mailbox: Mailbox, kind: str, give_up: float
) -> list[dict[str, Any]]:
    """Return the messages of this kind from all hosts, once they are there."""
    return [
        _wait_for_message(mailbox, f"{kind}_{index}", _member_name(member, index), give_up)
        for index in range(member.hosts)
    ]


def _member_name(member: RendezvousMember, index: int) -> str:
    return member.names[index] if member.names else f"host {index} of {member.hosts}"


def _wait_for_message(mailbox: Mailbox, name: str, whom: str, give_up: float) -> dict[str, Any]:
    while time.monotonic() < give_up:
        if failed := mailbox.get("failed"):
            raise NotAllHosts(failed["message"])
        if found := mailbox.get(name):
            return found
        time.sleep(POLL_PERIOD_S)
    raise NotAllHosts(
        f"{whom} did not come within {JOIN_TIMEOUT_S:g} s, and no rank was started: "
        "is it up, or still starting? Then run again"
    )


def _peer_endpoints(
    index: int, infos: Sequence[Mapping[str, Any]]
) -> Iterable[tuple[Endpoint, int]]:
    """Yield the addresses and ports to probe, loopback only for hosts that share it."""
    for other, info in enumerate(infos):
        shared = info["network"] == infos[index]["network"]
        for address, port in info["ports"].items():
            if other != index and (shared or not _is_loopback(address)):
                yield (other, address), port


def _probe_summary(probes: Mapping[Endpoint, ProbeResult]) -> dict[str, Any]:
    """Return, by host and address, this host's own address on that route, or the problem."""
    summary: dict[str, dict[str, dict[str, str]]] = {"reached": {}, "problems": {}}
    for (host, address), probe in probes.items():
        kind, text = (
            ("problems", probe.problem) if probe.problem else ("reached", probe.local_address)
        )
        summary[kind].setdefault(str(host), {})[address] = text
    return summary | {"done": True}


def choose_addresses(
    names: Sequence[str], infos: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Choose an address of each host that every other host has reached, the same on all hosts.

    Args:
        names: of the hosts.
        infos: each host's first message, with its addresses in order of preference.
        reports: of each host, from ``_probe_summary``.

    Raises:
        NotAllHosts: there is none.
    """
    reached = [{int(host): ways for host, ways in report["reached"].items()} for report in reports]
    others = range(1, len(names))
    for index in others:
        if not reached[index].get(0):
            raise _unreachable_error(names, index, 0, reports[index]["problems"].get("0", {}))
    common = [
        address
        for address in infos[0]["ports"]
        if all(address in reached[index][0] for index in others)
    ]
    if not common:
        ways = "; ".join(
            f"{names[index]} reaches {', '.join(reached[index][0])}" for index in others
        )
        raise NotAllHosts(
            f"{names[0]} has no address that all hosts reach ({ways}): join them by one network,"
            f" and name {names[0]}'s address there: Host({names[0]!r}, address='10.0.0.5')"
        )
    chosen = [common[0]]
    for index in others:
        local = reached[index][0][common[0]]
        ports = infos[index]["ports"]
        chosen.append(local if local in ports else next(iter(ports)))
    for index, known in enumerate(reached):
        for other, address in enumerate(chosen):
            if other != index and address not in known.get(other, {}):
                problem = reports[index]["problems"].get(str(other), {}).get(address, "not tried")
                raise _unreachable_error(names, index, other, {address: problem})
    return chosen


def _unreachable_error(
    names: Sequence[str], index: int, other: int, problems: Mapping[str, str]
) -> NotAllHosts:
    why = (
        "; ".join(f"{address}: {problem}" for address, problem in problems.items())
        or "it names only its loopback"
    )
    return NotAllHosts(
        f"{names[index]} cannot reach {names[other]} ({why}): let the firewall of {names[other]}"
        f" pass what comes from {names[index]}, or name another address: Host({names[other]!r},"
        " address='10.0.0.5')"
    )


def _usable_addresses(member: RendezvousMember) -> list[str]:
    """Return where this host listens; raise NotAllHosts if the requested address is not its own."""
    own = local_addresses()
    if not member.address:
        return own if member.hosts > 1 else [LOOPBACK]
    advice = (
        f"give one of {', '.join([each for each in own if not _is_loopback(each)] or own)}, or"
        " leave it out"
    )
    with_limit = ThreadPoolExecutor(max_workers=1)
    try:
        found = with_limit.submit(socket.getaddrinfo, member.address, None).result(PROBE_TIMEOUT_S)
    except (OSError, UnicodeError, TimeoutError):
        raise NotAllHosts(
            f"the address {member.address!r} of {member.name} does not resolve there: {advice}"
        ) from None
    finally:
        with_limit.shutdown(wait=False)
    resolved = {str(info[4][0]) for info in found}
    usable = [address for address in own if address in resolved]
    if not usable:
        given = (
            member.address
            if member.address in resolved
            else f"{member.address} ({', '.join(sorted(resolved))})"
        )
        raise NotAllHosts(
            f"the address {given} of {member.name} is not its own, so nobody would find it there:"
            f" {advice}"
        )
    return usable


def local_addresses() -> list[str]:
    """Return this host's addresses, loopback last, which only hosts on one machine reach."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [
        each.address
        for name in psutil.net_if_addrs().values()
        for each in name
        if each.family in families
    ]
    # An address with a scope such as %eth0 means nothing on another host.
    usable = [address for address in found if "%" not in address]
    return sorted(usable, key=lambda address: (_is_loopback(address), ":" in address))


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _machine_id() -> str:
    """Return a text that is equal for hosts on one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def _network_namespace_id() -> str:
    """Return a text that is equal for hosts that share a loopback."""
    own = Path("/proc/self/ns/net")
    return f"{_machine_id()} {own.stat().st_ino if own.exists() else ''}"


def host_versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts of a run."""
    torch = next((each.version for each in metadata.distributions(name="torch")), "none")
    return {"torch": torch, **labkit_versions()}


def labkit_versions() -> dict[str, str]:
    """Return the versions that must also equal those of the notebook, which may lack torch."""
    sources = [
        path
        for folder in ("labkit", "labkit_cluster", "launch")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    # A digest, because checkouts that differ may have the same version.
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "labkit": files_digest(*sources)[:12],
    }


def files_digest(*paths: Path) -> str:
    """Return a text that is equal for equal files."""
    together = hashlib.sha256()
    for path in paths:
        together.update(path.read_bytes())
    return together.hexdigest()


def refuse_version_mismatch(
    one: str, theirs: Mapping[str, str], other: str, ours: Mapping[str, str]
) -> None:
    """Raise NotAllHosts if two hosts differ in one of these versions."""
    for name, version in theirs.items():
        if ours[name] != version:
            raise NotAllHosts(
                f"{one} has {name} {version} and {other} has {ours[name]}: install the same on all"
                " hosts"
            )
