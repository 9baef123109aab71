"""Run many simulations, as many at a time as the machine has cores, and show progress."""

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
    requests: Sequence[SimulationRequest],
    title: str,
    on_end: Callable[[int, SimulationOutcome], str],
) -> None:
    """Run all requests; a failure does not stop the others, an interrupt stops them all.

    Args:
        requests: validated requests.
        title: name of the whole in the progress display.
        on_end: called in this thread with the index and outcome of each request as it ends; returns
            a text for the progress display.
    """
    display = choose_display()
    progress = SearchProgress(title, len(requests), planned_steps=len(requests))
    label = "interrupted"
    try:
        # The warm parent imports now: a thread that waited for it could not be interrupted.
        with fork_server_manager.server_for_run(requests[0].warm if requests else False):
            pass
        with contextlib.closing(_outcomes_as_completed(requests, progress, display)) as outcomes:
            for index, outcome in outcomes:
                progress.best = on_end(index, outcome)
                progress.done_steps += 1
        label = "ok"
    finally:
        display.close(progress, label)


@dataclass
class SearchProgress(ProgressState):
    """The number of simulations that ended, and the best so far."""

    best: str = ""
    wait_reason: str = ""

    def __str__(self) -> str:
        count = f"{self.program}: {self.done_steps} of {self.planned_steps} simulated"
        passed = f"{time.monotonic() - self.start_time_s:.0f} s"
        return ", ".join(filter(None, [count, passed, self.best, self.wait_reason]))


class SimulationDisplay(Display):
    """The display of one simulation: shows only waiting, and interrupts a stopped search."""

    def __init__(self, search: SearchProgress, stopped: threading.Event):
        self._search, self._stopped, self._is_interrupted = search, stopped, False

    def show_wait_reason(self, text: str) -> None:
        self._search.wait_reason = text
        self._raise_if_stopped()

    def show(self, state: ProgressState, lines: list[str]) -> None:
        self._search.wait_reason = ""
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        # Once only: the display is used again while the simulation ends.
        if self._stopped.is_set() and not self._is_interrupted:
            self._is_interrupted = True
            raise KeyboardInterrupt


def _outcomes_as_completed(
    requests: Sequence[SimulationRequest], progress: SearchProgress, display: Display
) -> Generator[tuple[int, SimulationOutcome], None, None]:
    """Yield the index and outcome of each request as it ends."""
    stopped = threading.Event()
    with ThreadPoolExecutor(len(requirements.usable_cores())) as pool:
        try:
            places = {
                pool.submit(_simulate_in_thread, each, SimulationDisplay(progress, stopped)): place
                for place, each in enumerate(requests)
            }
            left: set[Future[SimulationOutcome]] = set(places)
            while left:
                display.show(progress, [])
                done, left = wait(left, POLL_PERIOD_S, FIRST_COMPLETED)
                for each in sorted(done, key=places.__getitem__):
                    yield places[each], each.result()
        finally:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _simulate_in_thread(request: SimulationRequest, display: Display) -> SimulationOutcome:
    try:
        with use_display(display):
            return run_simulation(request)
    except (LabError, ValueError) as error:
        return error
