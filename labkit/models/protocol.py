"""The interface of every model of the FSDP lab, so that one training loop works for all of them."""

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional


class FSDPInitMode(Enum):
    """How a model is wrapped: not at all, or every block by itself and the whole around them."""

    NO_FSDP = auto()
    RECURSIVE = auto()


class CUDAInitMode(Enum):
    """When a model moves to the GPU: before it is wrapped, after it is wrapped, or never."""

    BEFORE = auto()
    AFTER = auto()
    NEVER = auto()


# A model knows no ranks: what differs between them, the samples' or an expert's seed, is passed in.
class LabModel(nn.Module, ABC):
    """A model with an input and a loss of its own."""

    block_types: ClassVar[tuple[str, ...]] = ()
    """Class names of the blocks that are usually wrapped or checkpointed, each by itself."""

    @classmethod
    def build(cls, **sizes: int) -> Self:
        """Build the model with these sizes; its constructor documents them and their defaults."""
        return cls(**sizes)

    @abstractmethod
    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """Return the arguments of ``forward``, equal for equal seeds; the global RNG is unused."""

    def get_loss(self, inputs: tuple[Tensor, ...], output: Any) -> Tensor:
        """Return the mean squared distance of the output to 1, a scalar."""
        # A sum of ReLU outputs, minimised, would reach 0 within a few steps and have no gradient
        # from there on: a comparison of gradients would then compare zeros.
        return (upcast_to_float32(output) - 1).square().mean()

    def run_backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        loss.backward()

    def local_modules(self) -> list[nn.Module]:
        """Return submodules that differ between ranks, whose gradients must not be averaged."""
        return []

    def unused_modules(self) -> list[nn.Module]:
        """Return submodules that the forward pass does not use, so that they have no gradient."""
        return []


class FloatInputModel(LabModel):
    """A LabModel whose input is normally distributed, and whose forward pass is that of ``net``."""

    input_shape: tuple[int, ...]
    net: nn.Module

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        return (random_normal(*self.input_shape, device=device, seed=seed),)


def upcast_to_float32(x: Tensor) -> Tensor:
    """Cast shorter floating-point types to float32: a loss should not be rounded to 8 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [N, T, V] with token ids [N, T]."""
    return functional.cross_entropy(upcast_to_float32(logits).flatten(0, 1), tokens.flatten())


def random_normal(*shape: int, device: torch.device, seed: int) -> Tensor:
    """Return standard normal numbers, drawn on the CPU so that every device gets the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(device)


def random_tokens(*shape: int, below: int, device: torch.device, seed: int) -> Tensor:
    """Return integers from 0 to ``below`` - 1, drawn on the CPU so that every device gets them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(below, shape, generator=generator, device="cpu").to(device)
