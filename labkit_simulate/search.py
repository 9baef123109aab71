"""Simulates many programs, as many at a time as this machine has cores, and says how far it has come."""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from labkit import requirements
from labkit.errors import LabError
from labkit.launcher.progress import Display, State, choose_display, shown_on
from labkit.launcher.warm import keeper
from labkit.runs.result import RunResult
from labkit_simulate.start import Simulation, carry_out

LOOK_PERIOD_S = 0.2
Outcome = RunResult | LabError | ValueError


def simulate_each(asked: Sequence[Simulation], title: str, ended: Callable[[int, Outcome], str]) -> None:
    """Simulate all of them, in order; one that fails does not end the others.

    An interrupt ends those that go on, and is passed on. What had ended before was told.

    Args:
        asked: checked requests.
        title: what progress calls the whole.
        ended: called with each one's place and its result or error, in the order in which they end, by the thread that
            called this; what it returns is shown beside the count.
    """
    display, progress = choose_display(), Progress(title, len(asked), planned_steps=len(asked))
    outcome = "interrupted"
    try:
        with keeper.during_a_run(asked[0].warm if asked else False):
            pass  # the parent of warm launches imports now: a thread that waits for it would hear no interrupt
        with contextlib.closing(_as_they_end(asked, progress, display)) as outcomes:
            for place, result in outcomes:
                progress.best = ended(place, result)
                progress.done_steps += 1
        outcome = "ok"
    finally:
        display.close(progress, outcome)


@dataclass
class Progress(State):
    """How many have ended, and what was best so far."""

    best: str = ""
    waits: str = ""

    def __str__(self) -> str:
        how_far = f"{self.program}: {self.done_steps} of {self.planned_steps} simulated"
        passed = f"{time.monotonic() - self.begun:.0f} s"
        return ", ".join(filter(None, [how_far, passed, self.best, self.waits]))


class Silent(Display):
    """Of one simulation: it shows nothing but that it waits, and ends the simulation once the search was stopped."""

    def __init__(self, search: Progress, stopped: threading.Event):
        self._search, self._stopped, self._is_told = search, stopped, False

    def wait(self, text: str) -> None:
        self._search.waits = text
        self._look()

    def show(self, state: State, lines: list[str]) -> None:
        self._search.waits = ""
        self._look()

    def _look(self) -> None:
        if self._stopped.is_set() and not self._is_told:
            self._is_told = True  # it is still followed while it ends
            raise KeyboardInterrupt


def _as_they_end(
    asked: Sequence[Simulation], progress: Progress, display: Display
) -> Generator[tuple[int, Outcome], None, None]:
    """Each one's place and outcome, in the order in which they end."""
    stopped = threading.Event()
    with ThreadPoolExecutor(len(requirements.cores())) as pool:
        try:
            places = {
                pool.submit(_simulated, each, Silent(progress, stopped)): place for place, each in enumerate(asked)
            }
            left: set[Future[Outcome]] = set(places)
            while left:
                display.show(progress, [])
                done, left = wait(left, LOOK_PERIOD_S, FIRST_COMPLETED)
                yield from ((places[each], each.result()) for each in sorted(done, key=lambda each: places[each]))
        finally:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _simulated(asked: Simulation, display: Display) -> Outcome:
    """One of them, in a thread of its own."""
    try:
        with shown_on(display):
            return carry_out(asked)
    except (LabError, ValueError) as error:
        return error
