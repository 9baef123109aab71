"""Multilayer perceptrons, alone and in a row: N samples, S positions of a sequence, D width."""

from itertools import cycle, islice

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.models.protocol import FloatInputModel

SEQUENCE_LENGTH = 8
MULTIPLIERS = (3, 4, 3)


class MLP(nn.Module):
    """Linear, ReLU, linear, ReLU, [..., D] to the same shape; a random buffer [D] on request."""

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

    def reset_parameters(self) -> None:
        """Draw weights, biases and the buffer again; after ``to_empty`` nothing else sets them."""
        # In the constructor's order, so that equal seeds give equal numbers.
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        if self.buffer is not None:
            nn.init.normal_(self.buffer)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.in_proj(x))
        x = functional.relu(self.out_proj(x))
        return x if self.buffer is None else x + self.buffer


class MLPStack(FloatInputModel):
    """MLPs [N, S, D] to the same shape, with inner widths of 3, 4 and 3 times D, in turn."""

    block_types = ("MLP",)

    def __init__(
        self, dim: int = 16, with_layer_norm: bool = False, batch: int = 2, layers: int = 3
    ):
        super().__init__()
        self.dim, self.input_shape = dim, (batch, SEQUENCE_LENGTH, dim)
        inner = islice(cycle(MULTIPLIERS), layers)
        self.layers = nn.ModuleList(MLP(dim, dim_multiplier=multiplier) for multiplier in inner)
        self.norm = nn.LayerNorm(dim, bias=False) if with_layer_norm else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None else self.norm(x)


class DoubleLinear(FloatInputModel):
    """Two linear layers with ReLU on the same input [N, D], of which the second may be unused."""

    block_types = ("Linear",)

    def __init__(self, dim: int = 16, use_second_linear: bool = True):
        super().__init__()
        self.use_second_linear, self.input_shape = use_second_linear, (SEQUENCE_LENGTH, dim)
        self.lin1, self.lin2 = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        first = functional.relu(self.lin1(x))
        return (first, functional.relu(self.lin2(x))) if self.use_second_linear else first

    def get_loss(
        self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor] | Tensor
    ) -> Tensor:
        if isinstance(output, tuple):
            return self.get_loss(inputs, output[0]) + self.get_loss(inputs, output[1])
        return super().get_loss(inputs, output)

    def unused_modules(self) -> list[nn.Module]:
        return [] if self.use_second_linear else [self.lin2]


class UnusedLinear(DoubleLinear):
    """DoubleLinear whose second layer is not used."""

    def __init__(self, dim: int = 16):
        super().__init__(dim, use_second_linear=False)
