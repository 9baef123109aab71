"""Keep a fork server (fork_server.py) ready for warm starts; it forks torchrun for a run.

The server imports for some seconds, in the background and never beside a measured run: a first run
is a cold one, and the server pauses during it; a later run waits for the server. LABKIT_WARM=1
always waits.
"""

import contextlib
import glob
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit import requirements
from labkit.environment import ENV_RUN_FOLDER, ENV_WARM
from labkit.errors import ParameterError
from labkit.launcher.progress import in_kernel
from labkit.runs.folder import ROOT

FORK_SERVER_ARGUMENTS = ("-m", "labkit.launcher.fork_server")
READY, PAUSE, RESUME, FORK = b"r", b"s", b"g", b"f"
INT_STRUCT = struct.Struct("i")
MAX_PATH_BYTES = 4096
READY_TIMEOUT_S, FORK_TIMEOUT_S = 60.0, 10.0
# All other environment variables arrive with the request.
ENV_PREFIXES_AT_IMPORT = (
    *("PYTHON", "TORCH", "PYTORCH", "TRITON", "INDUCTOR", "CUDA", "NVIDIA", "CXX", "CC"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS", "DNNL", "ONEDNN", "ATEN_", "NUMPY", "NPY_"),
    *("LD_", "MALLOC_", "GLIBC", "LANG", "LC_", "TZ", "TMPDIR", "LOGLEVEL"),
)
"""Prefixes of the variables that count when a process begins or imports torch."""


class ForkServerGone(Exception):
    """The fork server has ended, or may not fork any more."""


class WarmTorchrun:
    """A torchrun that the server forked, with the part of subprocess.Popen that labkit uses."""

    def __init__(self, answers: socket.socket, pid: int):
        self.pid, self._answers = pid, answers
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal; raise subprocess.TimeoutExpired."""
        if self._status is None:
            self._answers.settimeout(timeout)
            try:
                answer = self._answers.recv(INT_STRUCT.size)
            except TimeoutError:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0) from None
            self._answers.close()
            # Without an answer the server is gone, and torchrun goes with it.
            self._status = int(INT_STRUCT.unpack(answer)[0]) if answer else -signal.SIGKILL
        return self._status


class ForkServer:
    """One fork server, from its start to its end."""

    def __init__(self) -> None:
        self.state = process_state()
        self._ready = False
        self._control, theirs = socket.socketpair()
        env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        # numpy makes as many threads as this when it is imported; the ranks set their own number.
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # With room for any path: fork_server.show_run_folder overwrites it. Last, because those who
        # read /proc stop at its padding.
        env.pop(ENV_RUN_FOLDER, None)
        env[ENV_RUN_FOLDER] = "." * MAX_PATH_BYTES
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *FORK_SERVER_ARGUMENTS, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=env,
            )

    def wait_until_ready(self, within_s: float) -> bool:
        """Return whether it has imported everything by this time limit."""
        if not self._ready and select.select([self._control], [], [], within_s)[0]:
            with contextlib.suppress(ConnectionError):
                self._ready = self._control.recv(1) == READY
        return self._ready

    def send_command(self, word: bytes, files: Sequence[int] = ()) -> None:
        """Send it a command, which is lost if it has ended."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [word], files)

    def fork(self, request: dict[str, Any]) -> WarmTorchrun:
        """Let it fork torchrun; raise ForkServerGone if it cannot."""
        ours, theirs = socket.socketpair()
        pid = 0
        with contextlib.ExitStack() as on_error:
            # If this process is interrupted, the closed socket tells the fork to end.
            on_error.callback(ours.close)
            with theirs, open(os.memfd_create("labkit-request"), "w+") as file:
                json.dump(request, file)
                file.flush()
                file.seek(0)
                self.send_command(FORK, [file.fileno(), theirs.fileno()])
            ours.settimeout(FORK_TIMEOUT_S)
            with contextlib.suppress(TimeoutError):
                answer = ours.recv(INT_STRUCT.size).ljust(INT_STRUCT.size, b"\0")
                (pid,) = INT_STRUCT.unpack(answer)
            if not pid:
                self.process.kill()
                self.process.wait()
                raise ForkServerGone
            ours.sendall(RESUME)
            on_error.pop_all()
        return WarmTorchrun(ours, pid)

    def close(self) -> None:
        """Let it end once its runs have ended."""
        self._control.close()


class ForkServerManager:
    """Keeps this process's fork server: starts it, replaces it, pauses it beside a cold run."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._parent: ForkServer | None = None
        self._retired: list[ForkServer] = []
        self._cold_runs = 0
        self._is_first = True

    @contextlib.contextmanager
    def server_for_run(self, choice: bool | None) -> Iterator[ForkServer | None]:
        """Return the server for one run, or None for a cold start.

        Args:
            choice: what ``choose_warm_start`` returned.
        """
        with self._lock:
            parent = self._server_if_ready(choice)
            self._is_first = False
            if not parent:
                self._cold_runs += 1
                self._send_command(PAUSE)
        try:
            yield parent
        finally:
            with self._lock:
                self._cold_runs -= not parent
                if not self._cold_runs:
                    self._send_command(RESUME)
                    if choice is not False:
                        self.start_in_background()

    def start_in_background(self) -> None:
        """Start a server, unless there is one that matches the present state of this process."""
        with self._lock:
            if sys.platform == "linux" and os.environ.get(ENV_WARM) != "0":
                self._retire_if_stale()
                self._parent = self._parent or ForkServer()

    def forget_server(self) -> None:
        """Forget the server in a fork of this process: it belongs to the parent."""
        if self._parent:
            self._parent.close()
        self.__init__()  # type: ignore[misc]

    def _server_if_ready(self, choice: bool | None) -> ForkServer | None:
        if choice is False:
            return None
        self._retire_if_stale()
        # The first run of a kernel does not wait for the imports.
        wait = (choice or not self._is_first) and not self._cold_runs
        if wait and not self._parent:
            self._parent = ForkServer()
        server, limit_s = self._parent, READY_TIMEOUT_S if wait else 0
        return server if server and server.wait_until_ready(limit_s) else None

    def _send_command(self, word: bytes) -> None:
        if self._parent:
            self._parent.send_command(word)

    def _retire_if_stale(self) -> None:
        server = self._parent
        if server and (server.process.poll() is not None or server.state != process_state()):
            server.close()
            self._retired.append(server)
            self._parent = None
        # poll() collects the exit status of those that have ended.
        self._retired = [each for each in self._retired if each.process.poll() is None]


def choose_warm_start(wish: bool | None) -> bool | None:
    """Return whether to start warm: True, False, or None for "yes, once a server is ready".

    Args:
        wish: the caller's; None leaves it to LABKIT_WARM (0 or 1), and without that only a Jupyter
            kernel starts warm.

    Raises:
        ParameterError: LABKIT_WARM is something else.
    """
    said = os.environ.get(ENV_WARM, "")
    if said not in ("", "0", "1"):
        raise ParameterError(
            f"{ENV_WARM}={said!r} is neither 0 (never) nor 1 (always); unset it to have labkit"
            " choose"
        )
    # Elsewhere no fork is safe, see torchrun.can_fork.
    if sys.platform != "linux":
        return False
    if wish is not None:
        return wish
    if said:
        return said == "1"
    return None if in_kernel() else False


def process_state() -> tuple[Any, ...]:
    """Return what a Python started now would inherit; a server of another state is stale."""
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIXES_AT_IMPORT)
    }
    installed = os.stat(sysconfig.get_path("purelib")).st_mtime_ns
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(getattr(resource, name)) for name in names]
    # os.umask would change the umask for a moment, for all threads, so the system is asked.
    status = Path("/proc/self/status").read_text().splitlines()
    umask = next((line for line in status if line.startswith("Umask")), "")
    process = requirements.usable_cores(), os.getpriority(os.PRIO_PROCESS, 0), umask
    # The working folder matters only where a relative path is searched.
    paths = os.environ.get("PYTHONPATH", ROOT.anchor).split(os.pathsep)
    folder = "" if all(map(os.path.isabs, paths)) else os.getcwd()
    sources = glob.glob("labkit/**/*.py", root_dir=ROOT, recursive=True)
    times = {path: os.stat(f"{ROOT}/{path}").st_mtime_ns for path in sources}
    return variables, times, installed, limits, process, folder


fork_server_manager = ForkServerManager()
"""This process's own."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=fork_server_manager.forget_server)
