"""Hold a room's gradients against one device's, and train it with them and with the right ones."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launch.museum import TOLERANCE, open_room
from launch.museum.parts import Weights, draw_weights

Step = Callable[[Weights, Tensor, Tensor], Tensor]
LEARNING_RATE = 0.003


def own_weights(room: Any) -> Weights:
    """Return what this rank holds of a room's weights, as leaves that can have a gradient."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held = {}
    for name, whole in draw_weights(room.SHAPES).items():
        own = share(room, name, whole, rank, ranks)
        if own is not None:
            held[name] = own.clone().requires_grad_()
    return held


def share(room: Any, name: str, whole: Tensor, rank: int, ranks: int) -> Tensor | None:
    """Return a rank's share of a weight or of its gradient; None if another stage has it."""
    how = room.HELD.get(name)
    if isinstance(how, str):
        return whole if rank == {"first": 0, "last": ranks - 1}[how] else None
    return whole if how is None else whole.chunk(ranks, how)[rank]


def right_gradients(room: Any) -> tuple[Weights, float]:
    """Return one device's gradients of the first step, whole, and its loss."""
    weights = whole_weights(room)
    loss = room.one_device(weights, *room.batch(0))
    return {
        name: weight.grad for name, weight in weights.items() if weight.grad is not None
    }, float(loss)


def whole_weights(room: Any) -> Weights:
    """Return one device's weights."""
    return {name: whole.requires_grad_() for name, whole in draw_weights(room.SHAPES).items()}


def compare_gradients(room: Any) -> dict[str, dict[str, float]]:
    """Run one step on the ranks; return for each weight of this rank two numbers.

    ``errors``: how far the gradient is from one device's, as a part of it; ``ratios``: how long it
    is in the direction of the right one, 1 if it is right.
    """
    right, _ = right_gradients(room)
    weights = own_weights(room)
    room.step(weights, *room.batch(0))
    errors, ratios = {}, {}
    for name, weight in weights.items():
        wanted = share(room, name, right[name], dist.get_rank(), dist.get_world_size())
        assert wanted is not None
        got = torch.zeros_like(weight) if weight.grad is None else weight.grad
        errors[name] = float((got - wanted).norm() / wanted.norm())
        ratios[name] = float((got * wanted).sum() / wanted.square().sum())
    return {"errors": errors, "ratios": ratios}


def merge_ranks(own: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return the same with weights of other stages, and the names that are ``wrong`` on any rank.

    A weight's numbers are those of the first rank that has it.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    merged: dict[str, Any] = {"errors": {}, "ratios": {}, "wrong": []}
    for found in everyone:
        for kind in ("errors", "ratios"):
            merged[kind] = found[kind] | merged[kind]
        bad = [name for name, error in found["errors"].items() if not error < TOLERANCE]
        merged["wrong"] = sorted({*merged["wrong"], *bad})
    return merged


def train(room: Any, steps: int, weights: Weights, step: Step) -> list[float]:
    """Train with Adam, and return the loss that each step logs."""
    optimizer = torch.optim.Adam(weights.values(), lr=LEARNING_RATE)
    logged = []
    for index in range(steps):
        optimizer.zero_grad()
        logged.append(float(step(weights, *room.batch(index))))
        optimizer.step()
    return logged


def visit_room(name: str, steps: int) -> dict[str, Any]:
    """Compare a room's gradients, then train it with the bug and, on one device, without it."""
    began, room = time.perf_counter(), open_room(name)
    found = merge_ranks(compare_gradients(room))
    logged = train(room, steps, own_weights(room), room.step)
    right = train(room, steps, whole_weights(room), room.one_device)
    return found | {"logged": logged, "right": right, "seconds": time.perf_counter() - began}
