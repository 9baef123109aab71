"""Do a model's ranks on a 2-D mesh compute what one device computes, compiled as well as not?"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.models.mlp import MLPStack
from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import plain_name
from labkit.parallel.ddp import backwards_traced, compiled_backward, fused
from labkit.parallel.tensor import PlainParameters
from labkit.parity.one_device import OneDevice, optimizer_of, samples_and_seed
from labkit.parity.training import Parity

LIMIT = 1e-5
ModelType = TypeVar("ModelType", bound=LabModel)
Tensors = list[tuple[str, Tensor]]
"""By name; shards as DTensors."""


class Version:
    """One way to train the model.

    Args:
        model: to call and to train; its parameters are DTensors, or it is a ``PlainParameters``.
        backward: a context for forward and backward passes, such as the compiler's.
    """

    def __init__(self, model: nn.Module, backward: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext):
        self.model, self.backward, self.optimizer = model, backward, optimizer_of(model)

    def step(self, lab: LabModel, inputs: tuple[Tensor, ...]) -> Tensors:
        """One step with the objective of ``lab``; the output, and every gradient and parameter after it, by name."""
        self.optimizer.zero_grad()
        with self.backward():
            output = self.model(*inputs)
            lab.get_loss(inputs, output).backward()
        self.optimizer.step()
        return [("output", output.detach()), *tensors_of(self.model)]


def of_two_dims(
    build: Callable[[], ModelType],
    apply: Callable[[ModelType], nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    steps: int,
    *,
    compile: bool,
) -> dict[str, Any]:
    """Train on the mesh beside one device, which plays the lines of ``dp`` in turn. A collective.

    Every step's output, gradients and updated parameters are compared with one device's.

    Args:
        build: makes the model, equal every time.
        apply: puts it on the mesh.
        mesh: with an axis ``dp``, along which samples differ.
        device: of this rank.
        steps: how many.
        compile: train a compiled version as well, and compare it with one device and with the eager one.

    Returns:
        What ``Here.verdict`` takes: how many tensors were compared and the largest relative error against one device;
        with ``compile`` also the largest error against eager, and how many graphs and how many backward passes were
        compiled. Graphs must be some; backward passes, too, of a ``PlainParameters``, whose gradients DDP averages.
    """
    line, found, between = mesh["dp"].get_local_rank(), Parity(), Parity()

    def train(name: str, version: Version) -> list[Tensors]:
        one_device = OneDevice(lambda index: build(), mesh["dp"].size(), device=device)
        reference, results = one_device.copies[line], []
        for index in range(steps):
            inputs = samples_and_seed(reference, device, index, line)
            output = reference(*inputs).detach()
            one_device.step(index)
            results.append(version.step(reference, inputs))
            compare(found, f"{name}, step {index},", results[-1], [("output", output), *tensors_of(reference)])
        return results

    eager = train("eager", Version(apply(build())))  # not in fused(), where DDP would not use its own reducer
    if not compile:
        return found.verdict(LIMIT) | {"limit": LIMIT}
    with fused():
        before, version = compilations(), compiled(apply(build()))
        for index, (result, expected) in enumerate(zip(train("compiled", version), eager, strict=True)):
            compare(between, f"step {index},", result, expected)
        graphs, backwards = (after - count for after, count in zip(compilations(), before, strict=True))
    verdict, against = found.verdict(LIMIT), between.verdict(LIMIT)
    enough = graphs > 0 and (backwards > 0 or not isinstance(version.model, PlainParameters))
    return verdict | {
        "limit": LIMIT,
        "compiled_vs_eager": against["max_rel_error"],
        "compiled_graphs": graphs,
        "compiled_backwards": backwards,
        "ok": verdict["ok"] and against["ok"] and enough,
    }


def compare(found: Parity, prefix: str, actual: Tensors, expected: Tensors) -> None:
    """Add tensors to a comparison, quietly. A collective.

    A shard of both axes is gathered along one after the other, of which torch warns that it is slow: nothing that a
    comparison has to care about. Warnings in training are left alone.
    """
    logger = logging.getLogger("torch.distributed.tensor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        found.add_all(prefix, actual, expected)
    finally:
        logger.setLevel(level)


def compilations() -> tuple[int, int]:
    """Graphs, and backward passes of compiled autograd, that this process has compiled so far."""
    from torch._dynamo.utils import counters  # half a second for each rank

    return counters["stats"]["unique_graphs"], backwards_traced()


def compiled(model: nn.Module) -> Version:
    """A model of either plan, compiled: each MLP of a stack; a chain as a whole, its backward pass and DDP included.

    Shapes are static, since a DTensor's backward pass does not compile with dynamic ones (torch 2.13).
    """
    if isinstance(model, PlainParameters):
        model.compile(dynamic=False)
        return Version(model, compiled_backward)
    assert isinstance(model, MLPStack)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    return Version(model)


def tensors_of(model: nn.Module) -> Tensors:
    """Copies of a model's gradients and parameters.

    Raises:
        ValueError: a parameter has no gradient.
    """
    inner = model.model if isinstance(model, PlainParameters) else model
    assert isinstance(inner, nn.Module)
    parameters = {plain_name(name): parameter for name, parameter in inner.named_parameters()}
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    if without or not parameters:
        raise ValueError(f"nothing to compare: no gradient for {', '.join(without) or 'no parameters'}")
    found = []
    for what in ("gradient", "parameter"):
        tensors: dict[str, Any] = {n: (p.grad if what == "gradient" else p.detach()) for n, p in parameters.items()}
        shards = {name: tensor.clone() for name, tensor in tensors.items()}
        whole = model.as_dtensors(shards) if isinstance(model, PlainParameters) else shards
        found += [(f"{what} {name}", tensor) for name, tensor in whole.items()]
    return found
