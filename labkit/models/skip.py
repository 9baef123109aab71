"""A model [N samples, D width] of which a wrapper wraps some modules and skips others."""

from torch import Tensor, nn

from labkit.models.protocol import FloatInputModel


class SkipModule(nn.Module):
    """A linear layer that the wrapper skips, so that it belongs to the unit around it."""

    def __init__(self, dim: int):
        super().__init__()
        self.lin = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class NestedLinear(nn.Module):
    """A linear layer that is wrapped by itself, or twice with ``double_nest``."""

    def __init__(self, dim: int, double_nest: bool = False):
        super().__init__()
        self.nested_linear = NestedLinear(dim) if double_nest else nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.nested_linear(x)


class SkipModel(FloatInputModel):
    """A linear layer, one that is skipped, and one that is wrapped (``double_nest``: twice)."""

    block_types = ("NestedLinear",)

    def __init__(self, dim: int = 10, double_nest: bool = False):
        super().__init__()
        self.input_shape = 4, dim
        self.linear = nn.Linear(dim, dim, bias=False)
        self.linear_skip = SkipModule(dim)
        self.nested_linear = NestedLinear(dim, double_nest)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] to the same shape."""
        return self.nested_linear(self.linear_skip(self.linear(x)))
