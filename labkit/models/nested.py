"""Linear layers in nested blocks, for wrappers that work from the inside out.

Shapes: N samples.
"""

from torch import Tensor, nn

from labkit.models.protocol import FloatInputModel


class NestedBlock(nn.Sequential):
    """A part that is wrapped by itself; a class of its own, so that a rule can name it."""


class NestedWrappedModule(FloatInputModel):
    """Widths 8, 4, 16, 16, 4, 8: the middle is a block that holds a block, and another block
    follows it.
    """

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
    """The same widths, where only the last layer, 4 to 8, requires gradients; one block holds it
    and the one before.

    FSDP1 shards a block as one flat tensor, here of 108 numbers, of which the last 40 are trained:
    on two ranks the first holds none of these. Both must still agree on whether a step is skipped.
    """

    def __init__(self) -> None:
        super().__init__()
        first, middle, before_last, last = self.net
        self.net = nn.Sequential(first, middle, NestedBlock(*before_last.children(), last))
        self.requires_grad_(False)
        last.requires_grad_(True)
