"""Four linear layers in a row: the least model whose gradients fill several buckets.

Shapes: N samples, D width.
"""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit.models.protocol import NumbersModel


class LinearChain(NumbersModel):
    """fc1 to fc4, each D -> D with a bias. At D = 2000 a weight has 16 MB and a bias 8 kB.

    Args:
        dim: D.
        checkpoint: go through fc1 once more in the backward pass instead of keeping what it needs (non-reentrant).
        batch: N, samples in a step.
    """

    block_types = ("Linear",)

    def __init__(self, dim: int = 2000, checkpoint: bool = False, batch: int = 1):
        super().__init__()
        self.fc1 = nn.Linear(dim, dim)
        self.fc2 = nn.Linear(dim, dim)
        self.fc3 = nn.Linear(dim, dim)
        self.fc4 = nn.Linear(dim, dim)
        self.dim, self.checkpoint, self.input_shape = dim, checkpoint, (batch, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] to the same shape."""
        first = checkpoint(self.fc1, x, use_reentrant=False) if self.checkpoint else self.fc1(x)
        return self.fc4(self.fc3(self.fc2(first)))
