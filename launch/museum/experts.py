"""Expert parallelism: an expert lives on one rank, and works on the tokens of all.

pytorch/pytorch#160285, 10 August 2025.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from launch.museum.parts import (
    WIDTH,
    WORDS,
    Weights,
    draw_tokens,
    gather_from_ranks,
    part,
    sum_and_share,
    total,
)

EXPERTS = 12
HELD = {"experts": 0}
SHAPES = {"embed": (WIDTH, WIDTH), "experts": (EXPERTS, WIDTH, WIDTH), "head": (WORDS, WIDTH)}
batch = draw_tokens


def choose(count: int) -> Tensor:
    """Return 1 where a token goes to an expert, [tokens, experts]."""
    return one_hot(torch.arange(count) % EXPERTS, EXPERTS).float()


def one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients."""
    tokens, chosen = inputs @ weights["embed"].T, choose(len(inputs))
    mixed = torch.einsum("td,te,eod->to", tokens, chosen, weights["experts"])
    loss = cross_entropy(torch.tanh(mixed) @ weights["head"].T, targets)
    loss.backward()
    return loss.detach()


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    everyone = gather_from_ranks(part(inputs) @ weights["embed"].T)
    chosen = part(choose(len(inputs)), dim=1)  # all tokens, this rank's experts
    mixed = torch.einsum("td,te,eod->to", everyone, chosen, weights["experts"])
    logits = torch.tanh(sum_and_share(mixed)) @ weights["head"].T
    loss = cross_entropy(logits, part(targets))  # the mean of this rank's tokens
    loss.backward()
    for name in ("embed", "head"):  # the mean over the ranks; nobody else has these experts
        dist.all_reduce(weights[name].grad)
        weights[name].grad /= dist.get_world_size()
    return total(loss) / dist.get_world_size()
