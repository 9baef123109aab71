"""torchrun as the process of one run: ``python -m labkit.launcher.torchrun FOLDER ARGUMENTS``.

torch's own torchrun runs here with four additions: the run ends when the notebook's process is
gone, for whatever reason; no process that a rank has started outlives it; the exit of each failed
rank is written to exit.json; and the rendezvous is immediate (rendezvous_handlers.py). Two things
are faster: once a rank has failed, the others have two seconds to obey SIGTERM, not thirty; and on
Linux ranks are forked from this process, which has imported torch already.
"""

import ast
import contextlib
import ctypes
import importlib.util
import math
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from labkit import torch_private
from labkit.environment import ENV_HOST_INDEX, ENV_NOTEBOOK_PID, ENV_TORCHRUN_PID
from labkit.launcher import network_namespace, process, worker
from labkit.runs.folder import RunFolder, rank_of_process, write_json
from labkit.session.process_exit import print_error_and_status, reset_exit_handlers

PR_SET_CHILD_SUBREAPER = 36
NOTEBOOK_POLL_PERIOD_S = 0.5
SHUTDOWN_LIMIT_S = 2
POLL_PERIOD_S, FORK_POLL_PERIOD_S = 0.05, 0.001
# Of NVIDIA's drivers on Linux, on WSL2 and on Jetson, and of ROCm.
DRIVER_FILES = ("/dev/nvidia", "/dev/dxg", "/dev/nvhost", "/dev/nvmap", "/dev/kfd")


def main() -> None:
    """Run torchrun with the run's folder and the arguments of sys.argv; do not return."""
    folder = RunFolder(Path(sys.argv[1]))
    if sys.platform == "linux":
        # Adopt processes of this run whose own parent ends: one that was started with an empty
        # environment, in a session of its own, leaves no other trace.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # This must happen before there is a second thread.
    if process.ONE_HOST in sys.argv and network_namespace.is_namespace_requested():
        network_namespace.enter_namespace()
    threading.Thread(target=_watch_notebook, args=[folder], daemon=True).start()
    os.environ[ENV_TORCHRUN_PID] = str(os.getpid())
    try:
        status = _run_torchrun(folder, sys.argv[2:])
    except BaseException as error:
        status = print_error_and_status(error)
    # The notebook may have gone a moment ago, and the watching thread has not finished.
    if _is_notebook_gone() or _has_children():
        _kill_run(folder)
    # Tearing torch down takes Python 0.4 s, and there is nothing left to do.
    os._exit(status)


def _watch_notebook(folder: RunFolder) -> None:
    while not _is_notebook_gone():
        time.sleep(NOTEBOOK_POLL_PERIOD_S)
    try:
        _kill_run(folder)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _is_notebook_gone() -> bool:
    # The process that started this one has ended if another one is the parent now.
    return os.getppid() != int(os.environ[ENV_NOTEBOOK_PID])


def _kill_run(folder: RunFolder) -> None:
    process.kill_run_processes(folder.path, os.getpid(), os.environ.get(ENV_HOST_INDEX))


def _has_children() -> bool:
    """Tell whether child processes are left; collect those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def can_fork() -> bool:
    """Tell whether this process can be forked; otherwise each rank starts its own Python."""
    # Outside Linux the systems' own libraries do not survive a fork, which can then crash.
    if sys.platform != "linux":
        return False
    # A GPU's runtime does not survive a fork. It is unused while no file of the driver is open.
    for number in os.listdir("/proc/self/fd"):
        # listdir() has closed the descriptor that it had opened.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(DRIVER_FILES):
                return False
    return True


def hide_gpus() -> None:
    """Let torch find no GPU in this process, but in its forks: asking the driver forbids a fork.

    torchrun asks before it starts ranks (LaunchConfig.__post_init__ in torch/distributed/launcher),
    and torch.utils.cpp_extension as it is imported where there is a CUDA toolkit.
    """
    import torch

    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "is_available", is_available))


def _run_torchrun(folder: RunFolder, arguments: list[str]) -> int:
    """Run torchrun until it ends; return its exit status."""
    # Importing takes a second, so the watch begins first.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    backend = arguments[arguments.index("--rdzv-backend") + 1]
    handlers = importlib.import_module(backend)
    rendezvous_handler_registry.register(backend, handlers.create_handler)
    _adapt_torchrun()
    hide_gpus()
    if can_fork():
        _import_for_ranks(arguments)
    # The poll of a forked rank waits by itself.
    pause = FORK_POLL_PERIOD_S if can_fork() else POLL_PERIOD_S
    try:
        run.main(["--monitor-interval", str(pause), *arguments])
    except ChildFailedError as error:
        failures = [
            {"rank": rank_of_process(rank), "exitcode": failed.exitcode, "time": failed.timestamp}
            for rank, failed in error.failures.items()
        ]
        exit_json = folder.exit_json(int(os.environ.get(ENV_HOST_INDEX, "0")))
        write_json(exit_json, {"failures": failures})
        return 1
    return 0


def _import_for_ranks(arguments: list[str]) -> None:
    """Import the program's modules of torch and labkit once, instead of in each rank."""
    # torchrun and the ranks report what is wrong.
    with contextlib.suppress(Exception):
        program = arguments[arguments.index(worker.__name__) + 1]
        spec = None if program.endswith(".py") else importlib.util.find_spec(program)
        for name in list_imports(Path(spec.origin if spec and spec.origin else program)):
            # The name may be a function inside a module.
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)


def list_imports(program: Path) -> list[str]:
    """List the modules of torch and labkit that a program's top level imports, or may import."""
    tree = ast.parse(program.read_bytes())
    names: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            names += (each.name for each in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names.append(statement.module)
            # A name that is imported from a package may be a module.
            names += (f"{statement.module}.{each.name}" for each in statement.names)
    # session.steps(track=…) follows the memory.
    if any(isinstance(node, ast.keyword) and node.arg == "track" for node in ast.walk(tree)):
        names.append(torch_private.MEMORY_TRACKER_MODULE)
    return [name for name in names if name.startswith(("torch.", "labkit."))]


def _adapt_torchrun() -> None:
    """Let torchrun fork this process for each rank, and limit the time that ranks take to end."""
    close = torch_private.get("PContext.close")
    start_new_python = torch_private.get("SubprocessHandler._popen")

    def close_with_limit(context: Any, death_sig: Any = None, timeout: int = 30) -> None:
        close(context, death_sig, min(timeout, SHUTDOWN_LIMIT_S))

    def fork_rank(handler: Any, command: tuple[str, ...], env: dict[str, str]) -> Any:
        if can_fork():
            return RankProcess(command[command.index(worker.__name__) + 1 :], env)
        return start_new_python(handler, command, env)

    # torchrun's own --shutdown-timeout does not apply after a failure.
    torch_private.replace("PContext.close", close_with_limit)
    # torch has a public start_method="fork" (elastic_launch with a function), but its agent waits
    # for every rank's return value: a rank that leaves with os._exit(0) hangs the run, and of
    # several failures it reports one.
    torch_private.replace("SubprocessHandler._popen", fork_rank)


class RankProcess:
    """A forked rank, with the part of subprocess.Popen that torchrun uses."""

    # File descriptors that become readable when a rank ends, by its process id.
    pidfds: ClassVar[dict[int, int]] = {}

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run_as_rank(arguments, env)
        RankProcess.pidfds[self.pid] = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            # torchrun polls its ranks in turn, again and again. Here a poll waits until any rank
            # ends, so torchrun notices at once, and takes no time from the ranks until then.
            pidfds = RankProcess.pidfds
            select.select([*pidfds.values()], [], [], POLL_PERIOD_S / len(pidfds))
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(pidfds.pop(pid))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired(worker.__name__, timeout or 0)
        return status


@contextlib.contextmanager
def become_new_process(arguments: Sequence[str], env: Mapping[str, str]) -> Iterator[None]:
    """Do in a fork what Popen and a new Python would have done. The block must end the process."""
    try:
        os.setsid()
        reset_exit_handlers()
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [*arguments]
        yield
    except BaseException:
        # This happened before the program began.
        traceback.print_exc()
    finally:
        os._exit(1)


def _run_as_rank(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    with become_new_process([worker.__name__, *arguments], env):
        for descriptor in RankProcess.pidfds.values():
            os.close(descriptor)
        # torchrun has its own handlers.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # A new Python would seed its generators differently in every rank and run.
        random.seed()
        sys.modules["numpy"].random.seed()
        torch = sys.modules["torch"]
        torch.default_generator.seed()
        # PyTorch reads this variable only when it is imported.
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        worker.main()


if __name__ == "__main__":
    main()
