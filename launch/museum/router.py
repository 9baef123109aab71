"""A router that every rank has, and experts whose features the ranks share.

pytorch/torchtitan#4054, 3 August 2026.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu

from launch.museum.parts import INNER, WIDTH, WORDS, Weights, draw_tokens, sum_over_ranks

EXPERTS = 3
HELD = {"up": 1, "down": 2}
SHAPES = {
    **{"gate": (EXPERTS, WIDTH), "up": (EXPERTS, INNER, WIDTH), "down": (EXPERTS, WIDTH, INNER)},
    "head": (WORDS, WIDTH),
}
batch = draw_tokens


def one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients."""
    scores = torch.softmax(inputs @ weights["gate"].T, dim=1)
    inner = gelu(torch.einsum("td,ehd->teh", inputs, weights["up"]))
    mixed = torch.einsum("teh,edh,te->td", inner, weights["down"], scores)
    loss = cross_entropy((inputs + mixed) @ weights["head"].T, targets)
    loss.backward()
    return loss.detach()


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    scores = torch.softmax(inputs @ weights["gate"].T, dim=1)
    inner = gelu(torch.einsum("td,ehd->teh", inputs, weights["up"]))
    own = torch.einsum("teh,edh,te->td", inner, weights["down"], scores)
    mixed = sum_over_ranks(own)
    loss = cross_entropy((inputs + mixed) @ weights["head"].T, targets)
    loss.backward()
    return loss.detach()
