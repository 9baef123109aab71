"""A minimal mixture of experts: every rank has its own expert beside the parts that all share."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from labkit.models.delay import pause_device
from labkit.models.protocol import FloatInputModel

BATCH = 4
# 23 is odd, so that shards are uneven.
INPUT_WIDTH, SHARED_WIDTH, EXPERT_WIDTH = 8, 12, 23


class Shared(nn.Linear):
    """The part that all ranks train together."""


class Expert(nn.Linear):
    """A linear layer whose initial weight and bias come from ``seed``, not from the global RNG."""

    def __init__(self, in_features: int, out_features: int, seed: int):
        super().__init__(in_features, out_features)
        # The range of nn.Linear's own initial values.
        bound, generator = 1 / math.sqrt(in_features), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                drawn = torch.rand(parameter.shape, generator=generator, device="cpu")
                parameter.copy_((2 * drawn - 1) * bound)


class MixtureOfExperts(FloatInputModel):
    """Widths 8, 12, 23, 12, 8: the layer 12 to 23 is shared, that from 23 to 12 is the expert."""

    block_types = ("Shared",)
    input_shape = (BATCH, INPUT_WIDTH)

    def __init__(self, expert_seed: int = 0, delay_before_free_ms: int = 0):
        super().__init__()
        shared = Shared(SHARED_WIDTH, EXPERT_WIDTH)
        expert = Expert(EXPERT_WIDTH, SHARED_WIDTH, expert_seed)
        first, last = nn.Linear(INPUT_WIDTH, SHARED_WIDTH), nn.Linear(SHARED_WIDTH, INPUT_WIDTH)
        self.net = nn.Sequential(first, shared, expert, last)

        # A pause between the computation and the release of gathered parameters exposes a wrapper
        # that frees without waiting.
        def pause_before_free(module: nn.Module, args: Any, output: Tensor) -> None:
            pause_device(delay_before_free_ms, output.device)

        if delay_before_free_ms:
            shared.register_forward_hook(pause_before_free)
            expert.register_forward_hook(pause_before_free)

    def local_modules(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, Expert)]
