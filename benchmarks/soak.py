"""Does labkit stay right and leave nothing behind, over hundreds of runs that go well and wrong?

    python benchmarks/soak.py                   # 200 runs, ten rounds of twenty: some minutes on two cores
    python benchmarks/soak.py --rounds 1        # a round of each kind

A round has warm and cold runs and runs on two hosts (those of labkit_cluster.local_hosts), and faults among them: a
rank that raises, one that is killed, ranks that wait for each other, a host that dies. Each good run trains the same
network and must end with the losses of the first; each fault must be told by its own error and rank. After each run
none of its processes may be left. Prints a line a round, and last one JSON object: open files and resident memory of
this process and the warm parent after the first round and after the last.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro

import labkit
from labkit.environment import ENV_PROGRESS, ENV_RUN_FOLDER, ENV_RUNS_FOLDER
from labkit.errors import HostLost, LabError, RankFailed, RunTimedOut
from labkit_cluster.local_hosts import LocalHosts, start_local_hosts

MISBEHAVE = Path(__file__).resolve().parents[1] / "tests" / "programs" / "misbehave.py"
TRAINING: dict[str, Any] = {"model": "mlp_stack", "wrap": "block", "steps": 2, "device": "cpu"}
SAME = 1e-6
GONE_WITHIN_S = 5.0
MIB = 2**20
MEMORY_LIMIT_MIB = 64.0


@dataclass
class Options:
    rounds: int = 10
    """Of twenty runs each."""


def losses(result: labkit.RunResult) -> list[float]:
    """By step, the mean over the ranks."""
    frame = result.frame.query("kind == 'scalar' and name == 'loss'")
    return list(frame.groupby("step")["value"].mean())


def train(**how: Any) -> list[float]:
    return losses(labkit.run("fsdp_wrap", **TRAINING, **how))


def misbehave(wanted: type[LabError], rank: int | None = None, **how: Any) -> bool:
    """Whether a run that goes wrong is told by this error, and blamed on this rank."""
    try:
        labkit.run(MISBEHAVE, group=True, **how)
    except LabError as error:
        return isinstance(error, wanted) and rank in (None, getattr(error, "rank", None))
    return False


def host_dies(hosts: LocalHosts, runs: Path) -> bool:
    """Whether a host that dies while all ranks wait is named."""
    noted = runs / f"pids_{time.time_ns()}"

    def kill() -> None:
        while not noted.exists() or len(noted.read_text().split()) < 4:  # on each host torchrun and a rank
            time.sleep(0.05)
        hosts.kill_host("host1")

    threading.Thread(target=kill, daemon=True).start()
    try:
        labkit.run(MISBEHAVE, nproc=1, hosts=hosts, group=True, how="wait", pids=str(noted), timeout_s=60)
    except HostLost as error:
        return "host1" in str(error)
    return False


def cases(hosts: LocalHosts, runs: Path, right: list[float]) -> Iterator[tuple[str, Callable[[], bool]]]:
    """One round, by name: each says whether it went as it must."""

    def good(**how: Any) -> Callable[[], bool]:
        return lambda: max(abs(a / b - 1) for a, b in zip(train(**how), right, strict=True)) < SAME

    yield from [("warm", good(nproc=4, warm=True))] * 4
    yield "warm, raises", lambda: misbehave(RankFailed, 1, how="raise", warm=True)
    yield from [("warm", good(nproc=4, warm=True))] * 3
    yield "warm, killed", lambda: misbehave(RankFailed, 1, how="kill", warm=True)
    yield "two hosts", good(nproc=2, hosts=hosts)
    yield from [("cold", good(nproc=4, warm=False))] * 2
    yield "cold, raises", lambda: misbehave(RankFailed, 1, how="raise", warm=False)
    yield "warm, hangs", lambda: misbehave(RunTimedOut, how="wait", warm=True, timeout_s=3)
    yield "two hosts, one dies", lambda: host_dies(hosts, runs)
    yield from [("warm", good(nproc=4, warm=True))] * 3
    yield "two hosts, a rank raises", lambda: misbehave(RankFailed, 1, how="raise", nproc=1, hosts=hosts)
    yield "two hosts", good(nproc=2, hosts=hosts)


def left(runs: Path) -> list[int]:
    """Processes of runs in this folder, once they have had time to end."""
    give_up = time.monotonic() + GONE_WITHIN_S
    while found := [each.pid for each in psutil.process_iter() if _is_of(each, runs)]:
        if time.monotonic() > give_up:
            return found
        time.sleep(0.05)
    return []


def _is_of(process: psutil.Process, runs: Path) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return process.status() != psutil.STATUS_ZOMBIE and str(runs) in process.environ().get(ENV_RUN_FOLDER, "")
    return False


def weigh() -> dict[str, float]:
    """Open files and resident memory of this process and its children, the warm parent among them."""
    own = psutil.Process()
    everyone = [own, *own.children(recursive=True)]
    return {
        "files": own.num_fds(),
        "children": len(everyone) - 1,
        "resident_mib": round(sum(each.memory_info().rss for each in everyone) / MIB, 1),
    }


def main(options: Options) -> None:
    os.environ[ENV_PROGRESS] = "off"
    seen: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    orphans, weights, begun = 0, [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, start_local_hosts(2) as hosts:
        runs = Path(folder)
        os.environ[ENV_RUNS_FOLDER] = folder
        right = train(nproc=4, warm=True)
        for number in range(options.rounds):
            for name, went_well in cases(hosts, runs, right):
                seen[name] += 1
                if not went_well():
                    wrong[name] += 1
                    print(f"WRONG: {name}")
                orphans += len(left(runs))
            weights.append(weigh())
            print(f"round {number + 1}: {sum(seen.values())} runs, {time.monotonic() - begun:.0f} s, {weights[-1]}")
    flat = weights[-1]["files"] <= weights[0]["files"] and weights[-1]["children"] <= weights[0]["children"]
    grown_mib = weights[-1]["resident_mib"] - weights[0]["resident_mib"]
    report = {"runs": sum(seen.values()), "wrong": dict(wrong), "orphans": orphans, "hosts": hosts.kind}
    report |= {"first": weights[0], "last": weights[-1], "seconds": round(time.monotonic() - begun)}
    ok = not wrong and not orphans and flat and grown_mib < MEMORY_LIMIT_MIB
    print(json.dumps({"bench": "soak"} | report | {"kinds": dict(seen), "ok": ok}))


if __name__ == "__main__":
    main(tyro.cli(Options))
