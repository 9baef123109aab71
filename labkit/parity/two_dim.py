"""Do a model's ranks on a 2-D mesh compute what one device computes, compiled as well as not?"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.models.protocol import LabModel
from labkit.parallel.compiling import count_compiled_graphs
from labkit.parallel.ddp import compile_backward, count_traced_backwards, fuse_all_reduces
from labkit.parallel.small_tensor_parallel import TensorParallelPairs
from labkit.parallel.tensor_parallel import PlainParameters
from labkit.parity import comparison
from labkit.parity.one_device import OneDevice, draw_samples, make_sgd

FLOAT32_LIMIT = comparison.LIMITS[torch.float32]
ModelType = TypeVar("ModelType", bound=LabModel)
KINDS: tuple[comparison.TensorKind, ...] = ("gradient", "parameter")


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

    ``build`` makes the model, equal every time; ``apply(model)`` puts it on the mesh. With
    ``compile``, ``apply(model, compile=True)`` is compared with one device and the eager version.
    """
    # One device plays the rows of axis ``data``, which divides the samples, in turn.
    line, found, between = mesh["data"].get_local_rank(), comparison.Parity(), comparison.Parity()
    one_device = OneDevice(lambda _: build(), mesh["data"].size())
    reference = one_device.record_steps(steps, line, found, *KINDS)
    # Not inside fuse_all_reduces(), where DDP would not use its own reducer.
    eager = _train(build(), apply(build()), device, line, steps)
    expected = steps * (1 + comparison.count_tensors(build(), *KINDS))
    with silence_gather_warnings():
        found.compare_steps("eager", eager, reference)
    if not compile:
        return found.verdict(FLOAT32_LIMIT, expected)
    with fuse_all_reduces():
        graphs, backwards = count_compiled_graphs(), count_traced_backwards()
        model = apply(build(), compile=True)
        # DDP averages their gradients in the backward pass, which is then compiled too.
        replicated = isinstance(model, PlainParameters)
        with compile_backward() if replicated else contextlib.nullcontext():
            compiled = _train(build(), model, device, line, steps)
        graphs = count_compiled_graphs() - graphs
        backwards = count_traced_backwards() - backwards
    with silence_gather_warnings():
        found.compare_steps("compiled", compiled, reference)
        between.compare_steps("compiled", compiled, eager)
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


def _train(
    lab: LabModel, model: nn.Module, device: torch.device, line: int, steps: int
) -> Sequence[comparison.NamedTensors]:
    """Train ``model`` on the samples of ``lab``, and return what each step left."""
    optimizer, results = make_sgd(model), []
    for index in range(steps):
        inputs = draw_samples(lab, device, index, line)
        optimizer.zero_grad()
        output = model(*inputs)
        lab.get_loss(inputs, output).backward()
        optimizer.step()
        results.append({"output": output.detach(), **gradients_and_parameters(model)})
    return results


@contextlib.contextmanager
def silence_gather_warnings() -> Iterator[None]:
    """Silence torch's warning that gathering a tensor along two axes is slow."""
    logger = logging.getLogger("torch.distributed.tensor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def gradients_and_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's gradients and parameters by name, shards as DTensors."""
    if not isinstance(model, PlainParameters | TensorParallelPairs):
        return comparison.clone_tensors(model, *KINDS)
    found: dict[str, Tensor] = {}
    for what in KINDS:
        shards = comparison.tensors_by_name(model.model, what)
        copies = {name: each.clone() for name, each in shards.items() if each is not None}
        dtensors = model.as_dtensors(copies)
        found |= {f"{what} {name}": tensor for name, tensor in dtensors.items()}
    return found
