"""Fork torchrun for each run: ``python -m labkit.launcher.fork_server FD``, started by
warm_start.py.

Importing torch is most of the cost of a launch, and this process has already done it. Forking is
safe only with one thread and without CUDA, so it starts neither, and checks both before each fork.

FD is a socket to the notebook's process. When the other end closes, the server waits for current
runs and leaves. When the notebook's process is gone, the server and all its runs leave at once.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import selectors
import socket
import sys
import traceback
from typing import Any, NoReturn

from labkit.environment import ENV_NOTEBOOK_PID, ENV_RUN_FOLDER
from labkit.launcher import huge_pages, torchrun
from labkit.launcher.warm_start import FORK, INT_STRUCT, MAX_PATH_BYTES, PAUSE, READY, RESUME
from labkit.runs import private_files
from labkit.runs.folder import ROOT
from labkit.session.process_exit import reset_exit_handlers
from labkit.torch_private import SLOW_MODULES

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
"""What every run needs. What the programs of launch/ import is found in their text."""
WATCH_PERIOD_S = 0.5


def main() -> None:
    """Import everything, report readiness, and serve until the notebook closes the socket."""
    mark = ProcessTag()
    control = socket.socket(fileno=int(sys.argv[1]))
    path = list(sys.path)
    for name in MODULES_TO_PRELOAD:
        pause_when_asked(control)
        importlib.import_module(name)
    for name in list_program_modules():
        pause_when_asked(control)
        # A broken module is reported by the ranks that import it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # torchrun builds parts of its parser on first use.
    sys.modules["torch.distributed.run"].get_args_parser()
    # setuptools adds a folder of its own.
    sys.path[:] = path
    gc.collect()
    # Otherwise a garbage collection in a fork would copy the pages of all imported modules.
    gc.freeze()
    control.sendall(READY)
    serve_forks(control, os.getppid(), mark)


def list_program_modules() -> list[str]:
    """Return the modules of torch and labkit that the programs of launch/ import at the top."""
    programs = sorted((ROOT / "launch").glob("[!_]*.py"))
    return list(dict.fromkeys(name for path in programs for name in torchrun.list_imports(path)))


def pause_when_asked(control: socket.socket) -> None:
    """Leave the machine to a cold run that is being measured; serve_forks answers later
    requests.
    """
    word = RESUME
    while word == PAUSE or select.select([control], [], [], 0)[0]:
        word = control.recv(1)
        if not word:
            sys.exit()


class ProcessTag:
    """Set $LABKIT_RUN_FOLDER as the system shows it for this process, so that process.py finds a
    run.

    /proc shows the environment that a process started with, in its forks too, whatever they set
    since.
    So this process starts with room for the longest path, and overwrites that memory before each
    fork.
    """

    def __init__(self) -> None:
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        self._address = getenv(ENV_RUN_FOLDER.encode())
        self.set_folder("")

    def set_folder(self, folder: str) -> None:
        """Show this folder for this process and for those that it forks from now on."""
        ctypes.memmove(
            self._address, os.fsencode(folder).ljust(MAX_PATH_BYTES, b"\0"), MAX_PATH_BYTES
        )


def serve_forks(control: socket.socket, notebook: int, mark: ProcessTag) -> None:
    """Fork for each request; answer with the process id, and later with the exit status.

    Between runs it moves its memory into huge pages, one at a time so that no request waits long.
    """
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    small, still = huge_pages.find_huge_page_addresses(), False
    while os.getppid() == notebook and selector.get_map():
        is_free = bool(small) and not still and len(selector.get_map()) == 1
        ready = selector.select(0 if is_free else WATCH_PERIOD_S)
        if is_free and not ready:
            huge_pages.collapse_pages(small.pop())
        for key, _ in ready:
            if key.fileobj is not control:
                _send_exit_status(selector, key)
                continue
            word, files, *_ = socket.recv_fds(control, 1, 2)
            if word == FORK:
                _fork_torchrun(selector, mark, *files)
            elif word:
                still = word == PAUSE
            else:
                # The other end was closed.
                selector.unregister(control)
                still = True


def _fork_torchrun(
    selector: selectors.BaseSelector, mark: ProcessTag, request_file: int, answer_file: int
) -> None:
    """Fork torchrun and return its process id, or 0 if forking is no longer safe."""
    answer = socket.socket(fileno=answer_file)
    with open(request_file) as file:
        request = json.load(file)
    if not _can_fork_now():
        return _send_number(answer, 0)
    mark.set_folder(request["environment"][ENV_RUN_FOLDER])
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _run_as_torchrun(selector, answer, request, parent)
    mark.set_folder("")
    _send_number(answer, pid)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answer))


def _can_fork_now() -> bool:
    return torchrun.can_fork() and len(os.listdir("/proc/self/task")) == 1


def _send_exit_status(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    pid, answer = key.data
    selector.unregister(key.fileobj)
    os.close(key.fd)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with answer:
        _send_number(answer, status)


def _send_number(answer: socket.socket, number: int) -> None:
    # The process that asked was interrupted.
    with contextlib.suppress(OSError):
        answer.sendall(INT_STRUCT.pack(number))


def _run_as_torchrun(
    selector: selectors.BaseSelector, answer: socket.socket, request: Any, parent: int
) -> NoReturn:
    """Become torchrun in the fork, as Popen and a new Python would. Does not return."""
    try:
        # other runs' sockets must close when their owners close them
        for key in list(selector.get_map().values()):
            os.close(key.fd)
            if key.data:
                key.data[1].close()
        selector.close()
        # The process that asked was interrupted.
        if answer.recv(1) != RESUME:
            os._exit(1)
        answer.close()
        os.setsid()
        with private_files.open_file(request["log"], "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        reset_exit_handlers()
        os.environ.clear()
        os.environ.update(request["environment"] | {ENV_NOTEBOOK_PID: str(parent)})
        os.chdir(request["working_folder"])
        sys.argv = [torchrun.__name__, *request["arguments"]]
        torchrun.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
