"""A pipeline of two stages: the first looks words up in the table with which the last scores them.

uw-syfi/piper#13, 17 July 2026.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from launch.museum.parts import WIDTH, WORDS, Weights, draw_tokens, total

HELD = {"first": "first", "last": "last"}
SHAPES = {"words": (WORDS, WIDTH), "first": (WIDTH, WIDTH), "last": (WIDTH, WIDTH)}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return words and the ones that follow them: mostly the next of the vocabulary."""
    inputs, words = draw_tokens(step)
    return words, torch.where(inputs[:, 0] < 1, (words + 1) % WORDS, 0)


def one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients."""
    hidden = torch.tanh(weights["words"][inputs] @ weights["first"].T)
    hidden = torch.tanh(hidden @ weights["last"].T)
    loss = cross_entropy(hidden @ weights["words"].T, targets)
    loss.backward()
    return loss.detach()


def step(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients, and return the loss to log."""
    received, loss = weights["words"].new_empty(len(inputs), WIDTH), torch.zeros(())
    if "first" in weights:  # rank 0, the first stage
        hidden = torch.tanh(weights["words"][inputs] @ weights["first"].T)
        dist.send(hidden.detach(), dst=1)
        dist.recv(received, src=1)
        hidden.backward(received)
    else:  # rank 1, the last stage
        dist.recv(received, src=0)
        hidden = torch.tanh(received.requires_grad_() @ weights["last"].T)
        loss = cross_entropy(hidden @ weights["words"].T, targets)
        loss.backward()
        dist.send(received.grad, dst=0)
    return total(loss)
