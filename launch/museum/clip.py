"""Gradients clipped to a norm, while some weights are cut over the ranks: a whole weight must be
counted once, and one is taken to be whole that is not.

NVIDIA/Megatron-LM#7452, 17 September 2026.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu

from launch.museum.parts import (
    INNER,
    WIDTH,
    WORDS,
    Weights,
    copy_to_ranks,
    draw_tokens,
    sum_over_ranks,
    total,
)

LIMIT = 0.1
# Finding 8 of the thread.
HELD = {"up": 0, "down": 1}
SHAPES = {"up": (INNER, WIDTH), "down": (WIDTH, INNER), "head": (WORDS, WIDTH)}
batch = draw_tokens


def one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients."""
    mixed = gelu(inputs @ weights["up"].T) @ weights["down"].T
    loss = cross_entropy((inputs + mixed) @ weights["head"].T, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(weights.values(), LIMIT)
    return loss.detach()


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    inner = gelu(copy_to_ranks(inputs) @ weights["up"].T)
    mixed = sum_over_ranks(inner @ weights["down"].T)
    loss = cross_entropy((inputs + mixed) @ weights["head"].T, targets)
    loss.backward()
    squares = {name: weight.grad.square().sum() for name, weight in weights.items()}
    mine = squares["up"]
    if dist.get_rank() == 0:
        mine += squares["down"] + squares["head"]
    norm = total(mine).sqrt()
    for weight in weights.values():
        weight.grad *= (0.1 / norm).clamp(max=1)
    return loss.detach()
