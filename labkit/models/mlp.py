"""Multilayer perceptrons, alone and in a row.

Shapes: N samples, S positions of a sequence, D width.
"""

from itertools import cycle, islice

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.models.protocol import FloatInputModel

SEQUENCE_LENGTH = 8
MULTIPLIERS = (3, 4, 3)


class MLP(nn.Module):
    """Linear, ReLU, linear, ReLU, and a buffer added at the end.

    Args:
        dim: D, width in and out.
        device: of the parameters.
        bias: whether both linear layers have one.
        with_buffer: whether there is a buffer, random, of shape [D].
        dim_multiplier: the inner width is this many times D.
    """

    buffer: Tensor | None

    def __init__(
        self,
        dim: int,
        device: torch.device | str | None = None,
        *,
        bias: bool = True,
        with_buffer: bool = False,
        dim_multiplier: int = 4,
    ):
        super().__init__()
        self.in_proj = nn.Linear(dim, dim_multiplier * dim, bias=bias, device=device)
        self.out_proj = nn.Linear(dim_multiplier * dim, dim, bias=bias, device=device)
        self.register_buffer("buffer", torch.randn(dim, device=device) if with_buffer else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to the same shape."""
        x = functional.relu(self.in_proj(x))
        x = functional.relu(self.out_proj(x))
        return x if self.buffer is None else x + self.buffer


class MLPStack(FloatInputModel):
    """MLPs whose inner widths are 3, 4 and 3 times D, repeated if there are more than three.

    Args:
        dim: D.
        with_layer_norm: normalise the result; without a bias.
        batch: samples in a step, each of 8 positions.
        layers: the number of MLPs.
    """

    block_types = ("MLP",)

    def __init__(
        self,
        dim: int = 16,
        with_layer_norm: bool = False,
        batch: int = 2,
        layers: int = len(MULTIPLIERS),
    ):
        super().__init__()
        self.dim, self.input_shape = dim, (batch, SEQUENCE_LENGTH, dim)
        inner = islice(cycle(MULTIPLIERS), layers)
        self.layers = nn.ModuleList(MLP(dim, dim_multiplier=multiplier) for multiplier in inner)
        self.norm = nn.LayerNorm(dim, bias=False) if with_layer_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, D] to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None else self.norm(x)


class DoubleLinear(FloatInputModel):
    """Two linear layers side by side, each with ReLU, on the same input.

    Args:
        dim: D.
        use_second_linear: return both results; else the first alone, and the second layer gets no
            gradient.
    """

    block_types = ("Linear",)

    def __init__(self, dim: int = 16, use_second_linear: bool = True):
        super().__init__()
        self.use_second_linear, self.input_shape = use_second_linear, (SEQUENCE_LENGTH, dim)
        self.lin1, self.lin2 = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """[N, D] to one or two of the same shape."""
        first = functional.relu(self.lin1(x))
        return (first, functional.relu(self.lin2(x))) if self.use_second_linear else first

    def get_loss(
        self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor] | Tensor
    ) -> Tensor:
        """The mean squared distance to 1, summed over the results."""
        results = output if isinstance(output, tuple) else (output,)
        losses = [super(DoubleLinear, self).get_loss(inputs, result) for result in results]
        return torch.stack(losses).sum()

    def unused_modules(self) -> list[nn.Module]:
        return [] if self.use_second_linear else [self.lin2]


class UnusedLinear(DoubleLinear):
    """DoubleLinear whose second layer is not used."""

    def __init__(self, dim: int = 16):
        super().__init__(dim, use_second_linear=False)
