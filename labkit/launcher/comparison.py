"""Run variants of a program in turn, to compare their times."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from labkit.errors import ParameterError
from labkit.launcher.run import make_run_request, require_positive, run
from labkit.runs.result import RunResult


def compare(
    program: str | Path,
    variants: Mapping[str, Mapping[str, Any]],
    *,
    rounds: int = 3,
    budget_s: float = 30.0,
    value: str = "step_ms",
    **fixed: Any,
) -> dict[str, RunResult]:
    """Run variants of a program in turn, several times, and return a typical run of each, by label.

    In turn, so that whatever slows the machine meets all variants. Runs that other programs have
    disturbed count only where a variant has no other; such variants run again, within a budget.

        labkit.compare("fsdp_wrap", {"block": {"wrap": "block"}, "root": {"wrap": "root"}}, nproc=4)

    Args:
        program: as for ``run``.
        variants: arguments of ``run`` that differ, by label.
        rounds: how often each variant runs.
        budget_s: seconds for further runs of variants that were always disturbed.
        value: a run is typical if this value of it is the median.
        **fixed: the other arguments of ``run``.
    """
    rounds = require_positive("rounds", rounds, int, "number of rounds")
    for label, each in variants.items():
        if twice := ", ".join(sorted(set(each) & set(fixed))):
            fix = "leave one out"
            raise ParameterError(f"{twice}: given both for {label!r} and for all; {fix}")
        make_run_request(program, **each, **fixed)
    runs: dict[str, list[RunResult]] = {label: [] for label in variants}
    for _ in range(rounds):
        for label, each in variants.items():
            runs[label].append(run(program, **each, **fixed))
    end_s = time.monotonic() + budget_s
    while restless := [label for label in variants if not _undisturbed(runs[label])]:
        for label in restless:
            took_s = float(runs[label][-1].info["duration_s"])
            if time.monotonic() + took_s > end_s:
                return {label: _typical(each, value) for label, each in runs.items()}
            runs[label].append(run(program, **variants[label], **fixed))
    return {label: _typical(each, value) for label, each in runs.items()}


def _undisturbed(results: Iterable[RunResult]) -> list[RunResult]:
    return [each for each in results if not each.cores_of_others]


def _typical(results: list[RunResult], value: str) -> RunResult:
    """Return the run with the median of this value."""
    ranked = sorted(_undisturbed(results) or results, key=lambda each: each.value(value))
    return ranked[len(ranked) // 2]
