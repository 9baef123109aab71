"""Can each mystery run of lab 7 be solved from what three tools show, and does none leave a process?

    python benchmarks/mystery.py --seeds 200     # as for a release, 8 minutes
    python benchmarks/mystery.py --seeds 5       # a look

``diagnose`` is a scripted expert. Like a learner it reads the symptom and the printed tables of at most three tools;
it knows the causes by name, and not the seed's fault. It names the rank, the cause, and the line that proves it. Prints
a line for each seed that it gets wrong, and last one JSON object.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass

import psutil
import tyro

from labkit.environment import ENV_PROGRESS, ENV_RUN_FOLDER
from labkit_course.checks.mystery import Mystery, judge_diagnosis
from labkit_course.checks.ranks.mystery import RANKS, draw_fault

# A slow rank or link sleeps for 60; others take up to 40 alone, and somewhat more beside other programs.
SLOW_STEP_MS = 55
TAG = "MYSTERY_TAG"
"""An environment variable that all processes of the runs carry."""
Diagnosis = tuple[int | None, str, str]
NO_IDEA: Diagnosis = (None, "", "")


def diagnose(case: Mystery) -> Diagnosis:
    """Name rank, cause and proof of a run from its symptom and the text of at most three tools."""
    symptom = repr(case)
    if "was stopped" in symptom:
        return of_a_hang(case)
    if "failed" in symptom:
        return of_a_failure(case)
    if "nan" in symptom:
        losses = rows(case, "losses")
        step, first = next((step, row) for step, row in enumerate(losses) if "nan" in row)
        return first.index("nan"), "nan", f"losses: step {step}"
    pace = re.search(r"took (\d+) ms", symptom)
    if pace and int(pace[1]) > SLOW_STEP_MS:
        return of_slowness(case)
    return of_wrong_numbers(case)


def show(case: Mystery, tool: str) -> str:
    """Return what a tool prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        case.ask(tool)
    return printed.getvalue()


def rows(case: Mystery, tool: str) -> list[list[str]]:
    """Return the cells of a printed table, without its head and the names of its rows."""
    lines = show(case, tool).splitlines()[2:]
    return [re.split(r"\s{2,}", line.strip())[1:] for line in lines]


def odd_one(values: list[str]) -> int | None:
    """Return the rank whose value differs from what all others have; None if it is not one."""
    usual, count = Counter(values).most_common(1)[0]
    return next((rank for rank, value in enumerate(values) if value != usual), None) if count == RANKS - 1 else None


def of_a_hang(case: Mystery) -> Diagnosis:
    """Look at the stacks, and then at the calls."""
    stacks = [row[-1] for row in rows(case, "stacks")]
    waits = [rank for rank, stack in enumerate(stacks) if "wait_for_all" in stack]
    if len(waits) == 1:
        return waits[0], "fewer batches", f"stacks: rank {waits[0]}"
    swaps = [rank for rank, stack in enumerate(stacks) if "swap_boundary" in stack]
    if len(swaps) == 2:
        # Both send: the odd rank should receive first. Both receive: the even one should send.
        rank = swaps["send" in stacks[swaps[0]]]
        return rank, "deadlock", f"stacks: rank {rank}"
    return of_calls(case)


def of_calls(case: Mystery) -> Diagnosis:
    """Find the first call in which the ranks differ."""
    lines = re.findall(r"^(call \d+) +(.*)$", show(case, "record"), re.MULTILINE)
    table = [(row, [call.removesuffix(" …") for call in re.split(r"\s{2,}", cells.strip())]) for row, cells in lines]
    parted = next((place for place, (_, calls) in enumerate(table) if odd_one(calls) is not None), None)
    if parted is None:
        return NO_IDEA
    row, calls = table[parted]
    rank = odd_one(calls) or 0
    if calls[rank].split(" (")[0] == calls[rank - 1].split(" (")[0]:
        return rank, "other shape", f"record: {row}"
    # After two calls that were swapped all is equal again; after one that is missing, nothing is.
    is_equal_again = any(len(set(calls)) == 1 for _, calls in table[parted:])
    proof, _ = table[min(parted + 1, len(table) - 1)]
    return rank, "other order" if is_equal_again else "left out", f"record: {proof}"


def of_a_failure(case: Mystery) -> Diagnosis:
    """Look for the rank with an error of its own, or none at all."""
    text = show(case, "ends")
    for cause, pattern in {"killed": r"^rank (\d) +-9 ", "out of memory": r"^rank (\d) .*MemoryError"}.items():
        if found := re.search(pattern, text, re.MULTILINE):
            return int(found[1]), cause, f"ends: rank {found[1]}"
    return of_calls(case)


def of_slowness(case: Mystery) -> Diagnosis:
    """Who computes longest? If nobody, which message takes long?"""
    computes = [float(row[1]) for row in rows(case, "times")]
    if max(computes) > 2 * sorted(computes)[1]:
        rank = computes.index(max(computes))
        return rank, "straggler", f"times: rank {rank}"
    links = re.findall(r"(rank (\d) → \d) +(\S+)", show(case, "links"))
    row, rank, _ = max(links, key=lambda link: float(link[2]))
    return int(rank), "slow link", f"links: {row}"


def of_wrong_numbers(case: Mystery) -> Diagnosis:
    """Are the weights equal? If they are, what is the gradient's factor?"""
    start, end = zip(*rows(case, "weights"), strict=True)
    if (rank := odd_one(list(start))) is not None:
        return rank, "other weights", f"weights: rank {rank}"
    if set(end) != {"0"}:
        return of_calls(case)
    factors = {row[0] for row in rows(case, "gradients")}
    if factors == {f"{RANKS:.3f}"}:
        return None, "wrong scale", "gradients: rank 0"
    samples = {row[0] for row in rows(case, "samples")}
    return (None, "same samples", "samples: rank 0") if len(samples) == 1 else NO_IDEA


def processes_of_runs() -> list[int]:
    """The living processes of runs that this process, or one like it with the same TAG, has started."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_rank = each.environ().get(TAG) == os.environ.get(TAG) and each.environ().get(ENV_RUN_FOLDER)
            if is_rank and each.pid != os.getpid() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each.pid)
    return found


@dataclass
class Options:
    seeds: int = 200
    """So many mysteries."""
    first: int = 0
    """The first seed."""


def main(options: Options) -> None:
    os.environ[ENV_PROGRESS] = "off"
    os.environ.pop(ENV_RUN_FOLDER, None)
    os.environ[TAG] = str(os.getpid())
    solved, left, most_asked, longest_s = 0, 0, 0, 0.0
    causes: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.seeds):
        start = time.monotonic()
        case = Mystery(seed)
        took_s = time.monotonic() - start
        named = diagnose(case)
        is_right = judge_diagnosis(seed, named).ok
        if not is_right:
            print(f"{seed}: {draw_fault(seed)}, named {named} after {case!r} and {case.asked}", flush=True)
        solved, most_asked = solved + is_right, max(most_asked, len(case.asked))
        longest_s = max(longest_s, took_s)
        left += len(processes_of_runs())
        causes[draw_fault(seed).cause] += 1
    said = {"bench": "mystery", **vars(options), "solved": solved, "most_tools": most_asked, "left": left}
    said |= {"longest_s": round(longest_s, 2), "causes": dict(causes)}
    print(json.dumps(said | {"ok": solved >= 0.95 * options.seeds and not left}))


if __name__ == "__main__":
    main(tyro.cli(Options))
