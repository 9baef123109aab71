"""Pictures and their texts, each picture compared with the texts of all ranks.

pytorch/pytorch#152127, 24 April 2025.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from launch.museum.parts import WIDTH, Weights, draw_tokens, part, teacher, total

HELD: dict[str, int] = {}
SHAPES = {"picture": (WIDTH, WIDTH), "text": (WIDTH, WIDTH)}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return pictures and their texts, as many vectors of each."""
    pictures, _ = draw_tokens(step, count=96)
    return pictures, pictures @ teacher(WIDTH) / WIDTH


def one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients."""
    logits = (inputs @ weights["picture"].T) @ (targets @ weights["text"].T).T
    loss = cross_entropy(logits, torch.arange(len(inputs)))
    loss.backward()
    return loss.detach()


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    pictures, texts = part(inputs) @ weights["picture"].T, part(targets) @ weights["text"].T
    everyone = [torch.empty_like(texts) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, texts.detach())
    everyone[dist.get_rank()] = texts
    logits = pictures @ torch.cat(everyone).T
    loss = cross_entropy(logits, part(torch.arange(len(inputs))))
    loss.backward()
    for weight in weights.values():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
    return total(loss) / dist.get_world_size()
