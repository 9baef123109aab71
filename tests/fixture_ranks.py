"""The fixture ``ranks``, which runs the body of a test on several real processes that are ranks of a gloo group.

    def body(x):                       # on the module's level: a process finds it by its name
        total = torch.tensor(float(dist.get_rank() + x))
        dist.all_reduce(total)
        return total.item()

    def test_sum(ranks):
        assert ranks(4)(body, 1) == [10.0] * 4

The processes are started once, when the first test asks for them, and wait for the next body; each body gets a process
group of its own. One that fails or hangs takes its processes with it, and the next body gets new ones.
"""

import contextlib
import faulthandler
import importlib
import itertools
import multiprocessing
import operator
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from labkit import requirements
from labkit.launcher import fork_server
from labkit.launcher.process import loopback_interface

IMPORTED = ("numpy", "labkit.launcher.fork_server", *fork_server.MODULES_TO_PRELOAD)
"""What the processes need; one process imports it and forks them all, as a warm parent does for real ranks."""
TIMEOUT_S = 60.0
START_LIMIT_S = 90.0  # importing torch, on a busy machine
OTHERS_S = 0.3  # how long after one failure an earlier one may still be reported


class RankFailure(AssertionError):
    """A body failed on a rank, or did not end. Says on which, with that rank's own traceback or stack."""


@dataclass
class Answer:
    """What became of a body on one rank."""

    ok: bool
    value: Any = None
    """The body's result, pickled by a process."""
    text: str = ""
    """Why it failed."""
    moment: float = 0.0
    """When, on the clock that all processes share. 0 for one that ended without a word: the others only noticed."""


@pytest.fixture(scope="session")
def rank_pool() -> Iterator["RankPool"]:
    """The processes of all tests of this session."""
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture
def ranks(rank_pool: "RankPool") -> Callable[..., Callable[..., list[Any]]]:
    """``ranks(n, timeout_s=60)(body, *args)``: body(*args) on n processes in a gloo group; their results, by rank."""

    def on(count: int, timeout_s: float = TIMEOUT_S) -> Callable[..., list[Any]]:
        def call(body: Callable[..., Any], *args: Any) -> list[Any]:
            __tracebackhide__ = True  # the failing rank's own traceback is what a reader needs
            return rank_pool.run(count, body, args, timeout_s)

        return call

    return on


class RankPool:
    """Processes that wait for bodies. As many as the largest number of ranks that was asked for."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        self._calls = itertools.count()

    def run(self, count: int, body: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> list[Any]:
        """Run a body on ``count`` processes; see ``ranks``.

        Raises:
            ValueError: a process cannot find the body by its name.
            RankFailure: a rank failed first, or did not end within ``timeout_s``.
        """
        __tracebackhide__ = True
        refuse_unless_importable(body)
        job = (count, body.__module__, body.__qualname__, pickle.dumps(args), timeout_s)
        rendezvous = self._folder / f"group_{next(self._calls)}"
        if not all(process.is_alive() for process in self.processes):
            self._kill()
        try:
            self._grow(count)
            for rank, pipe in enumerate(self._pipes[:count]):
                pipe.send((list(sys.path), rank, rendezvous, *job))
            answers = self._answers(range(count), timeout_s)
            for pipe in self._pipes[:count]:
                pipe.send("all are done")
        except BaseException:  # nobody knows what state the processes are in
            self._kill()
            raise
        return [pickle.loads(answers[rank].value) for rank in range(count)]

    def stop(self) -> None:
        """Kill what is left, and remove the files."""
        self._kill()
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def _grow(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        new = range(len(self.processes), count)
        for index in new:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self._folder / f"stack_{index}"), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process ends the pipe
            self.processes.append(process)
            self._pipes.append(ours)
        self._answers(new, START_LIMIT_S)

    def _answers(self, ranks: Sequence[int], limit_s: float) -> dict[int, Answer]:
        """What the ranks answer. Raises RankFailure for the first that failed, or for one that has not ended."""
        __tracebackhide__ = True
        found: dict[int, Answer] = {}
        give_up = time.monotonic() + limit_s
        while len(found) < len(ranks):
            pending = {self._pipes[rank]: rank for rank in ranks if rank not in found}
            ready = connection.wait(list(pending), timeout=max(0.0, give_up - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pending[pipe]
                found[rank] = self._receive(rank)
                if not found[rank].ok:
                    give_up = min(give_up, time.monotonic() + OTHERS_S)
        raise_first_failure(found, ranks, limit_s, self._stack)
        return found

    def _receive(self, rank: int) -> Answer:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            self.processes[rank].join(1)
            return Answer(ok=False, text=f"its process ended with exit status {self.processes[rank].exitcode}")

    def _stack(self, rank: int) -> str:
        path = self._folder / f"stack_{rank}"
        if not path.exists():
            return "(it has not started yet)"
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # for the rest of it
        return path.read_text()

    def _kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                    child.kill()
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self.processes, self._pipes = [], []


def serve(pipe: connection.Connection, stack: Path) -> None:
    """What a process of the pool does: run the bodies that come through the pipe, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for pytest, which kills this process
    faulthandler.register(signal.SIGUSR1, stack.open("w"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
    pipe.send(Answer(ok=True))
    with contextlib.suppress(EOFError, ConnectionError):  # pytest is gone, or has given up this pool
        while True:
            sys.path[:], rank, rendezvous, count, *job = pipe.recv()
            answer = answer_of(rank, count, rendezvous, *job)
            pipe.send(answer)
            # The group stays until all are done, or the end of this rank would look like a failure to another.
            pipe.recv()
            if dist.is_initialized():
                dist.destroy_process_group()
    os._exit(0)


def answer_of(rank: int, count: int, rendezvous: Path, module: str, name: str, args: bytes, limit_s: float) -> Answer:
    """Run a body as this rank of a new gloo group."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{count}", "LOCAL_WORLD_SIZE": f"{count}"}
    torch.set_num_threads(max(1, len(requirements.usable_cores()) // count))
    torch.manual_seed(0)
    try:
        body = operator.attrgetter(name)(importlib.import_module(module))
        store = dist.FileStore(str(rendezvous), count)
        limit = timedelta(seconds=limit_s + 30)  # later than the pool's, which says where each rank is
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=limit)
        return Answer(ok=True, value=pickle.dumps(body(*pickle.loads(args))))
    except BaseException as error:
        return failed(error)


def failed(error: BaseException) -> Answer:
    """The answer of a rank whose body raised this."""
    frames = error.__traceback__ and error.__traceback__.tb_next  # the first is this file's
    return Answer(
        ok=False, text="".join(traceback.format_exception(error.with_traceback(frames))), moment=time.monotonic()
    )


def refuse_unless_importable(body: Callable[..., Any]) -> None:
    """Raises ValueError unless a process that imports the body's module finds the body there."""
    module, name = getattr(body, "__module__", None), getattr(body, "__qualname__", None)
    try:
        found = operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError, TypeError):
        found = None
    if found is not body:
        raise ValueError(
            f"a process cannot find {name or repr(body)} in module {module}: a body for ranks(n) is a function on the "
            f"module's level, not a closure, lambda or partial; move it there and pass what it needs as arguments"
        )


def raise_first_failure(
    answers: dict[int, Answer], ranks: Sequence[int], limit_s: float, stack: Callable[[int], str]
) -> None:
    """Raises RankFailure for the rank that failed first, or else for one that has not ended."""
    __tracebackhide__ = True
    failures = {rank: answer for rank, answer in answers.items() if not answer.ok}
    if failures:
        first = min(failures, key=lambda rank: failures[rank].moment)
        raise RankFailure(f"rank {first} of {len(ranks)} failed:\n{failures[first].text}")
    late = [rank for rank in ranks if rank not in answers]
    if late:
        stacks = "\n".join(f"rank {rank} is here:\n{stack(rank)}" for rank in late)
        raise RankFailure(f"no end after {limit_s:g} s on {len(late)} of {len(ranks)} ranks\n{stacks}")
