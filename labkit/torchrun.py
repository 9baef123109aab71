"""torchrun, as one run's process: ``python -m labkit.torchrun FOLDER ARGUMENTS`` (process.start builds the arguments).

torch's own torchrun runs here unchanged. Two things are added: the run ends when the notebook's process is gone,
however it went (torchrun alone would go on), and the way each failed rank ended is written to exit.json. One thing is
shortened: once a rank has failed, the others have two seconds to obey SIGTERM, not thirty.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from labkit.folder import NOTEBOOK_PID, TORCHRUN_PID, RunFolder, write_json

WATCH_PERIOD_S = 0.5
SHUTDOWN_LIMIT_S = 2


def main() -> None:
    """Be torchrun: sys.argv holds the run's folder and torchrun's arguments. Does not return."""
    folder = RunFolder(Path(sys.argv[1]))
    threading.Thread(target=_end_with_notebook, args=[folder], daemon=True).start()
    os.environ[TORCHRUN_PID] = str(os.getpid())
    try:
        status = _run_torchrun(folder, sys.argv[2:])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    if _notebook_is_gone():  # a moment ago, and the watch has not seen it or not finished
        _stop(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # Python takes 0.4 s to take torch apart, which has nothing left to do


def _run_torchrun(folder: RunFolder, arguments: list[str]) -> int:
    """Run torchrun to its end; returns its exit status."""
    from torch.distributed import run  # after the watch has begun: this import takes a second
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _shorten_shutdown()
    try:
        run.main(arguments)
    except ChildFailedError as error:
        write_json(folder.exit_json, {"failures": [_failure(rank, failed) for rank, failed in error.failures.items()]})
        return 1
    return 0


def _failure(rank: int, failed: Any) -> dict[str, Any]:
    """One failed rank as torchrun saw it; ``signal`` is "" for a rank that left by itself."""
    name = signal.Signals(-failed.exitcode).name if failed.exitcode < 0 else ""
    return {"rank": rank, "pid": failed.pid, "exitcode": failed.exitcode, "signal": name, "time": failed.timestamp}


def _shorten_shutdown() -> None:
    """Give ranks two seconds to obey SIGTERM. torchrun's --shutdown-timeout does not reach the end after a failure."""
    from torch.distributed.elastic.multiprocessing import PContext

    close = PContext.close

    def close_soon(context: PContext, death_sig: signal.Signals | None = None, timeout: int = SHUTDOWN_LIMIT_S) -> None:
        close(context, death_sig, min(timeout, SHUTDOWN_LIMIT_S))

    PContext.close = close_soon  # type: ignore[assignment, method-assign]


def _end_with_notebook(folder: RunFolder) -> None:
    while not _notebook_is_gone():
        time.sleep(WATCH_PERIOD_S)
    try:
        _stop(folder)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _notebook_is_gone() -> bool:
    """Whether this process has another parent than the one that started it."""
    return os.getppid() != int(os.environ[NOTEBOOK_PID])


def _stop(folder: RunFolder) -> None:
    from labkit.process import stop

    stop(folder.path, os.getpid())


if __name__ == "__main__":
    main()
