"""labkit_simulate.theory.calibration on machines made up, with noise;
labkit_simulate.flop_counter against torch's own counters.
"""

import importlib.util
import random
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from labkit.theory.collectives import AlphaBeta
from labkit_simulate.flop_counter import OperatorCounter
from labkit_simulate.theory.calibration import (
    CalibrationRun,
    CollectiveCalls,
    fit_hardware,
    nonnegative_least_squares,
    relative_errors,
    step_estimate_s,
)
from labkit_simulate.theory.hardware import get_hardware
from labkit_simulate.theory.step_time import Operator

TRUE = get_hardware(
    "laptop",
    matmul_share=1.0,
    call_s=0.0,
    flops_per_s={"float32": 4e10},
    memory_bytes_per_s=6e9,
    inside=AlphaBeta(3e-4, 2e-9),
    operator_s=1.2e-5,
)


def run_of(width, layers, ranks, noise=1.0):
    """A stack of square layers, batch 64, sharded: what a rank would do, and how long it takes on ``TRUE``."""
    product = Operator("mm", 2 * 64 * width**2, 4 * (width**2 + 128 * width))
    operators = [product, Operator("relu", 0, 8 * 64 * width), Operator("adam", 0, 28 * width**2 / ranks)]
    size = 4.0 * width**2
    calls = [
        CollectiveCalls("all_gather", 2 * layers, 2 * layers * size / ranks),
        CollectiveCalls("reduce_scatter", layers, layers * size),
    ]
    found = CalibrationRun(f"{width} x {layers} on {ranks}", ranks, operators * 3 * layers, calls if ranks > 1 else ())
    return CalibrationRun(found.name, ranks, found.operators, found.calls, noise * step_estimate_s(found, TRUE))


def runs(sizes, ranks, noise=0.0, seed=0):
    draw = random.Random(seed)
    return [run_of(width, layers, n, draw.uniform(1 - noise, 1 + noise)) for width, layers in sizes for n in ranks]


SMALL = [(64, 4), (256, 8), (512, 2), (1024, 4)]


def test_a_machine_is_found_again():
    found = fit_hardware(runs(SMALL, (1, 2)), TRUE.devices)
    assert found.flops_per_s["float32"] == pytest.approx(4e10, rel=1e-3)
    assert found.memory_bytes_per_s == pytest.approx(6e9, rel=1e-3)
    assert found.operator_s == pytest.approx(1.2e-5, rel=1e-3)
    assert found.inside.alpha_s == pytest.approx(3e-4, rel=1e-3)
    assert found.inside.beta_s_per_byte == pytest.approx(2e-9, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_with_noise_it_predicts_other_sizes_and_numbers_of_ranks(seed):
    found = fit_hardware(runs(SMALL, (1, 2), noise=0.15, seed=seed), TRUE.devices)
    off = relative_errors(runs([(128, 6), (384, 8), (768, 4)], (1, 2, 4)), found)
    assert statistics.median(map(abs, off.values())) < 0.15 and len(off) == 9
    assert max(map(abs, off.values())) < 0.5


def test_no_coefficient_is_negative_and_none_is_better():
    rng = np.random.default_rng(0)
    for _ in range(10):
        rows, wanted = rng.normal(size=(8, 5)), rng.normal(size=8)
        found = nonnegative_least_squares(rows, wanted)
        gradient = rows.T @ (rows @ found - wanted)
        assert (found >= 0).all()
        assert np.allclose(gradient[found > 0], 0, atol=1e-9) and (gradient >= -1e-9).all(), "Kuhn and Tucker's rule"


def test_too_little_to_fit_is_refused():
    with pytest.raises(ValueError, match="4 runs cannot tell five figures"):
        fit_hardware(runs(SMALL, (2,)), 2)
    with pytest.raises(ValueError, match="all runs have 1 rank"):
        fit_hardware(runs([*SMALL, (96, 4)], (1,)), 2)
    with pytest.raises(ValueError, match=r"took 0\.0 s"):
        fit_hardware([*runs(SMALL, (1, 2)), CalibrationRun("none", 1, [])], 2)


def test_operators_are_counted_on_tensors_without_content():
    def step():
        model = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 10))
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        model(torch.ones(32, 100)).sum().backward()
        return optimizer

    with FakeTensorMode(), FlopCounterMode(display=False) as flops, OperatorCounter() as counted:
        optimizer = step()
        before = len(counted.operators)
        optimizer.step()
    assert sum(each.flops for each in counted.operators) == flops.get_total_flops() == 2 * 32 * (2 * 30000 + 3 * 3000)
    first = next(each for each in counted.operators if each.name == "addmm")
    assert first.moved_bytes == 4 * (300 + 32 * 100 + 100 * 300 + 32 * 300) and first.dtype == "float32"
    assert next(each for each in counted.operators if each.name == "t").moved_bytes == 0, "a view moves nothing"
    adam = [each for each in counted.operators[before:] if each.name == "_fused_adam_"]
    numbers = 100 * 300 + 300 + 300 * 10 + 10
    # parameter, gradient and two moments are read; all four may be written; and a count of steps for each tensor
    assert len(adam) == 1 and 7 * 4 * numbers <= adam[0].moved_bytes <= 8 * 4 * numbers + 100


def test_the_benchmark_counts_a_models_step(monkeypatch):
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "calibrate.py"
    spec = importlib.util.spec_from_file_location("calibrate", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "calibrate", module)
    spec.loader.exec_module(module)
    counted = module.operators_of("mlp_stack", {"dim": 64, "batch": 4})
    weights = 2 * 64 * 64 * (3 + 4 + 3)
    assert sum(each.flops for each in counted) == 2 * 32 * (3 * weights - 64 * 64 * 3), "no gradient of the input"
