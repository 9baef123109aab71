"""Gradients accumulated over two micro-batches, which every rank sends as soon as they are there.

NVIDIA/Megatron-LM#6660, 19 August 2026.
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
    """Leave the gradients as published."""
    logged = torch.zeros(())
    for tokens, words in zip(part(inputs).chunk(2), part(targets).chunk(2), strict=True):
        logits = torch.tanh(tokens @ weights["first"].T) @ weights["last"].T
        loss = cross_entropy(logits, words, reduction="sum") / len(targets)
        loss.backward()  # adds to .grad
        for weight in weights.values():
            dist.all_reduce(weight.grad)
        logged += total(loss)
    return logged
