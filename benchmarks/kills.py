"""Is anything left of runs that are killed at random moments, and does a killed compile spoil the next run?

    python benchmarks/kills.py --kills 100 --compiles 20     # as for a release, on a quiet machine
    python benchmarks/kills.py --kills 3 --compiles 2        # a look

A process like a notebook starts a run: with cold ranks or warm ones, simulated, or on two hosts of this machine. At a
random moment this kills (SIGKILL) that process, or one of those that it started. Processes of all of them carry the
variable KILLS_TAG. ``late`` counts runs of which some process was there 5 s later;
``left`` lists network namespaces and folders in the place for temporary files that the kills have left, once another
start of hosts has cleaned up. Of a compile the ranks are killed; ``spoilt`` counts those after which the next run of
the same program fails. Prints a line for what went wrong, and last one JSON object.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

import labkit
from labkit.environment import ENV_PROGRESS, ENV_QUEUE, ENV_RUN_FOLDER, ENV_RUNS_FOLDER, ENV_WARM
from labkit.runs import private_files
from labkit_cluster.local_hosts import NAMESPACE_PREFIX, start_local_hosts

GONE_WITHIN_S = 5.0
COMPILERS = ("cc1plus", "as", "ld", "collect2")
TAG = "KILLS_TAG"
MISBEHAVE = Path(__file__).resolve().parents[1] / "tests" / "programs" / "misbehave.py"
ON_HOSTS = f"""
from labkit_cluster.local_hosts import start_local_hosts
with start_local_hosts(2) as hosts:
    labkit.run({str(MISBEHAVE)!r}, nproc=1, hosts=hosts)
"""
CHECK = """
from labkit_course.checks import collectives
def shift(mine, rank, ranks):
    return mine
for _ in range(10):
    collectives.shift(shift)
"""
# What is run, and whether from a warm parent.
KINDS = {
    "check": (CHECK, "1"),
    "cold": (f"labkit.run({str(MISBEHAVE)!r}, group=True)", "0"),
    "warm": (f"labkit.run({str(MISBEHAVE)!r}, group=True)", "1"),
    "simulated": ("labkit.simulate('decoder', world_size=64, rank=[0, 1])", "1"),
    "hosts": (ON_HOSTS, "0"),
}
COMPILES = """
import torch
print(torch.compile(lambda x: ({number} * x).sin() + x.exp().sum())(torch.ones(100)).shape)
"""


@dataclass
class Options:
    kills: int = 100
    """Runs of which one process is killed."""
    compiles: int = 20
    """Compiles of which the ranks are killed."""
    longest_s: float = 8.0
    """The latest moment of a kill, after the start."""
    seed: int = 0
    """Of the random moments and targets."""


def tagged(tag: str) -> list[psutil.Process]:
    """The living processes that were started with this tag."""
    found = []
    for each in psutil.process_iter():
        try:
            if each.environ().get(TAG) == tag and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except (psutil.Error, OSError):
            continue
    return found


def gone(condition: Callable[[], object]) -> bool:
    """Whether the condition ends within the limit."""
    give_up = time.monotonic() + GONE_WITHIN_S
    while condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


def kill_at_random(kind: str, index: int, longest_s: float) -> bool:
    """Kill a process of one run; whether all of them were gone in time."""
    code, warm = KINDS[kind]
    tag = f"{os.getpid()}-{index}"
    how = [sys.executable, "-c", f"import labkit\n{code}"]
    notebook = subprocess.Popen(how, env=os.environ | {TAG: tag, ENV_WARM: warm}, stderr=subprocess.DEVNULL)
    time.sleep(random.uniform(0, longest_s))
    target, goes_on = psutil.Process(notebook.pid), False
    chosen = random.choice([notebook.pid, *(each.pid for each in tagged(tag))])
    # Some processes end while they are looked at; then the notebook is killed.
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(chosen)
        is_server = found.ppid() == notebook.pid and "fork_server" in " ".join(found.cmdline())
        # A run whose warm parent is killed before it has forked starts cold, and goes on; so does a notebook with its
        # next check.
        goes_on = kind == "check" or (is_server and not found.children())
        target = found
    target.kill()
    # A run that loses another process ends by itself and says so; its notebook has nothing more to do.
    in_time = target.pid == notebook.pid or goes_on or gone(lambda: notebook.poll() is None)
    notebook.kill()
    notebook.wait()
    in_time &= gone(lambda: tagged(tag))
    if not in_time:
        print(f"{kind}: process {target.pid} killed, left: {[each.cmdline() for each in tagged(tag)]}", flush=True)
        for each in tagged(tag):
            each.kill()
    return in_time


def leftovers() -> set[str]:
    """Network namespaces of labkit, and its folders among the temporary files."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout.split()
    folders = {str(path) for path in Path(tempfile.gettempdir()).glob("labkit[-_]*/*")}
    return folders | {name for name in names if name.startswith(NAMESPACE_PREFIX)}


def is_compile_spoilt(folder: Path, number: int) -> bool:
    """Kill a compile at a random moment; whether the next run of the same program fails."""
    program = folder / f"compiles_{number}.py"
    program.write_text(COMPILES.format(number=number + 2))
    how = [sys.executable, "-c", f"import labkit\nlabkit.run({str(program)!r}, nproc=1)"]
    with subprocess.Popen(how, stderr=subprocess.DEVNULL) as notebook:
        compilers: list[psutil.Process] = []
        while not compilers and notebook.poll() is None:
            time.sleep(0.01)
            children = psutil.Process(notebook.pid).children(recursive=True)
            # Some end while they are looked at.
            with contextlib.suppress(psutil.Error):
                compilers = [each for each in children if each.name() in COMPILERS]
        time.sleep(random.choice([0, random.uniform(0, 3)]))
        notebook.kill()
    try:
        labkit.run(program, nproc=1)
    except labkit.LabError as error:
        print(error, flush=True)
        return True
    return False


def main(options: Options) -> None:
    random.seed(options.seed)
    os.environ |= {ENV_PROGRESS: "off", ENV_QUEUE: "0"}
    os.environ.pop(ENV_RUN_FOLDER, None)
    with tempfile.TemporaryDirectory(prefix="kills_") as name:
        os.environ |= {ENV_RUNS_FOLDER: f"{name}/runs", "TMPDIR": name}
        # Temporary files of other processes do not count.
        tempfile.tempdir = name
        before = leftovers()
        kinds = [random.choice(list(KINDS)) for _ in range(options.kills)]
        late = sum(not kill_at_random(kind, index, options.longest_s) for index, kind in enumerate(kinds))
        time.sleep(private_files.TEMPORARY_AGE_S)
        with start_local_hosts(1), private_files.temporary_folder():
            pass
        left = sorted(leftovers() - before)
        spoilt = sum(is_compile_spoilt(Path(name), number) for number in range(options.compiles))
    said = {"bench": "kills", **vars(options), "late": late, "left": left, "spoilt": spoilt}
    print(json.dumps(said | {"ok": not (late or left or spoilt)}))


if __name__ == "__main__":
    main(tyro.cli(Options))
