"""Hold a room's gradients against one device's, and train it with them and with the right ones."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launch.museum import TOLERANCE, cut_weights, open_room, parts
from launch.museum.parts import Weights, draw_weights

Step = Callable[[Weights, Tensor, Tensor], Tensor]
Found = dict[str, tuple[float, float]]
Comparison = Callable[[Weights, Weights, dict[str, int]], Found]
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


def parity(got: Weights, whole: Weights, cut: dict[str, int]) -> Found:
    """Return for each weight how far this rank's gradient is off, and its factor.

    ``got`` holds the gradients of this rank, ``whole`` one device's, of whole weights; ``cut`` says
    along which dimension a weight is cut. The first number is a part of the right gradient's
    length; the second times the right gradient comes nearest to the one that was got.
    """
    found = {}
    for name, mine in got.items():
        right = parts.part(whole[name], cut[name]) if name in cut else whole[name]
        error = (mine - right).norm() / right.norm()
        factor = (mine * right).sum() / right.square().sum()
        found[name] = (error.item(), factor.item())
    return found


def own_gradients(room: Any) -> Weights:
    """Run one step on the ranks, and return this rank's gradients; zeros where it left none."""
    weights = own_weights(room)
    room.step(dict(weights), *room.batch(0))
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in weights.items()
    }


def compare_gradients(name: str, compare: Comparison = parity) -> dict[str, dict[str, float]]:
    """Run one step of a room on the ranks; return three numbers for each weight of this rank.

    ``errors`` and ``ratios`` are those of ``parity``. ``spread``, of weights that all ranks hold
    whole: how far the ranks' gradients are from rank 0's, as a part of the right one.
    """
    room = open_room(name)
    right, _ = right_gradients(room)
    got = own_gradients(room)
    found = compare(got, right, cut_weights(name))
    spread = {}
    for each in (each for each in got if each not in room.HELD):
        everyone = [torch.empty_like(got[each]) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, got[each].contiguous())
        gaps = [(other - everyone[0]).norm() for other in everyone]
        spread[each] = float(max(gaps) / right[each].norm())
    errors = {each: float(error) for each, (error, _) in found.items()}
    ratios = {each: float(factor) for each, (_, factor) in found.items()}
    return {"errors": errors, "ratios": ratios, "spread": spread}


def merge_ranks(own: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return the same with weights of other stages, and the names that are ``wrong`` on any rank.

    A weight's numbers are those of the rank where it is furthest off.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    merged: dict[str, Any] = {"errors": {}, "ratios": {}, "spread": {}, "wrong": []}
    for found in everyone:
        merged["spread"] |= found["spread"]
        for name, error in found["errors"].items():
            if not error <= merged["errors"].get(name, -1.0):
                merged["errors"][name], merged["ratios"][name] = error, found["ratios"][name]
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


def visit_room(name: str, steps: int, compare: Comparison = parity) -> dict[str, Any]:
    """Compare a room's gradients, then train it with the bug and, on one device, without it."""
    began, room = time.perf_counter(), open_room(name)
    found = merge_ranks(compare_gradients(name, compare))
    logged = train(room, steps, own_weights(room), room.step)
    right = train(room, steps, whole_weights(room), room.one_device)
    return found | {"logged": logged, "right": right, "seconds": time.perf_counter() - began}
