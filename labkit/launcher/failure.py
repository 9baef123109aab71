"""Find the first failure of a run in what its ranks and torchrun left behind.

One rank fails, and within milliseconds the others fail too, because it no longer answers. The
first failure is:

1. the earliest exception that does not look like the consequence of another rank's end;
2. a rank that ended without an exception: by a signal, or with an exit status of its own;
3. torchrun, if a signal ended it;
4. the earliest exception that does look like a consequence;
5. torchrun itself, with the end of its log.
"""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.errors import RankFailed, RunTimedOut, shorten
from labkit.launcher import process
from labkit.launcher.resource_limits import shortage_fix
from labkit.runs.folder import RunFolder, disk_problem, read_json

LOG_TAIL_LINES = 30
MAX_OUTPUT_LINES = 100_000
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
    """Return the failure to report, given torchrun's exit status (negative: a signal)."""
    errors = read_rank_errors(folder)
    # Each host's torchrun reports its own ranks; the host that wrote first comes first.
    paths = sorted(folder.path.glob("exit*.json"), key=lambda path: path.stat().st_mtime)
    exits = [end for path in paths for end in read_json(path).get("failures", [])]
    if causes := [error for error in errors if not error["echo"]]:
        return _exception_failure(folder, causes[0])
    raised = {error["rank"] for error in errors}
    silent = [end for end in exits if end["rank"] not in raised]
    # torchrun lists a rank that it ended by SIGTERM after the one that made it do so, so the first
    # entry of all was ended by someone else.
    own = [end for end in silent if end["exitcode"] != -signal.SIGTERM]
    if own := own or [end for end in silent if end is exits[0]]:
        return _exit_status_failure(folder, own[0]["rank"], own[0]["exitcode"])
    if torchrun_status < 0 or not errors:
        return _exit_status_failure(folder, -1, torchrun_status)
    # Without exits torchrun was stopped before it could report.
    started = {int(path.stem.removeprefix("rank_")) for path in folder.path.glob("rank_*.pid")}
    ended = started - raised - {end["rank"] for end in exits} if exits else set()
    early, rule = ", ".join(map(str, sorted(ended))), "every rank must take part to the end"
    remark = f"\n(rank {early} had already ended, with status 0: {rule})" if early else ""
    return _exception_failure(folder, errors[0], remark)


def timeout_failure(folder: RunFolder, timeout_s: float, stacks: Mapping[int, str]) -> RunTimedOut:
    """Return the failure of a run that was stopped at its time limit, with its ranks' output."""
    outputs = {rank: read_tail(folder.log(rank), MAX_OUTPUT_LINES) for rank in stacks}
    return RunTimedOut(timeout_s, stacks, outputs)


def read_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a text file, "" if there is none."""
    return "\n".join(process.read_if_exists(path).splitlines()[-lines:])


def _exception_failure(folder: RunFolder, error: dict[str, Any], remark: str = "") -> RankFailed:
    rank, kind, message = error["rank"], error["exc_type"], error["message"]
    fix = shortage_fix(f"{kind}: {message}")
    return RankFailed(rank, kind, message + remark + fix, error["traceback"], folder.log(rank))


def _exit_status_failure(folder: RunFolder, rank: int, status: int) -> RankFailed:
    # Rank -1 is torchrun.
    if rank < 0:
        # Of several hosts' torchruns, the first with an exception has failed.
        logs = sorted(folder.path.glob("torchrun*.log"))
        failed = [log for log in logs if "Traceback" in process.read_if_exists(log)]
        log = next(iter(failed), folder.torchrun_log)
        stack = shorten(read_tail(log))
        silent = "no rank says why; the end of torchrun's log:"
    else:
        log, stack = folder.log(rank), process.read_stack(folder, rank)
        silent = "the rank left without an exception"
    reason = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    fix = shortage_fix(read_tail(log) + stack)
    message = disk_problem(folder.path) or SIGNAL_MEANINGS.get(reason, silent) + fix
    return RankFailed(rank, reason, message, stack, log if log.exists() else folder.torchrun_log)
