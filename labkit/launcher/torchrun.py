"""torchrun as the process of one run: ``python -m labkit.launcher.torchrun FOLDER ARGUMENTS``,
started by process.start.

torch's own torchrun runs here unchanged, with four additions. The run ends when the notebook's
process is gone, for whatever reason (torchrun alone would continue); no process that a rank has
started outlives it; the exit of each failed rank is written to exit.json; and the rendezvous is
immediate (rendezvous_handlers.py). Two things are faster: once a rank has failed, the others have
two seconds to obey SIGTERM, not thirty; and on Linux ranks are forked from this process, which has
imported torch and the program's other modules, instead of each starting Python and importing them
again. This process is itself a fork of the fork server (fork_server.py), if there is one.
"""

import ast
import contextlib
import ctypes
import importlib.util
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from labkit import torch_private
from labkit.environment import ENV_HOST_INDEX, ENV_NOTEBOOK_PID, ENV_TORCHRUN_PID
from labkit.launcher import network_namespace, process, worker
from labkit.runs.folder import (
    RunFolder,
    rank_of_process,
    write_json,
)
from labkit.session.process_exit import reset_exit_handlers

PR_SET_CHILD_SUBREAPER = 36
NOTEBOOK_POLL_PERIOD_S = 0.5
SHUTDOWN_LIMIT_S = 2
POLL_PERIOD_S, FORK_POLL_PERIOD_S = 0.05, 0.001
WORKER_MODULE = "labkit.launcher.worker"


def main() -> None:
    """Run torchrun: sys.argv holds the run's folder and torchrun's arguments. Does not return."""
    folder = RunFolder(Path(sys.argv[1]))
    _adopt_orphans()
    # This must happen before there is a second thread.
    if process.ONE_HOST in sys.argv and network_namespace.is_namespace_requested():
        network_namespace.enter_namespace()
    threading.Thread(target=_watch_notebook, args=[folder], daemon=True).start()
    os.environ[ENV_TORCHRUN_PID] = str(os.getpid())
    try:
        status = _run_torchrun(folder, sys.argv[2:])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        status = 1
        # The disk of the log is full.
        with contextlib.suppress(OSError):
            traceback.print_exc()
    # gone a moment ago, and the watch has not seen it or not finished
    if _is_notebook_gone() or _has_children():
        process.kill_run_processes(folder.path, os.getpid(), os.environ.get(ENV_HOST_INDEX))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Tearing torch down takes Python 0.4 s, and there is nothing left to do.
    os._exit(status)


def _adopt_orphans() -> None:
    """Become the parent of processes in this run whose own parent ends, so that they can be found
    in any session. Linux only.

    A program that starts a process with an empty environment, in a session of its own, leaves no
    other trace of it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _has_children() -> bool:
    """Tell whether a child process is left after the ranks have ended, and collect those that have
    ended.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def can_fork() -> bool:
    """Tell whether ranks can be forked from this process. Otherwise each starts a Python of its
    own.

    CUDA does not survive a fork; it is unused as long as this process has no file of the driver
    open. Outside Linux the systems' own libraries do not survive a fork, which can then crash
    (Python's own default there is spawn).
    """
    return sys.platform == "linux" and not any(
        name.startswith("/dev/nvidia") for name in _list_open_files()
    )


def _list_open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        # The descriptor that listdir() itself had opened.
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{number}")


def _run_torchrun(folder: RunFolder, arguments: list[str]) -> int:
    """Run torchrun until it ends; return its exit status."""
    # Importing takes a second, so the watch begins first.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from labkit.launcher import rendezvous_handlers

    rendezvous_handlers.register_handlers()
    _limit_shutdown_time()
    _fork_ranks()
    if can_fork():
        _import_for_ranks(arguments)
    # The poll of a forked rank waits by itself.
    pause = FORK_POLL_PERIOD_S if can_fork() else POLL_PERIOD_S
    try:
        run.main(["--monitor-interval", str(pause), *arguments])
    except ChildFailedError as error:
        failures = [_failure_entry(rank, failed) for rank, failed in error.failures.items()]
        write_json(
            folder.exit_json(int(os.environ.get(ENV_HOST_INDEX, "0"))), {"failures": failures}
        )
        return 1
    return 0


def _import_for_ranks(arguments: list[str]) -> None:
    """Import the program's modules of torch and labkit, once for all ranks of this host instead of
    in each.
    """
    # torchrun and the ranks report what is wrong.
    with contextlib.suppress(Exception):
        program = arguments[arguments.index(WORKER_MODULE) + 1]
        spec = None if program.endswith(".py") else importlib.util.find_spec(program)
        for name in list_imports(Path(spec.origin if spec and spec.origin else program)):
            # The name is a function inside a module.
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)


def list_imports(program: Path) -> list[str]:
    """List the modules of torch and labkit that a program imports at its top level, and names that
    may be modules.

    A program that passes ``track=`` to ``session.steps`` has its memory followed, so its list
    includes the tracker.

    Raises:
        OSError, SyntaxError: the program cannot be read.
    """
    tree = ast.parse(program.read_bytes())
    names: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            names += (each.name for each in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names += (
                statement.module,
                *(f"{statement.module}.{each.name}" for each in statement.names),
            )
    if any(isinstance(node, ast.keyword) and node.arg == "track" for node in ast.walk(tree)):
        names.append(torch_private.MEMORY_TRACKER_MODULE)
    return [name for name in names if name.startswith(("torch.", "labkit."))]


def _failure_entry(rank: int, failed: Any) -> dict[str, Any]:
    """Return torchrun's report of one failed rank; ``signal`` is "" for a rank that exited by
    itself.
    """
    name = signal.Signals(-failed.exitcode).name if failed.exitcode < 0 else ""
    return {
        "rank": rank_of_process(rank),
        "pid": failed.pid,
        "exitcode": failed.exitcode,
        "signal": name,
        "time": failed.timestamp,
    }


def _limit_shutdown_time() -> None:
    """Give ranks two seconds to obey SIGTERM. torchrun's --shutdown-timeout does not apply after a
    failure.
    """
    close = torch_private.get("PContext.close")

    def close_with_limit(
        context: Any, death_sig: signal.Signals | None = None, timeout: int = SHUTDOWN_LIMIT_S
    ) -> None:
        close(context, death_sig, min(timeout, SHUTDOWN_LIMIT_S))

    torch_private.replace("PContext.close", close_with_limit)


def _fork_ranks() -> None:
    """Let torchrun fork this process for each rank. Importing torch takes most of the time before a
    rank runs.

    torch has a public start_method="fork" (elastic_launch with a function), but its agent waits for
    every rank's return value: a rank that leaves with os._exit(0) hangs the run, and of several
    failures it reports one.
    """
    start_anew = torch_private.get("SubprocessHandler._popen")

    def fork_rank(handler: Any, command: tuple[str, ...], env: dict[str, str]) -> Any:
        if can_fork():
            return RankProcess(command[command.index(WORKER_MODULE) + 1 :], env)
        return start_anew(handler, command, env)

    torch_private.replace("SubprocessHandler._popen", fork_rank)


class RankProcess:
    """A forked rank, with the part of subprocess.Popen that torchrun uses: ``pid``, ``returncode``,
    poll and wait.

    torchrun polls its ranks in turn, again and again. Here a poll waits until any rank ends, so
    that torchrun notices at once, and takes no time from the ranks until then.
    """

    pidfds: ClassVar[dict[int, int]] = {}
    """A file descriptor that becomes readable when the rank ends, by process id."""

    def __init__(self, arguments: tuple[str, ...], env: dict[str, str]):
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_as_rank(arguments, env)
        RankProcess.pidfds[self.pid] = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            select.select(
                [*RankProcess.pidfds.values()], [], [], POLL_PERIOD_S / len(RankProcess.pidfds)
            )
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(RankProcess.pidfds.pop(pid))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        begun = time.monotonic()
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - begun > timeout:
                raise subprocess.TimeoutExpired(WORKER_MODULE, timeout)
        return status


def _run_as_rank(arguments: tuple[str, ...], env: dict[str, str]) -> NoReturn:
    """Do what Popen and a new Python would have done, then run the worker. Does not return."""
    try:
        os.setsid()
        for descriptor in RankProcess.pidfds.values():
            os.close(descriptor)
        reset_exit_handlers()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            # torchrun has its own handlers.
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        _reseed_generators()
        # PyTorch reads this variable when it is imported.
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
        sys.argv = [WORKER_MODULE, *arguments]
        worker.main()
    except BaseException:
        # This happened before the program began.
        traceback.print_exc()
    finally:
        os._exit(1)


def _reseed_generators() -> None:
    """Seed the random generators, which a new Python would seed differently in every rank and
    run.
    """
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()


def _watch_notebook(folder: RunFolder) -> None:
    while not _is_notebook_gone():
        time.sleep(NOTEBOOK_POLL_PERIOD_S)
    try:
        process.kill_run_processes(folder.path, os.getpid(), os.environ.get(ENV_HOST_INDEX))
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _is_notebook_gone() -> bool:
    """Tell whether the process that started this one has ended: the parent is then another."""
    return os.getppid() != int(os.environ[ENV_NOTEBOOK_PID])


if __name__ == "__main__":
    main()
