"""Hold emulated steps against their prediction, each technique where it wins and where it loses.

python benchmarks/emulated.py                    # all cases, on an idle machine
python benchmarks/emulated.py --busy             # beside a process that keeps one core busy
python benchmarks/emulated.py --cost             # what an emulation of zero time costs
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import labkit
from labkit import Emulated
from labkit.environment import ENV_PROGRESS
from labkit.models.mlp import SEQUENCE_LENGTH
from labkit.theory import emulated_steps, fsdp, two_dim
from labkit.theory.emulated_steps import FSDPUnit

RANKS = 8
CHAIN: dict[str, Any] = {"dim": 256, "layers": 24}
STACK = {"dim": 128, "blocks": 3}
TILES = 128
IMAGE: dict[str, Any] = {"height": 32, "width": 256}
NETWORK: dict[str, Any] = {"depths": (2, 2), "dims": (16, 32)}


@dataclass(frozen=True)
class Case:
    """One bar: a run under an emulation, and its predicted step in ms."""

    name: str
    program: str
    hardware: Emulated
    params: dict[str, Any]
    predicted_ms: float
    ranks: int = RANKS


@dataclass(frozen=True)
class Comparison:
    """The first of two cases is predicted to win."""

    winner: str
    loser: str


def ddp_cases() -> Iterator[Case]:
    hardware = Emulated(latency_us=600, gb_per_s=0.04, forward_ms=5, backward_ms=15)
    for bucket_mb in (0.0001, 0.5, 2, 100):
        step_s = emulated_steps.ddp_step_s(hardware, RANKS, bucket_mb=bucket_mb, **CHAIN)
        params = {"mode": "ddp", "bucket_mb": bucket_mb, "batch": 2, **CHAIN}
        yield Case(f"ddp {bucket_mb:g} MiB", "ddp_compile", hardware, params, 1e3 * step_s)


def fsdp_cases() -> Iterator[Case]:
    hardware = Emulated(latency_us=2000, gb_per_s=0.01, forward_ms=120, backward_ms=240)
    slow = replace(hardware, latency_us=20000, gb_per_s=None)
    sizes = fsdp.unit_bytes(fsdp.mlp_stack_layers("block", STACK["dim"]), RANKS)
    units = [FSDPUnit(shard) for shard, _ in sizes.values()]
    whole = FSDPUnit(sum(unit.shard_bytes for unit in units), len(units))
    params = {"model": "mlp_stack", "dim": STACK["dim"]}
    for prefetch in (False, True):
        step_s = emulated_steps.fsdp_step_s(hardware, RANKS, units, prefetch=prefetch)
        name = "fsdp prefetch" if prefetch else "fsdp block"
        yield Case(name, "fsdp_wrap", hardware, params | {"prefetch": prefetch}, 1e3 * step_s)
    for wrap, chosen, root in (("block", units, None), ("root", [], whole)):
        step_s = emulated_steps.fsdp_step_s(slow, RANKS, chosen, root=root)
        yield Case(f"latency: wrap {wrap}", "fsdp_wrap", slow, params | {"wrap": wrap}, 1e3 * step_s)


def extension_cases() -> Iterator[Case]:
    shapes = [(TILES, 768), (4 * TILES, TILES), (TILES, 4 * TILES), (4 * TILES, TILES), (TILES, 4 * TILES)]
    shapes = [*shapes, (10, TILES)]
    # The layers of each unit.
    layers = [[shapes[0]], shapes[1:3], shapes[3:5], [shapes[5]]]
    for wire, gb_per_s in (("narrow", 0.002), ("wide", 0.1)):
        hardware = Emulated(latency_us=500, gb_per_s=gb_per_s, forward_ms=40, memory_gb_per_s=0.02)
        for extension in ("none", "int8"):
            kind = "fp32" if extension == "none" else extension
            step_s = emulated_steps.extension_step_s(hardware, RANKS, layers, kind)
            params = {"extension": extension, "dim": TILES, "batch": 4}
            yield Case(f"{kind}, {wire} wire", "allgather_extensions", hardware, params, 1e3 * step_s)


def tensor_parallel_cases() -> Iterator[Case]:
    dim, batch, tp = 64, RANKS, RANKS
    tokens = batch * SEQUENCE_LENGTH
    sent = two_dim.activation_collectives(two_dim.mlp_pairs(dim), tokens, tp)
    sent = {name.removeprefix("tp/"): value for name, value in sent.items()}
    inside = Emulated(latency_us=2000, gb_per_s=0.1, forward_ms=600, backward_ms=1200)
    across = replace(inside, ranks_per_host=4, between_latency_us=20000, between_gb_per_s=0.01)
    for place, hardware, hosts in (("inside a host", inside, 1), ("across hosts", across, 2)):
        step_s = emulated_steps.compute_s(hardware, 3, 1 / RANKS)
        step_s += emulated_steps.collectives_s(hardware, sent, RANKS, hosts)
        params = {"tp": tp, "dim": dim, "batch": batch, "compile": False}
        yield Case(f"tp {place}", "two_dim", hardware, params, 1e3 * step_s)


def spatial_cases() -> Iterator[Case]:
    near = Emulated(latency_us=3000, gb_per_s=1.0, forward_ms=150)
    far = replace(near, latency_us=40000)
    yield spatial_case("data parallel", near, mesh=f"{RANKS}x1", batch=RANKS)
    yield spatial_case("strips", near, mesh=f"1x{RANKS}", batch=RANKS)
    yield spatial_case("an image in strips", near, mesh=f"1x{RANKS}", batch=1)
    yield spatial_case("an image in strips, far", far, mesh=f"1x{RANKS}", batch=1)
    yield spatial_case("an image on one device", near, mesh="1x1", batch=1)


def spatial_case(name: str, hardware: Emulated, *, mesh: str, batch: int) -> Case:
    data, space = map(int, mesh.split("x"))
    step_s = emulated_steps.spatial_step_s(hardware, **IMAGE, **NETWORK, batch=batch, data=data, space=space)
    params = IMAGE | NETWORK | {"mesh": mesh, "batch": batch}
    return Case(name, "convnext_spatial", hardware, params, 1e3 * step_s, data * space)


WINS = [
    Comparison("ddp 2 MiB", "ddp 0.0001 MiB"),
    Comparison("ddp 2 MiB", "ddp 100 MiB"),
    Comparison("fsdp prefetch", "fsdp block"),
    Comparison("latency: wrap root", "latency: wrap block"),
    Comparison("int8, narrow wire", "fp32, narrow wire"),
    Comparison("fp32, wide wire", "int8, wide wire"),
    Comparison("tp inside a host", "tp across hosts"),
    Comparison("data parallel", "strips"),
    Comparison("an image in strips", "an image on one device"),
    Comparison("an image on one device", "an image in strips, far"),
]
GROUPS: list[Callable[[], Iterator[Case]]] = [
    ddp_cases, fsdp_cases, extension_cases, tensor_parallel_cases, spatial_cases,
]  # fmt: skip


def measure(case: Case, steps: int) -> float:
    """Return the median of the slowest rank's steps, in ms."""
    params = case.params | {"steps": steps}
    result = labkit.run(case.program, nproc=case.ranks, emulate=case.hardware, timeout_s=120, **params)
    return result.value("step_ms")


def spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def busy_core(busy: bool) -> Iterator[None]:
    """Keep one core busy inside the block."""
    process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    if busy:
        process.start()
    try:
        yield
    finally:
        if busy:
            process.kill()


def compare(busy: bool, steps: int, only: str) -> dict[str, Any]:
    measured: dict[str, tuple[float, float]] = {}
    with busy_core(busy):
        for case in (case for group in GROUPS for case in group() if only in case.name):
            took_ms = measure(case, steps)
            measured[case.name] = case.predicted_ms, took_ms
            ratio = took_ms / case.predicted_ms
            print(
                f"{case.name:24} predicted {case.predicted_ms:7.1f} ms, measured {took_ms:7.1f}, ratio {ratio:.3f}",
                flush=True,
            )
    errors = [abs(took / predicted - 1) for predicted, took in measured.values()]
    known = [each for each in WINS if {each.winner, each.loser} <= measured.keys()]
    lost = [each.winner for each in known if measured[each.winner][1] >= measured[each.loser][1]]
    limit = 0.15 if busy else 0.1
    middle = statistics.median(errors)
    return {"bench": "emulated", "busy": busy, "cases": len(errors), "median_error": round(middle, 4),
            "largest_error": round(max(errors), 4), "wins": len(known) - len(lost), "lost": lost,
            "ok": middle <= limit and not lost}  # fmt: skip


def cost_of_zero_time(rounds: int) -> dict[str, Any]:
    """Return the ratio of steps with an emulation of zero time to steps without, run in turn."""
    ratios = []
    for _ in range(rounds):
        took = []
        for emulate in (None, Emulated()):
            how: dict[str, Any] = {"nproc": 2, "mode": "ddp", "steps": 20, "batch": 64}
            took.append(labkit.run("ddp_compile", emulate=emulate, **how).value("step_ms"))
        ratios.append(took[1] / took[0])
        print(f"without {took[0]:.2f} ms, with {took[1]:.2f} ms: {ratios[-1]:.3f}", flush=True)
    middle = statistics.median(ratios)
    return {"bench": "emulated", "zero_time_ratio": round(middle, 3), "ok": middle <= 1.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    parser.add_argument("--cost", action="store_true", help="measure an emulation of zero time")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each case")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    chosen = parser.parse_args()
    os.environ.setdefault(ENV_PROGRESS, "off")
    outcome = cost_of_zero_time(5) if chosen.cost else compare(chosen.busy, chosen.steps, chosen.only)
    print(json.dumps(outcome))
    raise SystemExit(not outcome["ok"])


if __name__ == "__main__":
    main()
