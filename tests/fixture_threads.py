"""The fixture ``threads``, which runs the body of a test on several ranks that are threads of this process.

It starts at once, any function will do, and what it sees of the test's variables is real. But ranks share all globals,
the random number generator among them, and the collectives are torch's own imitation: see ``fixture_ranks`` for gloo.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixture_ranks import TIMEOUT_S, Answer, RankFailure, failed, raise_first_failure


@pytest.fixture
def threads() -> Callable[..., Callable[..., list[Any]]]:
    """``threads(n, timeout_s=60)(body, *args)``: body(*args) on n threads in a group; their results, by rank."""

    def on(count: int, timeout_s: float = TIMEOUT_S) -> Callable[..., list[Any]]:
        def call(body: Callable[..., Any], *args: Any) -> list[Any]:
            __tracebackhide__ = True
            return run_on_threads(count, body, args, timeout_s)

        return call

    return on


def run_on_threads(count: int, body: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> list[Any]:
    """Run a body on threads; see ``threads``.

    Raises:
        RankFailure: a rank failed first, or did not end within ``timeout_s``. A thread that hangs outside of a
            collective goes on, since nothing can stop it.
    """
    __tracebackhide__ = True
    answers: dict[int, Answer] = {}
    with threaded_world() as (store, wake_others):

        def one(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
                answers[rank] = Answer(ok=True, value=body(*args))
            except BaseException as error:
                answers[rank] = failed(error)
                wake_others(error)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

        started = {rank: threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(count)}
        for thread in started.values():
            thread.start()
        give_up = time.monotonic() + timeout_s
        for thread in started.values():
            thread.join(max(0.0, give_up - time.monotonic()))

        def stack(rank: int) -> str:
            frame = sys._current_frames().get(started[rank].ident or 0)
            return "".join(traceback.format_stack(frame)) if frame else "(it has ended meanwhile)"

        try:
            raise_first_failure(dict(answers), range(count), timeout_s, stack)
        except RankFailure as failure:
            wake_others(failure)
            for thread in started.values():
                thread.join(1)
            raise
    return [answers[rank].value for rank in range(count)]


@contextlib.contextmanager
def threaded_world() -> Iterator[tuple[dist.Store, Callable[[BaseException], None]]]:
    """Let each thread have a process group of its own. All that is private to torch's threaded group is in here.

    Yields:
        A store for the threads, and a function that ends those that wait in a collective.
    """
    try:
        from torch._C._distributed_c10d import _set_thread_isolation_mode
        from torch.testing._internal.distributed import multi_threaded_pg as private

        install, uninstall = private._install_threaded_pg, private._uninstall_threaded_pg
        group = private.ProcessLocalGroup
    except (ImportError, AttributeError) as error:
        pytest.skip(f"torch {torch.__version__} has no process group of threads any more ({error}): use ranks(n)")
    _set_thread_isolation_mode(True)
    install()
    try:
        yield dist.HashStore(), group.exception_handle
    finally:
        group.reset()
        uninstall()
        _set_thread_isolation_mode(False)
