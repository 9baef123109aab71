"""Context parallelism with a second head, which predicts the word after the next.

NVIDIA/Megatron-LM#3943, 19 March 2026.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from launch.museum.parts import INNER, WIDTH, WORDS, Weights, draw_tokens, part, total

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
    """Leave the gradients as published."""
    hidden = torch.tanh(part(inputs) @ weights["trunk"].T)
    first, second = part(targets).T
    loss = cross_entropy(hidden @ weights["head"].T, first)
    more = cross_entropy(hidden @ weights["extra"].T, second)
    more = 0.3 * more / dist.get_world_size()  # the ranks share each sequence
    (loss + more).backward()
    for weight in weights.values():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
    return total(loss) / dist.get_world_size()
