"""The processes of a run: start them, find them, end exactly them.

A process belongs to a run when its environment names the run's folder, which everything inherits that torchrun and the
ranks start, or when it descends from the run's torchrun. The first catches orphans, the second a program that changed
its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.folder import NOTEBOOK_PID, VARIABLE, RunFolder

if TYPE_CHECKING:
    import psutil

STOP_LIMIT_S = 5.0
STACK_LIMIT_S = 1.0
STARTING_FRAMES = (
    "<frozen runpy>", str(Path(__file__).with_name("worker.py")), str(Path(__file__).with_name("torchrun.py")),
    "torch/distributed/elastic/", "torch/distributed/launcher/", "torch/distributed/run.py",
)  # fmt: skip


def start(
    folder: RunFolder, program: str, arguments: Sequence[str], nproc: int, device: str
) -> subprocess.Popen[bytes]:
    """Start torchrun with ``nproc`` ranks of a program; returns at once.

    Args:
        folder: the run's folder, which exists.
        program: absolute path of a .py file, or a module's name.
        arguments: the program's command line.
        nproc: number of ranks.
        device: "auto", "cpu" or "cuda", for the ranks' session.
    """
    # -P: a random.py in the notebook's folder must not shadow the real one
    command = [sys.executable, "-P", "-m", "labkit.torchrun", str(folder.path)]
    with folder.torchrun_log.open("wb") as log:
        return subprocess.Popen(
            [*command, *_torchrun_arguments(folder, nproc), program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the interrupt key of a terminal or kernel is for the notebook's process alone
            env=environment(folder, nproc, device),
        )


def environment(folder: RunFolder, nproc: int, device: str) -> dict[str, str]:
    """The environment of torchrun and its ranks: the notebook's, plus what a run on one host needs."""
    inherited = dict(os.environ)
    inherited.pop("MPLBACKEND", None)  # a notebook's drawing backend needs a notebook
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [inherited.get("PYTHONPATH")])]
    loopback = loopback_interface()
    return inherited | {
        VARIABLE: str(folder.path),
        NOTEBOOK_PID: str(os.getpid()),
        "LABKIT_DEVICE": device,
        "OMP_NUM_THREADS": str(max(1, cores() // nproc)),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def loopback_interface() -> str:
    """Name of the network interface that holds 127.0.0.1."""
    import psutil

    interfaces = psutil.net_if_addrs()
    return next((name for name, found in interfaces.items() if any(a.address == "127.0.0.1" for a in found)), "lo")


def processes_of(folder: Path, torchrun_pid: int | None = None) -> list[psutil.Process]:
    """The living processes of the run with this folder, except the one that asks."""
    import psutil

    found = {process.pid: process for process in psutil.process_iter() if _is_marked(process, str(folder))}
    if torchrun_pid is not None:
        with contextlib.suppress(psutil.Error):
            torchrun = psutil.Process(torchrun_pid)
            found |= {process.pid: process for process in [torchrun, *torchrun.children(recursive=True)]}
    found.pop(os.getpid(), None)
    return [process for process in found.values() if _is_alive(process)]


def stop(folder: Path, torchrun_pid: int | None = None) -> None:
    """Kill every process of the run, again until none is left, and touch no other.

    Raises:
        RuntimeError: some are still there after five seconds (the kernel cannot end one that waits for a device).
    """
    import psutil

    give_up = time.monotonic() + STOP_LIMIT_S
    while alive := processes_of(folder, torchrun_pid):
        if time.monotonic() > give_up:
            pids = sorted(process.pid for process in alive)
            raise RuntimeError(f"processes {pids} of {folder} did not die of SIGKILL")
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil compares the start time first: a process id that was reused is safe
        time.sleep(0.02)


def stack_of(folder: RunFolder, rank: int) -> str:
    """The stacks that a rank left, without the frames that start every program; "" where it left none."""
    path = folder.stack(rank)
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if not any(frame in line for frame in STARTING_FRAMES))


def stacks_of(folder: RunFolder, ranks: int) -> dict[int, str]:
    """The Python stacks of every rank at this moment, for as many as answer within a second."""
    living = {process.pid for process in processes_of(folder.path)}
    asked = {}
    for rank in range(ranks):
        pid = pid_of(folder, rank)
        if pid in living:
            with contextlib.suppress(ProcessLookupError):  # gone since
                os.kill(pid, signal.SIGUSR1)
                asked[rank] = folder.stack(rank)
    _wait_for_text(asked)
    return {rank: _stack_text(folder, rank, asked) for rank in range(ranks)}


def pid_of(folder: RunFolder, rank: int) -> int:
    """Process id of a rank, or 0 where its worker has not started yet."""
    try:
        return int(folder.pid(rank).read_text() or 0)
    except FileNotFoundError:
        return 0


def _torchrun_arguments(folder: RunFolder, nproc: int) -> list[str]:
    # A rendezvous in a file listens nowhere; --standalone would listen on every interface.
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"]
    rendezvous += ["--rdzv-endpoint", str(folder.rendezvous), "--rdzv-id", folder.path.name]
    local = ["--nnodes", "1", "--nproc-per-node", str(nproc), "--local-addr", "127.0.0.1"]
    local += ["--log-dir", str(folder.torchrun_folder)]
    return [*rendezvous, *local, "--no-python", sys.executable, "-u", "-P", "-m", "labkit.worker"]


def _is_marked(process: psutil.Process, folder: str) -> bool:
    import psutil

    try:
        return process.environ().get(VARIABLE) == folder
    except (psutil.Error, OSError):  # another user's, or gone
        return False


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _wait_for_text(files: Mapping[int, Path]) -> None:
    give_up = time.monotonic() + STACK_LIMIT_S
    sizes: dict[int, int] = {}
    while time.monotonic() < give_up:
        before, sizes = sizes, {rank: path.stat().st_size for rank, path in files.items()}
        if sizes == before and all(sizes.values()):  # written, and no longer growing
            return
        time.sleep(0.05)


def _stack_text(folder: RunFolder, rank: int, asked: Mapping[int, Path]) -> str:
    if rank not in asked:
        return "(not running)" if pid_of(folder, rank) else "(this rank had not started its program yet)"
    return stack_of(folder, rank) or "(no answer)"
