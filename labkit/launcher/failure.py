"""Find the first failure of a run in what its ranks and torchrun left behind.

One rank fails, and within milliseconds the others fail too, because it no longer answers. The
learner needs the first:

1. the earliest exception that does not look like the consequence of another rank's end;
2. a rank that ended without an exception: by a signal, or with an exit status of its own;
3. torchrun, if a signal ended it;
4. the earliest exception that does look like a consequence;
5. torchrun itself, with the end of its log.
"""

import signal
from pathlib import Path
from typing import Any

from labkit.errors import RankFailed, RunTimedOut, shorten
from labkit.launcher.process import read_stack
from labkit.launcher.resource_limits import shortage_fix
from labkit.runs.folder import RunFolder, disk_problem, read_json

LOG_TAIL_LINES = 30
SIGNAL_MEANINGS = {
    "SIGKILL": "killed from outside (kill -9, or the system ran out of memory)",
    "SIGSEGV": "crashed in native code (segmentation fault)",
    "SIGABRT": "native code gave up (abort)",
    "SIGTERM": "ended by someone's SIGTERM",
}


def read_rank_errors(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the exceptions that ended ranks, the earliest first."""
    found = [read_json(path) for path in folder.path.glob("rank_*.error.json")]
    return sorted((error for error in found if error), key=lambda error: error["time"])


def first_failure(folder: RunFolder, torchrun_status: int) -> RankFailed:
    """Return the failure to report for a run, given torchrun's exit status (negative: the signal
    that ended it).
    """
    errors = read_rank_errors(folder)
    causes = [error for error in errors if not error["echo"]]
    if causes:
        return _exception_failure(folder, causes[0])
    silent = _first_silent_exit(folder, {error["rank"] for error in errors})
    if silent:
        return _exit_status_failure(folder, silent["rank"], silent["exitcode"])
    if torchrun_status < 0 or not errors:
        return _exit_status_failure(folder, -1, torchrun_status)
    return _exception_failure(folder, errors[0], _early_exit_remark(folder, errors))


def timeout_failure(folder: RunFolder, timeout_s: float, ranks: int) -> RunTimedOut:
    """Return the failure of a run that was stopped at its time limit, after its ranks' stacks were
    requested.
    """
    stacks = {rank: read_stack(folder, rank) or "(no answer)" for rank in range(ranks)}
    outputs = {rank: read_tail(folder.log(rank), lines=100_000) for rank in range(ranks)}
    return RunTimedOut(timeout_s, stacks, outputs)


def _read_rank_exits(folder: RunFolder) -> list[dict[str, Any]]:
    """Return how ranks ended, as each host's torchrun reported; the host that wrote first comes
    first.
    """
    paths = sorted(folder.path.glob("exit*.json"), key=lambda path: path.stat().st_mtime)
    return [end for path in paths for end in read_json(path).get("failures", [])]


def read_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a text file, "" if there is none."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _exception_failure(folder: RunFolder, error: dict[str, Any], remark: str = "") -> RankFailed:
    message = error["message"] + remark + shortage_fix(f"{error['exc_type']}: {error['message']}")
    return RankFailed(
        error["rank"], error["exc_type"], message, error["traceback"], folder.log(error["rank"])
    )


def _torchrun_error_log(folder: RunFolder) -> Path:
    """Return the log of the torchrun that failed: of several, the first with an exception."""
    logs = sorted(folder.path.glob("torchrun*.log"))
    return next(
        (log for log in logs if "Traceback" in log.read_text(errors="replace")), folder.torchrun_log
    )


def _early_exit_remark(folder: RunFolder, errors: list[dict[str, Any]]) -> str:
    """Return a remark about ranks that ended well while others still waited for them; "" for
    none.
    """
    ends = _read_rank_exits(folder)
    # torchrun was stopped before it could report.
    if not ends:
        return ""
    failed = {end["rank"] for end in [*ends, *errors]}
    started = {int(path.stem.removeprefix("rank_")) for path in folder.path.glob("rank_*.pid")}
    early = ", ".join(str(rank) for rank in sorted(started - failed))
    return (
        f"\n(rank {early} had already ended, with status 0: every rank must take part to the end)"
        if early
        else ""
    )


def _first_silent_exit(folder: RunFolder, raised: set[int]) -> dict[str, Any]:
    """Return the first rank that ended without an exception and not by torchrun's SIGTERM; {} for
    none.
    """
    ends = _read_rank_exits(folder)
    silent = [end for end in ends if end["rank"] not in raised]
    by_itself = [end for end in silent if end["signal"] != "SIGTERM"]
    # torchrun lists a rank that it ended itself after the one that made it do so
    return by_itself[0] if by_itself else silent[0] if silent and silent[0] is ends[0] else {}


def _exit_status_failure(folder: RunFolder, rank: int, status: int) -> RankFailed:
    """Return the failure of a rank, or of torchrun (-1), that ended with this status and without an
    exception.
    """
    log, stack, silent = (
        folder.log(rank),
        read_stack(folder, rank),
        "the rank left without an exception",
    )
    if rank < 0:
        log = _torchrun_error_log(folder)
        stack = shorten(read_tail(log))
        silent = "no rank says why; the end of torchrun's log:"
    reason = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    message = disk_problem(folder.path) or SIGNAL_MEANINGS.get(reason, silent) + shortage_fix(
        read_tail(log) + stack
    )
    return RankFailed(rank, reason, message, stack, log if log.exists() else folder.torchrun_log)
