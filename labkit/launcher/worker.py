"""Runs a rank program inside one rank: ``python -m labkit.worker PROGRAM ARGUMENTS``.

PROGRAM is the path of a .py file or the name of a module. It behaves as it does under a bare torchrun; the worker only
adds to it: what it prints goes to the rank's log, its exception to the rank's error file, a request (SIGUSR1) dumps its
stacks, and the rank dies when torchrun does. The worker imports neither torch nor anything else that is large.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TextIO

from labkit.folder import TORCHRUN_PID, VARIABLE, RunFolder, write_json

PR_SET_PDEATHSIG = 1
ECHO_WORDS = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection aborted",
    "broken pipe",
    "socket closed",
    "closed the connection",
    "timed out waiting",
    "wait timeout",
    "remote process exited",
    "nccl communicator was aborted",
)


def main() -> None:
    """Run the program named in sys.argv as this rank."""
    _die_with_torchrun()
    rank, folder = int(os.environ["RANK"]), RunFolder(Path(os.environ[VARIABLE]))
    _redirect_output(folder.log(rank))
    stacks = folder.stack(rank).open("w")
    _keep_stacks(stacks)
    folder.pid(rank).write_text(str(os.getpid()))  # last: whoever reads it may send SIGUSR1 at once
    try:
        _run_program(sys.argv[1], sys.argv[2:])
    except SystemExit as error:
        if error.code in (None, 0):
            raise
        _report(folder.error(rank), rank, error)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        _leave(error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        _report(folder.error(rank), rank, error)
        sys.excepthook(type(error), error, _own_frames(error.__traceback__))
        _leave(1)


def _leave(status: int) -> None:
    """End this failed rank at once: gloo's threads can crash while the interpreter is taken down around them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_echo(error: BaseException) -> bool:
    """Whether an exception looks like the consequence of another rank's end: a lost connection, an absent peer."""
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(known in words for known in ECHO_WORDS)


def _die_with_torchrun() -> None:
    """Ask the kernel to kill this process when torchrun dies, however it dies. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(TORCHRUN_PID, os.getppid())):  # it died before the request
        os.kill(os.getpid(), signal.SIGKILL)


def _redirect_output(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _keep_stacks(stacks: TextIO) -> None:
    """Write this process's stacks when it is asked to (SIGUSR1) and when it crashes in native code."""
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def _run_program(program: str, arguments: list[str]) -> None:
    """Run the program as ``python PROGRAM`` or ``python -m PROGRAM`` would."""
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _report(path: Path, rank: int, error: BaseException) -> None:
    error.__traceback__ = _own_frames(error.__traceback__)
    content = {
        "rank": rank,
        "time": time.time(),
        "exc_type": type(error).__name__,
        "message": f"exit status {error.code}" if isinstance(error, SystemExit) else str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "echo": is_echo(error),
    }
    write_json(path, content)


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without its leading frames in this file and in runpy, which are not the learner's."""
    while frames and (frames.tb_frame.f_code.co_filename == __file__ or "runpy" in frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main()
