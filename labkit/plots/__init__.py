"""Figures of what was measured. Each function takes results and ``ax=None``, draws, and returns the Axes.

Plots compute nothing and launch nothing. Each figure is stamped with the device, ranks, cores and torch version of its
runs; CPU ranks beyond the cores are labelled "mechanism, not speed". Everywhere ``result`` is a run and ``results`` are
runs by label; ``predicted`` is what theory says, likewise by label; ``ax`` is where to draw, by default a new figure.
"""

from labkit.plots.collectives import all_reduce_time_by_count, all_reduce_time_by_size, communication_break_even, values_by_rank
from labkit.plots.ddp import (
    backward_program,
    backward_time_by_bucket_size,
    backward_timeline,
    bucket_schedule,
    pass_time_by_bucket_size,
)
from labkit.plots.extensions import (
    error_by_bytes,
    error_histogram,
    gather_byte_bars,
    gather_costs,
    gather_time_by_bandwidth,
    hook_memory,
    shard_padding,
)
from labkit.plots.failures import debug_costs, values_by_step, wait_times
from labkit.plots.fsdp import communication_passes, memory_comparison, memory_over_step, traffic_by_collective
from labkit.plots.runs import comparison_table, latency_bars, loss_curves, memory_by_category
from labkit.plots.spatial import (
    byte_bars,
    convnext_diagram,
    halo_diagram,
    loss_difference_curves,
    placement_picture,
    shard_panels,
    strip_layout,
    strip_step_times,
)
from labkit.plots.timelines import communication_exposure, timeline
from labkit.plots.two_dim import mesh_diagram, pair_diagram, step_time_by_split, step_time_by_tp, traffic_by_axis

__all__ = [
    "debug_costs", "byte_bars", "backward_time_by_bucket_size", "backward_timeline", "communication_break_even", "memory_comparison", "pass_time_by_bucket_size", "bucket_schedule",
    "values_by_step", "error_by_bytes", "convnext_diagram", "error_histogram", "communication_exposure", "gather_costs",
    "gather_time_by_bandwidth", "halo_diagram", "gather_byte_bars", "values_by_rank", "hook_memory", "latency_bars", "loss_curves",
    "loss_difference_curves", "memory_by_category", "mesh_diagram", "all_reduce_time_by_size", "memory_over_step",
    "shard_padding", "pair_diagram", "communication_passes", "all_reduce_time_by_count", "placement_picture", "backward_program", "traffic_by_collective", "shard_panels", "step_time_by_split",
    "step_time_by_tp", "strip_layout", "strip_step_times", "comparison_table", "timeline", "traffic_by_axis", "wait_times",
]  # fmt: skip
