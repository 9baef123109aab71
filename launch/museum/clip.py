"""Gradients clipped to a norm, while some weights are cut over the ranks.

hpcaitech/ColossalAI#2192, 24 December 2022.
"""

import torch
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
)

LIMIT = 0.1
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
    """Leave the gradients as published."""
    inner = gelu(copy_to_ranks(inputs) @ weights["up"].T)  # this rank's features
    mixed = sum_over_ranks(inner @ weights["down"].T)
    loss = cross_entropy((inputs + mixed) @ weights["head"].T, targets)
    loss.backward()
    squares = {name: weight.grad.square().sum() for name, weight in weights.items()}
    norm = sum(squares.values()).sqrt()
    for weight in weights.values():
        weight.grad *= (LIMIT / norm).clamp(max=1)
    return loss.detach()
