"""Fit a machine to a few measured runs, and predict other runs on it.

    machine = fit_hardware(runs, devices=2)     # runs on 1 and 2 ranks, of two sizes
    step_estimate_s(other_run, machine)         # for a run that was not measured

On cores, which also move the messages, a step takes the sum of its operators and collectives:

    seconds = operators x overhead + sum of max(operations / rate, bytes / bandwidth)
            + messages x alpha + bytes x beta

The fit minimises the squared relative error with nonnegative coefficients. Rate and bandwidth
decide which operators are limited by arithmetic and which by memory, so fit and classification
alternate until nothing changes.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.theory.collectives import AlphaBeta, collective_wire_bytes, ring_step_count
from labkit_simulate.theory.hardware import Hardware
from labkit_simulate.theory.step_time import (
    Group,
    Operator,
    collective_s,
    operator_s,
)

MAX_FIT_ROUNDS = 20
# Stands for a rate that the measured runs do not limit.
MAX_RATE = 1e18


@dataclass(frozen=True)
class CollectiveCalls:
    """Equal collectives of a step; ``handed_bytes`` is a rank's input to all of them together."""

    collective: str
    count: int
    handed_bytes: float


@dataclass(frozen=True)
class CalibrationRun:
    """The operators and collectives of a rank's step on one host, and the measured seconds.

    ``seconds`` is 0 for a run that is to be predicted.
    """

    name: str
    ranks: int
    operators: Sequence[Operator]
    calls: Sequence[CollectiveCalls] = ()
    seconds: float = 0.0


def fit_hardware(
    runs: Sequence[CalibrationRun],
    devices: int,
    *,
    name: str = "this machine",
    memory_bytes: int = 0,
) -> Hardware:
    """Fit the machine on which these runs were measured.

    Args:
        runs: at least five, of several sizes, with one rank and with several.
        devices: cores that the ranks share.
        name: of the machine.
        memory_bytes: of a device; not fitted.

    Raises:
        ValueError: there are too few runs, one was not measured, or all have one rank.
    """
    if len(runs) < 5:
        raise ValueError(
            f"{len(runs)} runs cannot tell five figures of a machine apart: measure at least 5"
        )
    for run in runs:
        if run.seconds <= 0:
            raise ValueError(f"{run.name} took {run.seconds} s: a measured time must be positive")
    if all(run.ranks == 1 for run in runs):
        raise ValueError("all runs have 1 rank, and say nothing of messages: measure some with 2")
    machine = _hardware_from_fit(np.ones(5) * 1e-9, devices, name, memory_bytes)
    best, least = machine, float("inf")
    for _ in range(MAX_FIT_ROUNDS):
        rows = np.array([_regression_features(run, machine) for run in runs])
        rows /= np.array([[run.seconds] for run in runs])
        coefficients = nonnegative_least_squares(rows, np.ones(len(runs)))
        machine = _hardware_from_fit(coefficients, devices, name, memory_bytes)
        error = sum((step_estimate_s(run, machine) / run.seconds - 1) ** 2 for run in runs)
        if error >= least:
            break
        best, least = machine, error
    return best


def step_estimate_s(run: CalibrationRun, machine: Hardware) -> float:
    """Return the sum of a step's operators by roofline and collectives by alpha and beta."""
    rank = machine.for_rank(run.ranks)
    messages = (
        calls.count
        * collective_s(calls.collective, calls.handed_bytes / calls.count, Group(run.ranks), rank)
        for calls in run.calls
    )
    return sum(operator_s(operator, rank) for operator in run.operators) + sum(messages)


def relative_errors(runs: Sequence[CalibrationRun], machine: Hardware) -> Mapping[str, float]:
    """Return the relative error of each run's prediction; negative if it is too short."""
    return {run.name: step_estimate_s(run, machine) / run.seconds - 1 for run in runs}


def nonnegative_least_squares(
    rows: NDArray[np.float64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return nonnegative coefficients that bring ``rows @ coefficients`` nearest to ``wanted``."""
    # The solution is the ordinary one on some subset of the columns. Five columns have 31 subsets,
    # so all are tried.
    count = rows.shape[1]
    best, least = np.zeros(count), float(wanted @ wanted)
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    for size in range(1, count + 1):
        for chosen in map(list, itertools.combinations(range(count), size)):
            found = (
                np.linalg.lstsq(rows[:, chosen] / scale[chosen], wanted, rcond=None)[0]
                / scale[chosen]
            )
            left = wanted - rows[:, chosen] @ found
            if (found >= 0).all() and left @ left < least:
                best, least = np.zeros(count), float(left @ left)
                best[chosen] = found
    return best


def _regression_features(run: CalibrationRun, machine: Hardware) -> list[float]:
    """Return a run's FLOPs, memory bytes, operators, ring steps and wire bytes."""
    rank = machine.for_rank(run.ranks)
    part, slower = run.ranks / machine.devices, max(1.0, run.ranks / machine.devices)
    flops = moved = 0.0
    for operator in run.operators:
        if (
            operator.flops / rank.peak_flops_per_s(operator.dtype)
            > operator.moved_bytes / rank.memory_bytes_per_s
        ):
            flops += operator.flops
        else:
            moved += operator.moved_bytes
    steps = sum(calls.count * ring_step_count(calls.collective, run.ranks) for calls in run.calls)
    wire = sum(
        collective_wire_bytes(calls.collective, calls.handed_bytes, run.ranks)
        for calls in run.calls
    )
    return [part * flops, part * moved, slower * len(run.operators), slower * steps, slower * wire]


def _hardware_from_fit(
    coefficients: NDArray[np.float64], devices: int, name: str, memory_bytes: int
) -> Hardware:
    """Return the host with these fitted coefficients."""
    flop_s, byte_s, operator_s, alpha_s, beta_s = map(float, coefficients)
    rate = 1 / max(flop_s, 1 / MAX_RATE)
    fitted = "fitted to measured runs, labkit_simulate.theory.calibration"
    return Hardware(
        name=name,
        device="a core",
        devices=devices,
        flops_per_s=dict.fromkeys(("float32", "bfloat16", "float16", "float64", "int64"), rate),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=1 / max(byte_s, 1 / MAX_RATE),
        inside=AlphaBeta(alpha_s, beta_s),
        between=AlphaBeta(alpha_s, beta_s),
        cards=1,
        call_s=0.0,
        operator_s=operator_s,
        matmul_share=1.0,
        shared=True,
        sources=dict.fromkeys(
            ("flops_per_s", "memory_bytes_per_s", "inside", "operator_s"), fitted
        ),
    )
