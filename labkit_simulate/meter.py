"""Trace a simulated rank's steps; nothing is timed."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.session.meter import Meter, Step, write_traffic
from labkit_simulate.event_recorder import EventRecorder
from labkit_simulate.memory_recorder import MemoryRecorder


class SimulationMeter(Meter):
    """Record memory, communication and events of one step."""

    tensors_have_values: ClassVar[bool] = False
    # Ranks with the same local index on different hosts would share a core.
    pins_cores: ClassVar[bool] = False

    def device_kind_and_name(self) -> tuple[str, str]:
        return "simulated", "simulated"

    def steps(
        self,
        count: int,
        *,
        warmup: int = 1,
        track: Sequence[Any] = (),
        units: Mapping[str, Sequence[nn.Module]] | None = None,
        mesh: DeviceMesh | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> Iterator[Step]:
        """Run the warm-up and the traced step; steps between them would differ only in their times.

        An odd count leaves one extra step, since a program may act on every second step only.
        """
        for _ in range(warmup + count % 2):
            yield Step(-1, False, self)
            after()
        yield from self.step_with_counts(count, track, mesh)
        after()

    @contextlib.contextmanager
    def count_traffic(
        self, index: int, track: Sequence[Any], tracker: Any, mesh: DeviceMesh | None
    ) -> Iterator[None]:
        """Count communication as on a real rank; record the step's events and memory."""
        recorder, memory = EventRecorder(mesh, tracker and tracker._mod_tracker), None
        with recorder:
            # By now the tracker knows which tensors existed before.
            if tracker:
                memory = MemoryRecorder(tracker, recorder.current_phase_and_block, track)
            yield
        write_traffic(self.writer, recorder, index)
        if memory:
            memory.write_records(self.writer, index)
        recorder.write_artifact(self.writer)
