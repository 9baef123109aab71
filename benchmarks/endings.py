"""Does any run hang at its end? Runs programs again and again and counts how each run ended.

    python benchmarks/endings.py --count 200 --others 50      # as for a release: some minutes on two cores
    python benchmarks/endings.py --programs ddp --count 40    # one of them

A rank can finish its work and then deadlock while it takes its process group down: see _groups_of_this_process in
labkit/session/session.py. ``ddp`` is the run in which that was seen: a DDP model is still alive when its rank ends.
``--count`` is for that one, ``--others`` for each of the rest, with small parameters. Prints a table, and last one JSON
object: ``hung`` is the number of runs that did not end within ``--timeout-s``.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import tyro

import labkit
from labkit.environment import ENV_PROGRESS, ENV_RUNS_FOLDER

SUSPECT = "ddp"
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    SUSPECT: ("ddp_compile", {"mode": "ddp", "bucket_mb": 0.001, "dim": 300, "steps": 3}),
    "all_reduce": ("all_reduce", {"repeats": 1}),
    "spatial": ("convnext_spatial", {"steps": 1, "width": 64, "height": 32}),
    "fsdp": ("fsdp_wrap", {"steps": 1}),
    "extensions": ("allgather_extensions", {"steps": 1}),
    "two_dim": ("two_dim", {"steps": 1, "nproc": 4}),
}


@dataclass
class Options:
    programs: tuple[str, ...] = tuple(RUNS)
    """Which runs."""
    count: int = 20
    """How often the suspect run is repeated."""
    others: int = 5
    """How often each of the others is repeated."""
    timeout_s: float = 60
    """A run that takes longer counts as hung."""


@dataclass
class Endings:
    """How the repetitions of one run ended."""

    name: str
    runs: int = 0
    hung: int = 0
    failed: int = 0
    median_s: float = 0.0


def repeat(name: str, count: int, timeout_s: float) -> Endings:
    """Run one of RUNS ``count`` times."""
    program, arguments = RUNS[name]
    found, seconds = Endings(name, count), []
    for _ in range(count):
        started = time.perf_counter()
        try:
            labkit.run(program, device="cpu", timeout_s=timeout_s, **arguments)
        except labkit.RunTimedOut:
            found.hung += 1
        except labkit.RankFailed as error:
            found.failed += 1
            print(error)
        seconds.append(time.perf_counter() - started)
    found.median_s = round(statistics.median(seconds), 3)
    return found


def main(options: Options) -> None:
    os.environ[ENV_PROGRESS] = "off"
    print("run           runs  hung  failed  median s")
    rows = []
    for name in options.programs:
        with tempfile.TemporaryDirectory() as folder:
            os.environ[ENV_RUNS_FOLDER] = folder
            row = repeat(name, options.count if name == SUSPECT else options.others, options.timeout_s)
        print(f"{row.name:<12}  {row.runs:4}  {row.hung:4}  {row.failed:6}  {row.median_s:8.2f}", flush=True)
        rows.append(row)
    ended_well = not any(row.hung or row.failed for row in rows)
    print(json.dumps({"bench": "endings", "runs": [vars(row) for row in rows], "ok": ended_well}))


if __name__ == "__main__":
    main(tyro.cli(Options))
