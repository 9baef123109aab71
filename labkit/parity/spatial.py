"""Does a model whose activations are sharded take the training step that one device takes?"""

from typing import Any

import torch
from torch import Tensor, nn

from labkit.parity.training import LIMITS, Parity, count_tensors


def compare_spatial_step(
    model: nn.Module,
    outputs: Tensor,
    reference: nn.Module,
    expected: Tensor,
    *,
    drops_samples: bool = False,
) -> dict[str, Any]:
    """Compare outputs, gradients and parameters of two models that started equal, after one step. A
    collective.

    Outputs are of this rank's samples; ``reference`` is the single-device model, ``expected`` its
    outputs. With ``drops_samples``, samples may skip a block, whose gradients are zeros if all do.
    """
    found = Parity()
    found.compare_tensor("outputs", outputs, expected)
    found.compare_models(model, reference, "gradient", some_zeros=drops_samples)
    found.compare_models(model, reference, "parameter")
    return found.verdict(
        LIMITS[torch.float32], 1 + count_tensors(reference, "gradient", "parameter")
    )
