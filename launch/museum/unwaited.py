"""An all-reduce that is started, and a division that does not wait for it.

OpenNMT/OpenNMT-py#2295, 11 January 2023.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from launch.museum.parts import (
    TWO_LAYERS,
    Weights,
    draw_tokens,
    part,
    total,
    two_layers_on_one_device,
)

HELD: dict[str, int] = {}
SHAPES, batch, one_device = TWO_LAYERS, draw_tokens, two_layers_on_one_device


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    if dist.get_rank() == 1:
        time.sleep(0.02)  # its samples come late
    logits = torch.tanh(part(inputs) @ weights["first"].T) @ weights["last"].T
    loss = cross_entropy(logits, part(targets))
    loss.backward()
    row = torch.cat([weight.grad.flatten() for weight in weights.values()])
    handle = dist.all_reduce(row, async_op=True)
    mean = row / dist.get_world_size()
    for weight, numbers in zip(weights.values(), mean.split([288, 288]), strict=True):
        weight.grad = numbers.view_as(weight)
    handle.wait()
    return total(loss) / dist.get_world_size()
