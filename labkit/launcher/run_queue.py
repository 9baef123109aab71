"""Runs on one machine take turns, whichever process starts them, as cores and memory allow.

There is no server. Every run has a ticket, a file that it keeps locked, in a folder that all
processes of this user share and no other user can enter; the lock ends with the process. Tickets
are numbered in the order of arrival, and none overtakes another. One lock on the folder makes each
look at the tickets atomic.
"""

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from labkit import requirements
from labkit.environment import ENV_QUEUE, ENV_RUN_FOLDER, read_choice
from labkit.errors import LabError
from labkit.runs import private_files

TICKET_PATTERN = "[0-9]*-[0-9]*-[01]-[0-9]*-[rw]*ing"
POLL_PERIOD_S = 0.05
# What a rank of the labs takes, or a little more: torch, and a small model.
RANK_BYTES = 400 * 2**20

_locks: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
# A fork of this process would keep the tickets locked after its end.
os.register_at_fork(after_in_child=lambda: [lock.close() for lock in _locks])


@dataclass(frozen=True)
class ResourceNeeds:
    """The resources that a run needs. A run on GPUs shares them with no other run."""

    cores: int
    memory_bytes: int
    uses_gpus: bool

    @classmethod
    def for_run(cls, nproc: int, device: str) -> "ResourceNeeds":
        """Return the needs of this many ranks of this machine, at most all cores."""
        gpus = nproc > 0 and device != "cpu" and requirements.has_nvidia_driver()
        return cls(min(nproc, len(requirements.usable_cores())), nproc * RANK_BYTES, gpus)


@contextlib.contextmanager
def wait_for_turn(need: ResourceNeeds, tell: Callable[[int], None]) -> Iterator[None]:
    """Wait until the machine has the resources for a run, and reserve them inside the block.

    Args:
        need: what the run needs.
        tell: called again and again during the wait, with the number of runs ahead.
    """
    choice = read_choice(ENV_QUEUE, "0 (do not wait for other runs)", "1 (wait)")
    # A run within a run does not wait: the outer one has reserved the resources.
    if choice == "0" or ENV_RUN_FOLDER in os.environ:
        yield
        return
    ticket = _create_ticket(need)
    try:
        while before := ticket.count_runs_ahead():
            tell(before)
            time.sleep(POLL_PERIOD_S)
            # Someone may have cleaned up the folder.
            if not ticket.path.exists():
                ticket.release()
                ticket = _create_ticket(need)
        yield
    finally:
        ticket.release()


class Ticket:
    """A place in the queue: a locked file named number-cores-gpus-process-state."""

    def __init__(self, folder: Path, number: int, need: ResourceNeeds):
        self.need = need
        name = f"{number:08d}-{need.cores}-{int(need.uses_gpus)}-{os.getpid()}-waiting"
        self.path = folder / name
        self._lock: IO[bytes] = private_files.open_file(self.path, "wb")
        _locks.add(self._lock)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def count_runs_ahead(self) -> int:
        """Return how many runs this one must wait for; at 0 it has its turn until ``release``."""
        with _lock_queue() as folder:
            if not self.path.exists():
                return 1
            others = [path for path in live_tickets(folder) if path != self.path]
            running = [path for path in others if path.name.endswith("running")]
            earlier = [path for path in others if path not in running and path < self.path]
            waiting = [path for path in earlier if not _is_suspended(path)]
            # A run that is larger than the machine runs alone.
            if waiting or (running and not self._has_room_beside(running)):
                return len(waiting) + len(running)
            name = self.path.name.replace("waiting", "running")
            self.path = self.path.rename(self.path.with_name(name))
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
        self._lock.close()


def _is_suspended(path: Path) -> bool:
    # Behind a process that is suspended (Ctrl-Z) the others need not wait.
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(int(path.name.split("-")[3])).status() == psutil.STATUS_STOPPED)
    return False


def _create_ticket(need: ResourceNeeds) -> Ticket:
    with _lock_queue() as folder:
        numbers = [int(path.name.split("-")[0]) for path in folder.glob(TICKET_PATTERN)]
        return Ticket(folder, max(numbers, default=0) + 1, need)


def live_tickets(folder: Path) -> list[Path]:
    """Return all tickets whose process is alive, in order, and remove the others."""
    alive = []
    for path in sorted(folder.glob(TICKET_PATTERN)):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                alive.append(path)
    return alive


@contextlib.contextmanager
def _lock_queue() -> Iterator[Path]:
    """Let one process in at a time; yield the folder of the tickets."""
    try:
        place = os.environ.get("XDG_RUNTIME_DIR", "")
        folder = private_files.per_user_folder(f"labkit-queue-{os.getuid()}", place)
        with private_files.lock_file(folder / "lock"):
            yield folder
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        raise LabError(f"no queue: {problem}; mend it, or set {ENV_QUEUE}=0") from error
