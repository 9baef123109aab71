"""On a rank: a learner's halo exchange gets one strip of an image that every rank, and the
notebook, can make whole.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.session.traffic import CommunicationCounter

HALO, COLUMNS = 3, 8


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer once.

    Args:
        answer: takes a strip or a padded gradient [N, C, H, W], the halo, this rank and the number
            of ranks.
        what: "forward", "backward" or "ones", see ``tasks``; or "function" for an autograd.Function
            that does the first two, of which the second is asked for by a backward pass.

    Returns:
        ``got``, the answer's tensor, or the type of what it is otherwise; ``moved``, the bytes that
        it handed over; for "function" ``grad`` as well, the gradient of the strip.
    """
    index, ranks = dist.get_rank(), dist.get_world_size()
    given = rank_tasks("forward" if what == "function" else what, ranks)[index][0].clone()
    grad = None
    with CommunicationCounter() as traffic:
        if what == "function":
            given.requires_grad_()
            got = answer.apply(given, HALO, index, ranks)  # type: ignore[attr-defined]
            if isinstance(got, Tensor):
                got.backward(rank_tasks("backward", ranks)[index][0])
                grad = given.grad
        else:
            got = answer(given, HALO, index, ranks)
    moved = sum(amount for name, amount in traffic.bytes.items() if name != "recv")
    return {
        "got": got if isinstance(got, Tensor) else type(got).__name__,
        "moved": moved,
        "grad": grad,
    }


def rank_tasks(what: str, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """What each rank is given, and what it should give back, said by the whole image.

    forward: a strip; the same strip with its neighbours' columns, zeros at the border of the image.
    ones: the same for an image of ones.
    backward: a gradient of the padded strip; the gradient of the strip when those of all ranks are
        added up.
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
    padded = torch.nn.functional.pad(image, (HALO, HALO)).unfold(
        -1, width, COLUMNS
    )  # [N, C, H, ranks, width]
    return list(zip(image.chunk(ranks, dim=-1), padded.unbind(3), strict=True))
