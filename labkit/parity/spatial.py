"""Does a model whose activations are sharded take the training step that one device takes?"""

from typing import Any

import torch
from torch import Tensor, nn

from labkit.parity.comparison import LIMITS, Parity, count_tensors


def compare_spatial_step(
    model: nn.Module,
    outputs: Tensor,
    reference: nn.Module,
    expected: Tensor,
    *,
    drops_samples: bool = False,
) -> dict[str, Any]:
    """Compare this rank's outputs and model with one device's, after one step. A collective."""
    found = Parity()
    found.compare_tensor("outputs", outputs, expected)
    # If all samples skip a block, its gradients are zeros.
    found.compare_models(model, reference, "gradient", some_zeros=drops_samples)
    found.compare_models(model, reference, "parameter")
    tensors = 1 + count_tensors(reference, "gradient", "parameter")
    return found.verdict(LIMITS[torch.float32], tensors)
