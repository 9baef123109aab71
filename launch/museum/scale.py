"""A norm under plain tensor parallelism, which is right: every rank has all tokens, and what enters
the ranks' own region is summed on the way back, so that no gradient is left to add up.
"""

from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, rms_norm

from launch.museum.parts import (
    INNER,
    WIDTH,
    WORDS,
    Weights,
    copy_to_ranks,
    draw_tokens,
    sum_over_ranks,
)

HELD = {"up": 0, "down": 1}
SHAPES = {"scale": (WIDTH,), "up": (INNER, WIDTH), "down": (WIDTH, INNER), "head": (WORDS, WIDTH)}
batch = draw_tokens


def one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients."""
    inner = gelu(rms_norm(inputs, (WIDTH,), weights["scale"]) @ weights["up"].T)
    loss = cross_entropy((inputs + inner @ weights["down"].T) @ weights["head"].T, targets)
    loss.backward()
    return loss.detach()


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    normed = rms_norm(inputs, (WIDTH,), weights["scale"])
    inner = gelu(copy_to_ranks(normed) @ weights["up"].T)
    mixed = sum_over_ranks(inner @ weights["down"].T)
    loss = cross_entropy((inputs + mixed) @ weights["head"].T, targets)
    loss.backward()
    return loss.detach()
