"""What do the labs' programs do on this machine's GPUs: are they right there, how fast, in how much memory?

    python benchmarks/gpu.py                                          # at most 8 minutes, whatever the number of GPUs
    python benchmarks/gpu.py --device cpu --preset small --folder /tmp/trial     # the same experiments without a GPU
    python benchmarks/gpu.py --page results/nvidia-h100-2026-11-25    # a page and a figure of a folder of results

It needs torch 2.11 or newer, numpy, pandas, matplotlib and psutil, and a copy of this repository: no installation, no
Jupyter, no tyro. Each experiment is a run with a limit of its own, and its result is on disk as soon as it has ended: a
run that hangs, or a machine that is taken away, costs no other result. What could not be run is written down with its
reason.

One GPU: several ranks share it over NCCL (LABKIT_SHARE_GPUS=1), which shows whether the techniques are right, not how
fast they are. Two GPUs or more: a rank on each. The order is that of their worth: what is asked first is known first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import labkit  # noqa: E402  (found beside this file)
from labkit import doctor  # noqa: E402
from labkit.environment import ENV_PROGRESS, ENV_QUEUE, ENV_RUNS_FOLDER, ENV_SHARE_GPUS  # noqa: E402
from labkit.runs.folder import write_json  # noqa: E402

LIMIT_S = 480.0
MISBEHAVE = ROOT / "tests" / "programs" / "misbehave.py"
VALUES = ("compared", "max_rel_error", "step_ms", "forward_ms", "backward_ms")
MEMORY = ("max_allocated", "max_reserved", "peak_total", "end_parameter", "end_optstate")
KEPT_FILES = ("run.json", "session.json", "verdict.json", "rank_00000.jsonl", "rank_00000.trace.json.gz")


@dataclass
class Experiment:
    """One run: what it answers, of which program, on how many ranks, with which parameters."""

    question: str
    program: str | Path
    ranks: int = 1
    params: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 60.0
    device: str = ""
    """Another device than the others'."""
    environment: dict[str, str] = field(default_factory=dict)
    expected: str = ""
    """The name of the error in which it must end."""
    warm: bool = True
    needs_gpu: bool = False


def parity(program: str, **params: Any) -> dict[str, Any]:
    return {"program": program, "params": {"check": "parity"} | params}


def launches() -> Iterator[Experiment]:
    """Are ranks forked on this machine? Then a run takes a tenth of a second to start."""
    for warm in (True, True, True, False, False, False):
        yield Experiment(
            "launch", "all_reduce", 2, {"repeats": 1, "message_bytes": (1024, 2048)}, device="cpu", warm=warm
        )


def one_rank() -> Iterator[Experiment]:
    """Is one GPU right by itself?"""
    for model in ("toy", "transformer"):
        for precision in ("fp32", "bf16", "autocast"):
            yield Experiment("one rank", **parity("fsdp_matrix", model=model, precision=precision))
    for options in ({"fsdp": 1}, {"offload": True}, {"compile": True}):
        yield Experiment("one rank", **parity("fsdp_matrix", model="toy", **options))
    # FSDP1 pins the memory that it offloads to.
    yield Experiment("one rank", **parity("fsdp_matrix", model="toy", fsdp=1, offload=True), needs_gpu=True)
    yield Experiment("one rank", **parity("decoder"))


def several_ranks(ranks: int) -> Iterator[Experiment]:
    """Are the techniques right over NCCL?"""
    tp = 2 if ranks % 2 == 0 else 1
    yield Experiment("collectives", "all_reduce", ranks)
    yield Experiment("parity", ranks=ranks, **parity("convnext_spatial", width=64 * ranks))
    tf32 = {"NVIDIA_TF32_OVERRIDE": "1"}
    yield Experiment("parity under TF32", ranks=ranks, environment=tf32, **parity("convnext_spatial", width=64 * ranks))
    for model in ("toy", "transformer", "moe"):
        yield Experiment("parity", ranks=ranks, **parity("fsdp_matrix", model=model))
    if ranks > 2 and ranks % 2 == 0:
        yield Experiment("parity", ranks=ranks, **parity("fsdp_matrix", hybrid=2))
    yield Experiment("parity", ranks=ranks, **parity("allgather_extensions"))
    yield Experiment("bytes", "allgather_extensions", ranks, {"check": "wire"})
    yield Experiment("parity", ranks=ranks, **parity("ddp_compile", dim=256), limit_s=120)
    yield Experiment("parity", ranks=ranks, **parity("simple_fsdp", model="transformer"))
    yield Experiment(
        "parity", ranks=ranks, **parity("simple_fsdp", compile=True, bucketing="passes", bucket_mb=1), limit_s=120
    )
    yield Experiment("parity", ranks=ranks, **parity("two_dim", tp=tp, compile=False))
    yield Experiment("parity", ranks=ranks, **parity("decoder", tp=tp, seq=tp > 1))
    yield Experiment("time line", "fsdp_wrap", ranks, {"timeline": True, "model": "mlp_stack"})


def failures(ranks: int) -> Iterator[Experiment]:
    """Is the cause of a failure told, and how soon?"""
    for how, expected in (("raise", "RankFailed"), ("kill", "RankFailed"), ("wait", "RunTimedOut")):
        params = {"how": how, "group": True}
        yield Experiment("failure", MISBEHAVE, ranks, params, limit_s=15 if how == "wait" else 60, expected=expected)


def memory() -> Iterator[Experiment]:
    """What do the tracker and the allocator say of the same step?"""
    for model in ("toy", "transformer", "mlp_stack"):
        yield Experiment("memory", "fsdp_wrap", 1, {"model": model, "steps": 2})
    yield Experiment("memory", "decoder", 1, {"steps": 2})


def decoders() -> Iterator[Experiment]:
    """How long does a step of a real decoder take, and in how much memory? Depths tell a block from the rest."""
    shape = {"model": "llama_2_7b", "precision": "bf16", "steps": 5}
    cases = ((2, 2, "none"), (4, 2, "none"), (8, 2, "none"), (4, 2, "full"), (4, 1, "none"))
    for layers, batch, checkpointing in cases:
        sizes = {"layers": layers, "batch": batch, "checkpointing": checkpointing}
        yield Experiment("decoder", "decoder", 1, shape | sizes, needs_gpu=True)
    yield Experiment("decoder", "decoder", 1, shape | {"model": "llama_3_8b", "layers": 4, "batch": 1}, needs_gpu=True)
    yield Experiment("time line", "decoder", 1, shape | {"layers": 2, "steps": 1, "timeline": True}, needs_gpu=True)


def measured(preset: str, ranks: int) -> Iterator[Experiment]:
    """How long do steps take, with the sizes of the preset?"""
    tp = 2 if ranks % 2 == 0 else 1
    strategy = "plain" if ranks == 1 else "local"
    yield Experiment("measured", "ddp_compile", ranks, {"mode": "compiled"}, limit_s=120)
    yield Experiment("measured", "ddp_compile", ranks, {"mode": "ddp"})
    yield Experiment("measured", "convnext_spatial", ranks, {"preset": preset, "strategy": strategy}, limit_s=90)
    yield Experiment("measured", "fsdp_wrap", ranks, {"preset": preset}, limit_s=90)
    if ranks > 1:
        if preset == "paper":
            # NVLink's bandwidth shows with messages of hundreds of MiB alone.
            sizes = tuple(2**power for power in (10, 14, 18, 22, 25, 28))
            yield Experiment("measured", "all_reduce", ranks, {"message_bytes": sizes}, limit_s=90)
        for extension in ("fp32", "bf16", "int8"):
            yield Experiment("measured", "allgather_extensions", ranks, {"extension": extension, "dim": 1024})
        yield Experiment("measured", "two_dim", ranks, {"preset": preset, "tp": tp})
        for bucket_mb in (0.1, 1, 5, 25, 100):
            yield Experiment("buckets", "ddp_compile", ranks, {"mode": "ddp", "bucket_mb": bucket_mb})


def experiments(gpus: int, preset: str) -> list[Experiment]:
    """All experiments for so many GPUs, the most valuable first; without one, those of two."""
    share = {ENV_SHARE_GPUS: "1"}
    if gpus == 1:
        groups = [several_ranks(2), failures(2)]
        four = Experiment("parity", ranks=4, environment=share, **parity("allgather_extensions"))
        shared = [each for group in groups for each in group]
        for each in shared:
            each.environment |= share
        return [*launches(), *one_rank(), *shared, four, *decoders(), *memory(), *measured(preset, 1)]
    sizes = [ranks for ranks in (2, 4, 8) if ranks <= max(gpus, 2)]
    right = [each for ranks in sizes for each in several_ranks(ranks)]
    return [*launches(), *right, *failures(2), *one_rank(), *decoders(), *memory(), *measured(preset, sizes[-1])]


def run(experiment: Experiment, device: str, left_s: float, folder: Path) -> dict[str, Any]:
    """Run an experiment; what came of it, as a row. What it recorded is kept in the folder."""
    params = {name: list(value) if isinstance(value, tuple) else value for name, value in experiment.params.items()}
    row: dict[str, Any] = {"question": experiment.question, "program": Path(experiment.program).stem}
    row |= {"ranks": experiment.ranks, "params": params, "environment": experiment.environment}
    limit_s = min(experiment.limit_s, left_s)
    if limit_s < 10:
        return row | {"skipped": "the time was over"}
    if experiment.needs_gpu and device == "cpu":
        return row | {"skipped": "needs a GPU"}
    begun, before = time.perf_counter(), dict(os.environ)
    os.environ |= experiment.environment
    where: dict[str, Any] = {"device": experiment.device or device, "warm": experiment.warm, "timeout_s": limit_s}
    try:
        result = labkit.run(experiment.program, nproc=experiment.ranks, **where, **experiment.params)
    except labkit.LabError as error:
        row |= {"ok": type(error).__name__ == experiment.expected, "error": f"{type(error).__name__}: {error}"[:2000]}
    else:
        row |= {"ok": result.ok and not experiment.expected, "warm": result.info["warm"], "session": result.session}
        values = {name: result.value(name) for name in result.summary()}
        wanted = [*VALUES, *(f"{name}_bytes" for name in MEMORY)]
        row |= {name: round(float(values[name]), 9) for name in wanted if name in values}
        folder.mkdir(parents=True)
        for name in KEPT_FILES:
            if (result.folder / name).exists():
                shutil.copy(result.folder / name, folder)
    finally:
        os.environ.clear()
        os.environ |= before
    return row | {"seconds": round(time.perf_counter() - begun, 2)}


def facts(device: str) -> dict[str, Any]:
    """What this machine is, and what torch says of it."""
    import torch

    found: dict[str, Any] = {"date": str(date.today()), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "cores": os.cpu_count(), "device": device}
    found["doctor"] = [str(each).partition("\n")[0] for each in doctor.run_checks().findings]
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,persistence_mode", "--format=csv,noheader"]
    for name, command in (("revision", git), ("nvidia_smi", smi)):
        try:
            found[name] = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            found[name] = f"not known: {error}"
    if device == "cuda":
        found |= {"gpus": torch.cuda.device_count(), "architectures": torch.cuda.get_arch_list()}
        found |= {"nccl": torch.cuda.nccl.version(), "tf32_convolutions": torch.backends.cudnn.allow_tf32}
    return found


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    what = " ".join(f"{name}={value}" for name, value in (row["params"] | row["environment"]).items())
    if "skipped" in row:
        said = f"skipped: {row['skipped']}"
    else:
        found = [f"warm {row['warm']}, {row['seconds']} s"] if row["question"] == "launch" and row["ok"] else []
        found += [f"{name} {row[name]:.6g}" for name in (*VALUES, "max_allocated_bytes") if name in row]
        said = ", ".join(["ok" if row["ok"] else "NOT OK", *found, row.get("error", "").partition("\n")[0][:120]])
    return f"{row['question']:<18} {row['program']:<21} {row['ranks']} {what:<50} {said.strip(' ,')}"


def bar_name(row: dict[str, Any]) -> str:
    """A row's program, and what tells it from others."""
    params = {name: value for name, value in row["params"].items() if name != "steps"}
    words = [value if isinstance(value, str) else f"{name} {value}" for name, value in params.items()]
    return ", ".join([f"{row['program']} on {row['ranks']}", *words])


def write_page(folder: Path) -> Path:
    """Write a page and a figure of a folder of results; return the page's path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    known = json.loads((folder / "facts.json").read_text())
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]
    timed = [row for row in rows if "step_ms" in row and row["question"] in ("measured", "buckets", "decoder")]
    figure, ax = plt.subplots(figsize=(8, 0.4 * len(timed) + 1.5), layout="constrained")
    bars = ax.barh([bar_name(row) for row in timed], [row["step_ms"] for row in timed], color="#4477AA")
    ax.bar_label(bars, fmt="%.1f")
    ax.margins(x=0.1)
    card = known["nvidia_smi"].partition(",")[0] or known["device"]
    ax.set_xlabel(f"ms a step\n{card}, torch {known['torch']}, {known['date']}")
    figure.savefig(folder / "steps.png", dpi=130)
    lines = [f"# {known['nvidia_smi'] or 'CPU'}, {known['date']}", "", *(f"- {each}" for each in known["doctor"])]
    lines += ["", "![steps](steps.png)", "", "```", *map(line, rows), "```", ""]
    (folder / "README.md").write_text("\n".join(lines))
    return folder / "README.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all experiments; 1 if one has not come out as it must."""
    parser = argparse.ArgumentParser(description="Run the labs' programs on this machine's GPUs.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the paths without a GPU")
    parser.add_argument("--preset", choices=("small", "paper"), default="paper", help="sizes of what is measured")
    parser.add_argument("--folder", type=Path, help="where the results go; by default results/<device>-<date>")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="no experiment lasts longer than this in all")
    parser.add_argument("--page", type=Path, help="write the page of this folder of results, and run nothing")
    options = parser.parse_args(arguments)
    if options.page:
        print(write_page(options.page))
        return 0
    import torch

    gpus = torch.cuda.device_count()
    if options.device == "cuda" and not gpus:
        parser.error("this PyTorch sees no GPU; --device cpu --preset small tries the paths without one")
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    folder = options.folder or ROOT / "results" / f"{name.replace(' ', '-').lower()}-{date.today()}"
    if (folder / "facts.json").exists():
        parser.error(f"{folder} holds results already: name another with --folder")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {ENV_PROGRESS: "off", ENV_QUEUE: "0", ENV_RUNS_FOLDER: str(folder / "runs")}
    begun, wrong = time.perf_counter(), []
    write_json(folder / "facts.json", facts(options.device))
    chosen = experiments(gpus if options.device == "cuda" else 0, options.preset)
    for number, experiment in enumerate(chosen):
        left_s = options.limit_s - (time.perf_counter() - begun)
        row = run(experiment, options.device, left_s, folder / "kept" / f"{number:02}")
        # At once: the machine may be taken away before the next has ended.
        write_json(folder / f"{number:02}.json", row)
        print(line(row), flush=True)
        wrong += [number] if not row.get("ok", True) else []
        shutil.rmtree(folder / "runs", ignore_errors=True)
    write_page(folder)
    seconds = round(time.perf_counter() - begun, 1)
    print(json.dumps({"bench": "gpu", "folder": str(folder), "experiments": len(chosen), "wrong": wrong, "s": seconds}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
