"""Watch the ranks of a run until they end, fail, or reach the time limit.

The caller stops what is left: ``process.kill_run_processes`` on each host.
"""

import contextlib
import math
import subprocess
import time
from collections.abc import Callable

POLL_PERIOD_S = 0.1
# How long torchrun may take to end by itself after a rank has failed.
FAILURE_GRACE_S = 3.0
EXIT_FAILED = 1


def watch_ranks(
    wait: Callable[[float], int],
    has_failed: Callable[[], bool],
    *,
    poll_period_s: float = POLL_PERIOD_S,
    grace_s: float = FAILURE_GRACE_S,
    timeout_s: float = math.inf,
    on_timeout: Callable[[], int] = lambda: EXIT_FAILED,
) -> int:
    """Wait as ``Backend.wait`` does, again and again; return the exit status.

    Args:
        wait: waits for torchrun's end.
        has_failed: whether the run has failed; called after each wait.
        poll_period_s: the length of each wait.
        grace_s: how long after a failure torchrun may take to end; then EXIT_FAILED is returned.
        timeout_s: the time limit of the run.
        on_timeout: called at the time limit; returns the exit status instead.
    """
    limit, failed_at = time.monotonic() + timeout_s, math.inf
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return wait(poll_period_s)
        failed, now = has_failed(), time.monotonic()
        if now > limit:
            return on_timeout()
        if failed:
            failed_at = min(failed_at, now)
        # A rank has failed but cannot leave by itself.
        if now >= failed_at + grace_s:
            return EXIT_FAILED
