"""Does a model whose activations are sharded take the training steps that one device takes?"""

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
    inputs: tuple[Tensor, Tensor] | None = None,
    drops_samples: bool = False,
) -> dict[str, Any]:
    """Compare this rank's last outputs and model with one device's. A collective.

    ``inputs`` are the images of both, whose gradients are compared too.
    """
    found = Parity()
    found.compare_tensor("outputs", outputs, expected)
    # If all samples skip a block, its gradients are zeros.
    found.compare_models(model, reference, "gradient", some_zeros=drops_samples)
    found.compare_models(model, reference, "parameter")
    if inputs:
        found.compare_tensor("gradient of the images", inputs[0].grad, inputs[1].grad)
    tensors = 1 + count_tensors(reference, "gradient", "parameter") + (inputs is not None)
    return found.verdict(LIMITS[torch.float32], tensors)
