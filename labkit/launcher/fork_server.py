"""Fork torchrun for each run: ``python -m labkit.launcher.fork_server FD``.

Importing torch is most of the cost of a launch, and this process has already done it. Forking is
safe only with one thread and without CUDA, so it starts neither, and checks both before each fork.

FD is a socket to the notebook's process (warm_start.py). When the other end closes, the server
waits for current runs and leaves. When that process is gone, server and runs leave at once.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import socket
import sys
from typing import Any

from labkit.environment import ENV_NOTEBOOK_PID, ENV_RUN_FOLDER
from labkit.launcher import torchrun, warm_start
from labkit.launcher.warm_start import MAX_ANSWER_BYTES, MAX_PATH_BYTES, PAUSE, READY, RESUME
from labkit.runs import private_files
from labkit.runs.folder import ROOT
from labkit.torch_private import SLOW_MODULES

# What every run needs. What the programs of launch/ import is found in their text.
MODULES_TO_PRELOAD = (
    "encodings.idna",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    *SLOW_MODULES,
    "torch.utils.cpp_extension",
    "labkit.rank",
    "labkit.launcher.rendezvous_handlers",
)
WATCH_PERIOD_S = 0.5
# Each torchrun's process id and socket for answers, by a descriptor that is readable at its end.
Runs = dict[int, tuple[int, socket.socket]]


def main() -> None:
    """Import everything, report readiness, and serve until the notebook closes the socket."""
    show_run_folder("")
    control = socket.socket(fileno=int(sys.argv[1]))
    os.register_at_fork(after_in_child=control.close)
    path = list(sys.path)
    torchrun.hide_gpus()
    for name in (*MODULES_TO_PRELOAD, *list_program_modules()):
        pause_when_asked(control)
        # A broken module is reported by the ranks that import it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # torchrun builds parts of its parser on first use.
    sys.modules["torch.distributed.run"].get_args_parser()
    # setuptools adds a folder of its own.
    sys.path[:] = path
    # Otherwise a garbage collection in a fork would copy the pages of all imported modules.
    gc.collect()
    gc.freeze()
    control.sendall(READY)
    serve_forks(control, os.getppid())


def list_program_modules() -> list[str]:
    """Return the modules of torch and labkit that the programs of launch/ import at the top."""
    programs = sorted((ROOT / "launch").glob("[!_]*.py"))
    return list(dict.fromkeys(name for path in programs for name in torchrun.list_imports(path)))


def pause_when_asked(control: socket.socket) -> None:
    """Leave the machine to a cold run that is being measured, until it has ended."""
    message = RESUME
    while message == PAUSE or select.select([control], [], [], 0)[0]:
        message = control.recv(MAX_ANSWER_BYTES)
        if not message:
            sys.exit()


def show_run_folder(folder: str) -> None:
    """Set $LABKIT_RUN_FOLDER as the system shows it, by which process.py finds a run's process."""
    # /proc shows the environment that a process started with, in its forks too, whatever they set
    # since. So this process starts with room for the longest path, and overwrites that memory.
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    content = os.fsencode(folder).ljust(MAX_PATH_BYTES, b"\0")
    ctypes.memmove(getenv(ENV_RUN_FOLDER.encode()), content, MAX_PATH_BYTES)


def serve_forks(control: socket.socket, notebook: int) -> None:
    """Fork for each request; answer with the process id, and later with the exit status."""
    runs: Runs = {}
    requests = [control.fileno()]
    while os.getppid() == notebook and (requests or runs):
        for ready in select.select([*requests, *runs], [], [], WATCH_PERIOD_S)[0]:
            if ready in runs:
                pid, answers = runs.pop(ready)
                os.close(ready)
                _send_number(answers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                answers.close()
                continue
            # PAUSE and RESUME matter to the imports alone.
            message, files, *_ = socket.recv_fds(control, warm_start.MAX_REQUEST_BYTES, 1)
            if files:
                _fork_torchrun(runs, json.loads(message), socket.socket(fileno=files[0]))
            elif not message:
                requests = []


def _fork_torchrun(runs: Runs, request: dict[str, Any], answers: socket.socket) -> None:
    """Fork torchrun and send its process id, or 0 if forking is no longer safe."""
    if not torchrun.can_fork() or len(os.listdir("/proc/self/task")) > 1:
        return _send_number(answers, 0)
    show_run_folder(request["environment"][ENV_RUN_FOLDER])
    request["environment"][ENV_NOTEBOOK_PID] = str(os.getpid())
    pid = os.fork()
    if pid == 0:
        _run_as_torchrun(runs, request, answers)
    show_run_folder("")
    _send_number(answers, pid)
    runs[os.pidfd_open(pid)] = pid, answers


def _send_number(answers: socket.socket, number: int) -> None:
    # The process that asked may have been interrupted.
    with contextlib.suppress(OSError):
        answers.sendall(str(number).encode())


def _run_as_torchrun(runs: Runs, request: dict[str, Any], answers: socket.socket) -> None:
    words = [torchrun.__name__, *request["arguments"]]
    with torchrun.become_new_process(words, request["environment"]):
        # Other runs' sockets must close when their owners close them.
        for descriptor, (_, others_answers) in runs.items():
            os.close(descriptor)
            others_answers.close()
        # The process that asked may have been interrupted.
        if answers.recv(MAX_ANSWER_BYTES) != RESUME:
            os._exit(1)
        answers.close()
        with private_files.open_file(request["log"], "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(request["working_folder"])
        torchrun.main()


if __name__ == "__main__":
    main()
