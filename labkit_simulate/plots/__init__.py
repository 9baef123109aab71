"""Figures of simulations and plans, in the form of labkit.plots."""

from labkit_simulate.plots.plan import candidates
from labkit_simulate.plots.scaling import held_against, of_each, step_parts, together
from labkit_simulate.plots.simulation import memory_by_block, memory_curve

__all__ = ["candidates", "held_against", "memory_by_block", "memory_curve", "of_each", "step_parts", "together"]
