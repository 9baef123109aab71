"""Figures of what was measured. Each function takes results and ``ax=None``, draws, and returns the Axes.

Plots compute nothing and launch nothing. Each figure is stamped with the device, ranks, cores and torch version of its
runs; CPU ranks beyond the cores are labelled "mechanism, not speed". Everywhere ``result`` is a run and ``results`` are
runs by label; ``predicted`` is what theory says, likewise by label; ``ax`` is where to draw, by default a new figure.
"""

from labkit.plots.collectives import batch_pays, held, messages, pieces
from labkit.plots.ddp import backward_by_bucket, backward_line, bucket_sizes, buckets, program
from labkit.plots.extensions import (
    bytes_against_error,
    error_histogram,
    gather_costs,
    gather_times,
    handed_bytes,
    hook_memory,
    padded_shards,
)
from labkit.plots.failures import aids, by_step, waits
from labkit.plots.fsdp import breakdown, over_step, passes, sent_beside
from labkit.plots.runs import latency, loss, memory, table
from labkit.plots.spatial import amounts, convnext, halos, loss_difference, placed, shards, strips, strips_pay
from labkit.plots.timelines import exposed, timeline
from labkit.plots.two_dim import mesh, pair, split_times, step_times, traffic

__all__ = [
    "aids", "amounts", "backward_by_bucket", "backward_line", "batch_pays", "breakdown", "bucket_sizes", "buckets",
    "by_step", "bytes_against_error", "convnext", "error_histogram", "exposed", "gather_costs",
    "gather_times", "halos", "handed_bytes", "held", "hook_memory", "latency", "loss",
    "loss_difference", "memory", "mesh", "messages", "over_step",
    "padded_shards", "pair", "passes", "pieces", "placed", "program", "sent_beside", "shards", "split_times",
    "step_times", "strips", "strips_pay", "table", "timeline", "traffic", "waits",
]  # fmt: skip
