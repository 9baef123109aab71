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
NamedShards = list[tuple[str, Tensor]]
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
    """Train on the mesh and on one device, which plays the rows of axis ``data`` in turn, and
    compare. A collective.

    Every step's output, gradients and updated parameters are compared. ``build`` makes the model,
    equal every time; ``apply`` puts it on the mesh, whose axis ``data`` divides the samples. Called
    with ``compile=True`` it compiles the model too; that version is compared with the eager one.

    Returns:
        The arguments of ``Session.finish_check``: the number of tensors compared and the largest
        relative error against one device; with ``compile`` also the largest error against eager,
        and how many graphs and backward passes were compiled. Both must be above 0; backward passes
        only for ``PlainParameters``, whose gradients DDP averages.
    """
    line, found, between = mesh["data"].get_local_rank(), Parity(), Parity()

    def train_and_compare(
        name: str, model: nn.Module, backward: BackwardContext = contextlib.nullcontext
    ) -> list[NamedShards]:
        one_device, optimizer = (
            OneDevice(lambda _: build(), mesh["data"].size(), device=device),
            make_sgd(model),
        )
        reference, results = one_device.copies[line], []
        for index in range(steps):
            inputs = draw_samples(reference, device, index, line)
            expected = reference(*inputs).detach()
            one_device.train_step(index)
            found.count_gradients(reference)
            optimizer.zero_grad()
            with backward():
                output = model(*inputs)
                reference.get_loss(inputs, output).backward()
            optimizer.step()
            results.append([("output", output.detach()), *gradients_and_parameters(model)])
            compare_quietly(
                found,
                f"{name}, step {index},",
                results[-1],
                [("output", expected), *gradients_and_parameters(reference)],
            )
        return results

    # Not inside fused(), where DDP would not use its own reducer.
    eager = train_and_compare("eager", apply(build()))
    expected = steps * (1 + count_tensors(build(), "gradient", "parameter"))
    if not compile:
        return found.verdict(FLOAT32_LIMIT, expected)
    with fuse_all_reduces():
        before, model = (
            (count_compiled_graphs(), count_traced_backwards()),
            apply(build(), compile=True),
        )
        # Afterwards DDP averages in the backward pass, which is compiled.
        replicated = isinstance(model, PlainParameters)
        compiled = train_and_compare(
            "compiled", model, compile_backward if replicated else contextlib.nullcontext
        )
        for index, (result, uncompiled) in enumerate(zip(compiled, eager, strict=True)):
            compare_quietly(between, f"step {index},", result, uncompiled)
        graphs, backwards = (
            count_compiled_graphs() - before[0],
            count_traced_backwards() - before[1],
        )
    verdict, (against_eager, _) = (
        found.verdict(FLOAT32_LIMIT, 2 * expected),
        between.largest_error(),
    )
    equal = between.compared == expected and against_eager <= FLOAT32_LIMIT
    enough = graphs > 0 and (backwards > 0 or not replicated)
    return verdict | {
        "compiled_vs_eager": against_eager,
        "compiled_graphs": graphs,
        "compiled_backwards": backwards,
        "ok": verdict["ok"] and equal and enough,
    }


def compare_quietly(found: Parity, prefix: str, actual: NamedShards, expected: NamedShards) -> None:
    """Compare tensors without torch's warning that gathering along two axes is slow. A
    collective.
    """
    logger = logging.getLogger("torch.distributed.tensor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        found.compare_named(prefix, actual, expected)
    finally:
        logger.setLevel(level)


def gradients_and_parameters(model: nn.Module) -> NamedShards:
    """Return copies of a model's gradients and parameters.

    Raises:
        ValueError: a parameter has no gradient.
    """
    inner = model.model if isinstance(model, PlainParameters | TensorParallelPairs) else model
    assert isinstance(inner, nn.Module)
    found: NamedShards = []
    for what in ("gradient", "parameter"):
        tensors = training.tensors_by_name(inner, what)
        without = [name for name, tensor in tensors if tensor is None]
        if without or not tensors:
            raise ValueError(
                f"nothing to compare: no gradient for {', '.join(without) or 'no parameters'}"
            )
        shards = {name: tensor.clone() for name, tensor in tensors if tensor is not None}
        whole = (
            model.as_dtensors(shards)
            if isinstance(model, PlainParameters | TensorParallelPairs)
            else shards
        )
        found += [(f"{what} {name}", tensor) for name, tensor in whole.items()]
    return found
