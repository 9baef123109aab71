"""A chain of linear layers, made to be wrapped: a few wide blocks hold most of its parameters."""

import math

import torch
from torch import Tensor, nn

from labkit.models.protocol import FloatInputModel


class CustomLinear(nn.Module):
    """A linear layer [..., a] to [..., b] that is no ``nn.Linear``, so no class rule finds it."""

    def __init__(self, a: int, b: int):
        super().__init__()
        # The transpose of nn.Linear's. Scaled, so that the output is as large as the input.
        self.weight = nn.Parameter(torch.randn(a, b) / math.sqrt(a))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class MyModule(nn.Module):
    """The block that is wrapped: a linear layer [..., a] to [..., b], then ReLU."""

    def __init__(self, a: int, b: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(a, b), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ToyModel(FloatInputModel):
    """Linear layers with ReLU between, [N, inputs] to [N, outputs], ``tail`` narrow blocks last."""

    block_types = ("MyModule",)

    def __init__(
        self,
        hidden: int = 10000,
        narrow: int = 1000,
        inputs: int = 10,
        outputs: int = 5,
        tail: int = 7,
        batch: int = 20,
    ):
        super().__init__()
        self.input_shape = batch, inputs
        self.net = nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            MyModule(hidden, hidden),
            MyModule(hidden, narrow),
            *[MyModule(narrow, narrow) for _ in range(tail)],
            nn.Linear(narrow, outputs),
        )
