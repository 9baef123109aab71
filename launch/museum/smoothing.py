"""Tensor parallelism up to the loss: each rank scores its own words, and the targets are smoothed,
so that each word's score counts a little.

NVIDIA/Megatron-LM#7452, 17 September 2026.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from launch.museum.parts import (
    WIDTH,
    WORDS,
    Weights,
    copy_to_ranks,
    draw_tokens,
    part,
    sum_over_ranks,
)

# Finding 1 of the thread.
HELD = {"head": 0}
SHAPES = {"trunk": (WIDTH, WIDTH), "head": (WORDS, WIDTH)}
batch = draw_tokens


def one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients."""
    logits = torch.tanh(inputs @ weights["trunk"].T) @ weights["head"].T
    loss = cross_entropy(logits, targets, label_smoothing=0.1)
    loss.backward()
    return loss.detach()


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    hidden = torch.tanh(inputs @ weights["trunk"].T)
    logits = copy_to_ranks(hidden) @ weights["head"].T
    chosen = part(one_hot(targets, 12), dim=1)  # 1 where a target is this rank's word
    everything = sum_over_ranks(logits.exp().sum(dim=1)).log()
    target = sum_over_ranks((chosen * logits).sum(dim=1))
    average = logits.mean(dim=1)  # the smoothed part
    loss = (everything - 0.9 * target - 0.1 * average).mean()
    loss.backward()
    return loss.detach()
