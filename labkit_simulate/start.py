"""Starts the simulation of a program: checked, launched and read back as ``labkit.run`` does it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from labkit import config
from labkit.errors import ParameterError
from labkit.launcher import packet
from labkit.launcher.run import Plan, execute, find_program, positive, resolve
from labkit.launcher.warm import decide
from labkit.runs.folder import RANKS, SIMULATED
from labkit.runs.result import MOST_RANKS, RunResult, load
from labkit_simulate import reckoned
from labkit_simulate.theory.hardware import Hardware

WORLD = "labkit_simulate.world"
MOST_AT_ONCE = 64
"""Ranks that "all" simulates at most."""
GPUS_OF_A_HOST = 8


def simulate(
    program: str | Path,
    *,
    world_size: int,
    rank: int | Sequence[int] | Literal["different", "all"] = 0,
    hardware: str | Hardware | None = None,
    ranks_per_host: int | None = None,
    timeout_s: float = 600,
    warm: bool | None = None,
    use: Mapping[str, Any] | None = None,
    **params: Any,
) -> RunResult:
    """Run a rank program as some of many ranks, without the others: what it holds, and what it hands to collectives.

    Nothing is computed or sent, so the size of the model and the number of ranks cost no memory and little time. There
    are no values (losses are left out), and times by reckoning alone, for ``hardware``. Memory by category and
    communication equal those of a real run on CPU ranks to the byte.

    A program that opens no session of labkit's is watched from its first line to its last: ``peak_..._bytes`` are those
    of the whole program, and a collective's count and bytes the largest of a step, from the end of one
    ``optimizer.step()`` to that of the next.

    Args:
        program: a name in launch/, such as ``"fsdp_wrap"``, or the path of a .py file.
        world_size: how many ranks the program finds itself among.
        rank: the one that is simulated, or several: each is a process. "different" takes those that differ from each
            other: which, says ``Config.different_ranks(world_size)`` of the program, else the first, the one in the
            middle and the last. "all" takes all of up to 64.
        hardware: kind of host by its name in ``labkit_simulate.theory.hardware``, such as "h100-8x", or a ``Hardware``: then
            ``reckoned_step_s`` and others are values of the result, and its time line is that of the step there.
            ``labkit_simulate.reckoned.reckon`` does it for other hardware, without simulating again.
        ranks_per_host: GPUs of a host: what crosses from host to host is counted as of a run on several hosts. By
            default those of the hardware, or 8.
        timeout_s: the simulation is stopped after this many seconds.
        warm: as for ``run``.
        use: as for ``run``.
        **params: parameters of the program, checked against its Config for this number of ranks.

    Returns:
        The records of the simulated ranks, as of a run; ``result.simulated`` is True, and stamps say so.

    Raises:
        ParameterError: a bad argument; nothing was started.
        RankFailed: the program failed; with ``exc_type`` "NoValues" where it reads a number from a tensor.
        RunTimedOut: the limit passed; holds the ranks' stacks.
        ValueError: the program multiplies numbers for which the hardware has no rate. The simulation itself is kept.
    """
    how = {"world_size": world_size, "rank": rank, "hardware": hardware, "ranks_per_host": ranks_per_host}
    plan = simulation_of(program, **how, timeout_s=timeout_s, warm=warm, use=use, **params)
    return carry_out(plan, b"" if use is None else packet.pack(use))


def carry_out(plan: "Simulation", given: bytes = b"") -> RunResult:
    """Simulate what was checked; ``given`` goes to the ranks."""
    result = execute(plan, given)
    if plan.hardware is None:
        return result
    reckoned.write(result, plan.hardware)
    return load(result.folder)


@dataclass
class Simulation(Plan):
    """A checked request for a simulation, in the words of run.json; ``nproc`` is the size of the world."""

    ranks: list[int]
    hardware: Hardware | None
    ranks_per_host: int
    simulated: bool = True

    @property
    def title(self) -> str:
        return f"{self.program} on {self.nproc} simulated ranks"

    @property
    def started(self) -> list[int]:
        return self.ranks

    @property
    def command(self) -> tuple[str, list[str]]:
        return WORLD, [self.target, *self.arguments]

    @property
    def variables(self) -> dict[str, str]:
        world = {"ranks": self.ranks, "world_size": self.nproc, "ranks_per_host": self.ranks_per_host}
        return {SIMULATED: json.dumps(world), RANKS: str(self.nproc)}


def simulation_of(
    program: str | Path,
    *,
    world_size: Any,
    rank: Any = 0,
    hardware: Any = None,
    ranks_per_host: Any = None,
    timeout_s: Any = 600.0,
    warm: Any = None,
    use: Any = None,
    **params: Any,
) -> Simulation:
    """Check everything that can be checked before a start; the arguments are those of ``simulate``."""
    world_size = positive("world_size", world_size, int, "not a number of ranks: give an int of at least 1")
    kind = None if hardware is None else reckoned.hardware_of(hardware)
    if ranks_per_host is None:
        ranks_per_host = kind.devices if kind else GPUS_OF_A_HOST
    ranks_per_host = positive("ranks_per_host", ranks_per_host, int, "not a number of GPUs: give an int of at least 1")
    timeout_s = positive("timeout_s", timeout_s, float, "not a time limit: give a positive number of seconds")
    if world_size > MOST_RANKS:
        raise ParameterError(f"world_size = {world_size} is too many: {MOST_RANKS} ranks are the limit")
    if kind:
        reckoned.filled(world_size, ranks_per_host, kind)
    path, target = find_program(program)
    if use is not None:
        packet.refuse_what_does_not_fit(use, config.read_replaceable(path), path.stem)
    sources = {name: packet.source_of(function) for name, function in (use or {}).items()}
    resolved = resolve(path, params, world_size)
    ranks = chosen_ranks(rank, world_size, path, resolved[0])
    common = Plan(path.stem, str(path), target, *resolved, world_size, "cpu", timeout_s, decide(warm), sources, [])
    return Simulation(**vars(common), ranks=ranks, hardware=kind, ranks_per_host=ranks_per_host)


def chosen_ranks(rank: Any, world_size: int, path: Path, params: Mapping[str, Any]) -> list[int]:
    """The ranks that are simulated, in order. Raises ParameterError for what is none of 0 to world_size - 1."""
    if rank == "different":
        config_class = config.read_config(path)
        made = config.make(config_class, params) if config_class else None
        said = getattr(made, "different_ranks", None)
        return sorted({*(said(world_size) if said else (0, world_size // 2, world_size - 1))})
    if rank == "all":
        if world_size > MOST_AT_ONCE:
            fix = 'take "different", or give a list of ranks'
            raise ParameterError(f"rank = 'all' of {world_size}: {MOST_AT_ONCE} processes are the limit; {fix}")
        return list(range(world_size))
    several = list(rank) if isinstance(rank, Sequence | range) and not isinstance(rank, str) else [rank]
    for each in several or [None]:
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < world_size:
            last = world_size - 1
            raise ParameterError(f"rank = {rank!r}: give one from 0 to {last}, or several of them, such as [0, {last}]")
    return sorted(set(several))
