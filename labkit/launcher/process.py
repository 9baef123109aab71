"""Start, find and kill the processes of a run.

A process belongs to a run if its environment names the run's folder (torchrun and the ranks pass
that on to their children), or if it descends from the run's torchrun, which adopts orphans on
Linux. The first rule finds survivors of torchrun, the second programs that changed their
environment. Only an orphan with an empty environment escapes after kill -9 of torchrun.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from labkit import requirements
from labkit.environment import (
    ENV_CLOCK_AHEAD_S,
    ENV_DEVICE,
    ENV_EXPECTED_WORLD_SIZE,
    ENV_HOST_INDEX,
    ENV_HOST_NAME,
    ENV_NOTEBOOK_PID,
    ENV_PAYLOAD_SHA256,
    ENV_RUN_FOLDER,
    ENV_TOTAL_CORES,
)
from labkit.launcher import warm_start
from labkit.runs import private_files
from labkit.runs.folder import ROOT, RunFolder

STOP_LIMIT_S = 5.0
STACK_LIMIT_S = 1.0
ENV_COMPILE_CACHE, TORCH_CACHE_PREFIX = "TORCHINDUCTOR_CACHE_DIR", "torchinductor_"
WORKER_ARGUMENTS = ("--no-python", sys.executable, "-u", "-P", "-m", "labkit.launcher.worker")
ONE_HOST, SEVERAL_HOSTS = "one-host", "several-hosts"
"""What rendezvous_handlers.py registers with torchrun."""
TORCHRUN_ENV_PREFIX = "PET_"
"""How the names of environment variables begin that are options of torchrun."""
STARTUP_FRAMES = (
    "<frozen runpy>",
    *(
        str(Path(__file__).with_name(f"{name}.py"))
        for name in ("worker", "torchrun", "fork_server")
    ),
    "torch/distributed/elastic/",
    "torch/distributed/launcher/",
    "torch/distributed/run.py",
)


TorchrunProcess = subprocess.Popen[bytes] | warm_start.WarmTorchrun


def start_torchrun(
    folder: RunFolder,
    program: str,
    arguments: Sequence[str],
    nproc: int,
    own: dict[str, str],
    parent: warm_start.ForkServer | None,
) -> TorchrunProcess:
    """Start torchrun with ``nproc`` ranks of a program, without waiting.

    Args:
        folder: the run's folder, which exists.
        program: absolute path of a .py file, or a module name.
        arguments: the program's command-line arguments.
        nproc: number of ranks.
        own: environment of torchrun.
        parent: fork server to fork from; without one, or if it is gone, start a new Python.
    """
    words = [str(folder.path), *_torchrun_arguments(folder, nproc), program, *arguments]
    if parent:
        request = {"arguments": words, "environment": own, "log": str(folder.torchrun_log)}
        with contextlib.suppress(warm_start.ForkServerGone):
            return parent.fork(request | {"working_folder": os.getcwd()})
    return spawn_torchrun(words, own, folder.torchrun_log)


def spawn_torchrun(
    words: Sequence[str], own: dict[str, str], log: Path, *files: int
) -> subprocess.Popen[bytes]:
    """Start torchrun as a new Python process that inherits these open files."""
    with private_files.open_file(log, "wb") as output:
        return subprocess.Popen(
            # -P: a random.py in the notebook's folder must not shadow the real one
            [sys.executable, "-P", "-m", "labkit.launcher.torchrun", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal or kernel is for the notebook's process alone
            start_new_session=True,
            pass_fds=files,
            env=own,
        )


def rank_environment(folder: RunFolder, nproc: int, device: str, hosts: int = 1) -> dict[str, str]:
    """Return the environment of one host's torchrun and ranks: this process's, plus the run's
    variables.
    """
    # the notebook's plotting backend needs a kernel; the others belong to an enclosing run
    outer = {"MPLBACKEND", ENV_HOST_NAME, ENV_HOST_INDEX, ENV_TOTAL_CORES, ENV_CLOCK_AHEAD_S}
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in outer and not name.startswith(TORCHRUN_ENV_PREFIX)
    }
    loopback = loopback_interface()
    return inherited | {
        ENV_RUN_FOLDER: str(folder.path),
        ENV_NOTEBOOK_PID: str(os.getpid()),
        ENV_DEVICE: device,
        ENV_PAYLOAD_SHA256: folder.payload_sha256,
        "OMP_NUM_THREADS": str(max(1, len(requirements.usable_cores()) // nproc)),
        ENV_EXPECTED_WORLD_SIZE: str(hosts * nproc),
        # several hosts replace these two after their rendezvous
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "PYTHONUNBUFFERED": "1",
        **_compile_cache_variables(inherited),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")])),
    }


def _compile_cache_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Choose a private folder for torch.compile's cache, unless the user chose one.

    The default lies in /tmp, where another user may have created it before.
    """
    chosen = inherited.get(ENV_COMPILE_CACHE, "")
    if chosen and not chosen.startswith(os.path.join(tempfile.gettempdir(), TORCH_CACHE_PREFIX)):
        return {}
    # If the folder cannot be made, torch reports it when it compiles.
    with contextlib.suppress(OSError):
        folder = private_files.per_user_folder(f"{TORCH_CACHE_PREFIX}{os.getuid()}")
        return {ENV_COMPILE_CACHE: str(folder)}
    return {}


def loopback_interface() -> str:
    """Return the name of the network interface that holds 127.0.0.1."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == "127.0.0.1" for each in addresses):
            return name
    return "lo"


def find_run_processes(
    folder: Path, torchrun_pid: int | None = None, node: str | None = None
) -> list[psutil.Process]:
    """Return the living processes of a run except this one; given ``node``, those of that host."""
    found, family = [], set()
    if torchrun_pid is not None:
        with contextlib.suppress(psutil.Error):
            torchrun = psutil.Process(torchrun_pid)
            family = {torchrun, *torchrun.children(recursive=True)}
    for process in psutil.process_iter():
        # It belongs to another user, or has ended.
        with contextlib.suppress(psutil.Error, OSError):
            own = process in family or (
                _is_in_run(process.environ(), folder, node) and _is_own_process(process)
            )
            if own and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_own_process(process: psutil.Process) -> bool:
    # root can read other users' environments, whose contents they choose
    return bool(process.uids().real == os.getuid())


def _is_in_run(environment: Mapping[str, str], folder: Path, node: str | None) -> bool:
    return environment.get(ENV_RUN_FOLDER) == str(folder) and node in (
        None,
        environment.get(ENV_HOST_INDEX),
    )


def kill_run_processes(
    folder: Path, torchrun_pid: int | None = None, node: str | None = None
) -> list[int]:
    """Kill all processes of a run (of one host, given ``node``) and wait until they have ended.

    Returns:
        Ids of processes that survive for five seconds: SIGKILL cannot end one that waits for a
            device.
    """
    give_up, killed = time.monotonic() + STOP_LIMIT_S, set[psutil.Process]()
    while alive := {*find_run_processes(folder, torchrun_pid, node), *filter(_is_alive, killed)}:
        if time.monotonic() > give_up:
            return sorted(process.pid for process in alive)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                # psutil compares the start time first, so a reused process id is safe
                process.kill()
        # A dying process loses its environment, by which it is found, before it has ended.
        killed |= alive
        time.sleep(0.02)
    return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_stack(folder: RunFolder, rank: int) -> str:
    """Return the stacks that a rank dumped, without the frames of every start, or ""."""
    path = folder.stack(rank)
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if not any(frame in line for frame in STARTUP_FRAMES))


def collect_stacks(
    folder: RunFolder, ranks: Iterable[int], host: str | None = None
) -> dict[int, str]:
    """Ask every rank for its Python stacks and wait up to a second for them.

    Args:
        folder: the run's folder.
        ranks: those that were started.
        host: ask only the ranks on the host of this name.
    """
    living = {process.pid for process in find_run_processes(folder.path)}
    stacks, asked = {}, []
    for rank in ranks:
        if host is not None and read_host_name(folder, rank) != host:
            continue
        pid = read_pid(folder, rank)
        stacks[rank] = "(this rank had not started its program yet)"
        if pid:
            stacks[rank] = "(this rank had ended already)"
        if pid in living:
            with contextlib.suppress(ProcessLookupError):  # gone since
                os.kill(pid, signal.SIGUSR1)
                asked.append(rank)
    # The folder was deleted.
    with contextlib.suppress(FileNotFoundError):
        _wait_for_text([folder.stack(rank) for rank in asked])
    return stacks | {rank: read_stack(folder, rank) or "(no answer)" for rank in asked}


def read_pid(folder: RunFolder, rank: int) -> int:
    """Return the process id of a rank, or 0 before its worker started."""
    try:
        return int(folder.pid(rank).read_text() or 0)
    except FileNotFoundError:
        return 0


def read_host_name(folder: RunFolder, rank: int) -> str:
    """Return the name of a rank's host, or "" with one host or before its worker started."""
    path = folder.host(rank)
    return path.read_text() if path.exists() else ""


def _torchrun_arguments(folder: RunFolder, nproc: int) -> list[str]:
    rendezvous = ["--rdzv-backend", ONE_HOST, "--rdzv-endpoint", "127.0.0.1"]
    rendezvous += ["--rdzv-id", folder.path.name]
    local = ["--nnodes", "1", "--nproc-per-node", str(nproc), "--local-addr", "127.0.0.1"]
    local += ["--log-dir", str(folder.torchrun_folder())]
    return [*rendezvous, *local, *WORKER_ARGUMENTS]


def _wait_for_text(files: Sequence[Path]) -> None:
    give_up = time.monotonic() + STACK_LIMIT_S
    sizes: list[int] = []
    while time.monotonic() < give_up:
        before, sizes = sizes, [path.stat().st_size for path in files]
        # All are written and have stopped growing.
        if sizes == before and all(sizes):
            return
        time.sleep(0.05)
