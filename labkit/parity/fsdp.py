"""Does a sharded model train as one device does that plays all ranks?"""

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from labkit.parity.one_device import OneDevice
from labkit.parity.training import LIMITS, Parity, What, count_tensors

KINDS: tuple[What, ...] = ("gradient", "parameter", "buffer")


def compare_training(
    one_device: OneDevice, model: nn.Module, losses: Sequence[Tensor], *, rank: int, steps: int
) -> dict[str, Any]:
    """Let one device, not trained yet, train as many steps as there are losses of this rank, and compare. A collective.

    The model, FSDP2's, FSDP1's or a plain one, comes after its steps; it should have trained ``steps`` of them.

    Returns:
        What ``Here.verdict`` takes, on the loss of every step, and the last step's gradients, parameters and buffers.

    Raises:
        ValueError: there is no loss, or a trained parameter has no gradient.
    """
    if not losses:
        raise ValueError("no loss, so nothing was trained that could be compared: train 1 step or more")
    found, reference = Parity(), one_device.copies[rank]
    for index, loss in enumerate(losses):
        found.add(f"loss of step {index}", loss.detach(), one_device.step(index)[rank])
    gather = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    with gather if isinstance(model, FullyShardedDataParallel) else contextlib.nullcontext():
        for what in KINDS:
            found.add_training(model, reference, what)
    return found.verdict(LIMITS[one_device.dtype], steps + count_tensors(reference, *KINDS))
