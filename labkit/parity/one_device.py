"""One device plays all ranks in turn: what data-parallel and sharded training must agree with.

It keeps one whole copy of the model for each rank, runs each copy on that rank's samples, averages the gradients of the
shared parameters over the copies, and lets each copy update. No rank, collective or shard is involved, so nothing that
sharding can get wrong can go wrong here as well. Dropout agrees because each copy draws after the same seed.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.models.protocol import LabModel

MOST_RANKS, MOST_STEPS = 10_000, 9_999


def seed_of(step: int, rank: int, batch: int = 0) -> int:
    """The seed of a rank's samples in one batch of a step: another one for each, up to 10,000 ranks and 9,999 steps."""
    return (batch * (MOST_STEPS + 1) + step + 1) * MOST_RANKS + rank


def samples_and_seed(model: LabModel, device: torch.device, step: int, rank: int, batch: int = 0) -> tuple[Tensor, ...]:
    """A rank's samples in one batch. What is drawn next, such as dropout, is that rank's and that batch's as well."""
    seed = seed_of(step, rank, batch)
    inputs = model.get_input(device, seed)
    torch.manual_seed(seed)
    return inputs


def optimizer_of(model: nn.Module) -> Optimizer:
    """SGD with momentum for a check: Adam turns the rounding of a gradient near zero into a step of full size."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


class OneDevice:
    """Whole copies of a model, one a rank, trained together on one device.

    Args:
        build: makes rank r's copy; shared parameters are equal in all of them.
        ranks: how many to play.
        dtype: forward and backward passes compute with parameters rounded to this; updates stay in float32.
        device: where the samples are put.
        batches: whose gradients add up in one step.
    """

    def __init__(
        self,
        build: Callable[[int], LabModel],
        ranks: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        batches: int = 1,
    ):
        self.copies = [build(rank) for rank in range(ranks)]
        self.optimizers = [optimizer_of(copy) for copy in self.copies]
        self.dtype, self.device, self.batches = dtype, device or torch.device("cpu"), batches

    def step(self, index: int) -> list[Tensor]:
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
            inputs = samples_and_seed(copy, self.device, index, rank, batch)
            loss = copy.get_loss(inputs, self._forward(copy, inputs))
            copy.run_backward(loss)
        return loss.detach()

    def _forward(self, copy: LabModel, inputs: tuple[Tensor, ...]) -> Tensor:
        if self.dtype == torch.float32:
            return copy(*inputs)
        rounded = {name: parameter.to(self.dtype) for name, parameter in copy.named_parameters()}
        return torch.func.functional_call(copy, rounded, tuple(to_dtype(each, self.dtype) for each in inputs))

    def _average_shared_gradients(self) -> None:
        local = [{id(p) for module in copy.local_modules() for p in module.parameters()} for copy in self.copies]
        for same in zip(*(copy.parameters() for copy in self.copies), strict=True):
            gradients = [parameter.grad for parameter in same if parameter.grad is not None]
            if gradients and id(same[0]) not in local[0]:
                mean = torch.stack(gradients).mean(dim=0)
                for gradient in gradients:
                    gradient.copy_(mean)


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another floating-point type; token ids and masks stay what they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
