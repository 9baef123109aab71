"""The parts of a session that another package can replace.

    from labkit.session.hooks import hooks

    hooks.make_meter = MyMeter

A module that runs rank programs sets these before the program starts. torchrun starts that module
instead of the program, and gives it the program's name and command line: ``python -m MODULE PROGRAM
ARGUMENTS``.
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
    """The Meter of a session, the device in session.json, and whether CPU ranks keep to cores."""

    make_meter: Callable[[RecordWriter, torch.device], Meter] = Meter
    device_kind_and_name: Callable[[torch.device], tuple[str, str]] = device_kind_and_name
    pins_cores: bool = True


hooks = SessionHooks()
