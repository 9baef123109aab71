"""Show the progress of a run: ranks started, step k of n, elapsed time, and what the ranks print.

In a notebook this is one block, redrawn in place and emptied at the end: times, which differ from
run to run, must not stay in the saved notebook. It is HTML, since the state of a widget would stay.
Elsewhere it is text on stderr. The ranks' output stays in ``result.ranks[i].log()``.
"""

import contextlib
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from labkit.environment import ENV_PROGRESS, read_choice
from labkit.errors import ParameterError
from labkit.runs import records
from labkit.runs.folder import RunFolder

REDRAW_PERIOD_S = 0.25
MAX_DISPLAY_LINES = 20
MAX_DISPLAY_CHARACTERS = 1000
MAX_PENDING_LINES = 10_000
PARSE_ERRORS = (ValueError, TypeError, LookupError, OverflowError, RecursionError)


class TailReader:
    """Reads a growing text file, whole lines at a time. The file need not exist yet."""

    def __init__(self, path: Path):
        self.path, self._position, self._rest = path, 0, b""

    def read_lines(self, *, has_ended: bool = False) -> list[str]:
        """Return the lines completed since the last call, and of a file that has ended the rest."""
        new = b""
        # The file does not exist yet, or was deleted.
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        self._position += len(new)
        # Bytes, because a read may end inside a character.
        *lines, self._rest = (self._rest + new).split(b"\n")
        if has_ended and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in lines]


@dataclass
class ProgressState:
    """The progress of a run."""

    program: str
    nproc: int
    started_ranks: int = 0
    done_steps: int = 0
    planned_steps: int = 0
    start_time_s: float = field(default_factory=time.monotonic)

    @property
    def fraction(self) -> float:
        """The share of the planned steps that are done, 0 to 1."""
        return min(1.0, self.done_steps / self.planned_steps) if self.planned_steps else 0.0

    def __str__(self) -> str:
        steps = f", step {self.done_steps} of {self.planned_steps}" if self.planned_steps else ""
        ranks = f"ranks started {self.started_ranks}/{self.nproc}"
        return f"{self.program}: {ranks}{steps}, {time.monotonic() - self.start_time_s:.0f} s"


class Display:
    """Where progress is shown; this one shows nothing."""

    def show_wait_reason(self, text: str) -> None:
        """Show why the run has not started yet."""

    def show(self, state: ProgressState, lines: list[str]) -> None:
        """Show the state, and lines that ranks have printed since the last call."""

    def close(self, state: ProgressState, outcome: str) -> None:
        """Show how the run ended, such as "ok", "differs" (its check), "failed", "timed out"."""


class TextDisplay(Display):
    """The ranks' output on stderr, and the state at the start, each quarter and the end."""

    def __init__(self) -> None:
        self._quarter = -1
        self._wait_reason = ""
        self._pending: deque[str] = deque()
        self._dropped = 0

    def show_wait_reason(self, text: str) -> None:
        if text != self._wait_reason:
            self._wait_reason = text
            self._print_lines(text)

    def show(self, state: ProgressState, lines: list[str]) -> None:
        self._print_lines(*lines)
        quarter = int(4 * state.fraction)
        if quarter > self._quarter:
            self._quarter = quarter
            self._print_lines(str(state))

    def close(self, state: ProgressState, outcome: str) -> None:
        self._print_lines(f"{state}: {outcome}", wait_for_reader=True)

    def _print_lines(self, *lines: str, wait_for_reader: bool = False) -> None:
        # A slow reader of a pipe must not delay the run or its time limit, and one that has gone
        # must not end it. So lines may wait here for the pipe to take them.
        self._pending.extend(lines)
        try:
            while self._pending and (wait_for_reader or _can_write_line(sys.stderr)):
                if self._dropped:
                    count = f"{self._dropped:,} lines left out here"
                    print(f"... {count}; they are in the output of the run ...", file=sys.stderr)
                    self._dropped = 0
                print(self._pending.popleft(), file=sys.stderr, flush=True)
        except BrokenPipeError:
            redirect_to_devnull(sys.stderr)
        while len(self._pending) > MAX_PENDING_LINES:
            self._pending.popleft()
            self._dropped += 1


def _can_write_line(file: Any) -> bool:
    # A stream without a file descriptor takes everything at once.
    with contextlib.suppress(TypeError, OSError, ValueError):
        return bool(select.select([], [file], [], 0)[1])
    return True


def redirect_to_devnull(file: Any) -> None:
    """Redirect a pipe whose reader has gone, so that Python does not fail again at exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), file.fileno())


class NotebookDisplay(Display):
    """One block of HTML under the cell, redrawn four times a second, empty at the end."""

    def __init__(self) -> None:
        from IPython.display import display

        self._lines: list[str] = []
        self._drawn = time.monotonic()
        self._handle: Any = display({"text/html": ""}, raw=True, display_id=True)

    def show_wait_reason(self, text: str) -> None:
        self._draw("", text)

    def show(self, state: ProgressState, lines: list[str]) -> None:
        self._lines = [*self._lines, *lines][-MAX_DISPLAY_LINES:]
        value = f'max="1" value="{state.fraction:.3f}"' if state.planned_steps else ""
        self._draw(value, str(state))

    def _draw(self, value: str, text: str) -> None:
        if time.monotonic() - self._drawn > REDRAW_PERIOD_S:
            self._drawn = time.monotonic()
            output = f"<pre>{escape(chr(10).join(self._lines))}</pre>" if self._lines else ""
            bar = f"<div><progress {value}></progress> {escape(text)}</div>"
            self._handle.update({"text/html": bar + output}, raw=True)

    def close(self, state: ProgressState, outcome: str) -> None:
        self._handle.update({"text/html": ""}, raw=True)


class RunMonitor:
    """Follows the files of one run and updates a display."""

    def __init__(self, folder: RunFolder, program: str, ranks: Sequence[int], display: Display):
        self.state = ProgressState(program, len(ranks))
        self._folder, self._ranks = folder, ranks
        self._logs = [TailReader(folder.log(rank)) for rank in ranks]
        self._records = TailReader(records.record_path(folder.path, ranks[0]))
        self._display = display

    def update(self, *, has_ended: bool = False) -> None:
        """Read what is new, and show it."""
        for record in self._records.read_lines():
            # A broken record is reported with its file when the run is loaded.
            with contextlib.suppress(*PARSE_ERRORS):
                self._count_steps(json.loads(record))
        if self.state.started_ranks < self.state.nproc:
            self.state.started_ranks = sum(self._folder.pid(rank).exists() for rank in self._ranks)
        output = []
        for rank, log in zip(self._ranks, self._logs, strict=True):
            prefix = f"[rank {rank}] " if rank != self._ranks[0] else ""
            lines = log.read_lines(has_ended=has_ended)
            output += [prefix + _clip_line(line, log.path) for line in lines]
        self._display.show(self.state, output)

    def close(self, outcome: str) -> None:
        """Show the rest, then the end."""
        self.update(has_ended=True)
        self._display.close(self.state, outcome)

    def _count_steps(self, record: Any) -> None:
        state = self.state
        if record["name"] == records.PLANNED_STEPS:
            state.planned_steps = int(record["value"])
        elif record["name"] == "step" and record["kind"] == "span":
            state.done_steps = max(state.done_steps, min(record["step"] + 1, state.planned_steps))


def _clip_line(line: str, log: Path) -> str:
    if len(line) <= MAX_DISPLAY_CHARACTERS:
        return line
    return f"{line[:MAX_DISPLAY_CHARACTERS]} ... ({len(line):,} characters; all are in {log})"


_display_override: ContextVar[Display | None] = ContextVar("_display_override", default=None)


@contextlib.contextmanager
def use_display(display: Display) -> Iterator[None]:
    """Show this thread's runs on this display; a KeyboardInterrupt from it ends the run."""
    token = _display_override.set(display)
    try:
        yield
    finally:
        _display_override.reset(token)


def choose_display() -> Display:
    """Return the display of ``use_display``, of LABKIT_PROGRESS, or for this kind of process."""
    if given := _display_override.get():
        return given
    displays = {"off": Display, "text": TextDisplay, "notebook": NotebookDisplay}
    choice = read_choice(ENV_PROGRESS, *displays)
    if choice == "notebook" and not in_kernel():
        rule = "draws in a Jupyter kernel, and this is none: set it to text or off"
        raise ParameterError(f"{ENV_PROGRESS}={choice!r} {rule}")
    return displays[choice or ("notebook" if in_kernel() else "text")]()


def in_kernel() -> bool:
    """Tell whether this is a Jupyter kernel, without importing IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")
