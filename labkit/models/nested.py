"""Linear layers in blocks that lie inside blocks, for wrappers that work from the inside out.

Shapes: N samples.
"""

from torch import Tensor, nn

from labkit.models.protocol import NumbersModel


class NestedBlock(nn.Sequential):
    """A part that is wrapped by itself; a class of its own so that a rule can name it."""


class NestedWrappedModule(NumbersModel):
    """Widths 8, 4, 16, 16, 4, 8: the middle is a block that holds a block, and another block follows it."""

    block_types = ("NestedBlock",)
    input_shape = (4, 8)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 4),
            NestedBlock(NestedBlock(nn.Linear(4, 16)), nn.Linear(16, 16)),
            NestedBlock(nn.Linear(16, 4)),
            nn.Linear(4, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8] to [N, 8]."""
        return self.net(x)


class NonUniformReqGradNWM(NestedWrappedModule):
    """The same, of which only the second block, 16 to 4, needs gradients: all else is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.net[2].requires_grad_(True)
