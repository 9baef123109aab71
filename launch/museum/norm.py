"""A norm under sequence parallelism: its weight is whole on every rank, and each rank sees only its
share of the tokens.

InternLM/InternLM#443, 25 October 2023.
"""

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, rms_norm

from launch.museum.parts import (
    INNER,
    WIDTH,
    WORDS,
    Weights,
    draw_tokens,
    gather_from_ranks,
    part,
    sum_and_share,
    total,
)

HELD = {"up": 0, "down": 1}
SHAPES = {"norm": (WIDTH,), "up": (INNER, WIDTH), "down": (WIDTH, INNER), "head": (WORDS, WIDTH)}
batch = draw_tokens


def one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients."""
    inner = gelu(rms_norm(inputs, (WIDTH,), weights["norm"]) @ weights["up"].T)
    tokens = inputs + inner @ weights["down"].T
    loss = cross_entropy(tokens @ weights["head"].T, targets)
    loss.backward()
    return loss.detach()


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    tokens = part(inputs)  # each rank has its share of the sequence
    normed = rms_norm(tokens, (WIDTH,), weights["norm"])
    inner = gelu(gather_from_ranks(normed) @ weights["up"].T)  # all tokens, this rank's features
    tokens = tokens + sum_and_share(inner @ weights["down"].T)
    losses = cross_entropy(tokens @ weights["head"].T, part(targets), reduction="sum")
    loss = losses / len(targets)
    loss.backward()
    dist.all_reduce(weights["head"].grad)  # each rank's gradient is that of its own tokens
    return total(loss)
