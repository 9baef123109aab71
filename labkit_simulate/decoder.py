"""A decoder like Llama's: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

The output layer shares no weight with the embedding. Shapes: N samples, S tokens, D width, H heads,
K heads of keys and values, E width of a head, F inner width of the feedforward part, V vocabulary.
Sources: Touvron et al., "LLaMA", 2023 (arXiv:2302.13971) and "Llama 2" (arXiv:2307.09288); Su et
al., "RoFormer", 2021 (arXiv:2104.09864); Ainslie et al., "GQA", 2023 (arXiv:2305.13245).
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from labkit.models.protocol import LabModel, random_tokens, token_loss
from labkit.theory.sizes import even_share

EPSILON = 1e-5
ROTATION_BASE = 500_000.0
"""Of the angles of the rotary embedding, as in Llama 3."""


class Attention(nn.Module):
    """Attention [N, S, D] of each token to itself and those before it.

    ``heads`` share the keys and values of ``kv_heads``. Both are read from the shapes of the
    weights, so that ranks can divide them.
    """

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
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
    """SwiGLU [N, S, D]: the result of one layer, after SiLU, scales that of another."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    """Attention, then the feedforward part; each adds its result to its input [N, S, D]."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=EPSILON)
        self.attention = Attention(width, heads, kv_heads)
        self.feedforward_norm = nn.RMSNorm(width, eps=EPSILON)
        self.feedforward = Feedforward(width, inner)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feedforward(self.feedforward_norm(x))


class DecoderModel(LabModel):
    """Embedding, blocks, norm, output layer; sizes are named as in ``theory.transformer``."""

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
        rotations = rotary_cos_sin(sequence, width // heads)
        self.register_buffer("rotations", rotations, persistent=False)

    def reset_parameters(self) -> None:
        """Draw all weights again and compute the rotations, as after ``to_empty`` on a model from
        the meta device.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.RMSNorm):
                module.reset_parameters()
        sequence, half_width, _ = self.rotations.shape
        self.rotations.copy_(rotary_cos_sin(sequence, 2 * half_width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [N, S] to logits [N, S, V]."""
        x = self.embedding(tokens)
        # Mixed precision leaves complex numbers alone.
        rotations = torch.view_as_complex(self.rotations)
        for block in self.blocks:
            x = block(x, rotations)
        return self.output(self.norm(x))

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        return (random_tokens(*self.input_shape, below=self.vocab, device=device, seed=seed),)

    def get_loss(self, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # The next tokens; after a sample's last token comes its first.
        return token_loss(output, inputs[0].roll(-1, dims=1))


def rotary_cos_sin(sequence: int, head_width: int) -> Tensor:
    """Return cosine and sine for each pair of a head's numbers at each position: [S, E / 2, 2]."""
    speeds = ROTATION_BASE ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(sequence), speeds)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def apply_rotary(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate the pairs of each head, [N, S, H, E], by complex numbers [S, E / 2], in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations.unsqueeze(1)).flatten(-2).to(x.dtype)


def apply_decoder_tensor_parallel(
    model: DecoderModel, mesh: DeviceMesh, *, sequence_parallel: bool
) -> None:
    """Share a decoder's matrices over the axis ``tp``, in place, embedding and output included.

    Ranks of one ``tp`` line take the same tokens. The logits stay a DTensor that is cut over the
    vocabulary: compute the loss and its backward pass in torch's ``loss_parallel()``, which sends
    three elements per token. ``sequence_parallel`` also cuts the sequence, dim 1, evenly between
    the pairs and in the norms. Apply checkpointing, compiling and FSDP over ``data`` afterwards.
    """
    for width in (model.kv_heads, model.feedforward, model.vocab):
        even_share(width, mesh["tp"].size(), "the inner width")
    parallelize_module(model, mesh["tp"], decoder_plan(sequence_parallel))


def decoder_plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Plan the pairs of a decoder: query, key, value and output; gate, up and down."""
    between = Shard(1) if sequence_parallel else Replicate()
    whole, columns, rows = Replicate(), ColwiseParallel(), RowwiseParallel(output_layouts=between)
    # The layers that begin a pair share one input, which the module around them prepares.
    block: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(whole, None)
        ),
        "feedforward": PrepareModuleInput(input_layouts=between, desired_input_layouts=whole),
        **dict.fromkeys(("attention.query", "attention.key", "attention.value"), columns),
        **dict.fromkeys(("feedforward.gate", "feedforward.up"), columns),
        **dict.fromkeys(("attention.output", "feedforward.down"), rows),
    }
    plan: dict[str, ParallelStyle] = {f"blocks.*.{name}": style for name, style in block.items()}
    # Cut by its width, so that the embedding needs no sum.
    plan["embedding"] = ColwiseParallel(output_layouts=between)
    # Logits [N, S, V / ranks] stay a DTensor, as loss_parallel() needs them.
    plan["output"] = ColwiseParallel(input_layouts=between, use_local_output=False)
    if sequence_parallel:
        norms = ("norm", "blocks.*.attention_norm", "blocks.*.feedforward_norm")
        plan |= {name: SequenceParallel(sequence_dim=1) for name in norms}
    return plan
