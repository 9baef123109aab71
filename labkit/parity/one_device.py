"""One device plays all ranks in turn: the reference for data-parallel and sharded training.

It keeps one whole copy of the model for each rank, runs each copy on that rank's samples, averages
the gradients of the shared parameters over the copies, and lets each copy update. It uses no rank,
collective or shard, so sharding cannot make the same mistake here.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer

from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import find_blocks
from labkit.parity.comparison import NamedTensors, Parity, TensorKind, clone_tensors

# Of all ranks in a step.
MAX_BATCHES = 10_000
# What is in the short type: parameters and samples of both passes; what autocast chooses; updates
# as well.
Rounding = Literal["parameters", "autocast", "everything"]


def sample_seed(step: int, rank: int, batch: int = 0, batches: int = 1) -> int:
    """Return the seed of a rank's samples in one batch of a step; all differ, up to 10,000 a step.

    One rank with four batches has the samples of four ranks with one batch each.
    """
    return (step + 1) * MAX_BATCHES + rank * batches + batch


def draw_samples(
    model: LabModel, device: torch.device, step: int, rank: int, batch: int = 0, batches: int = 1
) -> tuple[Tensor, ...]:
    """Draw a rank's samples of one batch, and seed the RNG for what follows."""
    seed = sample_seed(step, rank, batch, batches)
    inputs = model.get_input(device, seed)
    # A rank's dropout agrees with that of its copy on one device.
    torch.manual_seed(seed)
    return inputs


def make_sgd(model: nn.Module) -> Optimizer:
    """Return SGD with momentum, for a check."""
    # Adam would turn the rounding of a gradient near zero into a full-size step.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9)


@dataclass
class OneDevice:
    """Whole copies of a model, one for each rank, trained together on one device."""

    # Makes rank r's copy; shared parameters are equal in all of them.
    build: Callable[[int], LabModel]
    ranks: int
    # The copies compute in it; float32 rounds nothing.
    dtype: torch.dtype = torch.float32
    # Of a rank in one step. Their gradients add up, or are averaged: then they are like more ranks.
    batches: int = 1
    mean: bool = False
    rounding: Rounding = "parameters"
    # Class names of modules that keep their own gradients, besides the model's own such modules.
    local_types: Collection[str] = ()
    # Compute gradients of floating-point inputs too.
    input_gradients: bool = False
    # Called with each copy: returns what to call in its place, such as a wrapper around it.
    init_fn: Callable[[LabModel], nn.Module] | None = None

    def __post_init__(self) -> None:
        self.copies = [self.build(rank) for rank in range(self.ranks)]
        self.device = next(self.copies[0].parameters()).device
        if self.rounding == "everything":
            self.copies = [copy.to(self.dtype) for copy in self.copies]
        self.models = [self.init_fn(copy) if self.init_fn else copy for copy in self.copies]
        self.optimizers = [make_sgd(copy) for copy in self.copies]
        # Of each rank's last batch; the inputs have gradients.
        self.outputs: list[Any] = [None] * self.ranks
        self.inputs: list[tuple[Tensor, ...]] = [()] * self.ranks

    def record_steps(
        self, steps: int, rank: int, found: Parity, *kinds: TensorKind
    ) -> Sequence[NamedTensors]:
        """Train, count gradients, and return copies of a rank's output and tensors of each step."""
        recorded = []
        for index in range(steps):
            self.train_step(index)
            found.count_gradients(self.copies[rank])
            own = clone_tensors(self.copies[rank], *kinds)
            recorded.append({"output": self.outputs[rank].detach(), **own})
        return recorded

    def train_step(self, index: int) -> list[Tensor]:
        """Train one step; return each rank's loss, of its last batch."""
        losses = [self._forward_backward(index, rank) for rank in range(self.ranks)]
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
            output = self._forward_in_dtype(self.models[rank], inputs)
            loss = copy.get_loss(inputs, output)
            copy.run_backward(loss / self.batches if self.mean else loss)
        self.inputs[rank], self.outputs[rank] = inputs, output
        return loss.detach()

    def _forward_in_dtype(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        if self.dtype == torch.float32:
            return model(*inputs)
        if self.rounding == "autocast":
            with torch.autocast(self.device.type, self.dtype):
                return model(*inputs)
        # A batch norm stays in float32 under FSDP too, because its statistics do.
        norms = (module for module in model.modules() if isinstance(module, BatchNorm))
        kept = {id(parameter) for norm in norms for parameter in norm.parameters()}
        rounded = {
            name: parameter if id(parameter) in kept else parameter.to(self.dtype)
            for name, parameter in model.named_parameters()
        }
        casted = tuple(cast_floats(each, self.dtype) for each in inputs)
        return torch.func.functional_call(model, rounded, casted)

    def _average_shared_gradients(self) -> None:
        first = self.copies[0]
        local_modules = [*first.local_modules(), *find_blocks(first, self.local_types)]
        local = {id(parameter) for module in local_modules for parameter in module.parameters()}
        for same in zip(*(copy.parameters() for copy in self.copies), strict=True):
            gradients = [parameter.grad for parameter in same if parameter.grad is not None]
            if gradients and id(same[0]) not in local:
                mean = torch.stack(gradients).mean(dim=0)
                for gradient in gradients:
                    gradient.copy_(mean)


def require_gradients(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return inputs whose floating-point tensors require a gradient."""
    return tuple(each.requires_grad_() if each.is_floating_point() else each for each in inputs)


def cast_floats(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a floating-point tensor to this dtype; token ids and masks stay as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
