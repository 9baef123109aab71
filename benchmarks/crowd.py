"""Do many runs that are asked for at once share a machine?

    python benchmarks/crowd.py                  # thirty processes on this machine: half a minute on two cores

Every process calls labkit.run; each fifth lets a right answer to an exercise be judged on real ranks instead. They take
turns by labkit's queue. Prints who waited how long, and last one JSON object: ``out_of_order`` counts runs that began
before one that had asked at least half a second earlier; ``peak_gb`` is the memory of all of them together.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro

from labkit.environment import ENV_PROGRESS, ENV_QUEUE, ENV_RUNS_FOLDER

PROGRAM = Path(__file__).resolve().parents[1] / "tests" / "programs" / "small.py"
CLEARLY_EARLIER_S = 0.5
RUN = """
import json, sys, time, labkit
from datetime import datetime
asked = time.time()
result = labkit.run(sys.argv[1], device="cpu")
begun = datetime.fromisoformat(result.info["start"]).timestamp()
right = [rank.log() for rank in result.ranks] == [f"rank {rank} of 2 has 8\\n" for rank in range(2)]
print(json.dumps({"asked": asked, "begun": begun, "right": right}))
"""
CHECK = """
import json, time, torch
from torch import distributed as dist
from labkit_course.checks import fsdp_at_work
def average(model, experts, ranks):
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
verdict = fsdp_at_work.expert_gradients(average)
print(json.dumps({"right": verdict.ok, "verdict": repr(verdict)}))
"""


@dataclass
class Options:
    processes: int = 30
    """How many ask at once."""
    timeout_s: float = 300
    """After this they are killed, and have failed."""


def start(number: int) -> subprocess.Popen[str]:
    words = [CHECK] if number % 5 == 4 else [RUN, str(PROGRAM)]
    return subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True)


def memory_of_all() -> int:
    """Bytes of this process's children and theirs; a page that n processes share counts 1/n for each."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def main(options: Options) -> None:
    os.environ[ENV_PROGRESS] = "off"
    os.environ.pop(ENV_QUEUE, None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {ENV_RUNS_FOLDER: folder, "XDG_RUNTIME_DIR": folder}
        begun, peak = time.monotonic(), 0
        crowd = [start(number) for number in range(options.processes)]
        while any(each.poll() is None for each in crowd) and time.monotonic() - begun < options.timeout_s:
            peak = max(peak, memory_of_all())
            time.sleep(0.2)
        seconds = time.monotonic() - begun
        late = [each for each in crowd if each.poll() is None]
        for each in late:
            each.kill()
        answers = [json.loads(said) for each in crowd if (said := each.communicate()[0])]
        left = [process.pid for process in psutil.Process().children(recursive=True)]
        tickets = [path.name for path in Path(folder).glob("labkit-queue-*/*-*")]
    figures = {"peak_gb": round(peak / 1e9, 2), "seconds": round(seconds, 1)}
    report(answers, options.processes, figures, len(late) + len(left) + len(tickets))


def report(answers: list[dict[str, Any]], asked: int, figures: dict[str, float], leftovers: int) -> None:
    runs = sorted((answer for answer in answers if "asked" in answer), key=lambda answer: answer["begun"])
    first = min(run["asked"] for run in runs)
    for run in runs:
        print(f"asked at {run['asked'] - first:6.2f} s, began at {run['begun'] - first:6.2f} s")
    for answer in answers:
        if "verdict" in answer:
            print(answer["verdict"])
    pairs = itertools.combinations(runs, 2)  # each with one that began later
    out_of_order = sum(one["asked"] - later["asked"] > CLEARLY_EARLIER_S for one, later in pairs)
    right = sum(answer["right"] for answer in answers)
    ok = right == asked and not out_of_order and not leftovers
    counts = {"processes": asked, "right": right, "out_of_order": out_of_order, "left": leftovers}
    print(json.dumps({"bench": "crowd"} | counts | figures | {"ok": ok}))


if __name__ == "__main__":
    main(tyro.cli(Options))
