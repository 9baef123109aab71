"""Let units of a model take the time that an emulated device would need for their arithmetic.

The device has a clock of its own. A unit begins when the one before it has ended, or when what the
rank waited for has arrived, and lasts for its stated time; then the rank sleeps until the clock's
time has come. What the real arithmetic takes is part of that time, as long as it is shorter.
"""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import nn

from labkit.pause import attach_pause
from labkit.session.emulated_wire import Wire


class EmulatedDevice:
    """The device of this rank."""

    def __init__(self, wire: Wire):
        self.wire = wire
        self._end_s = 0.0

    def start_step(self) -> None:
        """Begin a step: what was late in the step before is not made up for."""
        self._end_s = time.monotonic()

    def start_profiled_step(self) -> AbstractContextManager[list[tuple[float, float]]]:
        """Begin a step, and note inside the returned context when messages are on a link."""
        self.start_step()
        return self.wire.note_transfers()

    def pause(self, seconds: float) -> None:
        """Let the clock stand still for what has just taken so long and does not belong to it."""
        self._end_s += seconds

    def compute(self, ms: float) -> None:
        """Wait for as long as the device computes."""
        begin_s = max(self._end_s, self.wire.waited_until_s)
        self._end_s = begin_s + ms / 1e3 * self.wire.waits
        left_s = self._end_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)

    def move(self, moved_bytes: float) -> None:
        """Wait for as long as the device's memory moves so many bytes."""
        rate = self.wire.hardware.memory_gb_per_s
        if rate:
            self.compute(1e3 * moved_bytes * self.wire.size_factor / (rate * 1e9))

    def add_units(self, units: Iterable[nn.Module], share: float = 1.0) -> None:
        """Make each unit take the emulated time, or this rank's share of it, in both passes."""
        hardware = self.wire.hardware
        forward_ms, backward_ms = share * hardware.forward_ms, share * hardware.unit_backward_ms
        parameter_bytes = 0
        for unit in units:
            attach_pause(
                unit, lambda _: self.compute(forward_ms), lambda _: self.compute(backward_ms)
            )
            own = sum(each.numel() * each.element_size() for each in unit.parameters())
            parameter_bytes = max(parameter_bytes, own)
        if hardware.unit_bytes and parameter_bytes:
            self.wire.size_factor = hardware.unit_bytes / parameter_bytes
