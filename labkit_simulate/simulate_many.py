"""Simulates many programs, as many at a time as this machine has cores, and says how far it has
come.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from labkit import requirements
from labkit.errors import LabError
from labkit.launcher.progress import Display, ProgressState, choose_display, use_display
from labkit.launcher.warm_start import fork_server_manager
from labkit.runs.result import RunResult
from labkit_simulate.run_simulation import SimulationRequest, run_simulation

POLL_PERIOD_S = 0.2
SimulationOutcome = RunResult | LabError | ValueError


def simulate_many(
    asked: Sequence[SimulationRequest], title: str, ended: Callable[[int, SimulationOutcome], str]
) -> None:
    """Simulate all of them, in order; one that fails does not end the others.

    An interrupt ends those that go on, and is passed on. What had ended before was told.

    Args:
        asked: checked requests.
        title: what progress calls the whole.
        ended: called with each one's place and its result or error, in the order in which they end,
            by the thread that called this; what it returns is shown beside the count.
    """
    display, progress = (
        choose_display(),
        SearchProgress(title, len(asked), planned_steps=len(asked)),
    )
    outcome = "interrupted"
    try:
        with fork_server_manager.server_for_run(asked[0].warm if asked else False):
            # the parent of warm launches imports now: a thread that waits for it would hear no
            # interrupt
            pass
        with contextlib.closing(_outcomes_as_completed(asked, progress, display)) as outcomes:
            for place, result in outcomes:
                progress.best = ended(place, result)
                progress.done_steps += 1
        outcome = "ok"
    finally:
        display.close(progress, outcome)


@dataclass
class SearchProgress(ProgressState):
    """How many have ended, and what was best so far."""

    best: str = ""
    wait_reason: str = ""

    def __str__(self) -> str:
        how_far = f"{self.program}: {self.done_steps} of {self.planned_steps} simulated"
        passed = f"{time.monotonic() - self.start_time_s:.0f} s"
        return ", ".join(filter(None, [how_far, passed, self.best, self.wait_reason]))


class SimulationDisplay(Display):
    """Of one simulation: it shows nothing but that it waits, and ends the simulation once the
    search was stopped.
    """

    def __init__(self, search: SearchProgress, stopped: threading.Event):
        self._search, self._stopped, self._is_told = search, stopped, False

    def show_wait_reason(self, text: str) -> None:
        self._search.wait_reason = text
        self._raise_if_stopped()

    def show(self, state: ProgressState, lines: list[str]) -> None:
        self._search.wait_reason = ""
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set() and not self._is_told:
            # It is still followed while it ends.
            self._is_told = True
            raise KeyboardInterrupt


def _outcomes_as_completed(
    asked: Sequence[SimulationRequest], progress: SearchProgress, display: Display
) -> Generator[tuple[int, SimulationOutcome], None, None]:
    """Each one's place and outcome, in the order in which they end."""
    stopped = threading.Event()
    with ThreadPoolExecutor(len(requirements.usable_cores())) as pool:
        try:
            places = {
                pool.submit(_simulate_in_thread, each, SimulationDisplay(progress, stopped)): place
                for place, each in enumerate(asked)
            }
            left: set[Future[SimulationOutcome]] = set(places)
            while left:
                display.show(progress, [])
                done, left = wait(left, POLL_PERIOD_S, FIRST_COMPLETED)
                yield from (
                    (places[each], each.result())
                    for each in sorted(done, key=lambda each: places[each])
                )
        finally:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _simulate_in_thread(asked: SimulationRequest, display: Display) -> SimulationOutcome:
    """One of them, in a thread of its own."""
    try:
        with use_display(display):
            return run_simulation(asked)
    except (LabError, ValueError) as error:
        return error
