"""The protocol of launchers, which run ranks on this host or several, and the local one."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from labkit.environment import ENV_RECORDED, read_choice
from labkit.launcher import process
from labkit.launcher.warm_start import WarmTorchrun
from labkit.runs.folder import RunFolder

CLUSTER_MODULE, SIMULATOR = "labkit_cluster.hosts", "labkit_simulate"
RECORDED_RUNS = "labkit_course.recorded_runs"


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


def find_recorded(request: Any) -> Any:
    """Return the result that the course holds of a request; None without one, or if unasked."""
    if read_choice(ENV_RECORDED, "0 (measure)", "1 (take recorded results)") != "1":
        return None
    return importlib.import_module(RECORDED_RUNS).find_recorded(request)


def load_simulator(module: str) -> Any:
    """Import a module of the simulator by name, because the core does not depend on it."""
    return importlib.import_module(f"{SIMULATOR}.{module}")
