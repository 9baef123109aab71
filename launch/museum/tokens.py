"""Tensor parallelism in experts: all ranks take the same tokens, each into its own features.

pytorch/torchtitan#1805, 7 October 2025.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu

from launch.museum.parts import INNER, WIDTH, WORDS, Weights, draw_tokens, sum_over_ranks

HELD = {"up": 0, "down": 1}
SHAPES = {
    **{"embed": (WIDTH, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)},
    "head": (WORDS, WIDTH),
}
batch = draw_tokens


def one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients."""
    tokens = torch.tanh(inputs @ weights["embed"].T)
    mixed = gelu(tokens @ weights["up"].T) @ weights["down"].T
    loss = cross_entropy((tokens + mixed) @ weights["head"].T, targets)
    loss.backward()
    return loss.detach()


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    tokens = torch.tanh(inputs @ weights["embed"].T)
    inner = gelu(tokens @ weights["up"].T)
    mixed = sum_over_ranks(inner @ weights["down"].T)
    loss = cross_entropy((tokens + mixed) @ weights["head"].T, targets)
    loss.backward()
    return loss.detach()
