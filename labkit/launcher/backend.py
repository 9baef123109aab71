"""What runs the ranks of a run, on this host or several, and the loop that watches them."""

import contextlib
import importlib
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from labkit.launcher import process
from labkit.launcher.warm_start import WarmTorchrun
from labkit.runs.folder import RunFolder

CLUSTER_MODULE = "labkit_cluster.hosts"
POLL_PERIOD_S = 0.1
# How long torchrun may take to end by itself after a rank has failed.
FAILURE_GRACE_S = 3.0
EXIT_FAILED = 1


class RunHost(Protocol):
    """A host of ``labkit.run(hosts=…)`` as far as the core knows it; see ``labkit.Host``."""

    @property
    def name(self) -> str: ...


class Backend(Protocol):
    """Run the ranks of one run: ``LocalBackend`` on this host, ``MultiHostBackend`` on several."""

    @property
    def is_warm(self) -> bool:
        """Whether the ranks come from a process that has imported torch already."""

    def start(self) -> None:
        """Start the ranks; return at once."""

    def wait(self, timeout_s: float) -> int:
        """Return the exit status; raise subprocess.TimeoutExpired after ``timeout_s`` seconds."""

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the Python stacks of these ranks, or why there are none, by rank."""

    def stop(self) -> list[int]:
        """End every process of the run; return the ids of those that do not die."""


class LocalBackend:
    """torchrun on this host, which ``launch`` starts."""

    def __init__(self, folder: RunFolder, launch: Callable[[], process.TorchrunProcess]):
        self._folder, self._launch = folder, launch
        self._torchrun: process.TorchrunProcess | None = None

    @property
    def is_warm(self) -> bool:
        return isinstance(self._torchrun, WarmTorchrun)

    def start(self) -> None:
        self._torchrun = self._launch()

    def wait(self, timeout_s: float) -> int:
        assert self._torchrun, "start() comes first"
        return self._torchrun.wait(timeout_s)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        return process.collect_stacks(self._folder, ranks)

    def stop(self) -> list[int]:
        pid = self._torchrun.pid if self._torchrun else None
        immortal = process.kill_run_processes(self._folder.path, pid)
        if self._torchrun and not immortal:
            self._torchrun.wait(process.STOP_LIMIT_S)
        return immortal


def load_cluster() -> Any:
    """Import the package for several hosts by name, because the core does not depend on it."""
    return importlib.import_module(CLUSTER_MODULE)


def watch_ranks(
    wait: Callable[[float], int],
    has_failed: Callable[[], bool],
    *,
    poll_period_s: float = POLL_PERIOD_S,
    grace_s: float = FAILURE_GRACE_S,
    timeout_s: float = math.inf,
    on_timeout: Callable[[], int] = lambda: EXIT_FAILED,
) -> int:
    """Wait as ``Backend.wait`` does, again and again; return the exit status.

    Args:
        wait: waits for torchrun's end.
        has_failed: whether the run has failed; called after each wait.
        poll_period_s: the length of each wait.
        grace_s: how long after a failure torchrun may take to end; then EXIT_FAILED is returned.
        timeout_s: the time limit of the run.
        on_timeout: called at the time limit; returns the exit status instead.
    """
    limit, failed_at = time.monotonic() + timeout_s, math.inf
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return wait(poll_period_s)
        failed, now = has_failed(), time.monotonic()
        if now > limit:
            return on_timeout()
        if failed:
            failed_at = min(failed_at, now)
        # A rank has failed but cannot leave by itself.
        if now >= failed_at + grace_s:
            return EXIT_FAILED
