"""Does anything stay behind when a process of labkit is killed at a random moment?

    python benchmarks/kills.py                        # 100 kills and 20 compiles that are cut off: a quarter of an hour
    python benchmarks/kills.py --kills 10 --compiles 2

Each kill starts a process that does what a notebook does, a run of one of ``WORK``, and after a random time ends one
process by SIGKILL: the notebook's, the warm parent, torchrun or a rank. Five seconds later none of them may be alive,
and after the next start no folder and no network of a killed process may be left. A compile is cut off while inductor
writes its library; the run after it has to compile anew. Prints a line for each, and last one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

from labkit.environment import ENV_PROGRESS, ENV_RUN_FOLDER, ENV_RUNS_FOLDER
from labkit_cluster.local_hosts import start_local_hosts

GONE_WITHIN_S = 5.0
COMPILE = "labkit.run('ddp_compile', nproc=2, device='cpu', mode='compiled', dim=40, steps=1, timeout_s=120)"
SHIFT = """
import torch, torch.distributed as dist
from labkit.checks import collectives
def shift(mine, rank, ranks):
    arrived = torch.empty_like(mine)
    for work in [dist.isend(mine, (rank + 1) % ranks), dist.irecv(arrived, (rank - 1) % ranks)]:
        work.wait()
    return arrived
collectives.shift(shift)
"""
HOSTS = """
from labkit_cluster.local_hosts import start_local_hosts
with start_local_hosts(2) as hosts:
    labkit.run('fsdp_wrap', nproc=1, hosts=hosts, device='cpu', steps=300)
"""
WORK = {
    "warm": "for _ in range(3): labkit.run('fsdp_wrap', nproc=2, device='cpu', steps=100)",
    "cold": "labkit.run('fsdp_wrap', nproc=2, device='cpu', steps=100, warm=False)",
    "two hosts": HOSTS,
    "simulation": "labkit.simulate('fsdp_wrap', world_size=64)",
    "check": SHIFT,
    "compile": COMPILE,
}


@dataclass
class Options:
    kills: int = 100
    """Processes that are killed."""
    compiles: int = 20
    """Compiles that are cut off."""
    seed: int = 0
    """Of the moments and of who is killed."""


def start(code: str, place: Path) -> subprocess.Popen[bytes]:
    """Start a process that does what a notebook does, with runs and temporary files in this folder."""
    (place / "tmp").mkdir(exist_ok=True)
    own = {ENV_RUNS_FOLDER: str(place / "runs"), "TMPDIR": str(place / "tmp"), ENV_PROGRESS: "off", "LABKIT_QUEUE": "0"}
    command = [sys.executable, "-c", f"import labkit\n{code}"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=os.environ | own, stdout=quiet, stderr=quiet, start_new_session=True)


def family(parent: int) -> list[psutil.Process]:
    """The process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(parent)
        return [root, *root.children(recursive=True)]
    return []


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def of_runs(place: Path) -> list[psutil.Process]:
    """Processes of runs in this folder, whoever started them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if str(place) in process.environ().get(ENV_RUN_FOLDER, "") and is_alive(process):
                found.append(process)
    return found


def kill_one(name: str, place: Path, draw: random.Random) -> str:
    """Kill one process of this work at a random moment; what is left after five seconds, or ""."""
    notebook = start(WORK[name], place)
    end = time.monotonic() + draw.uniform(0.5, 8.0)
    seen: dict[int, psutil.Process] = {}
    while time.monotonic() < end and notebook.poll() is None:
        seen |= {each.pid: each for each in family(notebook.pid)}
        time.sleep(0.05)
    alive = [each for each in seen.values() if is_alive(each)]
    victim = draw.choice(alive) if alive else None
    if victim:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen |= {each.pid: each for each in family(notebook.pid)}
            victim.kill()
    if victim and victim.pid != notebook.pid:
        # The notebook sees a failure or goes on; it ends as a learner's restarted kernel does.
        time.sleep(draw.uniform(0, 1))
        notebook.kill()
    notebook.wait()
    give_up = time.monotonic() + GONE_WITHIN_S
    while left := [each for each in seen.values() if is_alive(each)] + of_runs(place):
        if time.monotonic() > give_up:
            return f"{len(left)} processes: {[' '.join(each.cmdline())[-60:] for each in left][:3]}"
        time.sleep(0.05)
    return folders_left(place / "tmp")


def folders_left(place: Path) -> str:
    """Temporary folders that are there after the next start, or ""."""
    for folder in place.glob("labkit_temporary*/*"):
        os.utime(folder, (0, 0))  # as if some time had gone by
    code = "from labkit.runs import private_files\nwith private_files.temporary_folder(): pass"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(place)}, check=True)
    left = [str(folder) for folder in place.glob("labkit_temporary*/*")]
    return f"folders {left}" if left else ""


def cut_off_a_compile(place: Path, draw: random.Random) -> str:
    """Kill a run while it compiles; what goes wrong in the run after it, or ""."""
    cache = place / "tmp"
    before = set(cache.rglob("*.so"))
    notebook = start(COMPILE, place)
    give_up = time.monotonic() + 60
    while not set(cache.rglob("*.cpp")) and notebook.poll() is None and time.monotonic() < give_up:
        time.sleep(0.02)
    time.sleep(draw.uniform(0, 2.0))
    for each in family(notebook.pid)[::-1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    notebook.wait()
    # What a compiler leaves that was stopped half way through its last write.
    for library in set(cache.rglob("*.so")) - before:
        with library.open("r+b") as file:
            file.truncate(draw.choice([0, 100, library.stat().st_size // 2]))
    again = start(COMPILE, place)
    try:
        return "" if again.wait(timeout=240) == 0 else f"the next run failed with status {again.returncode}"
    except subprocess.TimeoutExpired:
        again.kill()
        return "the next run did not end"


def networks() -> set[str]:
    with contextlib.suppress(OSError):
        return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split())
    return set()


def main(options: Options) -> None:
    draw, wrong = random.Random(options.seed), list[str]()
    seen: Counter[str] = Counter()
    networks_before = networks()
    for number in range(options.kills):
        name = list(WORK)[number % len(WORK)]
        with tempfile.TemporaryDirectory() as folder:
            left = kill_one(name, Path(folder), draw)
        seen[name] += 1
        wrong += [f"{name}: {left}"] if left else []
        print(f"kill {number + 1}, {name}: {left or 'nothing left'}", flush=True)
    with start_local_hosts(2):
        pass
    stale = networks() - networks_before
    wrong += [f"networks {sorted(stale)}"] if stale else []
    for number in range(options.compiles):
        with tempfile.TemporaryDirectory() as folder:
            problem = cut_off_a_compile(Path(folder), draw)
        wrong += [f"compile: {problem}"] if problem else []
        print(f"compile {number + 1}: {problem or 'compiled anew'}", flush=True)
    report = {"bench": "kills", "kills": dict(seen), "compiles": options.compiles, "wrong": wrong, "ok": not wrong}
    print(json.dumps(report))


if __name__ == "__main__":
    main(tyro.cli(Options))
