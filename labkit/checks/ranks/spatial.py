"""Run a learner's halo exchange on one strip of an image that every process can rebuild."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.session.traffic import CommunicationCounter

HALO, COLUMNS = 3, 8


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer on a task of ``rank_tasks``; "function" asks for both passes.

    Return ``got``, the answer's tensor or the name of another type; ``moved``, bytes passed to
    sends and collectives; and for "function" ``grad``, the gradient of the strip.
    """
    index, ranks = dist.get_rank(), dist.get_world_size()
    is_function = what == "function"
    given = rank_tasks("forward" if is_function else what, ranks)[index][0].clone()
    given.requires_grad_(is_function)
    call = answer.apply if is_function else answer  # type: ignore[attr-defined]
    with CommunicationCounter() as traffic:
        got = call(given, HALO, index, ranks)
        if is_function and isinstance(got, Tensor):
            got.backward(rank_tasks("backward", ranks)[index][0])
    moved = sum(amount for name, amount in traffic.bytes.items() if name != "recv")
    got = got if isinstance(got, Tensor) else type(got).__name__
    return {"got": got, "moved": moved, "grad": given.grad}


def rank_tasks(what: str, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's input and expected output, computed from the whole image [N, C, H, W].

    forward: a strip, and the strip with its neighbours' columns, zeros at the border of the image.
    ones: like forward, for an image of ones.
    backward: a gradient of the padded strip, and the gradient of the strip summed over all ranks.
    """
    draw = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 5, COLUMNS * ranks, generator=draw)
    width = COLUMNS + 2 * HALO
    if what == "backward":
        gradients = [torch.randn(*image.shape[:3], width, generator=draw) for _ in range(ranks)]
        total = torch.zeros(*image.shape[:3], image.shape[3] + 2 * HALO)
        for index, gradient in enumerate(gradients):
            total[..., index * COLUMNS : index * COLUMNS + width] += gradient
        return list(zip(gradients, total[..., HALO:-HALO].chunk(ranks, dim=-1), strict=True))
    if what == "ones":
        image = torch.ones_like(image)
    # unfold cuts overlapping windows: [N, C, H, ranks, width]
    padded = torch.nn.functional.pad(image, (HALO, HALO)).unfold(-1, width, COLUMNS)
    return list(zip(image.chunk(ranks, dim=-1), padded.unbind(3), strict=True))
