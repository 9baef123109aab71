"""On a rank: a learner's collectives get one tensor of each rank, a learner's training loop its own
samples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.session.traffic import CommunicationCounter

STEPS, SAMPLES, INPUTS, OUTPUTS, LEARNING_RATE = 3, 4, 5, 2, 0.1
VECTOR_LENGTHS = {"shift": (100_000,), "in_two": (8,), "ring": (8, 10)}
"""Of the vectors that a rank is given; a message of 100,000 numbers is not sent before somebody
receives it.
"""


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer.

    Args:
        answer: takes a vector, this rank and the number of ranks; for "train" a model, batches and
            a learning rate.
        what: a key of ``LENGTHS``, or "train".

    Returns:
        ``got``, the answer's tensors, or the types of what is none; ``handed``, bytes by collective
        or message; ``gloo``, what gloo's all-reduce makes of the same vectors. For "train", the
        model's parameters as ``got``.
    """
    index, ranks = dist.get_rank(), dist.get_world_size()
    if what == "train":
        model = make_rank_model(index)
        answer(model, rank_batches(index), LEARNING_RATE)
        return {"got": list(model.parameters())}
    given = [rank_vectors(length, ranks)[index] for length in VECTOR_LENGTHS[what]]
    with CommunicationCounter() as traffic:
        found = [answer(vector.clone(), index, ranks) for vector in given]
    for vector in given:
        dist.all_reduce(vector)
    got = [each if isinstance(each, Tensor) else type(each).__name__ for each in found]
    return {"got": got, "handed": dict(traffic.bytes), "gloo": given}


def rank_vectors(length: int, ranks: int) -> Tensor:
    """What each rank is given, [ranks, length]."""
    return torch.randn(ranks, length, generator=torch.Generator().manual_seed(length))


def make_rank_model(index: int) -> nn.Module:
    """The network of a rank, with weights of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, OUTPUTS))


def rank_batches(index: int) -> list[tuple[Tensor, Tensor]]:
    """The samples of a rank in each step: inputs [SAMPLES, INPUTS] and targets [SAMPLES,
    OUTPUTS].
    """
    draw = torch.Generator().manual_seed(100 + index)
    return [
        (
            torch.randn(SAMPLES, INPUTS, generator=draw),
            torch.randn(SAMPLES, OUTPUTS, generator=draw),
        )
        for _ in range(STEPS)
    ]


def train_all_ranks(
    ranks: int,
    *,
    same_start: bool = True,
    together: bool = True,
    factor: float = 1.0,
    forget: bool = True,
) -> list[Sequence[Tensor]]:
    """The parameters of every rank after data-parallel training, which this process plays alone.

    Args:
        ranks: how many.
        same_start: all ranks begin with the weights of rank 0.
        together: they use the mean of their gradients, not each its own.
        factor: times this.
        forget: gradients of earlier steps are thrown away.
    """
    models = [make_rank_model(0 if same_start else index) for index in range(ranks)]
    batches = [rank_batches(index) for index in range(ranks)]
    for step in range(STEPS):
        for model, own in zip(models, batches, strict=True):
            if forget:
                model.zero_grad()
            inputs, targets = own[step]
            nn.functional.mse_loss(model(inputs), targets).backward()
        for places in zip(*(model.parameters() for model in models), strict=True):
            gradients = [place.grad for place in places if place.grad is not None]
            mean = sum(gradients[1:], gradients[0]) / ranks
            for place, gradient in zip(places, gradients, strict=True):
                place.grad = factor * (mean if together else gradient)
                place.data -= LEARNING_RATE * place.grad
    return [[place.detach() for place in model.parameters()] for model in models]
