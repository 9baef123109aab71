"""The interface of every model of the FSDP lab, so that one training loop works for all of them.

A model provides its input (``get_input``), its loss (``get_loss``) and the classes of blocks that
are worth wrapping (``block_types``). It knows no ranks: what differs between ranks, a seed for the
samples or for an expert, comes from the caller.
"""

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn


class FSDPInitMode(Enum):
    """How a model is wrapped."""

    NO_FSDP = auto()
    """Not at all: the plain module."""
    RECURSIVE = auto()
    """Every block by itself, and the whole around them."""


class CUDAInitMode(Enum):
    """When a model moves to the GPU."""

    BEFORE = auto()
    """Before it is wrapped."""
    AFTER = auto()
    """After it is wrapped."""
    NEVER = auto()
    """It stays on the CPU."""


class LabModel(nn.Module, ABC):
    """A model with an input and a loss of its own.

    Attributes:
        block_types: class names of the blocks that are usually wrapped or checkpointed, each by
            itself.
    """

    block_types: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def build(cls, **sizes: int) -> Self:
        """Build the model with these sizes; its constructor documents them and their defaults."""
        return cls(**sizes)

    @abstractmethod
    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """Return the arguments of ``forward``. Equal seeds give equal values on every device; the
        global RNG is not used.
        """

    def get_loss(self, inputs: tuple[Tensor, ...], output: Any) -> Tensor:
        """Return the mean squared distance of the output to 1, a scalar.

        A sum of ReLU outputs, minimised, would reach 0 within a few steps and have no gradient from
        there on: a comparison of gradients would then compare zeros.
        """
        return (upcast_to_float32(output) - 1).square().mean()

    def run_backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        loss.backward()

    def local_modules(self) -> list[nn.Module]:
        """Return submodules that are meant to differ between ranks: their gradients must not be
        averaged.
        """
        return []

    def unused_modules(self) -> list[nn.Module]:
        """Return submodules that the forward pass does not use, so that they have no gradient."""
        return []


class FloatInputModel(LabModel):
    """A LabModel whose input is one tensor of normally distributed numbers.

    Attributes:
        input_shape: of that tensor.
    """

    input_shape: tuple[int, ...]

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        return (random_normal(*self.input_shape, device=device, seed=seed),)


def upcast_to_float32(x: Tensor) -> Tensor:
    """Cast shorter floating-point types to float32: a loss should not be rounded to 8 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def random_normal(*shape: int, device: torch.device, seed: int) -> Tensor:
    """Return standard normal numbers, drawn on the CPU so that every device gets the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(
        device
    )


def random_tokens(*shape: int, below: int, device: torch.device, seed: int) -> Tensor:
    """Return integers from 0 to ``below`` - 1, drawn on the CPU so that every device gets the
    same.
    """
    return torch.randint(
        below, shape, generator=torch.Generator().manual_seed(seed), device="cpu"
    ).to(device)
