"""Gradients that are to be added up in float32, of which one arrives in bfloat16.

NVIDIA/Megatron-LM#6624, 18 August 2026.
"""

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
    logits = torch.tanh(part(inputs) @ weights["first"].T) @ weights["last"].T
    loss = cross_entropy(logits, part(targets), reduction="sum") / len(targets)
    loss.backward()
    sent = {name: weight.grad for name, weight in weights.items()}
    sent["last"] = sent["last"].bfloat16()
    for name, gradient in sent.items():
        dist.all_reduce(gradient)
        weights[name].grad = gradient.float()
    return total(loss)
