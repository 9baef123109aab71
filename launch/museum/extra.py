"""A loss beside the loss: a second head predicts the word after the next, and each rank weighs its
mean by its share of the tokens.

NVIDIA/Megatron-LM#7452, 17 September 2026.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from launch.museum.parts import INNER, WIDTH, WORDS, Weights, draw_tokens, part, total

# Finding 10 of the thread.
HELD: dict[str, int] = {}
SHAPES = {"trunk": (INNER, WIDTH), "head": (WORDS, INNER), "extra": (WORDS, INNER)}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens, and the two words that follow each, [tokens, 2]."""
    inputs, words = draw_tokens(step)
    return inputs, torch.stack([words, words.roll(-1)], dim=1)


def one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients."""
    hidden, (first, second) = torch.tanh(inputs @ weights["trunk"].T), targets.T
    loss = cross_entropy(hidden @ weights["head"].T, first)
    (loss + 0.3 * cross_entropy(hidden @ weights["extra"].T, second)).backward()
    return loss.detach()


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    hidden = torch.tanh(part(inputs) @ weights["trunk"].T)
    first, second = part(targets).T
    own = (first >= 0).sum()  # this rank's tokens
    everyone = own
    dist.all_reduce(everyone)  # the tokens of all ranks
    loss = cross_entropy(hidden @ weights["head"].T, first, reduction="sum") / everyone
    more = 0.3 * cross_entropy(hidden @ weights["extra"].T, second) * own / everyone
    (loss + more).backward()
    for weight in weights.values():
        dist.all_reduce(weight.grad)
    return total(loss)
