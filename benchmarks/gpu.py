"""What the labs' programs do on this machine's GPUs: are they right there, how fast, in how much memory?

    python benchmarks/gpu.py                                                   # any number of GPUs, at most 8 minutes
    python benchmarks/gpu.py --device cpu --preset small --folder /tmp/trial   # the same paths, without a GPU

It needs torch and labkit's core, and nothing of Jupyter. Every program of the labs runs its parity check on CUDA and
then its sizes of the preset, on as many ranks as there are GPUs, up to four; on one GPU those that can do with one
rank. Writes <folder>/<device>-<date>.json and a figure of the same name, prints a table, and last one JSON object. What
could not be run is in the file, with its reason.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

import tyro

import labkit
from labkit.environment import ENV_PROGRESS, ENV_RUNS_FOLDER
from labkit.models import catalog
from labkit.theory import fsdp, sizes, spatial, two_dim

MOST_RANKS = 4
MEMORY = ("max_allocated", "max_reserved", "peak_total", "end_parameter", "end_optstate")


@dataclass
class Options:
    preset: Literal["small", "paper"] = "paper"
    """Sizes of what is measured; parity checks are small in any case."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu tries the paths on a machine without a GPU."""
    ranks: int = 0
    """Ranks of each run; 0 for as many as there are GPUs, at most 4."""
    limit_s: float = 480
    """No run begins after this many seconds, and none lasts longer."""
    folder: Path = Path(__file__).resolve().parents[1] / "results"
    """Where the JSON and the figure go."""


@dataclass
class Job:
    """One run: what for, of which program, with which parameters, and what theory says of it."""

    lab: str
    program: str
    params: dict[str, Any]
    least_ranks: int = 1
    theory: dict[str, float] = field(default_factory=dict)

    @property
    def checks(self) -> bool:
        return "check" in self.params


def jobs(preset: str, ranks: int) -> list[Job]:
    """All runs for this many ranks, the checks first: what is fast but wrong is of no use."""
    tp = 2 if ranks % 2 == 0 else 1
    wide: dict[str, Any] = {"preset": preset}
    parity: list[Job] = [
        Job("spatial", "convnext_spatial", {"check": "parity", "width": 64 * max(ranks, 2)}, least_ranks=2),
        *(Job("fsdp", "fsdp_wrap", {"check": "parity", "model": model}) for model in ("toy", "transformer", "moe")),
        Job("extensions", "allgather_extensions", {"check": "parity"}, least_ranks=2),
        Job("extensions", "allgather_extensions", {"check": "wire"}, least_ranks=2),
        Job("ddp", "ddp_compile", {"check": "parity", "dim": 256}),
        Job("two_dim", "two_dim", {"check": "parity", "tp": tp, "compile": False}, least_ranks=2),
        Job("two_dim", "decoder", {"check": "parity", "tp": tp, "seq": tp > 1}, least_ranks=2),
    ]
    plain = Job("spatial", "convnext_spatial", wide | {"strategy": "plain"}) if ranks == 1 else None
    measured = [
        plain or Job("spatial", "convnext_spatial", wide | {"strategy": "local"}, theory=_spatial(preset, ranks)),
        Job("fsdp", "fsdp_wrap", wide | {"wrap": "root" if ranks == 1 else "block"}, theory=_toy(preset, ranks)),
        Job("extensions", "allgather_extensions", {"extension": "bf16", "dim": 1024}, least_ranks=2),
        Job("ddp", "ddp_compile", {"mode": "ddp"}),
        Job("ddp", "ddp_compile", {"mode": "compiled"}),
        Job("two_dim", "two_dim", wide | {"tp": tp}, least_ranks=2, theory=_two_dim(preset, ranks, tp)),
    ]
    return parity + measured


def _spatial(preset: str, ranks: int) -> dict[str, float]:
    config = labkit_config("convnext_spatial", preset)
    parameters = spatial.convnext_parameters(config.depths, config.dims, config.num_classes)
    return {"end_parameter_bytes": 4.0 * parameters, "end_optstate_bytes": 8.0 * parameters}


def _toy(preset: str, ranks: int) -> dict[str, float]:
    config = labkit_config("fsdp_wrap", preset)
    wrap, small = "root" if ranks == 1 else "block", catalog.MODELS["toy"].sizes
    layers = fsdp.toy_layers(wrap, config.hidden or small["hidden"], config.narrow or small["narrow"])
    kept = fsdp.resident_bytes(layers, ranks)
    return {name: float(size) for name, size in kept.items() if name in ("end_parameter_bytes", "end_optstate_bytes")}


def _two_dim(preset: str, ranks: int, tp: int) -> dict[str, float]:
    config = labkit_config("two_dim", preset)
    kept = two_dim.mesh_resident_bytes(two_dim.mlp_pairs(config.dim), data=ranks // tp, tp=tp)
    return {name: float(size) for name, size in kept.items() if name in ("end_parameter_bytes", "end_optstate_bytes")}


def labkit_config(program: str, preset: str) -> Any:
    """A program's Config with a preset's values."""
    from labkit import config
    from labkit.launcher.run import find_program

    found = config.read_config(find_program(program)[0])
    assert found is not None
    return config.build_config(found, {"preset": preset})


def run(job: Job, ranks: int, device: str, limit_s: float) -> dict[str, Any]:
    """Run a job; what came of it, as a row of the result."""
    row: dict[str, Any] = {"lab": job.lab, "program": job.program, "params": job.params, "ranks": ranks}
    if ranks < job.least_ranks:
        return row | {"skipped": f"takes {job.least_ranks} ranks or more, and there are {ranks}"}
    if limit_s < 10:
        return row | {"skipped": "the time was over"}
    begun = time.perf_counter()
    try:
        result = labkit.run(job.program, nproc=ranks, device=device, timeout_s=limit_s, **job.params)
    except labkit.LabError as error:
        return row | {"ok": False, "error": str(error)[:2000], "seconds": round(time.perf_counter() - begun, 1)}
    row |= {"ok": True, "seconds": round(time.perf_counter() - begun, 1), "backend": result.session["backend"]}
    values = result._value_by_name
    if job.checks:
        names = ("compared", "max_rel_error")
        return row | {name: values[name] for name in names if name in values}
    steps = {
        name: round(value, 4) for name, value in values.items() if name in ("step_ms", "forward_ms", "backward_ms")
    }
    memory = {f"{name}_bytes": values[f"{name}_bytes"] for name in MEMORY if f"{name}_bytes" in values}
    return row | steps | memory | {"theory": job.theory}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = []
    for row in rows:
        what = " ".join(f"{name}={value}" for name, value in row["params"].items())
        if "skipped" in row or not row["ok"]:
            said = row.get("skipped") or "FAILED: " + row["error"].splitlines()[0]
        elif "compared" in row:
            said = f"ok, {row['compared']:.0f} compared, error {row.get('max_rel_error', 0):.1e}"
        else:
            held = {name: sizes.readable_bytes(int(row[f"{name}_bytes"])) for name in MEMORY if f"{name}_bytes" in row}
            theory = {name: sizes.readable_bytes(int(size)) for name, size in row["theory"].items()}
            said = f"step {row.get('step_ms', 0):.2f} ms, {held}, theory {theory}"
        lines.append(f"{row['lab']:<10} {row['program']:<21} {what:<45} {said}")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path, stamp: str) -> None:
    """Step times and memory of what was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = [row for row in rows if "step_ms" in row]
    labels = [
        f"{row['lab']}\n{row['params'].get('mode', row['params'].get('strategy', ''))}".strip() for row in measured
    ]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    bars = left.bar(labels, [row["step_ms"] for row in measured], color="#4477AA")
    left.bar_label(bars, fmt="%.1f")
    left.set_ylabel("ms a step")
    for offset, name, color in ((-0.2, "max_allocated_bytes", "#4477AA"), (0.2, "max_reserved_bytes", "#CCBB44")):
        present = [row.get(name, row.get("peak_total_bytes", 0)) / 2**20 for row in measured]
        places = [index + offset for index in range(len(measured))]
        bars = right.bar(places, present, width=0.4, color=color, label=name.removesuffix("_bytes").replace("_", " "))
        right.bar_label(bars, fmt="%.0f", fontsize=8)
    right.set_xticks(range(len(measured)), labels)
    right.set_ylabel("MiB on the fullest rank")
    right.legend()
    figure.suptitle(stamp, fontsize=9)
    figure.savefig(path, dpi=130)


def main(options: Options) -> None:
    os.environ |= {ENV_PROGRESS: "off"}
    import torch

    gpus = torch.cuda.device_count()
    if options.device == "cuda" and not gpus:
        raise SystemExit("this PyTorch sees no GPU; --device cpu --preset small tries the paths without one")
    # a power of two, by which the labs' sizes can be divided
    ranks = options.ranks or (2 ** int(math.log2(min(gpus, MOST_RANKS))) if options.device == "cuda" else 2)
    device_name = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    begun, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as runs:
        os.environ[ENV_RUNS_FOLDER] = runs
        for job in jobs(options.preset, ranks):
            rows.append(run(job, ranks, options.device, options.limit_s - (time.perf_counter() - begun)))
            print(table(rows[-1:]), flush=True)
    facts = {"device": device_name, "gpus": gpus, "ranks": ranks, "preset": options.preset, "date": str(date.today())}
    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{device_name.replace(' ', '-').lower()}-{date.today()}.json"
    path.write_text(json.dumps(facts | {"rows": rows}, indent=1, default=str) + "\n")
    stamp = f"{device_name}, {ranks} ranks, torch {torch.__version__}, {date.today()}"
    draw(rows, path.with_suffix(".png"), stamp)
    ran = [row for row in rows if "skipped" not in row]
    ok = bool(ran) and all(row["ok"] for row in ran)
    summary = {"bench": "gpu", "file": str(path), "ran": len(ran), "skipped": len(rows) - len(ran), "ok": ok}
    print(json.dumps(summary | {"seconds": round(time.perf_counter() - begun, 1)}))
    if not ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Options))
