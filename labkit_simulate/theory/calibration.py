"""Fit a machine to a few measured runs, and predict others of it.

    machine = fit(runs, devices=2)          # runs on 1 and 2 ranks, of two sizes
    predicted_s(other, machine)             # the same sum, for a run that was not measured

A step is taken for the sum of its operators and collectives, as on cores, which carry their
messages themselves:

    seconds = operators x overhead + sum of max(operations / rate, bytes / bandwidth)
            + messages x alpha + bytes x beta

It is least squares of the relative error, no coefficient negative. Which operators are held up by
arithmetic and which by memory follows from rate and bandwidth, so both are found in turn until
nothing changes.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.theory.collectives import AlphaBeta, collective_wire_bytes
from labkit_simulate.theory.hardware import Hardware
from labkit_simulate.theory.step_time import (
    Group,
    Operator,
    collective_s,
    operator_s,
    ring_step_count,
)

MAX_FIT_ROUNDS = 20
MAX_RATE = 1e18
"""Rate of what cost nothing in the measured runs: no machine is faster."""


@dataclass(frozen=True)
class CollectiveCalls:
    """Equal collectives of a step.

    Attributes:
        collective: such as "all_gather".
        count: how many.
        handed_bytes: to all of them together, by a rank.
    """

    collective: str
    count: int
    handed_bytes: float


@dataclass(frozen=True)
class CalibrationRun:
    """What a rank does in a step of a run on one host, and how long it took.

    Attributes:
        name: for people.
        ranks: how many.
        operators: of one rank.
        calls: its collectives, among all ranks.
        seconds: of a step, measured; 0 where it is yet to be predicted.
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
    """The machine on which these runs took as long as they did, as nearly as one can be made.

    Args:
        runs: at least five, with one rank and with several, and of several sizes.
        devices: cores that the ranks share.
        name: of the machine.
        memory_bytes: of a device, for those who ask; nothing is fitted to it.

    Raises:
        ValueError: too few runs, one that was not measured, or none with several ranks.
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
    """Seconds of a step: its operators by roofline, its collectives by alpha and beta, one after
    another.
    """
    rank = machine.for_rank(run.ranks)
    messages = (
        calls.count
        * collective_s(calls.collective, calls.handed_bytes / calls.count, Group(run.ranks), rank)
        for calls in run.calls
    )
    return sum(operator_s(operator, rank) for operator in run.operators) + sum(messages)


def relative_errors(runs: Sequence[CalibrationRun], machine: Hardware) -> Mapping[str, float]:
    """By how much each run's prediction is off, as a part of what was measured; negative where it
    is too short.
    """
    return {run.name: step_estimate_s(run, machine) / run.seconds - 1 for run in runs}


def nonnegative_least_squares(
    rows: NDArray[np.float64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The coefficients, none negative, that bring ``rows @ coefficients`` nearest to what is
    wanted.

    They are the ordinary ones of those columns whose coefficients are not 0. Five columns have 31
    choices: all are tried.
    """
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
    """What the five coefficients are multiplied by: operations, bytes, operators, messages, bytes
    on the wire.
    """
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
    """The host whose figures these are. What cost nothing is as fast as can be written down."""
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
