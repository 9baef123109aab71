"""The torchrun of one host of several: started at once, and told the rendezvous result later."""

import contextlib
import json
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


def start_and_rendezvous(
    folder: RunFolder, request: Mapping[str, Any], guest: RendezvousMember, board: Mailbox
) -> tuple[subprocess.Popen[bytes], Heartbeats]:
    """Start torchrun, join the rendezvous while it imports torch, and return both.

    Args:
        folder: on this host.
        request: target, the program; nproc; device.
        guest: this host.
        board: where the hosts leave messages for each other.

    Raises:
        NotAllHosts: the hosts did not find each other.
    """
    sender, receiver = socket.socketpair()
    with sender:
        running = _start_torchrun(folder, request, guest, receiver)
        meeting = join_rendezvous(guest, board)
        _send_rendezvous_result(sender, guest, meeting)
    return running, meeting.heartbeats


def _start_torchrun(
    folder: RunFolder, request: Mapping[str, Any], guest: RendezvousMember, receiver: socket.socket
) -> subprocess.Popen[bytes]:
    """Start torchrun, which imports torch and then waits at ``receiver``; it is closed here."""
    nproc = request["nproc"]
    own = process.rank_environment(folder, nproc, request["device"], guest.hosts)
    own |= {ENV_HOST_NAME: guest.name, ENV_HOST_INDEX: str(guest.index)}
    words = [str(folder.path), "--rdzv-backend", process.SEVERAL_HOSTS, "--rdzv-endpoint", "met"]
    words += ["--rdzv-id", folder.path.name, "--rdzv-conf", f"told={receiver.fileno()}"]
    words += ["--nnodes", str(guest.hosts), "--nproc-per-node", str(nproc)]
    words += ["--log-dir", str(folder.torchrun_folder(guest.index)), *process.WORKER_ARGUMENTS]
    words += [request["target"]]
    with receiver:
        log = folder.host_torchrun_log(guest.index)
        return process.spawn_torchrun(words, own, log, receiver.fileno())


def _send_rendezvous_result(
    sender: socket.socket, guest: RendezvousMember, meeting: RendezvousResult
) -> None:
    """Send the rendezvous result to this host's torchrun; on host 0, with the listening socket of
    its store.
    """
    interface = meeting.interface
    environment = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        ENV_TOTAL_CORES: str(meeting.cores),
        ENV_CLOCK_AHEAD_S: str(meeting.clock_ahead_s),
    }
    message = {
        "index": guest.index,
        "hosts": guest.hosts,
        "address": meeting.address,
        "port": meeting.port,
        "environment": environment,
    }
    listeners = [meeting.listener.fileno()] if meeting.listener else []
    with (
        meeting.listener or contextlib.nullcontext(),
        # If torchrun has ended, its exit status says more.
        contextlib.suppress(BrokenPipeError),
    ):
        socket.send_fds(sender, [json.dumps(message).encode()], listeners)
