"""Mistakes in a sharded ConvNeXt, which lab 1 shows without labels for the learner to diagnose."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pandas
import torch
import torch.distributed as dist
from torch import Tensor

from labkit import rank
from labkit.models.convnext import ConvNeXt
from labkit.parallel.halo import pad_columns
from labkit.runs.result import RunResult
from labkit_course.checks.judge import projection

Reduction = Callable[[list[Tensor], list[Tensor]], None]
SHOWN = {
    "stem": "stages.0.conv.weight",
    "block 1, 7 × 7": "stages.1.depthwise.weight",
    "block 1, last 1 × 1": "stages.1.project.weight",
    "downsampling": "stages.2.conv.weight",
    "block 2, 7 × 7": "stages.3.depthwise.weight",
    "block 2, last 1 × 1": "stages.3.project.weight",
    "head": "head.weight",
}
"""Tensors whose gradients the table has, in the order of the forward pass, by their places."""


def swapped(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Put the columns that came from the left on the right, and the other way round."""
    padded = pad_columns(strip, halo, rank, ranks)
    return torch.cat([padded[..., -halo:], strip, padded[..., :halo]], dim=-1)


def forgotten(grad: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Send no gradient home."""
    return grad[..., halo:-halo].contiguous()


def summed(cut: list[Tensor], head: list[Tensor]) -> None:
    """Reduce as it is right."""
    for gradient in cut:
        dist.all_reduce(gradient)


def averaged(cut: list[Tensor], head: list[Tensor]) -> None:
    """Average, as DDP does."""
    for gradient in cut:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def kept(cut: list[Tensor], head: list[Tensor]) -> None:
    """Reduce nothing: each rank keeps its own part."""


MISTAKES: dict[int, dict[str, Callable[..., Any]]] = {
    1: {"exchange_halo": swapped},
    2: {"return_gradients": forgotten},
    3: {"reduce_gradients": averaged},
    4: {"reduce_gradients": kept},
}
"""Functions for ``use=``, by the numbers of the lab's text."""
UNLABELLED = {"A": 2, "B": 3, "C": 1, "D": 4}
"""The number of the mistake in each run."""


def source(use: Mapping[str, Callable[..., Any]]) -> str:
    """Return the code of a mistake."""
    return "\n\n".join(inspect.getsource(function) for function in use.values())


def reporting(use: Mapping[str, Any]) -> dict[str, Any]:
    """Return functions for ``use=`` that do the same, and report all gradients after each step."""
    return {
        **use,
        "reduce_gradients": partial(reduce_and_report, use.get("reduce_gradients", summed)),
    }


def reduce_and_report(reduce: Reduction, cut: list[Tensor], head: list[Tensor]) -> None:
    """Reduce the gradients, and report them to the notebook."""
    reduce(cut, head)
    rank.report(cut=cut, head=head)


def gradient_ratios(runs: Mapping[str, RunResult], right: RunResult) -> pandas.DataFrame:
    """Return the part of the right gradient that each run's has, by tensor.

    It is the projection of lab 1's section 5, (own · right) / (right · right).
    """
    names = [name for name, _ in ConvNeXt().named_parameters()]
    wanted = named_gradients(right, names)
    table = {}
    for label, run in runs.items():
        own = named_gradients(run, names)
        table[label] = [projection(own[name], wanted[name]) for name in SHOWN.values()]
    return pandas.DataFrame(table, index=list(SHOWN))


def named_gradients(run: RunResult, names: list[str]) -> dict[str, Tensor]:
    """Return the gradients that rank 0 reported, by name."""
    reported = run.ranks[0].reported
    return dict(zip(names, [*reported["cut"], *reported["head"]], strict=True))
