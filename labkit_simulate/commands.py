"""Add the commands simulate and plan to ``python -m labkit``."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import tyro

from labkit_simulate import planner
from labkit_simulate.run_simulation import simulate


@dataclass
class SimulateCommand:
    """Simulate one rank of many, or several, and show its summary: memory and communication, no
    values.

    With a hardware its step's time is reckoned; no time is measured.

    ``simulate PROGRAM --help`` lists the parameters of a program.
    """

    program: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROGRAM")]
    """A name in launch/, or the path of a Python file."""
    world_size: int = 8
    """Number of ranks among which the program finds itself."""
    rank: tuple[int, ...] | Literal["different", "all"] = (0,)
    """Those that are simulated; different: those that differ from each other, by what the program
    says.
    """
    hardware: str | None = None
    """Kind of host for which the step's time is reckoned, such as h100-8x."""
    ranks_per_host: int | None = None
    """GPUs of a host; by default those of the hardware, or 8."""
    timeout_s: float = 600
    """Seconds after which the simulation is stopped."""

    about: ClassVar[str] = "Simulate {program} and show its summary."
    takes_lists: ClassVar[bool] = False

    def execute(self, **arguments: Any) -> int:
        """Simulate the program and print its summary."""
        result = simulate(**arguments)
        print(f"{result.table_text()}\nrecorded in {result.folder}")
        return 0


@dataclass
class PlanCommand:
    """Simulate all combinations of some values, and show those that fit, the fastest first.

    ``plan PROGRAM --help`` lists the parameters of a program; each takes one value or several.
    """

    program: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROGRAM")]
    """A name in launch/, or the path of a Python file."""
    world_size: tuple[int, ...] = (64,)
    """Numbers of ranks."""
    hardware: tuple[str, ...] = ("h100-8x",)
    """Kinds of hosts."""
    budget_gib: float | None = None
    """What a rank may take of its device, in GiB; by default all that it has."""
    dollars_per_hour: float | None = None
    """What a device costs in an hour."""
    samples: int | None = None
    """Of all ranks in a step; by default one for each of the most ranks."""
    limit: int = 100
    """More candidates than that are refused."""
    timeout_s: float = 600
    """Seconds after which one simulation is stopped."""
    whole: int | None = 3
    """How many of the best are simulated whole; the others may be continued from a few blocks.
    None: all.
    """

    about: ClassVar[str] = "Simulate candidates of {program} and show those that fit."
    takes_lists: ClassVar[bool] = True

    def execute(self, **arguments: Any) -> int:
        """Simulate the candidates and print the table of those that fit."""
        lists = {name: list(each) for name, each in arguments.items() if isinstance(each, tuple)}
        found = planner.plan(**(arguments | lists))
        print(f"{found}\nrecorded in {found.folder}")
        return 0


COMMANDS = {"simulate": SimulateCommand, "plan": PlanCommand}
