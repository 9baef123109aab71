"""Run a learner's collectives on a vector per rank, and a training loop on each rank's samples."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.session.counted_group import GroupTraffic
from labkit_course.checks.judge import expect

STEPS, SAMPLES, INPUTS, OUTPUTS, LEARNING_RATE = 3, 4, 5, 2, 0.1
# gloo buffers short messages. A send of 100,000 elements blocks until its receive is posted, so an
# answer that deadlocks is caught.
VECTOR_LENGTHS = {"shift": (100_000,), "in_two": (12,), "ring": (8, 10), "hosts": (6,)}
RANKS_PER_HOST = 2


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer; ``what`` is a key of ``VECTOR_LENGTHS``, or "train" for a training loop.

    Return ``got``, the answer's tensors or the names of other types, or the trained parameters;
    for vectors also ``handed``, bytes by operation, ``gloo``, results of gloo's all-reduce, and
    ``changed``, whether the answer wrote into a vector. For "hosts" see ``run_by_host``.
    """
    index, ranks = dist.get_rank(), dist.get_world_size()
    if what == "train":
        return {"got": run_training(answer)}
    if what == "hosts":
        return run_by_host(answer)
    given = [rank_vectors(length, ranks)[index] for length in VECTOR_LENGTHS[what]]
    mine = [vector.clone() for vector in given]
    with GroupTraffic() as traffic:
        found = [answer(vector, index, ranks) for vector in mine]
    expect_all_waited(traffic)
    changed = not all(map(torch.equal, mine, given))
    for vector in given:
        dist.all_reduce(vector)
    got = [each if isinstance(each, Tensor) else type(each).__name__ for each in found]
    return {"got": got, "handed": traffic.bytes(), "gloo": given, "changed": changed}


def run_by_host(answer: Callable[..., Any]) -> dict[str, Any]:
    """Call an answer that averages by host, and note the groups that it makes and uses.

    Return ``got``, what it returned, with the names of types that are no tensors; ``largest``, the
    number of ranks in the largest new group; and ``in_world``, its calls in the group of all ranks.
    """
    index, count = dist.get_rank(), dist.get_world_size()
    make_group, sizes, own_calls = dist.new_group, [0], 0

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        nonlocal own_calls
        wanted = list(range(count) if ranks is None else ranks)
        asked: list[Any] = [None] * count
        before = len(traffic.calls())
        # Ranks that make different groups could wait for each other until the time is up.
        dist.all_gather_object(asked, wanted)
        own_calls += len(traffic.calls()) - before
        for other, theirs in enumerate(asked):
            said = f"rank 0 makes a group of ranks {asked[0]} while rank {other} makes {theirs}"
            expect(theirs == asked[0], f"{said}: all ranks make all groups, in the same order")
        sizes.append(len(wanted))
        return make_group(ranks, *args, **kwargs)

    (length,) = VECTOR_LENGTHS["hosts"]
    mine = rank_vectors(length, count)[index].clone()
    with GroupTraffic() as traffic, mock.patch.object(dist, "new_group", new_group):
        found = answer(mine, index, count, RANKS_PER_HOST)
    means = list(found) if isinstance(found, tuple | list) else [found]
    got = [each if isinstance(each, Tensor) else type(each).__name__ for each in means]
    world = dist.group.WORLD
    in_world = len(traffic.calls(world.group_name if world else None)) - own_calls
    return {"got": got, "largest": max(sizes), "in_world": in_world}


def expect_all_waited(traffic: GroupTraffic) -> None:
    """Raise WrongAnswer if the answer returned with messages of its own under way."""
    left = traffic.count_unwaited()
    messages = "1 message was" if left == 1 else f"{left} messages were"
    said = f"rank {dist.get_rank()} returned while {messages} under way"
    expect(not left, f"{said}: call wait() on every handle")


def run_training(answer: Callable[..., Any], *, same_start: bool = False) -> list[Tensor]:
    """Train this rank's model with the answer, and return the model's parameters."""
    index = dist.get_rank()
    model = make_rank_model(0 if same_start else index)
    answer(model, rank_batches(index), LEARNING_RATE)
    return [parameter.detach() for parameter in model.parameters()]


def rank_vectors(length: int, ranks: int) -> Tensor:
    """Return the ranks' vectors, [ranks, length]."""
    return torch.randn(ranks, length, generator=torch.Generator().manual_seed(length))


def make_rank_model(index: int) -> nn.Module:
    """Return a small network whose weights depend on the rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, OUTPUTS))


def rank_batches(index: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's inputs [SAMPLES, INPUTS] and targets [SAMPLES, OUTPUTS] of each step."""
    draw = torch.Generator().manual_seed(100 + index)
    inputs = torch.randn(STEPS, SAMPLES, INPUTS, generator=draw)
    targets = torch.randn(STEPS, SAMPLES, OUTPUTS, generator=draw)
    return list(zip(inputs, targets, strict=True))


def train_all_ranks(
    ranks: int,
    *,
    same_start: bool = True,
    together: bool = True,
    factor: float = 1.0,
    forget: bool = True,
    keep: bool = True,
    zero_last: bool = False,
) -> list[list[Tensor]]:
    """Simulate data-parallel training in this process and return the parameters of every rank.

    The options are mistakes: weights of each rank's own, no mean, a factor, gradients not cleared,
    and then those of the rank itself, where the mean was not kept.
    With ``zero_last`` the last layer's weight begins as zeros.
    """
    models = [make_rank_model(0 if same_start else index) for index in range(ranks)]
    for model in models if zero_last else []:
        nn.init.zeros_(model.get_parameter("2.weight"))
    for step in range(STEPS):
        for index, model in enumerate(models):
            if forget:
                model.zero_grad()
            inputs, targets = rank_batches(index)[step]
            nn.functional.mse_loss(model(inputs), targets).backward()
        for places in zip(*(model.parameters() for model in models), strict=True):
            own = torch.stack([place.grad for place in places if place.grad is not None])
            used = factor * (own.mean(0).expand_as(own) if together else own)
            for place, gradient in zip(places, used, strict=True):
                place.grad = gradient if keep else place.grad
                place.data -= LEARNING_RATE * gradient
    return [[place.detach() for place in model.parameters()] for model in models]
