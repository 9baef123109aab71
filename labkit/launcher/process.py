"""The processes of a run: start them, find them, end exactly them.

A process belongs to a run when its environment names the run's folder, which everything inherits that torchrun and the
ranks start, or when it descends from the run's torchrun, which on Linux adopts orphans. The first finds what is left
when torchrun is gone, the second a program that changed its environment. Only what is both escapes: an orphan with an
empty environment after a kill -9 of torchrun, and, outside Linux, always. A bare torchrun leaves all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from labkit import requirements
from labkit.launcher import warm
from labkit.runs import private
from labkit.runs.folder import (
    AHEAD,
    CORES,
    DEVICE,
    GIVEN,
    HOST,
    NODE,
    NOTEBOOK_PID,
    RANKS,
    ROOT,
    VARIABLE,
    RunFolder,
)

if TYPE_CHECKING:
    from labkit_cluster.meeting import Guest, Meeting

STOP_LIMIT_S = 5.0
STACK_LIMIT_S = 1.0
CACHE, TORCHS_OWN = "TORCHINDUCTOR_CACHE_DIR", "torchinductor_"
WORKER = ("--no-python", sys.executable, "-u", "-P", "-m", "labkit.launcher.worker")
ONE_HOST, SEVERAL_HOSTS = "one-host", "several-hosts"
"""What rendezvous.py registers with torchrun."""
TORCHRUNS_OWN = "PET_"
"""How the names of environment variables begin that are options of torchrun."""
LONGEST_WORD = 4096
"""Of what a torchrun is told of a meeting."""
STARTING_FRAMES = (
    "<frozen runpy>",
    *(str(Path(__file__).with_name(name)) for name in ("worker.py", "torchrun.py", "parent.py")),
    "torch/distributed/elastic/",
    "torch/distributed/launcher/",
    "torch/distributed/run.py",
)


Running = subprocess.Popen[bytes] | warm.Torchrun


def start(
    folder: RunFolder,
    program: str,
    arguments: Sequence[str],
    nproc: int,
    own: dict[str, str],
    parent: warm.Parent | None,
) -> Running:
    """Start torchrun with ``nproc`` ranks of a program; returns at once.

    Args:
        folder: the run's folder, which exists.
        program: absolute path of a .py file, or a module's name.
        arguments: the program's command line.
        nproc: number of ranks.
        own: its environment.
        parent: forks it, if it can; otherwise it begins as a new Python.
    """
    words = [str(folder.path), *_torchrun_arguments(folder, nproc), program, *arguments]
    if parent:
        request = {"arguments": words, "environment": own, "log": str(folder.torchrun_log)}
        with contextlib.suppress(warm.Gone):
            return parent.fork(request | {"working_folder": os.getcwd()})
    return _begin(words, own, folder.torchrun_log)


def start_among_hosts(
    folder: RunFolder, request: Mapping[str, Any], guest: Guest, told: socket.socket
) -> subprocess.Popen[bytes]:
    """Start the torchrun of one host of several; returns at once.

    It imports torch, and then waits for ``tell_meeting`` at the other end of ``told``.

    Args:
        folder: on this host.
        request: holds the arguments of ``start``: target, the program; arguments, its command line; nproc; device.
        guest: this host.
        told: is closed here afterwards.
    """
    nproc = request["nproc"]
    own = environment(folder, nproc, request["device"], guest.hosts) | {HOST: guest.name, NODE: str(guest.index)}
    meet = ["--rdzv-backend", SEVERAL_HOSTS, "--rdzv-endpoint", "met", "--rdzv-id", folder.path.name]
    meet += ["--rdzv-conf", f"told={told.fileno()}", "--nnodes", str(guest.hosts), "--nproc-per-node", str(nproc)]
    words = [str(folder.path), *meet, "--log-dir", str(folder.torchrun_folder(guest.index)), *WORKER]
    words += [request["target"], *request["arguments"]]
    with told:
        return _begin(words, own, folder.torchrun_log_of(guest.index), told.fileno())


def tell_meeting(teller: socket.socket, guest: Guest, meeting: Meeting) -> None:
    """Let the torchrun of this host go on with what came of the meeting, and give it the door of its store."""
    interface = meeting.interface
    environment = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    environment |= {CORES: str(meeting.cores), AHEAD: str(meeting.ahead_s)}
    word = {"index": guest.index, "hosts": guest.hosts, "address": meeting.address, "port": meeting.port}
    door = [meeting.door.fileno()] if meeting.door else []
    with meeting.door or contextlib.nullcontext(), contextlib.suppress(BrokenPipeError):  # its exit status says more
        socket.send_fds(teller, [json.dumps(word | {"environment": environment}).encode()], door)


def _begin(words: Sequence[str], own: dict[str, str], log: Path, *files: int) -> subprocess.Popen[bytes]:
    """A new Python that is torchrun, with these arguments, this environment and these open files."""
    with private.open_file(log, "wb") as output:
        return subprocess.Popen(
            # -P: a random.py in the notebook's folder must not shadow the real one
            [sys.executable, "-P", "-m", "labkit.launcher.torchrun", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the interrupt key of a terminal or kernel is for the notebook's process alone
            pass_fds=files,
            env=own,
        )


def environment(folder: RunFolder, nproc: int, device: str, hosts: int = 1) -> dict[str, str]:
    """The environment of one host's torchrun and its ranks: the notebook's, plus what a run needs."""
    outer = {"MPLBACKEND", HOST, NODE, CORES, AHEAD}  # the first needs a notebook, the others are of an outer run
    inherited = {
        name: value for name, value in os.environ.items() if name not in outer and not name.startswith(TORCHRUNS_OWN)
    }
    loopback = loopback_interface()
    return inherited | {
        VARIABLE: str(folder.path),
        NOTEBOOK_PID: str(os.getpid()),
        DEVICE: device,
        GIVEN: folder.given_sha256,
        "OMP_NUM_THREADS": str(max(1, len(requirements.cores()) // nproc)),
        RANKS: str(hosts * nproc),
        "GLOO_SOCKET_IFNAME": loopback,  # of several hosts another, which they say when they have met
        "NCCL_SOCKET_IFNAME": loopback,
        "PYTHONUNBUFFERED": "1",
        **_compile_cache(inherited),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")])),
    }


def _compile_cache(inherited: Mapping[str, str]) -> dict[str, str]:
    """Where torch.compile keeps programs: by itself in a folder of /tmp that another user may have made before.

    What a person chose stays. In a process that has compiled, torch has set its own choice.
    """
    chosen = inherited.get(CACHE, "")
    if chosen and not chosen.startswith(os.path.join(tempfile.gettempdir(), TORCHS_OWN)):
        return {}
    with contextlib.suppress(OSError):  # no place for it: torch will say so, if it compiles
        return {CACHE: str(private.shared_folder(f"{TORCHS_OWN}{os.getuid()}"))}
    return {}


def loopback_interface() -> str:
    """Name of the network interface that holds 127.0.0.1."""
    interfaces = psutil.net_if_addrs()
    return next((name for name, found in interfaces.items() if any(a.address == "127.0.0.1" for a in found)), "lo")


def processes_of(folder: Path, torchrun_pid: int | None = None, node: str | None = None) -> list[psutil.Process]:
    """The living processes of the run with this folder, except the one that asks; given ``node``, of one host."""
    found, family = [], set()
    if torchrun_pid is not None:
        with contextlib.suppress(psutil.Error):
            torchrun = psutil.Process(torchrun_pid)
            family = {torchrun, *torchrun.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # another user's, or gone
            own = process in family or (_is_of(process.environ(), folder, node) and _is_own(process))
            if own and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_own(process: psutil.Process) -> bool:
    """Whether this user began it. Root can read other users' environments, in which they write what they like."""
    return bool(process.uids().real == os.getuid())


def _is_of(environment: Mapping[str, str], folder: Path, node: str | None) -> bool:
    return environment.get(VARIABLE) == str(folder) and node in (None, environment.get(NODE))


def stop(folder: Path, torchrun_pid: int | None = None, node: str | None = None) -> list[int]:
    """Kill every process of the run, again until none is left, and touch no other; those of one host, given ``node``.

    Returns:
        The ids of those that are still there after five seconds: the system cannot end one that waits for a device.
    """
    give_up = time.monotonic() + STOP_LIMIT_S
    while alive := processes_of(folder, torchrun_pid, node):
        if time.monotonic() > give_up:
            return sorted(process.pid for process in alive)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil compares the start time first: a process id that was reused is safe
        time.sleep(0.02)
    return []


def stack_of(folder: RunFolder, rank: int) -> str:
    """The stacks that a rank left, without the frames that start every program; "" where it left none."""
    path = folder.stack(rank)
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if not any(frame in line for frame in STARTING_FRAMES))


def stacks_of(folder: RunFolder, ranks: Iterable[int], host: str | None = None) -> dict[int, str]:
    """The Python stacks of every rank at this moment, for as many as answer within a second.

    Args:
        folder: the run's.
        ranks: those that it started.
        host: ask the ranks of the host of this name alone, where there are several.
    """
    living = {process.pid for process in processes_of(folder.path)}
    stacks, asked = {}, []
    for rank in ranks:
        if host is not None and host_of(folder, rank) != host:
            continue
        pid = pid_of(folder, rank)
        stacks[rank] = "(this rank had ended already)" if pid else "(this rank had not started its program yet)"
        if pid in living:
            with contextlib.suppress(ProcessLookupError):  # gone since
                os.kill(pid, signal.SIGUSR1)
                asked.append(rank)
    with contextlib.suppress(FileNotFoundError):  # the folder was deleted
        _wait_for_text([folder.stack(rank) for rank in asked])
    return stacks | {rank: stack_of(folder, rank) or "(no answer)" for rank in asked}


def pid_of(folder: RunFolder, rank: int) -> int:
    """Process id of a rank, or 0 where its worker has not started yet."""
    try:
        return int(folder.pid(rank).read_text() or 0)
    except FileNotFoundError:
        return 0


def host_of(folder: RunFolder, rank: int) -> str:
    """Name of a rank's host, or "" where there is one host alone or the rank's worker has not started yet."""
    path = folder.host(rank)
    return path.read_text() if path.exists() else ""


def _torchrun_arguments(folder: RunFolder, nproc: int) -> list[str]:
    rendezvous = ["--rdzv-backend", ONE_HOST, "--rdzv-endpoint", "127.0.0.1", "--rdzv-id", folder.path.name]
    local = ["--nnodes", "1", "--nproc-per-node", str(nproc), "--local-addr", "127.0.0.1"]
    local += ["--log-dir", str(folder.torchrun_folder())]
    return [*rendezvous, *local, *WORKER]


def _wait_for_text(files: Sequence[Path]) -> None:
    give_up = time.monotonic() + STACK_LIMIT_S
    sizes: list[int] = []
    while time.monotonic() < give_up:
        before, sizes = sizes, [path.stat().st_size for path in files]
        if sizes == before and all(sizes):  # written, and no longer growing
            return
        time.sleep(0.05)
