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
from labkit.hidden_modules import ranks_hiding_files
from labkit.launcher import process
from labkit.launcher.resource_limits import shortage_fix
from labkit.runs.folder import RunFolder, disk_problem, read_json

LOG_TAIL_LINES = 30
# What Python raises where a file hides a module from an import.
IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "AttributeError")
TORCHRUN = -1  # in place of a rank
MAX_OUTPUT_LINES = 100_000
SILENCE_MEANING = (
    " or a word: does its program call os._exit, or close descriptors that it has not opened, its"
    " output among them (os.closerange)?"
)
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
    errors, exits = read_rank_errors(folder), _read_rank_exits(folder)
    if causes := [error for error in errors if not error["echo"]]:
        return _exception_failure(folder, causes[0])
    raised = {error["rank"] for error in errors}
    if silent := _first_silent_exit(exits, raised):
        return _exit_status_failure(folder, silent["rank"], silent["exitcode"])
    if torchrun_status < 0 or not errors:
        return _exit_status_failure(folder, TORCHRUN, torchrun_status)
    return _exception_failure(folder, errors[0], _early_exit_remark(folder, exits, raised))


def _read_rank_exits(folder: RunFolder) -> list[dict[str, Any]]:
    """Return how ranks ended, as torchrun reports it; the host that wrote first comes first."""
    paths = sorted(folder.path.glob("exit*.json"), key=lambda path: path.stat().st_mtime)
    return [end for path in paths for end in read_json(path).get("failures", [])]


def _first_silent_exit(exits: list[dict[str, Any]], raised: set[int]) -> dict[str, Any] | None:
    """Return the first rank that ended without an exception, unless torchrun has ended it."""
    silent = [end for end in exits if end["rank"] not in raised]
    for end in silent:
        if end["exitcode"] != -signal.SIGTERM:
            return end
    # torchrun lists a rank that it ended by SIGTERM after the one that made it do so. So the first
    # of the list was ended by someone else.
    return silent[0] if silent and silent[0] is exits[0] else None


def _early_exit_remark(folder: RunFolder, exits: list[dict[str, Any]], raised: set[int]) -> str:
    """Name the ranks that had ended well while others waited for them, or return ""."""
    # Without exits torchrun was stopped before it could report.
    if not exits:
        return ""
    started = {int(path.stem.removeprefix("rank_")) for path in folder.path.glob("rank_*.pid")}
    early = ", ".join(map(str, sorted(started - raised - {end["rank"] for end in exits})))
    rule = "every rank must take part to the end"
    return f"\n(rank {early} had already ended, with status 0: {rule})" if early else ""


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
    if kind in IMPORT_ERRORS and (hiding := ranks_hiding_files()):
        fix += f"\n{hiding}"
    return RankFailed(rank, kind, message + remark + fix, error["traceback"], folder.log(rank))


def _exit_status_failure(folder: RunFolder, rank: int, status: int) -> RankFailed:
    if rank == TORCHRUN:
        # Of several hosts' torchruns, the first with an exception has failed.
        logs = sorted(folder.path.glob("torchrun*.log"))
        failed = [log for log in logs if "Traceback" in process.read_if_exists(log)]
        log = next(iter(failed), folder.torchrun_log)
        stack, lines = shorten(read_tail(log)), MAX_OUTPUT_LINES
        silent = "no rank says why; the end of torchrun's log:"
    else:
        log, stack, lines = folder.log(rank), process.read_stack(folder, rank), LOG_TAIL_LINES
        silent = "the rank left without an exception"
        if not read_tail(log).strip():
            silent += SILENCE_MEANING
    reason = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    fix = shortage_fix(read_tail(log, lines) + stack)
    if any(f"{kind}:" in stack for kind in IMPORT_ERRORS) and (hiding := ranks_hiding_files()):
        fix += f"\n{hiding}"
    message = disk_problem(folder.path) or SIGNAL_MEANINGS.get(reason, silent) + fix
    return RankFailed(rank, reason, message, stack, log if log.exists() else folder.torchrun_log)
