"""Figures of simulations and plans, in the form of labkit.plots."""

from labkit_simulate.plots.plan import candidate_scatter
from labkit_simulate.plots.scaling import (
    accuracy_by_hosts,
    estimate_accuracy,
    step_time_parts,
    throughput_per_gpu,
    total_throughput,
)
from labkit_simulate.plots.simulation import memory_by_block, memory_curve

__all__ = [
    "accuracy_by_hosts",
    "candidate_scatter",
    "estimate_accuracy",
    "memory_by_block",
    "memory_curve",
    "step_time_parts",
    "throughput_per_gpu",
    "total_throughput",
]
