"""One device plays all ranks in turn: what data-parallel and sharded training must agree with.

It keeps one whole copy of the model for each rank, runs each copy on that rank's samples, averages
the gradients of the shared parameters over the copies, and lets each copy update. No rank,
collective or shard is involved, so nothing that sharding can get wrong can go wrong here as well.
Dropout agrees because each copy draws after the same seed.
"""

from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer

from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import find_blocks

MAX_BATCHES = 10_000
"""Of all ranks in a step."""
Rounding = Literal["parameters", "autocast", "everything"]
"""What is in the short type: parameters and samples of both passes; what autocast chooses; updates
as well.
"""


def sample_seed(step: int, rank: int, batch: int = 0, batches: int = 1) -> int:
    """The seed of a rank's samples in one of its batches of a step: another one for each, up to
    10,000 in a step.

    One rank that goes through four batches has the samples of four ranks with one batch each.
    """
    return (step + 1) * MAX_BATCHES + rank * batches + batch


def draw_samples(
    model: LabModel, device: torch.device, step: int, rank: int, batch: int = 0, batches: int = 1
) -> tuple[Tensor, ...]:
    """A rank's samples in one batch. What is drawn next, such as dropout, is that rank's and that
    batch's as well.
    """
    seed = sample_seed(step, rank, batch, batches)
    inputs = model.get_input(device, seed)
    torch.manual_seed(seed)
    return inputs


def make_sgd(model: nn.Module) -> Optimizer:
    """SGD with momentum for a check: Adam turns the rounding of a gradient near zero into a step of
    full size.
    """
    return torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9
    )


class OneDevice:
    """Whole copies of a model, one a rank, trained together on one device.

    Args:
        build: makes rank r's copy; shared parameters are equal in all of them.
        ranks: how many to play.
        dtype: in what the copies compute, see ``Rounding``; float32 rounds nothing.
        rounding: what is rounded to it.
        device: where the samples are put.
        batches: of a rank in one step; their gradients add up.
        mean: divide by the number of batches, so that more batches are as more ranks.
        local_types: class names of modules whose gradients are not averaged, beside the model's own
            local ones.
        input_gradients: let samples, where they are numbers, have gradients.

    Attributes:
        copies: the models.
        outputs: of each rank's last batch.
        inputs: the same batch, which has the gradients.
    """

    def __init__(
        self,
        build: Callable[[int], LabModel],
        ranks: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        batches: int = 1,
        *,
        rounding: Rounding = "parameters",
        mean: bool = False,
        local_types: Collection[str] = (),
        input_gradients: bool = False,
    ):
        self.copies = [build(rank) for rank in range(ranks)]
        if rounding == "everything":
            self.copies = [copy.to(dtype) for copy in self.copies]
        self.optimizers = [make_sgd(copy) for copy in self.copies]
        self.dtype, self.rounding, self.device = dtype, rounding, device or torch.device("cpu")
        self.batches, self.mean, self.input_gradients = batches, mean, input_gradients
        self.local_types = local_types
        self.outputs: list[Any] = [None] * ranks
        self.inputs: list[tuple[Tensor, ...]] = [()] * ranks

    def train_step(self, index: int) -> list[Tensor]:
        """One training step; each rank's loss, of its last batch."""
        losses = [self._forward_backward(index, rank) for rank in range(len(self.copies))]
        self._average_shared_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        return losses

    def _forward_backward(self, index: int, rank: int) -> Tensor:
        copy = self.copies[rank]
        self.optimizers[rank].zero_grad()
        for batch in range(self.batches):
            inputs = draw_samples(copy, self.device, index, rank, batch, self.batches)
            if self.input_gradients:
                inputs = require_gradients(inputs)
            output = self._forward_in_dtype(copy, inputs)
            loss = copy.get_loss(inputs, output)
            copy.run_backward(loss / self.batches if self.mean else loss)
        self.inputs[rank], self.outputs[rank] = inputs, output
        return loss.detach()

    def _forward_in_dtype(self, copy: LabModel, inputs: tuple[Tensor, ...]) -> Any:
        if self.dtype == torch.float32:
            return copy(*inputs)
        if self.rounding == "autocast":
            with torch.autocast(self.device.type, self.dtype):
                return copy(*inputs)
        kept = {
            id(p)
            for module in copy.modules()
            if isinstance(module, BatchNorm)
            for p in module.parameters()
        }
        rounded = {
            name: p if id(p) in kept else p.to(self.dtype) for name, p in copy.named_parameters()
        }
        return torch.func.functional_call(
            copy, rounded, tuple(cast_floats(each, self.dtype) for each in inputs)
        )

    def _average_shared_gradients(self) -> None:
        local = [
            {id(p) for module in self._local_modules(copy) for p in module.parameters()}
            for copy in self.copies
        ]
        for same in zip(*(copy.parameters() for copy in self.copies), strict=True):
            gradients = [parameter.grad for parameter in same if parameter.grad is not None]
            if gradients and id(same[0]) not in local[0]:
                mean = torch.stack(gradients).mean(dim=0)
                for gradient in gradients:
                    gradient.copy_(mean)

    def _local_modules(self, copy: LabModel) -> list[nn.Module]:
        return [*copy.local_modules(), *find_blocks(copy, self.local_types)]


def require_gradients(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Samples of which those that are numbers need a gradient."""
    return tuple(each.requires_grad_() if each.is_floating_point() else each for each in inputs)


def cast_floats(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another floating-point type; token ids and masks stay what they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
