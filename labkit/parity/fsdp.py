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
    """The results of one step of a rank; with several batches in a step, of the last one."""

    loss: Tensor
    output: Any
    """Of any structure."""
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

    Args:
        step: of a session, which measures.
        lab: the lab's model, which knows its loss and how to run backward from it.
        model: the model to call: the lab's, or its wrapper.
        inputs: of the model.
        keep: keep the output and the inputs, to compare them with one device's. Measured steps keep
            neither, so that they hold no more memory than training needs.
        autocast: context of the forward pass.
        scale: maps the loss to the one whose gradients are computed.
    """
    with step.span("forward"), autocast or contextlib.nullcontext():
        output = model(*inputs)
        loss = lab.get_loss(inputs, output)
    kept = tree_map_only(Tensor, Tensor.detach, output) if keep else None
    # Otherwise the output would occupy memory during the backward pass.
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

    The model, under FSDP2, FSDP1 or plain, comes after its steps; it should have trained ``steps``
    of them.

    Returns:
        The arguments of ``Session.finish_check``: the comparison of the loss and output of every
        step, its input's gradient if it has one, and the last step's gradients, parameters and
        buffers. FSDP1 shows gradients by name only with ``use_orig_params``.

    Raises:
        ValueError: there is no step; a parameter that is used has no gradient; an output has
            another structure.
    """
    if not trained:
        raise ValueError(
            "no loss, so nothing was trained that could be compared: train 1 step or more"
        )
    floor = FLOORS.get(one_device.dtype, 0.0) if one_device.rounding == "everything" else 0.0
    found, reference, kinds = Parity(floor=floor), one_device.copies[rank], comparable_kinds(model)
    each = 0
    for index, step in enumerate(trained):
        found.compare_tensor(
            f"loss of step {index}", step.loss.detach(), one_device.train_step(index)[rank]
        )
        found.compare_leaves(f"output of step {index}", step.output, one_device.outputs[rank])
        each = 1 + count_leaves(one_device.outputs[rank])
        for place, (mine, expected) in enumerate(
            zip(step.inputs, one_device.inputs[rank], strict=True)
        ):
            if expected.requires_grad:
                found.compare_tensor(
                    f"gradient of input {place} of step {index}", mine.grad, expected.grad
                )
                each += 1
    gather = FullyShardedDataParallel.summon_full_params(model, with_grads="gradient" in kinds)
    with gather if isinstance(model, FullyShardedDataParallel) else contextlib.nullcontext():
        for what in kinds:
            found.compare_models(model, reference, what)
    if "gradient" not in kinds:
        found.count_gradients(reference)
    return found.verdict(LIMITS[one_device.dtype], steps * each + count_tensors(reference, *kinds))


def comparable_kinds(model: nn.Module) -> tuple[TensorKind, ...]:
    """Return which tensors of a trained model can be compared by name."""
    flat = isinstance(model, FullyShardedDataParallel) and not model._use_orig_params
    return ("parameter", "buffer") if flat else ("gradient", "parameter", "buffer")
