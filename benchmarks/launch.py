"""What labkit.run costs over a bare torchrun of the same program.

    python benchmarks/launch.py

Two ranks join a gloo group, reduce a few numbers and leave, so that nearly all of the time is launching. The two ways
take turns within each pair, after a warm-up of both, because the speed of a shared machine drifts. Prints a table, and
last one JSON object: ``run_over_torchrun`` is the median of the pairs' ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import labkit
from labkit import requirements

PROGRAM = Path(__file__).resolve().parents[1] / "tests" / "programs" / "small.py"
PAIRS = 5
LIMIT = 1.05


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def with_labkit() -> None:
    labkit.run(PROGRAM, nproc=2, device="cpu")


def with_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM)]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, len(requirements.cores()) // 2))}
    subprocess.run(command, check=True, capture_output=True, env=environment)


def main() -> None:
    os.environ["LABKIT_PROGRESS"] = "off"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LABKIT_RUNS"] = folder
        with_labkit()
        with_torchrun()
        pairs = []
        for number in range(PAIRS):
            order = [with_labkit, with_torchrun] if number % 2 == 0 else [with_torchrun, with_labkit]
            taken = {way: seconds_of(way) for way in order}
            pairs.append((taken[with_labkit], taken[with_torchrun]))
    report(pairs)


def report(pairs: list[tuple[float, float]]) -> None:
    print("pair  labkit.run s  torchrun s  ratio")
    for number, (ours, bare) in enumerate(pairs, start=1):
        print(f"{number:4}  {ours:12.2f}  {bare:10.2f}  {ours / bare:5.3f}")
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    result = {
        "bench": "launch",
        "run_over_torchrun": round(ratio, 4),
        "limit": LIMIT,
        "run_s": round(statistics.median(ours for ours, _ in pairs), 3),
        "torchrun_s": round(statistics.median(bare for _, bare in pairs), 3),
        "pairs": PAIRS,
        "ok": ratio <= LIMIT,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
