"""Linear layers in a row [N samples, D width]: four wide ones fill several gradient buckets."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit.models.protocol import FloatInputModel


class LinearChain(FloatInputModel):
    """Layers fc1, fc2, …, each D -> D with a bias; ``checkpoint`` recomputes the first."""

    block_types = ("Linear",)
    fc1: nn.Linear
    fc2: nn.Linear
    fc3: nn.Linear
    fc4: nn.Linear

    def __init__(self, dim: int = 2000, checkpoint: bool = False, batch: int = 1, layers: int = 4):
        super().__init__()
        for index in range(1, layers + 1):
            setattr(self, f"fc{index}", nn.Linear(dim, dim))
        self.dim, self.checkpoint, self.input_shape = dim, checkpoint, (batch, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] to the same shape."""
        first, *others = self.children()
        x = checkpoint(first, x, use_reentrant=False) if self.checkpoint else first(x)
        for layer in others:
            x = layer(x)
        return x
