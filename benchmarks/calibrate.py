"""How well does a machine fitted to a few small runs predict others of it?

    python benchmarks/calibrate.py                  # about two minutes on two cores
    python benchmarks/calibrate.py --rounds 5       # on a machine that does other work as well

Fully sharded training of two models, each in two sizes, on one and two ranks, gives latency, bandwidths, compute rate
and what an operator costs (``labkit_simulate.theory.calibration``). Sizes in between and beyond are then
predicted and measured. Runs take turns within each round; of each, the quickest round's median step counts, because
other work only adds to it. Prints each case, and last one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch._subclasses.fake_tensor import FakeTensorMode

import labkit
from labkit import requirements
from labkit.environment import ENV_PROGRESS, ENV_QUEUE, ENV_RUNS_FOLDER
from labkit.models import catalog
from labkit_simulate.flop_counter import OperatorCounter
from labkit_simulate.theory.calibration import (
    CalibrationRun,
    CollectiveCalls,
    fit_hardware,
    relative_errors,
    step_estimate_s,
)
from labkit_simulate.theory.step_time import Operator

LIMIT = 0.25
FITTED = {
    "mlp_stack": ({"dim": 128, "batch": 8}, {"dim": 512, "batch": 32}),
    "hf_bert": ({"hidden": 64, "layers": 2}, {"hidden": 256, "layers": 4}),
}
HELD_OUT = {
    "mlp_stack": ({"dim": 256, "batch": 32}, {"dim": 384, "batch": 16}, {"dim": 640, "batch": 32}),
    "hf_bert": ({"hidden": 128, "layers": 2}, {"hidden": 128, "layers": 6}, {"hidden": 320, "layers": 4}),
}
Sizes = Mapping[str, int]


@dataclass
class Options:
    rounds: int = 3
    """How often each case is run."""
    steps: int = 10
    """Timed steps of each run."""
    models: tuple[str, ...] = tuple(FITTED)
    """Of which models; hf_bert needs transformers."""


def operators_of(model: str, sizes: Sizes) -> list[Operator]:
    """Of one training step of the plain model with Adam, counted without computing it."""
    with torch.device("meta"):
        lab = catalog.create_model(model, **sizes)
    with FakeTensorMode(allow_non_fake_inputs=True), OperatorCounter() as counted:
        lab.to_empty(device="cpu")
        optimizer = torch.optim.Adam(lab.parameters(), lr=1e-3, fused=True)
        for _ in range(2):  # in the first step the optimizer makes its state
            counted.operators.clear()
            optimizer.zero_grad()
            inputs = lab.get_input(torch.device("cpu"))
            lab.run_backward(lab.get_loss(inputs, lab(*inputs)))
            optimizer.step()
    return counted.operators


def cases(chosen: Mapping[str, tuple[Sizes, ...]], models: tuple[str, ...]) -> list[tuple[str, Sizes, int]]:
    return [(model, sizes, ranks) for model in models for sizes in chosen[model] for ranks in (1, 2)]


def measure(model: str, sizes: Sizes, ranks: int, steps: int) -> CalibrationRun:
    """One run: its median step, and what it sent."""
    how: dict[str, Any] = {"model": model, "wrap": "block", "steps": steps, **sizes}
    result = labkit.run("fsdp_wrap", nproc=ranks, device="cpu", **how)
    spans = result.frame.query("kind == 'span' and name == 'step' and step >= 0")
    comm = result.frame.query("kind == 'comm' and rank == 0").groupby("name")[["count", "bytes"]].sum()
    calls = [CollectiveCalls(str(name), int(row["count"]), float(row["bytes"])) for name, row in comm.iterrows()]
    seconds = float(spans.groupby("rank").dur_us.median().max() / 1e6)
    name = f"{model} {' '.join(f'{key} {value}' for key, value in sizes.items())}, {ranks} rank{'s' * (ranks > 1)}"
    return CalibrationRun(name, ranks, operators_of(model, sizes), calls, seconds)


def quickest(which: list[tuple[str, Sizes, int]], options: Options) -> list[CalibrationRun]:
    rounds = [[measure(*case, options.steps) for case in which] for _ in range(options.rounds)]
    return [min(runs, key=lambda run: run.seconds) for runs in zip(*rounds, strict=True)]


def main(options: Options) -> None:
    os.environ |= {ENV_PROGRESS: "off", ENV_QUEUE: "0"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ENV_RUNS_FOLDER] = folder
        fitted, held = cases(FITTED, options.models), cases(HELD_OUT, options.models)
        runs = quickest(fitted + held, options)
    known, unknown = runs[: len(fitted)], runs[len(fitted) :]
    machine = fit_hardware(known, len(requirements.usable_cores()))
    print(f"{'case':<46} {'measured ms':>12} {'predicted ms':>13} {'error %':>8}")
    for title, group in (("fitted", known), ("held out", unknown)):
        print(title)
        for run, error in zip(group, relative_errors(group, machine).values(), strict=True):
            milliseconds = 1000 * run.seconds, 1000 * step_estimate_s(run, machine)
            print(f"  {run.name:<44} {milliseconds[0]:>12.2f} {milliseconds[1]:>13.2f} {100 * error:>8.1f}")
    median = statistics.median(map(abs, relative_errors(unknown, machine).values()))
    report = {
        "bench": "calibrate",
        "rounds": options.rounds,
        "cores": machine.devices,
        "flops_per_s_a_core": round(machine.flops_per_s["float32"]),
        "memory_bytes_per_s_a_core": round(machine.memory_bytes_per_s),
        "operator_us": round(1e6 * machine.operator_s, 2),
        "alpha_us": round(1e6 * machine.inside.alpha_s, 1),
        "beta_ns_per_byte": round(1e9 * machine.inside.beta_s_per_byte, 3),
        "held_out": len(unknown),
        "median_error": round(median, 3),
        "ok": median <= LIMIT,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(tyro.cli(Options))
