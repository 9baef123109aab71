"""Run a learner's halo exchange on one strip of an image that every process can rebuild."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from labkit.session.counted_group import GroupTraffic
from labkit_course.checks.ranks.collectives import expect_all_waited

# 3 ranks cut the width into strips of 11, 11 and 10 columns.
HALO, WIDTH = 3, 32


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer on a task of ``rank_tasks``, or on gradients to reduce.

    Return ``got``, the answer's tensor or the name of another type; ``sent``, calls and bytes by
    collective; and ``kept``, whether the tensor that was given is unchanged.
    """
    index, ranks = dist.get_rank(), dist.get_world_size()
    if what == "reduce":
        return run_reduction(answer, index, ranks)
    given = rank_tasks(what, ranks)[index][0].clone()
    before = given.clone()
    with GroupTraffic() as traffic:
        got = answer(given, HALO, index, ranks)
    expect_all_waited(traffic)
    got = got if isinstance(got, Tensor) else type(got).__name__
    return {"got": got, "sent": traffic.totals(), "kept": torch.equal(before, given)}


def run_reduction(answer: Callable[..., Any], index: int, ranks: int) -> dict[str, Any]:
    """Call the answer on this rank's gradients of a network, whose images are cut over the ranks.

    Return ``own`` gradients, ``got``, what became of them, and those of one device as ``right``:
    lists by "cut", what comes before the mean over the image, and "head".
    """
    own, right = (network_gradients(part) for part in ((index, ranks), (0, 1)))
    got = {name: [each.clone() for each in gradients] for name, gradients in own.items()}
    with GroupTraffic() as traffic:
        answer(got["cut"], got["head"])
    expect_all_waited(traffic)
    return {"own": own, "right": right, "got": got, "sent": traffic.totals()}


def network_gradients(part: tuple[int, int]) -> dict[str, list[Tensor]]:
    """Return the gradients of the loss of whole images from one rank's strip of them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cut, head = nn.Conv2d(3, 4, 1), nn.Linear(4, 5)
        images, labels = torch.randn(6, 3, 2, 24), torch.randint(5, (6,))
    index, ranks = part
    # Only this strip's pixels have a gradient, as where other strips are on other ranks.
    maps = cut(images).relu().tensor_split(ranks, dim=-1)
    seen = [each if place == index else each.detach() for place, each in enumerate(maps)]
    features = torch.cat(seen, dim=-1).mean(dim=(2, 3))
    nn.functional.cross_entropy(head(features), labels).backward()
    parameters = {"cut": cut.parameters(), "head": head.parameters()}
    return {name: [each.grad for each in own] for name, own in parameters.items()}  # type: ignore[misc]


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
