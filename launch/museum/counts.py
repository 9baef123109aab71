"""Data parallelism over texts of which only some tokens count: each rank divides by its own number.

huggingface/transformers#34242, 18 October 2024.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from launch.museum.parts import (
    IGNORED,
    TWO_LAYERS,
    Weights,
    draw_tokens,
    part,
    total,
    two_layers_on_one_device,
)

HELD: dict[str, int] = {}
SHAPES, one_device = TWO_LAYERS, two_layers_on_one_device


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens; of the first half only every third has a target, the others are prompts."""
    inputs, targets = draw_tokens(step)
    place = torch.arange(len(targets))
    return inputs, targets.where((place >= len(place) // 2) | (place % 3 == 0), IGNORED)


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    logits = torch.tanh(part(inputs) @ weights["first"].T) @ weights["last"].T
    loss = cross_entropy(logits, part(targets), ignore_index=IGNORED)  # the mean of its tokens
    loss.backward()
    for weight in weights.values():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
    return total(loss) / dist.get_world_size()
