"""Linear layers in nested blocks, for wrappers that work from the inside out."""

from torch import nn

from labkit.models.protocol import FloatInputModel


class NestedBlock(nn.Sequential):
    """A part that is wrapped by itself; a class of its own, so that a rule can name it."""


class NestedWrappedModule(FloatInputModel):
    """Widths 8, 4, 16, 16, 4, 8: in the middle a block that holds a block, and then a block."""

    block_types = ("NestedBlock",)
    input_shape = (4, 8)

    def __init__(self) -> None:
        super().__init__()
        # [N, 8] to [N, 8]
        self.net = nn.Sequential(
            nn.Linear(8, 4),
            NestedBlock(NestedBlock(nn.Linear(4, 16)), nn.Linear(16, 16)),
            NestedBlock(nn.Linear(16, 4)),
            nn.Linear(4, 8),
        )


class NonUniformReqGradNWM(NestedWrappedModule):
    """The same widths; only the last layer requires gradients, in a block with the one before."""

    def __init__(self) -> None:
        super().__init__()
        first, middle, before_last, last = self.net.children()
        self.net = nn.Sequential(first, middle, NestedBlock(*before_last.children(), last))
        # FSDP1 shards this block as one flat tensor, of which only the last 40 numbers are trained:
        # on two ranks the first holds none. Both must still agree on whether to skip a step.
        self.requires_grad_(False)
        last.requires_grad_(True)
