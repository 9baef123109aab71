"""What a session leaves to whatever runs its rank: another package may put its own in their place.

    from labkit.session.hooks import hooks

    hooks.make_meter = MyMeter

A module that runs rank programs does so before the program starts. It is a rank's program itself,
and gets the program's name and command line: ``python -m MODULE PROGRAM ARGUMENTS``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labkit.runs.records import RecordWriter
from labkit.session.meter import Meter


def device_kind_and_name(device: torch.device) -> tuple[str, str]:
    """Return a device's kind, such as "cuda", and its name, such as "NVIDIA H100"."""
    return device.type, torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@dataclass
class SessionHooks:
    """What of a session can be replaced.

    Attributes:
        make_meter: gives each session its Meter, which runs its steps, and times and traces them.
        device_kind_and_name: what session.json says of the device.
        pins_cores: whether a rank on the CPU keeps to its own share of the cores.
    """

    make_meter: Callable[[RecordWriter, torch.device], Meter] = Meter
    device_kind_and_name: Callable[[torch.device], tuple[str, str]] = device_kind_and_name
    pins_cores: bool = True


hooks = SessionHooks()
