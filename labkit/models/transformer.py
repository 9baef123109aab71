"""An encoder and decoder whose output layer shares its weight with the embedding.

Shapes: N samples, S source tokens, T target tokens, D model width, V vocabulary.
"""

import torch
from torch import Tensor, nn

from labkit.models.protocol import LabModel, random_tokens, token_loss

BATCH, SOURCE_TOKENS, TARGET_TOKENS = 2, 6, 4


class TransformerWithSharedParams(LabModel):
    """``nn.Transformer`` (8 heads) between an embedding of both sides and an output tied to it."""

    block_types = ("TransformerEncoderLayer", "TransformerDecoderLayer")
    vocab_bias: Tensor
    long_buffer: Tensor

    def __init__(
        self,
        vocab: int = 23,
        d_model: int = 16,
        layers: int = 2,
        feedforward: int = 8,
        dropout: float = 0.1,
        add_bn: bool = True,
    ):
        super().__init__()
        self.vocab = vocab
        self.embed_tokens = nn.Embedding(vocab, d_model)
        self.transformer = nn.Transformer(
            d_model,
            num_encoder_layers=layers,
            num_decoder_layers=layers,
            dim_feedforward=feedforward,
            dropout=dropout,
            batch_first=True,
        )
        self.output_proj = nn.Linear(d_model, vocab)
        # One parameter with two users, which no split into units may separate.
        self.output_proj.weight = self.embed_tokens.weight
        # One of floats and one of integers, because wrappers treat buffers apart.
        self.register_buffer("vocab_bias", torch.ones(d_model))
        self.register_buffer("long_buffer", torch.zeros(d_model, dtype=torch.long))
        # Takes the samples for its channels. Every rank changes its running statistics in its way.
        self.norm = nn.BatchNorm1d(BATCH) if add_bn else None

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Token ids [N, S] and [N, T] to logits [N, T, V]."""
        source = self.embed_tokens(source)
        # In the embedding's type, because under mixed precision the buffers keep theirs.
        source = source + self.vocab_bias.to(source.dtype) + self.long_buffer.to(source.dtype)
        target = self.embed_tokens(target)
        if self.norm is not None:
            # The shape inside is [T, N, D].
            normed = self.norm(target.transpose(0, 1)).transpose(0, 1)
            # Wrappers keep the norm in float32.
            target = normed.to(target.dtype)
        return self.output_proj(self.transformer(source, target))

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        shape = BATCH, SOURCE_TOKENS + TARGET_TOKENS
        tokens = random_tokens(*shape, below=self.vocab, device=device, seed=seed)
        return tokens[:, :SOURCE_TOKENS], tokens[:, SOURCE_TOKENS:]

    def get_loss(self, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return token_loss(output, inputs[1])
