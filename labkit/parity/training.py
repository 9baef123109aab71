"""Does a distributed run compute what one device computes? Compare tensors, and count what was compared.

The error of a tensor is the largest absolute difference over the largest absolute value expected, so that one number
serves weights, gradients and outputs of any scale.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ModelType = TypeVar("ModelType", bound=nn.Module)


@dataclass
class Parity:
    """A running comparison: how many tensors so far, the largest relative error, and the name of the worst tensor."""

    compared: int = 0
    max_rel_error: float = 0.0
    worst: str = ""

    def add(self, name: str, actual: Tensor | None, expected: Tensor | None) -> None:
        """Compare one tensor. A DTensor is gathered, so every rank must add the same tensors in the same order.

        Raises:
            ValueError: one of the two is missing, or their shapes differ.
        """
        actual, expected = whole(actual), whole(expected)
        if actual is None or expected is None:
            missing = "distributed" if actual is None else "single-device"
            raise ValueError(f"{name}: the {missing} side has none to compare")
        if actual.shape != expected.shape:
            raise ValueError(f"{name}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}")
        error = relative_error(actual, expected)
        self.compared += 1
        if math.isnan(error) or error > self.max_rel_error:  # once nan, it stays nan
            self.max_rel_error, self.worst = error, name

    def add_all(self, prefix: str, actual: Iterable[tuple[str, Any]], expected: Iterable[tuple[str, Any]]) -> None:
        """Compare two lists of named tensors. Raises ValueError where the names differ."""
        left, right = dict(actual), dict(expected)
        if left.keys() != right.keys():
            raise ValueError(f"{prefix}: only on one side: {sorted(left.keys() ^ right.keys())}")
        for name, tensor in left.items():
            self.add(f"{prefix} {name}", tensor, right[name])

    def add_training(self, actual: nn.Module, expected: nn.Module, what: str) -> None:
        """Compare ``"gradient"`` or ``"parameter"`` of every parameter of two models."""

        def chosen(model: nn.Module) -> list[tuple[str, Tensor | None]]:
            return [(name, p.grad if what == "gradient" else p.detach()) for name, p in model.named_parameters()]

        self.add_all(what, chosen(actual), chosen(expected))

    def verdict(self, limit: float) -> dict[str, Any]:
        """The result over all ranks, as ``Here.verdict`` prints it. A collective."""
        mine = (self.max_rel_error, self.worst)
        everyone: list[Any] = [mine] * (dist.get_world_size() if dist.is_initialized() else 1)
        if dist.is_initialized():
            dist.all_gather_object(everyone, mine)
        error, worst = max(everyone, key=lambda pair: (math.isnan(pair[0]), pair[0]))
        ok = self.compared > 0 and error <= limit
        return {"check": "parity", "compared": self.compared, "max_rel_error": error, "worst": worst, "ok": ok}


def of_training_step(
    model: nn.Module, outputs: Tensor, reference: nn.Module, expected: Tensor, *, limit: float
) -> dict[str, Any]:
    """The verdict on outputs, gradients and parameters after one step of two models that started equal. A collective.

    Args:
        model: the distributed one.
        outputs: its outputs for this rank's samples.
        reference: the single-device one.
        expected: its outputs for the same samples.
        limit: largest relative error that is still right.
    """
    found = Parity()
    found.add("outputs", outputs, expected)
    found.add_training(model, reference, "gradient")
    found.add_training(model, reference, "parameter")
    return found.verdict(limit)


def whole(tensor: Tensor | None) -> Tensor | None:
    """A plain tensor with all shards of a DTensor (a collective), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over largest absolute value expected; nan or inf stay visible."""
    difference = (actual.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    if difference == 0 and not math.isnan(scale):
        return 0.0
    return difference / scale if scale else math.inf


def seeded_copy(model: ModelType, seed: int) -> ModelType:
    """Make a model's parameters non-degenerate (see ``seed_parameters``), and return a copy to compare it with."""
    seed_parameters(model, seed)
    return copy.deepcopy(model)


def seed_parameters(model: nn.Module, seed: int, spread: float = 0.2) -> None:
    """Add seeded noise to every parameter, so that no channel equals another and no bias, norm or scale is neutral."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.add_(noise.to(parameter.device))
