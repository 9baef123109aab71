"""Leave out every test that starts a process: ``make check`` runs the others, thousands in a minute.

No list and no mark says which tests these are. A test is left out at the moment in which it, or a fixture it uses,
starts a process, and is counted as skipped. What it has asserted up to there holds.

    python -m pytest -p tests.fixture_quick tests/test_run.py
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import NoReturn

import pytest

REASON = "starts a process: make test runs it"
_has_started = threading.Event()


@pytest.fixture(scope="session", autouse=True)
def skip_when_a_process_starts() -> Iterator[None]:
    """Replace the ways to start a process for as long as tests run; pytest-xdist has started its own before."""
    signal.signal(signal.SIGUSR2, leave_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", leave_out)
        patch.setattr(BaseProcess, "start", leave_out)
        patch.setattr(os, "fork", leave_out)
        yield


def leave_out(*arguments: object, **options: object) -> NoReturn:
    """Skip the test that runs. What pytest raises is no Exception, so most code under test does not handle it."""
    _has_started.set()
    if threading.current_thread() is not threading.main_thread():  # where the test waits for this thread
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
        raise SystemExit
    pytest.skip(REASON)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test whose code, such as IPython's, has taken the skip for an error of a cell."""
    _has_started.clear()
    try:
        yield
    except BaseException:
        if _has_started.is_set():
            pytest.skip(REASON)
        raise
