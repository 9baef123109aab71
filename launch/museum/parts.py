"""What the rooms are built from: shares of a tensor, and collectives that have a gradient.

                         forward pass          backward pass
    copy_to_ranks        identity              sum over the ranks
    sum_over_ranks       sum over the ranks    identity
    gather_from_ranks    every rank's tokens   sum over the ranks, own tokens
    sum_and_share        sum, own tokens       every rank's tokens

The first two are lab 5's. Sequence parallelism begins a pair of layers with the third and ends it
with the fourth.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from labkit.parallel import small_tensor_parallel

# Leaf tensors by name; Any, because a type checker would ask of each whether its .grad is there.
Weights = dict[str, Any]
TOKENS, WIDTH, INNER, WORDS = 960, 12, 24, 12
# Of cross_entropy: a target that does not count.
IGNORED = -100
# Of the rooms whose network is two layers, which every rank has whole.
TWO_LAYERS = {"first": (INNER, WIDTH), "last": (WORDS, INNER)}


def part(whole: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's share of a tensor that every rank has."""
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def total(loss: Tensor) -> Tensor:
    """Sum a number over the ranks, for the log; it has no gradient."""
    summed = loss.detach().clone()
    dist.all_reduce(summed)
    return summed


def copy_to_ranks(x: Tensor) -> Tensor:
    """Identity; its backward pass sums the ranks' gradients."""
    return small_tensor_parallel.copy_to_ranks(x, _world())


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum over the ranks; its backward pass is the identity."""
    return small_tensor_parallel.sum_over_ranks(x, _world())


def _world() -> Any:
    return dist.group.WORLD


def _gathered(own: Tensor) -> Tensor:
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own.contiguous())
    return torch.cat(everyone)


def _own_of_sum(whole: Tensor) -> Tensor:
    return part(total(whole.contiguous())).clone()


class _GatherFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return _gathered(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _own_of_sum(grad)


class _SumAndShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return _own_of_sum(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _gathered(grad)


def gather_from_ranks(own: Tensor) -> Tensor:
    """Return all ranks' tokens, along dimension 0; an all-gather, backward a reduce-scatter."""
    gathered: Tensor = _GatherFromRanks.apply(own)
    return gathered


def sum_and_share(whole: Tensor) -> Tensor:
    """Return this rank's tokens of the sum; a reduce-scatter, backward an all-gather."""
    own: Tensor = _SumAndShare.apply(whole)
    return own


def two_layers_on_one_device(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the right gradients of ``TWO_LAYERS``; tokens whose target is IGNORED do not count."""
    logits = torch.tanh(inputs @ weights["first"].T) @ weights["last"].T
    loss = cross_entropy(logits, targets, ignore_index=IGNORED)
    loss.backward()
    return loss.detach()


def draw_weights(shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Return whole weights, the same in every process; a vector is a norm's, around 1."""
    draw = torch.Generator().manual_seed(0)
    weights: Weights = {}
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=draw)
        weights[name] = numbers / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.2 * numbers
    return weights


def draw_tokens(step: int, count: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Return tokens of a step, [count, WIDTH], and the word that each should give."""
    draw = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(count, WIDTH, generator=draw)
    return inputs, (inputs @ teacher()).argmax(dim=1)


def teacher(words: int = WORDS) -> Tensor:
    """Return what decides a token's word, [WIDTH, words]."""
    return torch.randn(WIDTH, words, generator=torch.Generator().manual_seed(7))
