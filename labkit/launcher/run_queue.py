"""Runs on one machine take turns, whichever process starts them: as many at a time as cores and
memory allow.

There is no server. Every run has a ticket, a file that it keeps locked, in a folder that all
processes of this user share and no other user can enter; the lock ends with the process. Tickets
are numbered in the order of arrival, and none overtakes another. One lock on the folder makes each
look at the tickets atomic.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

import psutil

from labkit import requirements
from labkit.environment import ENV_QUEUE, ENV_RUN_FOLDER
from labkit.errors import LabError, ParameterError
from labkit.runs import private_files

TICKET_PATTERN = "[0-9]*-[0-9]*-[01]-[0-9]*-[rw]*ing"
POLL_PERIOD_S = 0.05
RANK_BYTES = 400 * 2**20
"""What a rank of the labs takes, or a little more: torch, and a small model."""


@dataclass(frozen=True)
class ResourceNeeds:
    """The resources that a run needs.

    Attributes:
        cores: one for each rank, but no more than there are.
        memory_bytes: bytes of memory.
        uses_gpus: whether it may use GPUs, which it then has to itself.
    """

    cores: int
    memory_bytes: int
    uses_gpus: bool

    @classmethod
    def for_run(cls, nproc: int, device: str) -> "ResourceNeeds":
        """Return the needs of a run on this many ranks."""
        gpus = device != "cpu" and Path("/dev/nvidiactl").exists()
        return cls(min(nproc, len(requirements.usable_cores())), nproc * RANK_BYTES, gpus)


@contextlib.contextmanager
def wait_for_turn(need: ResourceNeeds, tell: Callable[[int], None]) -> Iterator[None]:
    """Wait until the machine has the resources for a run, and reserve them inside the block.

    A run within a run does not wait: the outer one has reserved them.

    Args:
        need: what the run needs.
        tell: called again and again during the wait, with the number of runs ahead.

    Raises:
        ParameterError: LABKIT_QUEUE is neither 0 nor 1.
        LabError: there is no place for the tickets.
    """
    switch = os.environ.get(ENV_QUEUE, "1")
    if switch not in ("0", "1"):
        raise ParameterError(
            f"{ENV_QUEUE}={switch!r} is neither 0 (do not wait for other runs) nor 1; unset it"
        )
    if switch == "0" or ENV_RUN_FOLDER in os.environ:
        yield
        return
    ticket = _create_ticket(need)
    try:
        while before := ticket.count_runs_ahead():
            tell(before)
            time.sleep(POLL_PERIOD_S)
            if not ticket.path.exists():  # someone cleaned up
                ticket.release()
                ticket = _create_ticket(need)
        yield
    finally:
        ticket.release()


class Ticket:
    """A place in the queue. Its file's name holds number, cores, GPUs, process, and whether it is
    running.
    """

    lock_files: ClassVar[set[IO[bytes]]] = set()
    """The locked files of this process."""

    def __init__(self, folder: Path, number: int, need: ResourceNeeds):
        self.folder, self.need = folder, need
        self.path = (
            folder / f"{number:08d}-{need.cores}-{int(need.uses_gpus)}-{os.getpid()}-waiting"
        )
        self._lock: IO[bytes] = private_files.open_file(self.path, "wb")
        Ticket.lock_files.add(self._lock)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def count_runs_ahead(self) -> int:
        """Return how many runs this one must wait for; at 0 it has its turn, and keeps it until
        ``release``.
        """
        with _lock_queue(self.folder):
            if not self.path.exists():  # someone cleaned up
                return 1
            others = [path for path in live_tickets(self.folder) if path != self.path]
            earlier = [
                path
                for path in others
                if path.name.endswith("waiting") and path.name < self.path.name
            ]
            waiting = [path for path in earlier if not _is_suspended(path)]
            running = [path for path in others if path.name.endswith("running")]
            if waiting or (running and not self._has_room_beside(running)):
                return len(waiting) + len(running)
            self.path = self.path.rename(
                self.path.with_name(self.path.name.replace("waiting", "running"))
            )
            return 0

    def _has_room_beside(self, running: list[Path]) -> bool:
        taken = [path.name.split("-") for path in running]
        cores = sum(int(cores) for _, cores, *_ in taken) + self.need.cores
        gpus = self.need.uses_gpus and any(gpus == "1" for _, _, gpus, *_ in taken)
        memory = psutil.virtual_memory().available >= self.need.memory_bytes
        return cores <= len(requirements.usable_cores()) and not gpus and memory

    def release(self) -> None:
        """Give up the place."""
        self.path.unlink(missing_ok=True)
        Ticket.lock_files.discard(self._lock)
        self._lock.close()


def _close_locks_in_fork() -> None:
    """Close the inherited files in a fork of this process, which would otherwise keep them
    locked.
    """
    for lock in Ticket.lock_files:
        lock.close()
    Ticket.lock_files.clear()


os.register_at_fork(after_in_child=_close_locks_in_fork)


def _is_suspended(path: Path) -> bool:
    """Tell whether a ticket's process is suspended (Ctrl-Z), so that those behind it need not
    wait.
    """
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(int(path.name.split("-")[3])).status() == psutil.STATUS_STOPPED)
    return False


def _create_ticket(need: ResourceNeeds) -> Ticket:
    with _explain_os_errors():
        folder = private_files.per_user_folder(
            f"labkit-queue-{os.getuid()}", os.environ.get("XDG_RUNTIME_DIR", "")
        )
    with _lock_queue(folder):
        numbers = [int(path.name.split("-")[0]) for path in folder.glob(TICKET_PATTERN)]
        return Ticket(folder, max(numbers, default=0) + 1, need)


def live_tickets(folder: Path) -> list[Path]:
    """Return all tickets whose process is alive, and remove the others."""
    alive = []
    for path in sorted(folder.glob(TICKET_PATTERN)):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alive.append(path)
            else:
                path.unlink()
    return alive


@contextlib.contextmanager
def _lock_queue(folder: Path) -> Iterator[None]:
    """Let one process in at a time; the folder is created if necessary."""
    with _explain_os_errors():
        private_files.make_own_folder(folder)
        with private_files.lock_file(folder / "lock"):
            yield


@contextlib.contextmanager
def _explain_os_errors() -> Iterator[None]:
    """Turn an OSError into a LabError that names the file and the fix."""
    try:
        yield
    except OSError as error:
        raise LabError(
            f"no queue: {error.filename}: {error.strerror}; mend it, or set {ENV_QUEUE}=0"
        ) from error
