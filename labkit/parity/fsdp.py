"""Does a sharded model train as one device does that plays all ranks?"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from labkit.models.protocol import LabModel
from labkit.parity import comparison
from labkit.parity.one_device import OneDevice
from labkit.session.meter import Step
from labkit.torch_private import tree_map_only


class StepOutcome(NamedTuple):
    """The results of a rank's step, or of the last of its batches; outputs have any structure."""

    loss: Tensor
    output: Any
    inputs: tuple[Tensor, ...]


def forward_backward(
    step: Step,
    lab: LabModel,
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    *,
    keep: bool,
    autocast: contextlib.AbstractContextManager[Any] | None = None,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> StepOutcome:
    """Run forward and backward pass of ``lab``, or its wrapper ``model``, as spans of the step."""
    with step.span("forward"), autocast or contextlib.nullcontext():
        output = model(*inputs)
        loss = lab.get_loss(inputs, output)
    # For a comparison. Measured steps hold no more memory than training needs.
    kept = tree_map_only(Tensor, Tensor.detach, output) if keep else None
    del output
    with step.span("backward"):
        lab.run_backward(scale(loss))
    return StepOutcome(loss.detach(), kept, inputs if keep else ())


def compare_fsdp_training(
    one_device: OneDevice,
    model: nn.Module,
    trained: Sequence[StepOutcome],
    *,
    rank: int,
    steps: int,
) -> dict[str, Any]:
    """Train an untrained OneDevice, and compare a model that trained ``steps``. A collective.

    It compares the loss, output and input gradient of every step, and the last step's gradients,
    parameters and buffers. The model is plain or under FSDP1 or FSDP2.
    """
    if not trained:
        raise ValueError(
            "no loss, so nothing was trained that could be compared: train 1 step or more"
        )
    rounds_updates = one_device.rounding == "everything"
    floor = comparison.FLOORS.get(one_device.dtype, 0.0) if rounds_updates else 0.0
    found, reference = comparison.Parity(floor=floor), one_device.copies[rank]
    for index, step in enumerate(trained):
        expected_loss = one_device.train_step(index)[rank]
        found.compare_tensor(f"loss of step {index}", step.loss.detach(), expected_loss)
        found.compare_leaves(f"output of step {index}", step.output, one_device.outputs[rank])
        inputs = zip(step.inputs, one_device.inputs[rank], strict=True)
        for place, (mine, expected) in enumerate(inputs):
            if expected.requires_grad:
                what = f"gradient of input {place} of step {index}"
                found.compare_tensor(what, mine.grad, expected.grad)
    kinds: tuple[comparison.TensorKind, ...] = ("gradient", "parameter", "buffer")
    gather: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        # FSDP1 shows gradients by name only with use_orig_params.
        if not model._use_orig_params:
            kinds = ("parameter", "buffer")
            found.count_gradients(reference)
        gather = model.summon_full_params(model, with_grads=model._use_orig_params)
    with gather:
        for kind in kinds:
            found.compare_models(model, reference, kind)
    a_step = 1 + comparison.count_leaves(one_device.outputs[rank])
    a_step += sum(each.requires_grad for each in one_device.inputs[rank])
    expected_count = steps * a_step + comparison.count_tensors(reference, *kinds)
    return found.verdict(comparison.LIMITS[one_device.dtype], expected_count)
