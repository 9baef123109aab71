"""Tell how busy this host's cores were while steps were timed, and how much of it was this rank."""

import os
import time
from collections.abc import Collection
from operator import sub
from pathlib import Path

from labkit.runs.records import BUSY_CORES, RANK_CORES, TIMED_S, RecordWriter

STAT = Path("/proc/stat")
# user, nice, system, irq, softirq, and steal, which other machines on the same host have had; not
# idle and iowait, nor guests, which are a part of user.
BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


def busy_s(cores: Collection[int]) -> float:
    """Return how long these cores have been busy since the system started, in s; 0 on macOS."""
    total = 0
    for line in STAT.read_text().splitlines() if STAT.exists() else ():
        name, *columns = line.split()
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cores:
            total += sum(int(columns[place]) for place in BUSY_COLUMNS)
    return total / os.sysconf("SC_CLK_TCK")


class CoreUse:
    """A stretch of time in which this rank and others used the host's cores."""

    def __init__(self, cores: Collection[int]):
        self._cores = cores
        self._start = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), busy_s(self._cores)

    def write_records(self, writer: RecordWriter, step: int) -> None:
        """Write how many cores this rank used, and how many were busy."""
        took_s, own_s, all_s = map(sub, self._now(), self._start)
        writer.write("scalar", TIMED_S, step, value=took_s, unit="s")
        writer.write("scalar", RANK_CORES, step, value=own_s / took_s, unit="cores")
        writer.write("scalar", BUSY_CORES, step, value=all_s / took_s, unit="cores")
