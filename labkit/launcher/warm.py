"""The notebook's side of warm launching: keeps a warm parent (parent.py) at hand, which forks torchrun for a run.

The parent imports for some seconds, in the background and never beside a run that is measured: a run that comes first
is a cold one, during which the parent stands still; a later run waits for it. Who sets LABKIT_WARM=1 always waits.
"""

import contextlib
import json
import os
import resource
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
from labkit.errors import ParameterError
from labkit.launcher.progress import in_kernel
from labkit.runs.folder import ROOT, VARIABLE

SWITCH = "LABKIT_WARM"
PROGRAM = ("-m", "labkit.launcher.parent")
READY, STAND_STILL, GO_ON, FORK = b"r", b"s", b"g", b"f"
NUMBER = struct.Struct("i")
LONGEST_PATH = 4096
READY_WITHIN_S, ANSWERS_WITHIN_S = 60.0, 10.0
READ_AT_IMPORT = (
    *("PYTHON", "TORCH", "PYTORCH", "TRITON", "INDUCTOR", "CUDA", "NVIDIA", "CXX", "CC"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS", "DNNL", "ONEDNN", "ATEN_", "NUMPY", "NPY_"),
    *("LD_", "MALLOC_", "GLIBC", "LANG", "LC_", "TZ", "TMPDIR", "LOGLEVEL"),
)
"""How the environment variables begin that count when a process begins or imports torch. All others arrive anyway."""


class Gone(Exception):
    """The warm parent has ended, or may not fork any more."""


class Torchrun:
    """A torchrun that the warm parent forked, with what labkit uses of subprocess.Popen: ``pid`` and ``wait``."""

    def __init__(self, answers: socket.socket, pid: int):
        self.pid, self._answers = pid, answers
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        if self._status is None:
            self._answers.settimeout(timeout)
            try:
                answer = self._answers.recv(NUMBER.size)
            except TimeoutError:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0) from None
            self._answers.close()
            # without an answer the parent is gone, and torchrun goes with it
            self._status = int(NUMBER.unpack(answer)[0]) if answer else -signal.SIGKILL
        return self._status


class Parent:
    """One warm parent, from its start to its end."""

    def __init__(self) -> None:
        self.state = state_of_this_process()
        self._ready = False
        self._control, theirs = socket.socketpair()
        ours = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        # numpy makes as many threads as this says when it is imported; the ranks set their own number later
        ours |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        room = {VARIABLE: "." * LONGEST_PATH}  # last, see parent.Mark
        inherited = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "MPLBACKEND")}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=inherited | ours | room,
            )

    def becomes_ready(self, within_s: float) -> bool:
        """Whether it has imported everything, or does so within this time. Raises Gone if it has ended."""
        if self.process.poll() is not None:
            raise Gone
        if not self._ready:
            self._control.settimeout(within_s)
            try:
                self._ready = self._control.recv(1) == READY
            except (TimeoutError, BlockingIOError):
                return False
            except OSError:
                raise Gone from None
            if not self._ready:
                raise Gone
        return True

    def say(self, word: bytes, files: Sequence[int] = ()) -> None:
        """Tell it something. Raises Gone if it has ended."""
        self._control.settimeout(None)
        try:
            socket.send_fds(self._control, [word], files)
        except OSError:
            raise Gone from None

    def fork(self, request: dict[str, Any]) -> Torchrun:
        """Have it fork torchrun. Raises Gone if it cannot."""
        ours, theirs = socket.socketpair()
        pid = 0
        with contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)  # if this is interrupted, the fork learns by it that nobody wants it
            with theirs, open(os.memfd_create("labkit-request"), "w+") as file:
                json.dump(request, file)
                file.flush()
                file.seek(0)
                self.say(FORK, [file.fileno(), theirs.fileno()])
            ours.settimeout(ANSWERS_WITHIN_S)
            with contextlib.suppress(TimeoutError):
                pid = NUMBER.unpack(ours.recv(NUMBER.size).ljust(NUMBER.size, b"\0"))[0]
            if not pid:
                self.process.kill()
                self.process.wait()
                raise Gone
            ours.sendall(GO_ON)
            on_error.pop_all()
        return Torchrun(ours, pid)

    def retire(self) -> None:
        """Let it end when its runs have ended."""
        self._control.close()


class Keeper:
    """Has a warm parent at hand for this process: starts it, renews it, and keeps it still beside a cold run."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._parent: Parent | None = None
        self._retired: list[Parent] = []
        self._cold_runs = 0
        self._is_first = True

    @contextlib.contextmanager
    def during_a_run(self, wish: bool | None) -> Iterator[Parent | None]:
        """The parent for one run, or None if that is to be cold. ``wish`` as for ``decide``."""
        choice = decide(wish)
        with self._lock:
            parent = self._parent_for(choice)
            self._is_first = False
            if not parent:
                self._cold_runs += 1
                self._tell(STAND_STILL)
        try:
            yield parent
        finally:
            with self._lock:
                if not parent:
                    self._cold_runs -= 1
                if not self._cold_runs:
                    self._tell(GO_ON)
                    if choice is not False and not self._parent:
                        self.begin()

    def begin(self) -> None:
        """Start a parent in the background, unless one is there that stands for this process as it is now."""
        with self._lock:
            if sys.platform != "linux" or os.environ.get(SWITCH) == "0":
                return
            self._drop_if_stale()
            if not self._parent:
                self._parent = Parent()

    def forget(self) -> None:
        """In a fork of this process: the parent is not its own."""
        if self._parent:
            self._parent.retire()
        self.__init__()  # type: ignore[misc]

    def _parent_for(self, choice: bool | None) -> Parent | None:
        if choice is False:
            return None
        self._drop_if_stale()
        wait = (choice or not self._is_first) and not self._cold_runs
        if wait and not self._parent:
            self._parent = Parent()
        try:
            return self._parent if self._parent and self._parent.becomes_ready(READY_WITHIN_S if wait else 0) else None
        except Gone:
            self._drop()
            return None

    def _tell(self, word: bytes) -> None:
        """Tell the parent to stand still, or to go on, with what it does beside the runs."""
        try:
            if self._parent:
                self._parent.say(word)
        except Gone:
            self._drop()

    def _drop_if_stale(self) -> None:
        if self._parent and self._parent.state != state_of_this_process():
            self._drop()

    def _drop(self) -> None:
        if self._parent:
            self._parent.retire()
            self._retired.append(self._parent)
        self._parent = None
        self._retired = [each for each in self._retired if each.process.poll() is None]


def decide(wish: bool | None) -> bool | None:
    """Whether to launch warm: True, False, or None for "yes, once a parent is ready".

    Args:
        wish: what the caller asked for; None leaves it to LABKIT_WARM (0 or 1), and without that only a kernel is warm.

    Raises:
        ParameterError: LABKIT_WARM is something else.
    """
    said = os.environ.get(SWITCH, "")
    if said not in ("", "0", "1"):
        raise ParameterError(f"{SWITCH}={said!r} is neither 0 (never) nor 1 (always); unset it to have labkit choose")
    if sys.platform != "linux":  # elsewhere no fork is safe, see torchrun.may_fork
        return False
    if wish is not None:
        return wish
    if said:
        return said == "1"
    return None if in_kernel() else False


def state_of_this_process() -> tuple[Any, ...]:
    """What a new Python would find that began now. A parent that began with another state must not stand for it."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT)}
    installed = os.stat(sysconfig.get_path("purelib")).st_mtime_ns
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    process = requirements.cores(), os.getpriority(os.PRIO_PROCESS, 0), _umask()
    relative = not all(map(os.path.isabs, os.environ.get("PYTHONPATH", ROOT.anchor).split(os.pathsep)))
    return variables, _times_of_sources(), installed, limits, process, os.getcwd() if relative else ""


def _times_of_sources() -> dict[str, int]:
    times = {}
    for folder, _, names in os.walk(ROOT / "labkit"):
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            with contextlib.suppress(FileNotFoundError):  # an editor's link to nowhere
                times[path] = os.stat(path).st_mtime_ns
    return times


def _umask() -> str:
    """As the system tells it: asking by os.umask would set it for a moment, for all threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((line for line in lines if line.startswith("Umask")), "")


keeper = Keeper()
"""This process's own."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=keeper.forget)
