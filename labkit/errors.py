"""Define labkit's exceptions, whose messages say what to do.

Every error that labkit raises on purpose is a LabError. Those that the caller can fix are also
ValueErrors.
"""

from collections.abc import Mapping
from pathlib import Path

MAX_TEXT_CHARACTERS = 20_000


def shorten(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """Return a text, cut in its middle to ``limit`` characters plus a remark if it is longer."""
    if len(text) <= limit:
        return text
    # The middle goes: the first lines name the place of a failure, the last ones its cause.
    left_out = f"{len(text) - limit:,} characters left out here"
    remark = f"\n... {left_out}; they are in the output of the run ...\n"
    return text[: limit // 2] + remark + text[-(limit // 2) :]


class LabError(Exception):
    """Base of all labkit errors."""


class ParameterError(LabError, ValueError):
    """A parameter of a run is unknown or has an invalid value. Nothing was launched."""


class RecordError(LabError, ValueError):
    """A file of a run is unreadable. The message starts with the file, or file:line of a record."""


class MemoryCapExceeded(LabError, MemoryError):
    """A rank asked for more memory than the run allows per process."""


class RankFailed(LabError):
    """A rank of the run failed. Holds the first failure, not those that followed on other ranks.

    Attributes:
        rank: the global rank that failed first, or -1 if torchrun failed before any rank did.
        exc_type: class of its exception ("ValueError"), a signal ("SIGKILL"), or "exit status 3".
    """

    def __init__(self, rank: int, exc_type: str, message: str, traceback: str, log: Path):
        self.rank, self.exc_type, self.message = rank, exc_type, message
        self.traceback, self.log = traceback, log
        who = f"rank {rank}" if rank >= 0 else "torchrun"
        failure = f"{who} failed: {exc_type}" + (f": {message}" if message else "")
        super().__init__(f"{failure}\nits output: {log}\n{traceback}".rstrip())


class NotAllHosts(LabError):
    """The hosts of a run did not find each other. No rank was started."""


class HostLost(LabError):
    """A host of the run is unreachable or was lost. Ranks on other hosts were stopped."""


class RunTimedOut(LabError):
    """The run exceeded its limit; ``stacks`` has where each rank was, ``output`` what it said."""

    def __init__(self, timeout_s: float, stacks: Mapping[int, str], output: Mapping[int, str]):
        self.timeout_s, self.stacks, self.output = timeout_s, dict(stacks), dict(output)
        fix = "raise timeout_s if the run is only slow. Where each rank was:"
        text = f"no end after {timeout_s:g} s; {fix}"
        for rank, stack in sorted(self.stacks.items()):
            text += f"\n--- rank {rank}\n{stack.rstrip()}"
        super().__init__(text)
