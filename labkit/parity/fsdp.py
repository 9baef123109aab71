"""Does a sharded model train as one device does that plays all ranks?"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from labkit.models.protocol import LabModel
from labkit.parity.one_device import OneDevice
from labkit.parity.training import FLOORS, LIMITS, Parity, TensorKind, count_leaves, count_tensors
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
    """Run a training step's forward and backward pass, each as a span of the step.

    ``model`` is ``lab`` or its wrapper. ``scale`` maps the loss to the one whose gradients are
    computed. A step that ``keep``s its output and inputs can be compared with one device's.
    """
    with step.span("forward"), autocast or contextlib.nullcontext():
        output = model(*inputs)
        loss = lab.get_loss(inputs, output)
    # Measured steps keep nothing, so that they hold no more memory than training needs.
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
    """Train an untrained OneDevice for as many steps as this rank has, and compare. A collective.

    The model, under FSDP2, FSDP1 or plain, should have trained ``steps`` of them. It compares the
    loss and output of every step, its input's gradient if it has one, and the last step's
    gradients, parameters and buffers.
    """
    if not trained:
        raise ValueError(
            "no loss, so nothing was trained that could be compared: train 1 step or more"
        )
    floor = FLOORS.get(one_device.dtype, 0.0) if one_device.rounding == "everything" else 0.0
    found, reference, kinds = Parity(floor=floor), one_device.copies[rank], comparable_kinds(model)
    for index, step in enumerate(trained):
        expected_loss = one_device.train_step(index)[rank]
        found.compare_tensor(f"loss of step {index}", step.loss.detach(), expected_loss)
        found.compare_leaves(f"output of step {index}", step.output, one_device.outputs[rank])
        inputs = zip(step.inputs, one_device.inputs[rank], strict=True)
        for place, (mine, expected) in enumerate(inputs):
            if expected.requires_grad:
                what = f"gradient of input {place} of step {index}"
                found.compare_tensor(what, mine.grad, expected.grad)
    gather = FullyShardedDataParallel.summon_full_params(model, with_grads="gradient" in kinds)
    with gather if isinstance(model, FullyShardedDataParallel) else contextlib.nullcontext():
        for kind in kinds:
            found.compare_models(model, reference, kind)
    if "gradient" not in kinds:
        found.count_gradients(reference)
    a_step = 1 + count_leaves(one_device.outputs[rank])
    a_step += sum(each.requires_grad for each in one_device.inputs[rank])
    tensors = steps * a_step + count_tensors(reference, *kinds)
    return found.verdict(LIMITS[one_device.dtype], tensors)


def comparable_kinds(model: nn.Module) -> tuple[TensorKind, ...]:
    """Return which tensors of a trained model can be compared by name."""
    # FSDP1 shows gradients by name only with use_orig_params.
    flat = isinstance(model, FullyShardedDataParallel) and not model._use_orig_params
    return ("parameter", "buffer") if flat else ("gradient", "parameter", "buffer")
