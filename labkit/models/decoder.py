"""A decoder like Llama's: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, and an output
layer that shares no weight with the embedding.

Shapes: N samples, S tokens, D width, H heads, K heads of keys and values, E width of a head, F
inner width of the feedforward part, V vocabulary. Sources: Touvron et al., "LLaMA", 2023
(arXiv:2302.13971) and "Llama 2" (arXiv:2307.09288); Su et al., "RoFormer", 2021 (arXiv:2104.09864);
Ainslie et al., "GQA", 2023 (arXiv:2305.13245).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.models.protocol import LabModel, random_tokens, upcast_to_float32

EPSILON = 1e-5
ROTATION_BASE = 500_000.0
"""Of the angles of the rotary embedding, as in Llama 3."""


class Attention(nn.Module):
    """Attention in which each token sees itself and those before it; groups of heads share keys and
    values.

    The number of heads is read from the shapes, so that ranks can divide them.

    Args:
        width: D.
        heads: H.
        kv_heads: K, which divides H.
    """

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """[N, S, D], and ``rotations`` of the model, to [N, S, D]."""
        # Shapes: [N, S, H, E], and [N, S, K, E] for keys and values.
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width))
            for layer in (self.query, self.key, self.value)
        )
        query, key = apply_rotary(query, rotations), apply_rotary(key, rotations)
        # Attention needs the heads before the positions.
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class Feedforward(nn.Module):
    """SwiGLU: the result of one layer, after SiLU, scales that of another.

    Args:
        width: D.
        inner: F.
    """

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, D] to the same shape."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    """Attention, then the feedforward part. Each reads its input normalised, and adds its result to
    it.

    The arguments are those of ``Attention`` and ``Feedforward``.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=EPSILON)
        self.attention = Attention(width, heads, kv_heads)
        self.feedforward_norm = nn.RMSNorm(width, eps=EPSILON)
        self.feedforward = Feedforward(width, inner)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """[N, S, D], and ``rotations`` of the model, to [N, S, D]."""
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feedforward(self.feedforward_norm(x))


class DecoderModel(LabModel):
    """Embedding, blocks, norm, output layer.

    Sizes have the names of ``labkit_simulate.theory.transformer.DecoderShape``.

    Args:
        width: D.
        layers: the number of blocks.
        heads: H, which divides D.
        kv_heads: K, which divides H.
        feedforward: F.
        vocab: V.
        sequence: S of the input.
        batch: N of the input.
    """

    block_types = ("DecoderBlock",)
    rotations: Tensor

    def __init__(
        self,
        width: int = 32,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        feedforward: int = 64,
        vocab: int = 96,
        sequence: int = 16,
        batch: int = 2,
    ):
        super().__init__()
        self.kv_heads, self.feedforward, self.vocab = kv_heads, feedforward, vocab
        self.input_shape = batch, sequence
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            DecoderBlock(width, heads, kv_heads, feedforward) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=EPSILON)
        self.output = nn.Linear(width, vocab, bias=False)
        self.register_buffer(
            "rotations", rotary_cos_sin(sequence, width // heads), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [N, S] to logits [N, S, V]."""
        x = self.embedding(tokens)
        # Mixed precision leaves complex numbers alone.
        rotations = torch.view_as_complex(self.rotations)
        for block in self.blocks:
            x = block(x, rotations)
        return self.output(self.norm(x))

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """Token ids [N, S]."""
        return (random_tokens(*self.input_shape, below=self.vocab, device=device, seed=seed),)

    def get_loss(self, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the mean cross-entropy of the logits with the next tokens; after a sample's last
        token comes its first.
        """
        following = inputs[0].roll(-1, dims=1)
        return functional.cross_entropy(
            upcast_to_float32(output).flatten(0, 1), following.flatten()
        )


def rotary_cos_sin(sequence: int, head_width: int) -> Tensor:
    """Return the rotation of each pair of a head's numbers at each position: cosine and sine, [S, E
    / 2, 2].
    """
    speeds = ROTATION_BASE ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(sequence), speeds)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def apply_rotary(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate each pair of numbers of each head: [N, S, H, E] by complex numbers [S, E / 2], in
    float32.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations.unsqueeze(1)).flatten(-2).to(x.dtype)
