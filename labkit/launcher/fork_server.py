"""The warm parent: ``python -m labkit.launcher.fork_server FD``, started by warm.py. It forks torchrun for each run.

It has imported what rank programs import, which is most of what a launch costs. Forking is right only while a process
has one thread and no CUDA, so it starts none and trains nothing; both are looked at before every fork.

FD is its end of a socket to the notebook's process. When the other end closes it waits for the runs that go on, and
then leaves; when the notebook's process is gone it leaves at once, and every run's torchrun, which watches it, too.
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
from dataclasses import dataclass
from typing import Any, NoReturn

from labkit import config
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
    "tyro",
    "labkit.rank",
    "labkit.launcher.rendezvous_handlers",
)
"""What every run needs. What the programs of launch/ import is found in their text."""
WATCH_PERIOD_S = 0.5


def main() -> None:
    """Import everything, say so, and serve until the notebook has no more need of this process."""
    mark = ProcessTag()
    control = socket.socket(fileno=int(sys.argv[1]))
    path = list(sys.path)
    for name in MODULES_TO_PRELOAD:
        pause_when_asked(control)
        importlib.import_module(name)
    for name in list_program_modules():
        pause_when_asked(control)
        with contextlib.suppress(
            Exception
        ):  # a broken module is the business of the ranks that import it
            importlib.import_module(name)
    warm_up_parsers()
    sys.path[:] = path  # setuptools adds a folder of its own
    gc.collect()
    gc.freeze()  # a fork that collects garbage would copy the pages of all that was imported
    control.sendall(READY)
    serve_forks(control, os.getppid(), mark)


def list_program_modules() -> list[str]:
    """List the modules of torch and labkit that the programs of launch/ import at their top, each once."""
    programs = sorted((ROOT / "launch").glob("[!_]*.py"))
    return list(dict.fromkeys(name for path in programs for name in torchrun.list_imports(path)))


def warm_up_parsers() -> None:
    """Read command lines as every torchrun and every rank will: some of what that needs is only made on first use."""
    sys.modules["torch.distributed.run"].get_args_parser()
    config.parse_argv(WarmupConfig, ["--steps", "2"])


@dataclass
class WarmupConfig:
    """Parameters, as a rank program has them."""

    steps: int = 1
    """How many."""


def pause_when_asked(control: socket.socket) -> None:
    """While a cold run is measured, it shall have the machine for itself; serve looks after that later."""
    word = RESUME
    while word == PAUSE or select.select([control], [], [], 0)[0]:
        word = control.recv(1)
        if not word:
            sys.exit()


class ProcessTag:
    """What the system shows as this process's $LABKIT_RUN_FOLDER, by which process.py finds the processes of a run.

    The system shows the environment that a process began with, also of its forks, whatever they have set since. So this
    process begins with as much room as a path can need, and writes into it what its next fork is to show.
    """

    def __init__(self) -> None:
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        self._address = getenv(ENV_RUN_FOLDER.encode())
        self.set_folder("")

    def set_folder(self, folder: str) -> None:
        """Show this folder, in this process and in those that it forks from now on."""
        ctypes.memmove(
            self._address, os.fsencode(folder).ljust(MAX_PATH_BYTES, b"\0"), MAX_PATH_BYTES
        )


def serve_forks(control: socket.socket, notebook: int, mark: ProcessTag) -> None:
    """Fork for each request, and answer each with its process id and later its exit status.

    While no run goes on, it gathers its memory in huge pages, one at a time, so that nobody waits for that.
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
            else:  # the other end was closed
                selector.unregister(control)
                still = True


def _fork_torchrun(
    selector: selectors.BaseSelector, mark: ProcessTag, request_file: int, answer_file: int
) -> None:
    """Fork torchrun for a request; 0 for its process id says that this cannot be done from here any more."""
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
    """A torchrun has ended: tell its exit status to whoever waits for it."""
    pid, answer = key.data
    selector.unregister(key.fileobj)
    os.close(key.fd)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with answer:
        _send_number(answer, status)


def _send_number(answer: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # whoever asked was interrupted
        answer.sendall(INT_STRUCT.pack(number))


def _run_as_torchrun(
    selector: selectors.BaseSelector, answer: socket.socket, request: Any, parent: int
) -> NoReturn:
    """In the fork: what Popen and a new Python would have done, then torchrun. Does not return."""
    try:
        for key in list(
            selector.get_map().values()
        ):  # other runs' sockets must close when their owners close them
            os.close(key.fd)
            if key.data:
                key.data[1].close()
        selector.close()
        if answer.recv(1) != RESUME:  # whoever asked was interrupted
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
