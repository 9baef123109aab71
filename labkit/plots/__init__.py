"""Figures of what was measured. Each function takes results and ``ax=None``, draws, and returns the Axes.

Plots compute nothing and launch nothing. Each figure is stamped with the device, ranks, cores and torch version of its
runs; CPU ranks beyond the cores are labelled "mechanism, not speed". Everywhere ``result`` is a run and ``results`` are
runs by label; ``predicted`` is what theory says, likewise by label; ``ax`` is where to draw, by default a new figure.
"""

from labkit.plots.collectives import batch_pays, held, messages, pieces
from labkit.plots.ddp import backward_by_bucket, backward_line, bucket_sizes, buckets, program
from labkit.plots.extensions import bytes_against_error, gather_costs, gather_times, hook_memory, padded_shards
from labkit.plots.failures import aids, by_step, waits
from labkit.plots.fsdp import breakdown, passes
from labkit.plots.runs import latency, loss, memory, table
from labkit.plots.spatial import convnext, halos, loss_difference, shards, strips_pay
from labkit.plots.timelines import exposed, timeline
from labkit.plots.two_dim import mesh, pair, split_times, step_times, traffic

__all__ = [
    "aids", "backward_by_bucket", "backward_line", "batch_pays", "breakdown", "bucket_sizes", "buckets", "by_step",
    "bytes_against_error",
    "convnext", "exposed", "gather_costs", "gather_times", "halos", "held", "hook_memory", "latency", "loss",
    "loss_difference", "memory", "mesh", "messages", "padded_shards", "pair", "passes", "pieces", "program",
    "shards", "split_times", "step_times", "strips_pay", "table", "timeline", "traffic", "waits",
]  # fmt: skip
