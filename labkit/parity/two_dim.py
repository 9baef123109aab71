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
from labkit.parallel.ddp import compiled_backward, fused
from labkit.parallel.tensor import PlainParameters
from labkit.parity.one_device import OneDevice, optimizer_of, samples_and_seed
from labkit.parity.training import Parity

LIMIT = 1e-5
ModelType = TypeVar("ModelType", bound=LabModel)


class Version:
    """One way to train the model.

    Args:
        model: to call and to train; its parameters are DTensors, or it is a ``PlainParameters``.
        backward: a context for forward and backward passes, such as the compiler's.
    """

    def __init__(self, model: nn.Module, backward: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext):
        self.model, self.backward, self.optimizer = model, backward, optimizer_of(model)

    def step(self, lab: LabModel, inputs: tuple[Tensor, ...]) -> list[tuple[str, Tensor]]:
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
        with ``compile`` also the largest error against eager, and how many graphs were compiled, which must be some.
    """
    quiet = logging.getLogger("torch.distributed.tensor")  # whole tensors are gathered to be compared, never mind how
    quiet.setLevel(logging.ERROR)
    line, found, between = mesh["dp"].get_local_rank(), Parity(), Parity()
    one_device = OneDevice(lambda index: build(), mesh["dp"].size(), device=device)
    reference = one_device.copies[line]
    with fused() if compile else contextlib.nullcontext():
        versions = {"eager": Version(apply(build()))} | ({"compiled": compiled(apply(build()))} if compile else {})
        for index in range(steps):
            inputs = samples_and_seed(reference, device, index, line)
            expected = [("output", reference(*inputs).detach())]
            one_device.step(index)
            expected += tensors_of(reference)
            results = {name: version.step(reference, inputs) for name, version in versions.items()}
            for name, result in results.items():
                found.add_all(f"{name}, step {index},", result, expected)
            if compile:
                between.add_all(f"step {index},", results["compiled"], results["eager"])
    verdict = found.verdict(LIMIT) | {"limit": LIMIT}
    if compile:
        from torch._dynamo.utils import counters  # half a second for each rank

        against, graphs = between.verdict(LIMIT), int(counters["stats"]["unique_graphs"])
        verdict |= {"compiled_vs_eager": against["max_rel_error"], "compiled_graphs": graphs}
        verdict["ok"] = verdict["ok"] and against["ok"] and graphs > 0
    return verdict


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


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Copies of a model's gradients and parameters by name, shards as DTensors.

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
