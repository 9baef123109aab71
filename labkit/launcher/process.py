"""Start, find and kill the processes of a run.

A process belongs to a run if its environment, which children inherit, names the run's folder, or if
it descends from the run's torchrun, which adopts orphans on Linux. The first rule finds survivors
of torchrun, the second programs that changed their environment. Only an orphan with an empty
environment escapes after kill -9 of torchrun.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from labkit import compile_cache, environment, requirements
from labkit.environment import ENV_HOST_INDEX, ENV_RUN_FOLDER
from labkit.launcher import warm_start
from labkit.runs import private_files
from labkit.runs.folder import ROOT, RunFolder
from labkit.session import pending_calls

STOP_LIMIT_S = 5.0
STACK_LIMIT_S = 1.0
WORKER_ARGUMENTS = ("--no-python", sys.executable, "-u", "-P", "-m", "labkit.launcher.worker")
# The module that torchrun loads for its rendezvous.
ONE_HOST = "labkit.launcher.rendezvous_handlers"
# Environment variables whose names begin so are options of torchrun.
TORCHRUN_ENV_PREFIX = "PET_"
OUTER_VARIABLES = {
    "MPLBACKEND",  # the notebook's plotting backend, which needs a kernel
    # The others belong to an enclosing run.
    environment.ENV_HOST_NAME,
    environment.ENV_HOST_INDEX,
    environment.ENV_TOTAL_CORES,
    environment.ENV_CLOCK_AHEAD_S,
    environment.ENV_SIMULATION,
    environment.ENV_PROCESS_RANKS,
}
STARTUP_FRAMES = (
    *("<frozen runpy>", f"{Path(__file__).parent}{os.sep}"),
    *("torch/distributed/elastic/", "torch/distributed/launcher/", "torch/distributed/run.py"),
)

TorchrunProcess = subprocess.Popen[bytes] | warm_start.WarmTorchrun


def start_torchrun(
    folder: RunFolder,
    program: str,
    arguments: Sequence[str],
    nproc: int,
    env: dict[str, str],
    parent: warm_start.ForkServer | None,
) -> TorchrunProcess:
    """Start torchrun for a program: the absolute path of a .py file, or a module's name."""
    command = [str(folder.path), "--rdzv-backend", ONE_HOST, "--rdzv-endpoint", "127.0.0.1"]
    command += ["--rdzv-id", folder.path.name, "--log-dir", str(folder.torchrun_folder())]
    command += ["--nnodes", "1", "--nproc-per-node", str(nproc), "--local-addr", "127.0.0.1"]
    command += [*WORKER_ARGUMENTS, program, *arguments]
    if parent:
        request = {"arguments": command, "environment": env, "log": str(folder.torchrun_log)}
        with contextlib.suppress(warm_start.ForkServerGone):
            return parent.fork(request | {"working_folder": os.getcwd()})
    # There is no fork server, or it is gone.
    return spawn_torchrun(command, env, folder.torchrun_log)


def spawn_torchrun(
    command: Sequence[str], env: dict[str, str], log: Path, *files: int
) -> subprocess.Popen[bytes]:
    """Start torchrun as a new Python process that inherits these open files."""
    with private_files.open_file(log, "wb") as output:
        return subprocess.Popen(
            # -P: a random.py in the notebook's folder must not shadow the real one.
            [sys.executable, "-P", "-m", "labkit.launcher.torchrun", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal or kernel is for the notebook's process alone.
            start_new_session=True,
            pass_fds=files,
            env=env,
        )


def rank_environment(folder: RunFolder, nproc: int, device: str, hosts: int = 1) -> dict[str, str]:
    """Return the environment of one host's torchrun and ranks: this process's, and the run's."""
    inherited = dict(os.environ)
    for name in os.environ:
        if name in OUTER_VARIABLES or name.startswith(TORCHRUN_ENV_PREFIX):
            del inherited[name]
    return inherited | {
        ENV_RUN_FOLDER: str(folder.path),
        environment.ENV_NOTEBOOK_PID: str(os.getpid()),
        environment.ENV_DEVICE: device,
        environment.ENV_PAYLOAD_SHA256: folder.payload_sha256,
        environment.ENV_EXPECTED_WORLD_SIZE: str(hosts * nproc),
        "OMP_NUM_THREADS": str(max(1, len(requirements.usable_cores()) // nproc)),
        **requirements.openmp_variables(inherited),
        # Several hosts replace these two after their rendezvous.
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback_interface()),
        "PYTHONUNBUFFERED": "1",
        # A rank that leaves early could break connections that others are still making: Gloo says
        # "Connection closed by peer" (pytorch/pytorch#53270). With it they wait for each other. One
        # rank has nobody to wait for, and the fake store of lab 6 could not.
        "TORCH_DIST_INIT_BARRIER": inherited.get(
            "TORCH_DIST_INIT_BARRIER", str(int(nproc * hosts > 1))
        ),
        **compile_cache.cache_variables(inherited),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")])),
    }


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
        # The process belongs to another user, or has ended.
        with contextlib.suppress(psutil.Error, OSError):
            is_in_run = process in family or _has_run_environment(process, folder, node)
            if is_in_run and process.pid != os.getpid() and _is_alive(process):
                found.append(process)
    return found


def _has_run_environment(process: psutil.Process, folder: Path, node: str | None) -> bool:
    env = process.environ()
    if env.get(ENV_RUN_FOLDER) != str(folder) or node not in (None, env.get(ENV_HOST_INDEX)):
        return False
    # Root can read other users' environments, whose contents they choose.
    return bool(process.uids().real == os.getuid())


def kill_run_processes(
    folder: Path, torchrun_pid: int | None = None, node: str | None = None
) -> list[int]:
    """Kill a run's processes; return those that after 5 s still wait for a device, and so live."""
    give_up, killed = time.monotonic() + STOP_LIMIT_S, set[psutil.Process]()
    while alive := {*find_run_processes(folder, torchrun_pid, node), *filter(_is_alive, killed)}:
        if time.monotonic() > give_up:
            return sorted(process.pid for process in alive)
        for process in alive:
            # psutil compares the start time first, so a reused process id is safe.
            with contextlib.suppress(psutil.Error):
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
    threads = read_if_exists(folder.stack(rank)).split("\n\n")
    # Without the thread that answers for the others.
    shown = "\n\n".join(each for each in threads if pending_calls.__file__ not in each)
    lines = shown.splitlines()
    return "\n".join(line for line in lines if not any(frame in line for frame in STARTUP_FRAMES))


def read_stacks(folder: RunFolder, ranks: Iterable[int]) -> dict[int, str]:
    """Return the stacks that these ranks dumped, for each rank."""
    return {rank: read_stack(folder, rank) or "(no answer)" for rank in ranks}


def collect_stacks(
    folder: RunFolder, ranks: Iterable[int], host: str | None = None
) -> dict[int, str]:
    """Ask ranks for their Python stacks, only those on ``host`` if it is given; wait up to 1 s."""
    living = {process.pid for process in find_run_processes(folder.path)}
    stacks, asked = {}, []
    for rank in ranks:
        if host is not None and read_if_exists(folder.host(rank)) != host:
            continue
        pid = read_pid(folder, rank)
        end = "ended already" if pid else "not started its program yet"
        stacks[rank] = f"(this rank had {end})"
        if pid in living:
            # The rank may have ended since.
            with contextlib.suppress(ProcessLookupError):
                # The first answer needs a thread of the rank, the second none.
                os.kill(pid, pending_calls.ASKING_SIGNAL)
                os.kill(pid, signal.SIGUSR1)
                asked.append(rank)
    # The folder may have been deleted.
    with contextlib.suppress(FileNotFoundError):
        _wait_for_text([folder.stack(rank) for rank in asked])
    return stacks | read_stacks(folder, asked)


def read_pid(folder: RunFolder, rank: int) -> int:
    """Return the process id of a rank, or 0 before its worker started."""
    return int(read_if_exists(folder.pid(rank)) or 0)


def read_if_exists(path: Path) -> str:
    """Return the content of a text file, "" if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""


def _wait_for_text(files: Sequence[Path]) -> None:
    # A stack is complete when all files have stopped growing.
    give_up = time.monotonic() + STACK_LIMIT_S
    sizes: list[int] = []
    while time.monotonic() < give_up:
        before, sizes = sizes, [path.stat().st_size for path in files]
        if sizes == before and all(sizes):
            return
        time.sleep(0.05)
