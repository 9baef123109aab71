"""What a launch costs: the same small job on two ranks, by labkit and by others, in turn.

    python benchmarks/launch.py                          # labkit warm and cold, bare torchrun
    python benchmarks/launch.py --ways warm nbdistributed accelerate ipyparallel torchrunx     # pip install .[bench]
    python benchmarks/launch.py --breakdown              # where the time of one warm and one cold run goes
    python benchmarks/launch.py --figure out/launch.png

Two ranks join a gloo group, reduce a few numbers and leave, so that nearly all of the time is launching. nbdistributed
and ipyparallel keep their processes from cell to cell: there the job is sent to processes that have a group already.
The ways take turns within each round, after a warm-up of each, because the speed of a shared machine drifts. Prints a
table, and last one JSON object: ``<way>_s`` are medians, ``<a>_over_<b>`` medians of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import tyro

import labkit
from labkit import requirements
from labkit.environment import ENV_PROGRESS, ENV_QUEUE, ENV_RUNS_FOLDER

PROGRAM = Path(__file__).resolve().parents[1] / "tests" / "programs" / "small.py"
RANKS = 2
COLD_LIMIT, WARM_LIMIT_S = 0.42, 0.25
Way = Literal["warm", "cold", "torchrun", "torchrunx", "accelerate", "nbdistributed", "ipyparallel"]
OPTIONAL = ("torchrunx", "accelerate", "nbdistributed", "ipyparallel")


@dataclass
class Options:
    ways: tuple[Way, ...] = ("warm", "cold", "torchrun")
    """Who launches; those that are not installed are left out, and said so."""
    rounds: int = 5
    """How often each way launches."""
    breakdown: bool = False
    """Also print where a warm and a cold run spend their time."""
    figure: Path | None = None
    """Draw the medians into this file."""


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def job() -> float:
    """The program's own work, for launchers that take a function."""
    import torch
    import torch.distributed as dist

    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    total = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(total)
    if own:
        dist.destroy_process_group()
    return float(total[0])


@contextlib.contextmanager
def with_labkit(warm: bool) -> Iterator[Callable[[], None]]:
    seen: set[str] = set()

    def launch() -> None:
        result = labkit.run(PROGRAM, nproc=RANKS, device="cpu", warm=warm)
        pids = {path.read_text() for path in result.folder.glob("rank_*.pid")}
        assert len(pids) == RANKS and not pids & seen, "every run has processes of its own"
        assert result.info["warm"] == warm
        seen.update(pids)

    yield launch


@contextlib.contextmanager
def with_torchrun() -> Iterator[Callable[[], None]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, len(requirements.usable_cores()) // RANKS))}

    def launch() -> None:
        subprocess.run([*command, str(PROGRAM)], check=True, capture_output=True, env=environment)

    yield launch


@contextlib.contextmanager
def with_torchrunx() -> Iterator[Callable[[], None]]:
    import torchrunx

    launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=RANKS, backend="gloo")

    def launch() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert launcher.run(job).rank(0) == 2.0**3

    yield launch


@contextlib.contextmanager
def with_accelerate() -> Iterator[Callable[[], None]]:
    import accelerate

    def launch() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            accelerate.debug_launcher(job, num_processes=RANKS)

    yield launch


@contextlib.contextmanager
def with_nbdistributed() -> Iterator[Callable[[], None]]:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    text = "import torch\ntotal = torch.ones(4)\nfor _ in range(3):\n    dist.all_reduce(total)\nfloat(total[0])"

    def launch() -> None:
        with capture_output() as shown:
            shell.run_cell_magic("distributed", "", text)
        assert shown.stdout.count(str(2.0**3)) >= RANKS, shown.stdout

    here = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}  # it starts "python"
    with capture_output(), mock.patch.dict(os.environ, here):
        shell.run_line_magic("load_ext", "nbdistributed")
        shell.run_line_magic("dist_init", f"--num-processes {RANKS}")
        shell.run_cell_magic("distributed", "", text)  # the first cell may time out
    try:
        yield launch
    finally:
        with capture_output():
            shell.run_line_magic("dist_shutdown", "")


@contextlib.contextmanager
def with_ipyparallel() -> Iterator[Callable[[], None]]:
    import ipyparallel

    with ipyparallel.Cluster(n=RANKS, log_level=50) as engines, tempfile.TemporaryDirectory() as folder:
        view = engines[:]
        view.map_sync(join, range(RANKS), [RANKS] * RANKS, [f"file://{folder}/store"] * RANKS)

        def launch() -> None:
            assert view.apply_sync(job) == [2.0**3] * RANKS

        yield launch


def join(index: int, ranks: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=store, rank=index, world_size=ranks)


def way_of(name: str) -> contextlib.AbstractContextManager[Callable[[], None]]:
    if name in ("warm", "cold"):
        return with_labkit(name == "warm")
    found: contextlib.AbstractContextManager[Callable[[], None]] = globals()[f"with_{name}"]()
    return found


def measure(names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of every launch, by way; after one to warm up, in turn, in every other round the other way round."""
    with contextlib.ExitStack() as stack:
        ways = {name: stack.enter_context(way_of(name)) for name in names}
        for way in ways.values():
            way()
        taken: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                taken[name].append(seconds_of(ways[name]))
    return taken


def breakdown(warm: bool) -> dict[str, float]:
    """Where one run's time went, in ms: what happened when, after the call; the program notes its own two moments."""
    with tempfile.TemporaryDirectory() as name:
        program = Path(name) / "noting.py"
        program.write_text(
            "import time; begun = time.time()\nimport torch.distributed as dist\nimported = time.time()\n"
            "dist.init_process_group('gloo')\njoined = time.time()\ndist.destroy_process_group()\n"
            "print(begun, imported, joined, time.time())\n"
        )
        called = time.time()
        result = labkit.run(program, nproc=RANKS, device="cpu", warm=warm)
        home = time.time()
    moments = [list(map(float, rank.log().split())) for rank in result.ranks]
    begun, imported, joined, ended = (max(each) for each in zip(*moments, strict=True))
    started = datetime.fromisoformat(result.info["start"]).timestamp()
    pids = [path.stat().st_mtime for path in result.folder.glob("rank_*.pid")]
    over = (result.folder / "run.json").stat().st_mtime
    steps = {
        "labkit checks and plans": started - called,
        "torchrun begins, ranks begin": max(pids) - started,
        "the program is read": begun - max(pids),
        "torch.distributed is imported": imported - begun,
        "the process group forms": joined - imported,
        "and ends": ended - joined,
        "torchrun notices, labkit looks for leftovers": over - ended,
        "records are read": home - over,
    }
    return {name: max(0.0, round(1000 * seconds, 1)) for name, seconds in steps.items()}  # labkit notes whole ms


def report(taken: dict[str, list[float]]) -> dict[str, Any]:
    print("round" + "".join(f"{name:>15}" for name in taken))
    for number, row in enumerate(zip(*taken.values(), strict=True), start=1):
        print(f"{number:5}" + "".join(f"{seconds:15.3f}" for seconds in row))
    medians = {f"{name}_s": round(statistics.median(each), 3) for name, each in taken.items()}
    ratios = {
        f"{ours}_over_{other}": round(statistics.median(a / b for a, b in zip(taken[ours], each, strict=True)), 4)
        for ours in ("warm", "cold")
        if ours in taken
        for other, each in taken.items()
        if other not in ("warm", "cold")
    }
    limits = {"warm_s": WARM_LIMIT_S, "cold_over_torchrun": COLD_LIMIT}
    held = [value <= limits[name] for name, value in (medians | ratios).items() if name in limits]
    ok = bool(held) and all(held)  # where nothing was held against a limit, nothing is ok
    # cold_over_torchrun had another name when there was nothing else
    old = {"run_over_torchrun": ratios["cold_over_torchrun"]} if "cold_over_torchrun" in ratios else {}
    return {"bench": "launch", **medians, **ratios, **old, "rounds": len(next(iter(taken.values()))), "ok": ok}


def draw(taken: dict[str, list[float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    from labkit import plots  # noqa: F401  (the course's style)

    figure, ax = plt.subplots(figsize=(6, 0.5 + 0.4 * len(taken)), layout="constrained")
    names = sorted(taken, key=lambda name: statistics.median(taken[name]), reverse=True)
    bars = ax.barh(names, [statistics.median(taken[name]) for name in names], color="#4477AA")
    ax.bar_label(bars, fmt="%.2f s", padding=3)
    ax.margins(x=0.15)
    ax.set_xlabel(f"seconds for a job on {RANKS} ranks, median of {len(next(iter(taken.values())))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(options: Options) -> None:
    os.environ |= {ENV_PROGRESS: "off", ENV_QUEUE: "0"}
    missing = [name for name in options.ways if name in OPTIONAL and importlib.util.find_spec(name) is None]
    for name in missing:
        print(f"{name} is not installed and left out: pip install {name}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ENV_RUNS_FOLDER] = folder
        taken = measure([name for name in options.ways if name not in missing], options.rounds)
        result = report(taken)
        if options.breakdown:
            result["breakdown_ms"] = {name: breakdown(name == "warm") for name in ("warm", "cold")}
            for name, steps in result["breakdown_ms"].items():
                print(f"{name}: ms after the step before")
                print("".join(f"  {step:<45} {ms:8.1f}\n" for step, ms in steps.items()), end="")
    if options.figure:
        draw(taken, options.figure)
    print(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Options))
