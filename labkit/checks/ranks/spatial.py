"""Run a learner's halo exchange on one strip of an image that every process can rebuild."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from labkit.checks.ranks.collectives import expect_all_waited
from labkit.session.counted_group import GroupTraffic

# 3 ranks cut the width into strips of 11, 11 and 10 columns.
HALO, WIDTH = 3, 32


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer on a task of ``rank_tasks``; "function" asks for both passes.

    Return ``got``, the answer's tensor or the name of another type; ``sent``, calls and bytes by
    collective; and for "function" ``grad``, the gradient of the strip.
    """
    index, ranks = dist.get_rank(), dist.get_world_size()
    is_function = what == "function"
    given = rank_tasks("forward" if is_function else what, ranks)[index][0].clone()
    given.requires_grad_(is_function)
    call = answer.apply if is_function else answer  # type: ignore[attr-defined]
    with GroupTraffic() as traffic:
        got = call(given, HALO, index, ranks)
        if is_function and isinstance(got, Tensor):
            got.backward(rank_tasks("backward", ranks)[index][0])
    expect_all_waited(traffic)
    got = got if isinstance(got, Tensor) else type(got).__name__
    return {"got": got, "sent": traffic.totals(), "grad": given.grad}


def rank_tasks(what: str, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's input and expected output, computed from the whole image [N, C, H, W].

    forward: a strip, and the strip with its neighbours' columns, zeros at the border of the image.
    ones: like forward, for an image of ones.
    backward: a gradient of the padded strip, and the gradient of the strip summed over all ranks.
    """
    draw = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 5, WIDTH, generator=draw)
    if what == "ones":
        image = torch.ones_like(image)
    strips = image.tensor_split(ranks, dim=-1)
    widths = [strip.shape[-1] for strip in strips]
    # Overlapping views of the whole image, or of the sum of all ranks' gradients.
    whole = pad(image if what != "backward" else torch.zeros_like(image), (HALO, HALO))
    starts = accumulate(widths[:-1], initial=0)
    padded = [
        whole[..., start : start + width + 2 * HALO]
        for start, width in zip(starts, widths, strict=True)
    ]
    if what != "backward":
        return list(zip(strips, padded, strict=True))
    gradients = [torch.randn(view.shape, generator=draw) for view in padded]
    for view, gradient in zip(padded, gradients, strict=True):
        view += gradient
    return list(zip(gradients, (view[..., HALO:-HALO] for view in padded), strict=True))
