"""A stack of transformer blocks: attention by heads and a gated MLP, each behind a norm.

Shapes: N samples, S positions of a sequence, D width, E width of a head, F inner width.
"""

from torch import Tensor, nn
from torch.nn import functional

from labkit.models.protocol import FloatInputModel

SEQUENCE_LENGTH = 8
HEAD_WIDTH = 8


class TransformerBlock(nn.Module):
    """Attention, then a gated MLP; each adds its result to its input [N, S, D]."""

    def __init__(self, dim: int, head_width: int, inner: int):
        super().__init__()
        self.head_width = head_width
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            # The number of heads is read from the features, because a rank may have only some.
            layer(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class BlockStack(FloatInputModel):
    """Transformer blocks in a row, [N, S, D] to the same shape."""

    block_types = ("TransformerBlock",)

    def __init__(
        self,
        dim: int = 64,
        batch: int = 2,
        blocks: int = 2,
        *,
        head_width: int = HEAD_WIDTH,
        tokens: int = SEQUENCE_LENGTH,
    ):
        super().__init__()
        self.dim, self.input_shape = dim, (batch, tokens, dim)
        self.blocks = nn.ModuleList(
            TransformerBlock(dim, head_width, 4 * dim) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
