"""Starts the simulation of a program: checked, launched and read back as ``labkit.run`` does it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from labkit import config, program_source
from labkit.environment import ENV_PROCESS_RANKS, ENV_SIMULATION
from labkit.errors import ParameterError
from labkit.launcher import payload_pickling
from labkit.launcher.run import (
    RunRequest,
    execute_request,
    find_program,
    require_positive,
    resolve_params,
)
from labkit.launcher.warm_start import choose_warm_start
from labkit.runs.result import MAX_RANKS, RunResult, load
from labkit_simulate import estimate
from labkit_simulate.theory.hardware import Hardware

RANK_MODULE = "labkit_simulate.run_rank"
MAX_SIMULATED_RANKS = 64
"""Ranks that "all" simulates at most."""
DEFAULT_GPUS_PER_HOST = 8


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
    """Run a rank program as some of many ranks, without the others: what it holds, and what it
    hands to collectives.

    Nothing is computed or sent, so the size of the model and the number of ranks cost no memory and
    little time. There are no values (losses are left out), and times by reckoning alone, for
    ``hardware``. Memory by category and communication equal those of a real run on CPU ranks to the
    byte.

    A program that opens no session of labkit's is watched from its first line to its last:
    ``peak_..._bytes`` are those of the whole program, and a collective's count and bytes the
    largest of a step, from the end of one ``optimizer.step()`` to that of the next.

    Args:
        program: a name in launch/, such as ``"fsdp_wrap"``, or the path of a .py file.
        world_size: how many ranks the program finds itself among.
        rank: the one that is simulated, or several: each is a process. "different" takes those that
            differ from each other, which are the program's ``Config.different_ranks(world_size)``,
            or else the first, the middle and the last. "all" takes all of up to 64.
        hardware: kind of host by its name in ``labkit_simulate.theory.hardware``, such as
            "h100-8x", or a ``Hardware``: then ``reckoned_step_s`` and others are values of the
            result, and its time line is that of the step there. ``estimate.estimate_rank_step``
            does it for other hardware, without simulating again.
        ranks_per_host: GPUs of a host: what crosses from host to host is counted as of a run on
            several hosts. By default those of the hardware, or 8.
        timeout_s: the simulation is stopped after this many seconds.
        warm: as for ``run``.
        use: as for ``run``.
        **params: parameters of the program, checked against its Config for this number of ranks.

    Returns:
        The records of the simulated ranks, as of a run; ``result.is_simulated`` is True, and stamps
        say so.

    Raises:
        ParameterError: a bad argument; nothing was started.
        RankFailed: the program failed; with ``exc_type`` "NoValues" where it reads a number from a
            tensor.
        RunTimedOut: the limit passed; holds the ranks' stacks.
        ValueError: the program multiplies numbers for which the hardware has no rate. The
            simulation itself is kept.
    """
    how = {
        "world_size": world_size,
        "rank": rank,
        "hardware": hardware,
        "ranks_per_host": ranks_per_host,
    }
    plan = make_simulation_request(
        program, **how, timeout_s=timeout_s, warm=warm, use=use, **params
    )
    return run_simulation(plan, b"" if use is None else payload_pickling.pack_payload(use))


def run_simulation(plan: "SimulationRequest", given: bytes = b"") -> RunResult:
    """Simulate what was checked; ``given`` goes to the ranks."""
    result = execute_request(plan, given)
    if plan.hardware is None:
        return result
    estimate.write_estimate(result, plan.hardware)
    return load(result.folder)


@dataclass
class SimulationRequest(RunRequest):
    """A checked request for a simulation, in the words of run.json; ``nproc`` is the size of the
    world.
    """

    ranks: list[int]
    hardware: Hardware | None
    ranks_per_host: int
    simulated: bool = True

    @property
    def title(self) -> str:
        return f"{self.program} on {self.nproc} simulated ranks"

    @property
    def active_ranks(self) -> list[int]:
        return self.ranks

    @property
    def worker_command(self) -> tuple[str, list[str]]:
        return RANK_MODULE, [self.target]

    @property
    def extra_environment(self) -> dict[str, str]:
        world = {"world_size": self.nproc, "ranks_per_host": self.ranks_per_host}
        return {ENV_PROCESS_RANKS: json.dumps(self.ranks), ENV_SIMULATION: json.dumps(world)}


def make_simulation_request(
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
) -> SimulationRequest:
    """Check everything that can be checked before a start; the arguments are those of
    ``simulate``.
    """
    world_size = require_positive(
        "world_size", world_size, int, "not a number of ranks: give an int of at least 1"
    )
    kind = None if hardware is None else estimate.resolve_hardware(hardware)
    if ranks_per_host is None:
        ranks_per_host = kind.devices if kind else DEFAULT_GPUS_PER_HOST
    ranks_per_host = require_positive(
        "ranks_per_host", ranks_per_host, int, "not a number of GPUs: give an int of at least 1"
    )
    timeout_s = require_positive(
        "timeout_s", timeout_s, float, "not a time limit: give a positive number of seconds"
    )
    if world_size > MAX_RANKS:
        raise ParameterError(
            f"world_size = {world_size} is too many: {MAX_RANKS} ranks are the limit"
        )
    if kind:
        estimate.ranks_on_each_host(world_size, ranks_per_host, kind)
    path, target = find_program(program)
    if use is not None:
        payload_pickling.validate_replacements(
            use, program_source.read_replaceable(path), path.stem
        )
    sources = {
        name: payload_pickling.function_source(function) for name, function in (use or {}).items()
    }
    resolved = resolve_params(path, params, world_size)
    ranks = select_ranks(rank, world_size, path, resolved[0])
    common = RunRequest(
        path.stem,
        str(path),
        target,
        *resolved,
        world_size,
        "cpu",
        timeout_s,
        choose_warm_start(warm),
        sources,
        [],
    )
    return SimulationRequest(
        **vars(common), ranks=ranks, hardware=kind, ranks_per_host=ranks_per_host
    )


def select_ranks(rank: Any, world_size: int, path: Path, params: Mapping[str, Any]) -> list[int]:
    """The ranks that are simulated, in order. Raises ParameterError for what is none of 0 to
    world_size - 1.
    """
    if rank == "different":
        config_class = config.read_config(path)
        made = config.build_config(config_class, params) if config_class else None
        said = getattr(made, "different_ranks", None)
        return sorted({*(said(world_size) if said else (0, world_size // 2, world_size - 1))})
    if rank == "all":
        if world_size > MAX_SIMULATED_RANKS:
            fix = 'take "different", or give a list of ranks'
            raise ParameterError(
                f"rank = 'all' of {world_size}: {MAX_SIMULATED_RANKS} processes are the limit;"
                f" {fix}"
            )
        return list(range(world_size))
    several = (
        list(rank) if isinstance(rank, Sequence | range) and not isinstance(rank, str) else [rank]
    )
    for each in several or [None]:
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < world_size:
            last = world_size - 1
            raise ParameterError(
                f"rank = {rank!r}: give one from 0 to {last}, or several of them, such as [0,"
                f" {last}]"
            )
    return sorted(set(several))
