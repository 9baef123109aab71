"""Do a model's ranks on a 2-D mesh compute what one device computes, compiled as well as not?"""

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.models.protocol import LabModel
from labkit.parallel.compiling import count_compiled_graphs
from labkit.parallel.ddp import compile_backward, count_traced_backwards, fuse_all_reduces
from labkit.parallel.small_tensor_parallel import TensorParallelPairs
from labkit.parallel.tensor_parallel import PlainParameters
from labkit.parity import training
from labkit.parity.one_device import OneDevice, draw_samples, make_sgd
from labkit.parity.training import LIMITS, Parity, count_tensors

FLOAT32_LIMIT = LIMITS[torch.float32]
ModelType = TypeVar("ModelType", bound=LabModel)
# Shards by name, each a DTensor.
NamedShards = dict[str, Tensor]
# A context for the forward and the backward pass, such as the compiler's.
BackwardContext = Callable[[], AbstractContextManager[None]]


def compare_mesh_training(
    build: Callable[[], ModelType],
    apply: Callable[..., nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    steps: int,
    *,
    compile: bool,
) -> dict[str, Any]:
    """Train on the mesh and on one device, and compare what every step leaves. A collective.

    One device plays the rows of axis ``data``, which divides the samples, in turn. ``build`` makes
    the model, equal every time; ``apply(model)`` puts it on the mesh. With ``compile``, the result
    of ``apply(model, compile=True)`` is compared with one device and with the eager version.
    """
    line, found, between = mesh["data"].get_local_rank(), Parity(), Parity()

    def train_and_compare(
        name: str, model: nn.Module, backward: BackwardContext = contextlib.nullcontext
    ) -> list[NamedShards]:
        one_device = OneDevice(lambda _: build(), mesh["data"].size(), device=device)
        optimizer, reference, results = make_sgd(model), one_device.copies[line], []
        for index in range(steps):
            inputs = draw_samples(reference, device, index, line)
            one_device.train_step(index)
            found.count_gradients(reference)
            optimizer.zero_grad()
            with backward():
                output = model(*inputs)
                reference.get_loss(inputs, output).backward()
            optimizer.step()
            results.append(_step_results(output, model))
            expected = _step_results(one_device.outputs[line], reference)
            compare_quietly(found, f"{name}, step {index},", results[-1], expected)
        return results

    # Not inside fuse_all_reduces(), where DDP would not use its own reducer.
    eager = train_and_compare("eager", apply(build()))
    expected = steps * (1 + count_tensors(build(), "gradient", "parameter"))
    if not compile:
        return found.verdict(FLOAT32_LIMIT, expected)
    with fuse_all_reduces():
        graphs, backwards = count_compiled_graphs(), count_traced_backwards()
        model = apply(build(), compile=True)
        # DDP averages their gradients in the backward pass, which is then compiled too.
        replicated = isinstance(model, PlainParameters)
        context = compile_backward if replicated else contextlib.nullcontext
        compiled = train_and_compare("compiled", model, context)
        for index, (result, uncompiled) in enumerate(zip(compiled, eager, strict=True)):
            compare_quietly(between, f"step {index},", result, uncompiled)
        graphs = count_compiled_graphs() - graphs
        backwards = count_traced_backwards() - backwards
    verdict = found.verdict(FLOAT32_LIMIT, 2 * expected)
    against_eager, _ = between.largest_error()
    equal = between.compared == expected and against_eager <= FLOAT32_LIMIT
    # Only PlainParameters have gradients that DDP averages.
    enough = graphs > 0 and (backwards > 0 or not replicated)
    return verdict | {
        "compiled_vs_eager": against_eager,
        "compiled_graphs": graphs,
        "compiled_backwards": backwards,
        "ok": verdict["ok"] and equal and enough,
    }


def compare_quietly(found: Parity, prefix: str, actual: NamedShards, expected: NamedShards) -> None:
    """Compare tensors without torch's warning that gathering along two axes is slow."""
    logger = logging.getLogger("torch.distributed.tensor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        found.compare_named(prefix, actual, expected)
    finally:
        logger.setLevel(level)


def _step_results(output: Tensor, model: nn.Module) -> NamedShards:
    return {"output": output.detach(), **gradients_and_parameters(model)}


def gradients_and_parameters(model: nn.Module) -> NamedShards:
    """Return copies of a model's gradients and parameters, all of which must be there."""
    wrapper = model if isinstance(model, PlainParameters | TensorParallelPairs) else None
    inner = wrapper.model if wrapper else model
    found: NamedShards = {}
    for what in ("gradient", "parameter"):
        tensors = training.tensors_by_name(inner, what)
        without = [name for name, tensor in tensors.items() if tensor is None]
        if without or not tensors:
            names = ", ".join(without) or "no parameters"
            raise ValueError(f"nothing to compare: no gradient for {names}")
        shards = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
        whole = wrapper.as_dtensors(shards) if wrapper else shards
        found |= {f"{what} {name}": tensor for name, tensor in whole.items()}
    return found
