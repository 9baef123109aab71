"""One device plays all ranks in turn: what fully sharded training must agree with.

It keeps one whole copy of the model for each rank, runs each copy on that rank's samples, averages the gradients of the
shared parameters over the copies, and lets each copy update. No rank, collective or shard is involved, so nothing that
sharding can get wrong can go wrong here as well. Dropout agrees because each copy draws after the same seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import plain_name
from labkit.parity.training import Parity

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # bfloat16 rounds to 1 part in 256


def samples_and_seed(model: LabModel, device: torch.device, step: int, rank: int) -> tuple[Tensor, ...]:
    """A rank's samples in one step. What is drawn next, such as dropout, is that rank's and that step's as well."""
    seed = 10_000 * (step + 1) + rank
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
    """

    def __init__(
        self,
        build: Callable[[int], LabModel],
        ranks: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ):
        self.copies = [build(rank) for rank in range(ranks)]
        self.optimizers = [optimizer_of(copy) for copy in self.copies]
        self.dtype, self.device = dtype, device or torch.device("cpu")

    def step(self, index: int) -> list[Tensor]:
        """One training step; each rank's loss."""
        losses = [self._forward_backward(index, rank) for rank in range(len(self.copies))]
        self._average_shared_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        return losses

    def verdict(self, rank: int, losses: Sequence[Tensor], model: nn.Module) -> dict[str, Any]:
        """Train as many steps as there are losses, and compare with the distributed model. A collective.

        Args:
            rank: whose losses and samples these are.
            losses: of every step.
            model: after these steps: FSDP2's, FSDP1's or a plain one.

        Returns:
            What ``Here.verdict`` takes: the loss of every step, and the last step's gradients, parameters and buffers.
        """
        found = Parity()
        for index, loss in enumerate(losses):
            found.add(f"loss of step {index}", loss.detach(), self.step(index)[rank])
        compare_training(found, model, self.copies[rank])
        return found.verdict(limit=LIMITS[self.dtype])

    def _forward_backward(self, index: int, rank: int) -> Tensor:
        copy = self.copies[rank]
        self.optimizers[rank].zero_grad()
        inputs = samples_and_seed(copy, self.device, index, rank)
        if self.dtype == torch.float32:
            output = copy(*inputs)
        else:
            rounded = {name: parameter.to(self.dtype) for name, parameter in copy.named_parameters()}
            output = torch.func.functional_call(copy, rounded, tuple(to_dtype(each, self.dtype) for each in inputs))
        loss = copy.get_loss(inputs, output)
        copy.run_backward(loss)
        return loss.detach()

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


def compare_training(found: Parity, model: nn.Module, expected: nn.Module) -> None:
    """Compare every gradient, parameter and buffer of a model with gathered parameters with one device's. A collective.

    Args:
        found: takes what was compared.
        model: FSDP2's, FSDP1's or a plain one.
        expected: this rank's copy.
    """
    gather = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    with gather if isinstance(model, FullyShardedDataParallel) else contextlib.nullcontext():
        for what in ("gradient", "parameter", "buffer"):
            found.add_all(what, _named(model, what), _named(expected, what))


def _named(model: nn.Module, what: str) -> list[tuple[str, Tensor]]:
    if what == "buffer":
        return [(plain_name(name), buffer) for name, buffer in model.named_buffers()]
    chosen = [(name, p.grad if what == "gradient" else p.detach()) for name, p in model.named_parameters()]
    return [(plain_name(name), tensor) for name, tensor in chosen if tensor is not None]
