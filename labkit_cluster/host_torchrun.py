"""The torchrun of one host of several: started at once, and told the rendezvous result later."""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from labkit.environment import (
    ENV_CLOCK_AHEAD_S,
    ENV_HOST_INDEX,
    ENV_HOST_NAME,
    ENV_TOTAL_CORES,
)
from labkit.launcher import process
from labkit.runs.folder import RunFolder
from labkit_cluster.host_rendezvous import (
    Mailbox,
    RendezvousMember,
    RendezvousResult,
    join_rendezvous,
)
from labkit_cluster.listeners import Heartbeats

RENDEZVOUS_MODULE = "labkit_cluster.multi_host_handler"


def start_and_rendezvous(
    folder: RunFolder, request: Mapping[str, Any], member: RendezvousMember, mailbox: Mailbox
) -> tuple[subprocess.Popen[bytes], Heartbeats]:
    """Start torchrun, join the rendezvous while it imports torch, and return both.

    Args:
        folder: on this host.
        request: target, the program; nproc; device.
        member: this host.
        mailbox: where the hosts leave messages for each other.

    Raises:
        NotAllHosts: the hosts did not find each other.
    """
    sender, receiver = socket.socketpair()
    with sender:
        running = _start_torchrun(folder, request, member, receiver)
        result = join_rendezvous(member, mailbox)
        _send_rendezvous_result(sender, member, result)
    return running, result.heartbeats


def _start_torchrun(
    folder: RunFolder, request: Mapping[str, Any], member: RendezvousMember, receiver: socket.socket
) -> subprocess.Popen[bytes]:
    """Start torchrun, which imports torch and then waits at ``receiver``; it is closed here."""
    nproc = request["nproc"]
    own = process.rank_environment(folder, nproc, request["device"], member.hosts)
    own |= {ENV_HOST_NAME: member.name, ENV_HOST_INDEX: str(member.index)}
    words = [str(folder.path), "--rdzv-backend", RENDEZVOUS_MODULE, "--rdzv-endpoint", "met"]
    words += ["--rdzv-id", folder.path.name, "--rdzv-conf", f"told={receiver.fileno()}"]
    words += ["--nnodes", str(member.hosts), "--nproc-per-node", str(nproc)]
    words += ["--log-dir", str(folder.torchrun_folder(member.index)), *process.WORKER_ARGUMENTS]
    words += [request["target"]]
    with receiver:
        log = folder.host_torchrun_log(member.index)
        return process.spawn_torchrun(words, own, log, receiver.fileno())


def _send_rendezvous_result(
    sender: socket.socket, member: RendezvousMember, result: RendezvousResult
) -> None:
    """Send the rendezvous result to this host's torchrun; on host 0, with the listening socket of
    its store.
    """
    interface = result.interface
    environment = {
        "GLOO_SOCKET_IFNAME": interface,
        # NCCL takes a name for a prefix, so that eth1 is eth10 as well, unless = is in front.
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", f"={interface}"),
        ENV_TOTAL_CORES: str(result.cores),
        ENV_CLOCK_AHEAD_S: str(result.clock_ahead_s),
    }
    message = {
        "index": member.index,
        "hosts": member.hosts,
        "address": result.address,
        "port": result.port,
        "environment": environment,
    }
    listeners = [result.listener.fileno()] if result.listener else []
    with (
        result.listener or contextlib.nullcontext(),
        # If torchrun has ended, its exit status says more.
        contextlib.suppress(BrokenPipeError),
    ):
        socket.send_fds(sender, [json.dumps(message).encode()], listeners)
