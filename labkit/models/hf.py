"""BERT and T5 from the transformers package, with random weights: nothing is downloaded.

Shapes: N samples, T tokens, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

from labkit.models.protocol import LabModel, random_tokens, token_loss

BATCH = 2


class _TokenModel(LabModel):
    """Token ids in, logits out, cross-entropy with the input's token ids."""

    vocab: int
    tokens: int

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        # Token 0 does not occur, because it pads and starts the decoder.
        return (
            1 + random_tokens(BATCH, self.tokens, below=self.vocab - 1, device=device, seed=seed),
        )

    def get_loss(self, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return token_loss(output, inputs[0])


class Bert(_TokenModel):
    """BertForMaskedLM without dropout; its prediction head shares a weight with the embeddings."""

    block_types = ("BertLayer", "BertLMPredictionHead")

    def __init__(
        self,
        vocab: int = 96,
        hidden: int = 32,
        layers: int = 2,
        heads: int = 2,
        mlp_ratio: int = 2,
        tokens: int = 8,
    ):
        # Here, because the package is optional, and its import takes seconds.
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        self.vocab, self.tokens = vocab, tokens
        config = BertConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=mlp_ratio * hidden,
            max_position_embeddings=tokens,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = BertForMaskedLM(config)
        for name, module in self.model.named_modules():
            # Softmax cancels the bias of the keys: its gradient is rounding noise, which no two
            # computations share.
            if name.endswith("attention.self.key"):
                module.register_parameter("bias", None)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [N, T] to logits [N, T, V]."""
        return self.model(input_ids=ids).logits


class T5(_TokenModel):
    """T5ForConditionalGeneration without dropout: it copies the encoder's input."""

    block_types = ("T5Block",)

    def __init__(
        self,
        vocab: int = 96,
        hidden: int = 32,
        layers: int = 2,
        heads: int = 2,
        mlp_ratio: int = 2,
        tokens: int = 8,
    ):
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        self.vocab, self.tokens = vocab, tokens
        config = T5Config(
            vocab_size=vocab,
            d_model=hidden,
            d_kv=hidden // heads,
            d_ff=mlp_ratio * hidden,
            num_layers=layers,
            num_heads=heads,
            dropout_rate=0.0,
            use_cache=False,
        )
        self.model = T5ForConditionalGeneration(config)

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        """Token ids [N, T] of the encoder and of the decoder to logits [N, T, V]."""
        return self.model(input_ids=ids, decoder_input_ids=decoder_ids).logits

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        (ids,) = super().get_input(device, seed)
        # The decoder reads the same tokens one place later, after the start token 0.
        return ids, functional.pad(ids[:, :-1], (1, 0))
