"""How much faster does ConvNeXt train when two ranks share each image?

    python benchmarks/spatial.py

Plain training in one process against each strategy on two ranks, one thread a rank, in turn: plain, local, dtensor,
plain, local, dtensor, ... A machine that slows down in between slows all of them, so the ratio of neighbours is kept.
``bound`` is what no exchange at all would give: two ranks at once, each training on half of the image by itself.

"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import labkit
from labkit import requirements
from labkit.environment import ENV_PROGRESS

STRATEGIES = ("bound", "local", "dtensor", "native")
HALVES = Path(__file__).with_name("programs") / "halves.py"


def main() -> None:
    """Run the rounds, print a table for people and one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="paired measurements")
    parser.add_argument("--only", nargs="*", choices=STRATEGIES, help="beside plain; by default all")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in each")
    options = parser.parse_args()
    os.environ.setdefault(ENV_PROGRESS, "off")
    problem = requirements.native_convolution_problem()
    strategies = [name for name in options.only or STRATEGIES if name != "native" or not problem]
    step_ms: dict[str, list[float]] = {name: [] for name in ("plain", *strategies)}
    for _ in range(options.rounds):
        for name in step_ms:
            step_ms[name].append(median_step_ms(name, options.steps))
    report = {"bench": "spatial", "rounds": options.rounds, "plain_step_ms": statistics.median(step_ms["plain"])}
    print(f"{'strategy':<10} {'ranks':>5} {'step ms':>9} {'speedup':>8}   median of {options.rounds} rounds, then each")
    for name, values in step_ms.items():
        ratios = [plain / value for plain, value in zip(step_ms["plain"], values, strict=True)]
        speedup = report[f"{name}_speedup"] = round(statistics.median(ratios), 3)
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{name:<10} {1 if name == 'plain' else 2:>5} {statistics.median(values):>9.1f} {speedup:>8.2f}   {each}")
    del report["plain_speedup"]
    if {"local", "bound"} <= step_ms.keys():
        ratios = [bound / local for bound, local in zip(step_ms["bound"], step_ms["local"], strict=True)]
        report["local_over_bound"] = round(statistics.median(ratios), 3)
    if problem:
        print(problem)
        report["native_speedup"] = None
    print(json.dumps(report))


@contextlib.contextmanager
def one_core_a_rank(ranks: int) -> Iterator[None]:
    """Leave this process, and what it launches, as many cores as there are ranks: one thread for each rank."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:ranks])
    yield
    os.sched_setaffinity(0, allowed)


def median_step_ms(strategy: str, steps: int) -> float:
    """The median step of one run at the preset ``bench``: [2, 3, 256, 512], depths 2, 2, 2, dims 64, 128, 256."""
    ranks = 1 if strategy == "plain" else 2
    with one_core_a_rank(ranks):
        if strategy == "bound":
            result = labkit.run(HALVES, nproc=ranks, device="cpu", steps=steps)
        else:
            how: dict[str, Any] = {"preset": "bench", "strategy": strategy, "steps": steps}
            result = labkit.run("convnext_spatial", nproc=ranks, device="cpu", **how)
    spans = result.frame.query("kind == 'span' and name == 'step' and step >= 0")
    return float(spans.groupby("rank").dur_us.median().max() / 1000)


if __name__ == "__main__":
    main()
