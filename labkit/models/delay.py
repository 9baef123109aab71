"""Delays at chosen moments of a training step: they show overlap and missing synchronisation.

On a GPU a delay occupies the current stream and returns at once, like a long kernel. On a CPU the
thread sleeps and releases the GIL, so that communication continues.
"""

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from labkit import torch_private
from labkit.models.nested import NestedWrappedModule
from labkit.models.protocol import LabModel
from labkit.pause import attach_pause, pause_once

_CALIBRATION_CYCLES = 20_000_000


@cache
def _cycles_per_ms(device: torch.device) -> float:
    """Return a GPU's clock cycles per millisecond, measured with its own events."""
    with torch.cuda.device(device):
        # This wakes the device up, and raises its clock rate.
        torch_private.sleep(_CALIBRATION_CYCLES)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch_private.sleep(_CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        return _CALIBRATION_CYCLES / start.elapsed_time(end)


def pause_device(ms: float, device: torch.device) -> None:
    """Do nothing for ``ms`` milliseconds: on a GPU's current stream, otherwise in this thread."""
    if ms > 0 and device.type == "cuda":
        torch_private.sleep(int(ms * _cycles_per_ms(device)))
    elif ms > 0:
        time.sleep(ms / 1e3)


def delay_compute(block: nn.Module, ms: float) -> None:
    """Lengthen a block's forward and backward pass by ``ms`` milliseconds each, in place."""

    def pause(device: torch.device) -> None:
        pause_device(ms, device)

    if ms > 0:
        attach_pause(block, pause, pause)


def delay_reduction(block: nn.Module, ms: float) -> None:
    """Wait ``ms`` milliseconds between a block's gradients and their reduction by a wrapper."""
    # A block's backward pass computes the gradient of its input last. If no input requires one, as
    # in a model's first block, the delay is at the output, before the block's gradients.
    at_input = False

    def pause(device: torch.device) -> None:
        pause_device(ms, device)

    def pause_at_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal at_input
        changed, at_input = pause_once((args, kwargs), pause)
        return changed

    def pause_at_output(module: nn.Module, args: Any, output: Any) -> Any:
        return output if at_input else pause_once(output, pause)[0]

    if ms > 0:
        block.register_forward_pre_hook(pause_at_input, with_kwargs=True)
        block.register_forward_hook(pause_at_output)


class ModuleWithDelay(LabModel):
    """A model whose step pauses after the loss, before gradients are reduced, or both."""

    def __init__(
        self, module: LabModel, delay_after_loss_ms: float = 0, delay_before_reduction_ms: float = 0
    ):
        super().__init__()
        self.module = module
        # Of this object, not of the class.
        self.block_types = module.block_types  # type: ignore[misc]
        self.delay_after_loss_ms = delay_after_loss_ms
        for block in module.modules():
            if type(block).__name__ in module.block_types:
                delay_reduction(block, delay_before_reduction_ms)

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        return self.module.get_input(device, seed)

    def get_loss(self, inputs: tuple[Tensor, ...], output: Any) -> Tensor:
        loss = self.module.get_loss(inputs, output)
        pause_device(self.delay_after_loss_ms, loss.device)
        return loss

    def local_modules(self) -> list[nn.Module]:
        return self.module.local_modules()

    def unused_modules(self) -> list[nn.Module]:
        return self.module.unused_modules()


class NestedWithDelay(ModuleWithDelay):
    """NestedWrappedModule with the same delays."""

    def __init__(self, delay_after_loss_ms: float = 0, delay_before_reduction_ms: float = 0):
        super().__init__(NestedWrappedModule(), delay_after_loss_ms, delay_before_reduction_ms)
