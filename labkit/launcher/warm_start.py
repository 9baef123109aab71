"""Keep a fork server (fork_server.py) ready, which forks torchrun for a run that starts warm.

The server imports for some seconds, in the background and never beside a measured run: a first run
is cold, and the server pauses during it; a later run waits for the server.
"""

import contextlib
import glob
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit import requirements
from labkit.environment import ENV_RUN_FOLDER, ENV_WARM, read_choice
from labkit.launcher.progress import in_kernel
from labkit.runs.folder import ROOT

FORK_SERVER_ARGUMENTS = ("-m", "labkit.launcher.fork_server")
# Messages between this process and the server. A request to fork is the JSON of torchrun's start,
# and comes with a socket for the answers: torchrun's process id, and later its exit status.
READY, PAUSE, RESUME = b"ready", b"pause", b"resume"
MAX_REQUEST_BYTES, MAX_ANSWER_BYTES = 2**20, 16
MAX_PATH_BYTES = 4096
READY_TIMEOUT_S, FORK_TIMEOUT_S = 60.0, 10.0
# Prefixes of the variables that count when a process begins or imports torch; all others arrive
# with the request.
ENV_PREFIXES_AT_IMPORT = (
    *("PYTHON", "TORCH", "PYTORCH", "TRITON", "INDUCTOR", "CUDA", "NVIDIA", "CXX", "CC"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS", "DNNL", "ONEDNN", "ATEN_", "NUMPY", "NPY_"),
    *("LD_", "MALLOC_", "GLIBC", "LANG", "LC_", "TZ", "TMPDIR", "LOGLEVEL"),
)


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
                answer = self._answers.recv(MAX_ANSWER_BYTES)
            except TimeoutError:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0) from None
            self._answers.close()
            # Without an answer the server is gone, and torchrun goes with it.
            self._status = int(answer) if answer else -signal.SIGKILL
        return self._status


class ForkServer:
    """One fork server, from its start to its end."""

    def __init__(self) -> None:
        self.state = process_state()
        self._ready = False
        self._control, theirs = _make_message_sockets()
        # The first is the notebook's plotting backend, which needs a kernel.
        outer = ("MPLBACKEND", ENV_RUN_FOLDER)
        env = {name: value for name, value in os.environ.items() if name not in outer}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        # numpy makes as many threads as this when it is imported; the ranks set their own number.
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # Read when torch is imported, for all ranks to come.
        env |= requirements.openmp_variables(env)
        # With room for any path: fork_server.show_run_folder overwrites it. Last, since readers of
        # /proc stop at its padding.
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
                self._ready = self._control.recv(MAX_ANSWER_BYTES) == READY
        return self._ready

    def send_command(self, message: bytes, files: Sequence[int] = ()) -> None:
        """Send it a message, which is lost if it has ended."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [message], files)

    def fork(self, request: dict[str, Any]) -> WarmTorchrun:
        """Let it fork torchrun; raise ForkServerGone if it cannot."""
        ours, theirs = _make_message_sockets()
        pid = 0
        try:
            with theirs:
                self.send_command(json.dumps(request).encode(), [theirs.fileno()])
            ours.settimeout(FORK_TIMEOUT_S)
            with contextlib.suppress(TimeoutError, ConnectionError):
                pid = int(ours.recv(MAX_ANSWER_BYTES) or 0)
            if not pid:
                # One that another thread has retired meanwhile has runs that go on.
                if self._control.fileno() >= 0:
                    self.process.kill()
                    self.process.wait()
                raise ForkServerGone
            ours.sendall(RESUME)
        except BaseException:
            # If this process is interrupted, the closed socket tells the fork to end.
            ours.close()
            raise
        return WarmTorchrun(ours, pid)

    def close(self) -> None:
        """Let it end once its runs have ended."""
        self._control.close()


def _make_message_sockets() -> tuple[socket.socket, socket.socket]:
    # Unlike a stream, this kind of socket keeps messages apart.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # A request holds all environment variables. If they do not fit, the run starts cold.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
    return ours, theirs


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
        """Return the server for one run, or None for a cold start; see ``choose_warm_start``."""
        with self._lock:
            server = self._server_if_ready(choice)
            self._is_first = False
            if not server:
                self._cold_runs += 1
                self._send_command(PAUSE)
        try:
            yield server
        finally:
            with self._lock:
                self._cold_runs -= not server
                if not self._cold_runs:
                    self._send_command(RESUME)
                    if choice is not False:
                        self.start_in_background()

    def start_in_background(self) -> None:
        """Start a server, unless there is one of this process's present state."""
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

    The caller's wish decides, then LABKIT_WARM; without both, only a Jupyter kernel starts warm.
    """
    choice = read_choice(ENV_WARM, "0 (never)", "1 (always)")
    # Elsewhere no fork is safe, see torchrun.can_fork.
    if sys.platform != "linux":
        return False
    if wish is None and choice:
        return choice == "1"
    return None if wish is None and in_kernel() else bool(wish)


def process_state() -> tuple[Any, ...]:
    """Return what a Python started now would inherit; a server of another state is stale."""
    names = [name for name in os.environ if name.startswith(ENV_PREFIXES_AT_IMPORT)]
    variables = {name: os.environ[name] for name in names}
    installed = os.stat(sysconfig.get_path("purelib")).st_mtime_ns
    resources = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(number) for number in resources]
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
os.register_at_fork(after_in_child=fork_server_manager.forget_server)
