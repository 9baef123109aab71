"""What can go wrong, as exceptions that say what to do.

Every error that labkit raises on purpose is a LabError, so one ``except labkit.LabError`` catches
them all. Those that the caller can mend are ValueErrors as well.
"""

from collections.abc import Mapping
from pathlib import Path

MAX_TEXT_CHARACTERS = 20_000


def shorten(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """A text of at most ``limit`` characters and a remark: of a longer one, the beginning and the
    end.
    """
    if len(text) <= limit:
        return text
    remark = (
        f"\n... {len(text) - limit:,} characters left out here; they are in the output of the run"
        " ...\n"
    )
    return text[: limit // 2] + remark + text[-(limit // 2) :]


class LabError(Exception):
    """Base of all labkit errors."""


class ParameterError(LabError, ValueError):
    """A parameter of a run is unknown or has a value that the rank program does not take. Nothing
    was launched.
    """


class RecordError(LabError, ValueError):
    """A file of a run cannot be read. The message starts with the file, for records with
    file:line.
    """


class MemoryCapExceeded(LabError, MemoryError):
    """A rank asked for more memory than the run allows each of its processes."""


class RankFailed(LabError):
    """A rank of the run failed. Holds the first failure, not the errors that it caused on the other
    ranks.

    Attributes:
        rank: the global rank that failed first, or -1 where torchrun itself failed before any rank
            did.
        exc_type: class name of its exception, such as ``"ValueError"``; ``"SIGKILL"`` for a rank
            that a signal ended; ``"exit status 3"`` for one that left without an exception.
        message: the exception's text.
        traceback: the rank's own traceback, or "" where it left none.
        log: the file with everything that this rank printed.
    """

    def __init__(self, rank: int, exc_type: str, message: str, traceback: str, log: Path):
        self.rank, self.exc_type, self.message, self.traceback, self.log = (
            rank,
            exc_type,
            message,
            traceback,
            log,
        )
        who = f"rank {rank}" if rank >= 0 else "torchrun"
        lines = [
            f"{who} failed: {exc_type}: {message}" if message else f"{who} failed: {exc_type}",
            f"its output: {log}",
        ]
        super().__init__("\n".join([*lines, traceback.rstrip()]).rstrip())


class NotAllHosts(LabError):
    """The hosts of a run did not find each other. No rank was started."""


class HostLost(LabError):
    """A host of the run cannot be reached or was lost. The ranks of the others were stopped."""


class RunTimedOut(LabError):
    """The run was still going after its time limit and was stopped.

    Attributes:
        timeout_s: the limit, in seconds.
        stacks: for each rank, the Python stacks of its threads at that moment.
        output: for each rank, what it had printed.
    """

    def __init__(self, timeout_s: float, stacks: Mapping[int, str], output: Mapping[int, str]):
        self.timeout_s, self.stacks, self.output = timeout_s, dict(stacks), dict(output)
        parts = [
            f"no end after {timeout_s:g} s; raise timeout_s if the run is only slow. Where each"
            " rank was:"
        ]
        parts += [
            f"--- rank {rank}\n{stack.rstrip()}" for rank, stack in sorted(self.stacks.items())
        ]
        super().__init__("\n".join(parts))
