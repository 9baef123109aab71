"""What all tests share: a place for runs that is not the checkout's, and plots without a window."""

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path
from unittest import mock

import matplotlib
import pytest
from fixture_answers import answer_to, nothing_starts, ranks_at_hand  # noqa: F401  (fixtures of all tests)
from fixture_long import seventh_of_today
from fixture_ranks import rank_pool, ranks  # noqa: F401
from fixture_threads import threads  # noqa: F401
from fixture_users import another_user, open_place  # noqa: F401

from labkit import rank

# Not through the environment: a notebook's kernel would inherit it and draw nothing.
matplotlib.use("Agg")


def pytest_report_header() -> list[str]:
    """Say what this session runs on, so that a log can be read later."""
    names = ("torch", "numpy", "pandas", "matplotlib", "jupyterlab", "ipywidgets", "papermill", "nbval", "playwright")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} missing")
    return [f"labkit on Python {sys.version.split()[0]}, {os.cpu_count()} cores: {', '.join(versions)}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long for what it adds: all of it, or six sevenths."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0]].append(item)
    if not os.environ.get("LABKIT_TEST"):
        for item in chain(*cases.values()):
            item.add_marker(pytest.mark.skip(reason="takes long for what it adds: make test TODAY=1"))
        return
    other_days = {*chain(*cases.values())} - {*seventh_of_today(cases.values())}
    config.hook.pytest_deselected(items=[item for item in items if item in other_days])
    items[:] = [item for item in items if item not in other_days]


@pytest.fixture(scope="session", autouse=True)
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the tests are recorded outside the checkout; pytest keeps those of the last three sessions."""
    folder = tmp_path_factory.mktemp("runs")
    os.environ["LABKIT_RUNS"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def all_cores() -> Iterator[None]:
    """A session pins its rank to its cores; here that would slow down all tests after it."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    if before and os.sched_getaffinity(0) != before:
        os.sched_setaffinity(0, before)


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C; tests of interrupts would wait for it forever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def warm_ranks() -> None:
    """Ranks are forked from a process that has imported torch, except where a test asks for ``both_ways``."""
    os.environ["LABKIT_WARM"] = "1"
    os.environ["LABKIT_QUEUE"] = "0"  # some tests run two at once on purpose


@pytest.fixture(params=["warm", "cold"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test is run twice: with ranks from a warm parent, and with those of a new Python."""
    monkeypatch.setenv("LABKIT_WARM", "1" if request.param == "warm" else "0")
    return request.param


@pytest.fixture
def lone_rank() -> Iterator[rank.Session]:
    """The session of this process as the only rank, on the CPU."""
    with mock.patch.dict(os.environ, LABKIT_DEVICE="cpu"), rank.session() as here:
        yield here


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A disk of one megabyte, on which runs are recorded."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    monkeypatch.setenv("LABKIT_RUNS", str(disk))
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[1]
