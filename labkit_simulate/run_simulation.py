"""Start the simulation of a program: validated, launched and read back as ``labkit.run`` does."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from labkit import config
from labkit.environment import ENV_PROCESS_RANKS, ENV_SIMULATION
from labkit.errors import ParameterError
from labkit.launcher import payload_pickling
from labkit.launcher.run import RunRequest, execute_request, require_positive, validate_program
from labkit.runs.folder import FULL_DISK_FIX, explain_write_errors
from labkit.runs.result import MAX_RANKS, RunResult, load
from labkit_simulate import estimate
from labkit_simulate.theory.hardware import Hardware

RANK_MODULE = "labkit_simulate.run_rank"
MAX_SIMULATED_RANKS = 64  # processes that rank="all" starts at most
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
    """Run a rank program as one or some of many ranks, without starting the others.

    Nothing is computed or sent, so model size and number of ranks cost no memory and little time.
    Tensors hold no values, so losses are left out. Memory by category and communication equal those
    of a real run on CPU ranks to the byte.

    A program without a labkit session is recorded whole: ``peak_..._bytes`` cover all of it, and
    the count and bytes of a collective are the largest of a step, which lasts from the end of one
    ``optimizer.step()`` to the end of the next.

    Args:
        program: a name in launch/, such as ``"fsdp_wrap"``, or the path of a .py file.
        world_size: number of ranks that the program sees.
        rank: the simulated rank or ranks, each a process. "different" takes the program's
            ``Config.different_ranks(world_size)``, or else the first, middle and last rank. "all"
            takes all of up to 64.
        hardware: kind of host, such as "h100-8x", or a ``Hardware``. With it the result has an
            estimated time line and ``reckoned_step_s`` and others; ``estimate.estimate_rank_step``
            estimates other hardware without another simulation.
        ranks_per_host: GPUs of a host, which decides what traffic crosses hosts; by default those
            of the hardware, or 8.
        timeout_s: stop the simulation after this many seconds.
        warm: as for ``run``.
        use: as for ``run``.
        **params: parameters of the program, checked against its Config for ``world_size`` ranks.

    Returns:
        The records of the simulated ranks; ``result.is_simulated`` is True, and plots say so.

    Raises:
        ParameterError: an argument is wrong; nothing was started.
        RankFailed: the program failed; ``exc_type`` is "NoValues" if it reads a tensor's value.
        RunTimedOut: the limit passed; holds the ranks' stacks.
        ValueError: the hardware has no rate for a dtype; the simulation itself is kept.
    """
    request = make_simulation_request(
        program,
        world_size=world_size,
        rank=rank,
        hardware=hardware,
        ranks_per_host=ranks_per_host,
        timeout_s=timeout_s,
        warm=warm,
        use=use,
        **params,
    )
    return run_simulation(request, b"" if use is None else payload_pickling.pack_payload(use))


def run_simulation(request: "SimulationRequest", payload: bytes = b"") -> RunResult:
    """Run a validated simulation; ranks receive the payload."""
    result = execute_request(request, payload)
    if request.hardware is None:
        return result
    with explain_write_errors(result.folder, FULL_DISK_FIX):
        estimate.write_estimate(result, request.hardware)
    return load(result.folder)


@dataclass
class SimulationRequest(RunRequest):
    """A validated request; its fields are keys of run.json, and ``nproc`` is the world size."""

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
    """Validate the arguments of ``simulate`` without starting anything."""
    world_size = require_positive("world_size", world_size, int, "number of ranks")
    if world_size > MAX_RANKS:
        raise ParameterError(
            f"world_size = {world_size} is too many: {MAX_RANKS} ranks are the limit"
        )
    kind = None if hardware is None else estimate.resolve_hardware(hardware)
    if ranks_per_host is None:
        ranks_per_host = kind.devices if kind else DEFAULT_GPUS_PER_HOST
    ranks_per_host = require_positive("ranks_per_host", ranks_per_host, int, "number of GPUs")
    if kind:
        estimate.ranks_on_each_host(world_size, ranks_per_host, kind)
    fields = validate_program(program, params, world_size, timeout_s, warm, use)
    return SimulationRequest(
        **fields,
        device="cpu",
        hosts=[],
        emulate=None,
        ranks=select_ranks(rank, world_size, Path(fields["program_path"]), fields["params"]),
        hardware=kind,
        ranks_per_host=ranks_per_host,
    )


def select_ranks(rank: Any, world_size: int, path: Path, params: Mapping[str, Any]) -> list[int]:
    """Return the ranks to simulate, sorted; raise ParameterError outside 0 to world_size - 1."""
    last = world_size - 1
    if rank == "different":
        config_class = config.read_config(path)
        program_config = config.build_config(config_class, params) if config_class else None
        different_ranks = getattr(program_config, "different_ranks", None)
        return sorted(
            {*(different_ranks(world_size) if different_ranks else (0, world_size // 2, last))}
        )
    if rank == "all":
        if world_size > MAX_SIMULATED_RANKS:
            raise ParameterError(
                f"rank = 'all' of {world_size}: {MAX_SIMULATED_RANKS} processes are the limit;"
                ' take "different", or give a list of ranks'
            )
        return list(range(world_size))
    several = isinstance(rank, Sequence | range) and not isinstance(rank, str)
    ranks = list(rank) if several else [rank]
    for each in ranks or [None]:
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each <= last:
            raise ParameterError(
                f"rank = {rank!r}: give one from 0 to {last}, or several, such as [0, {last}]"
            )
    return sorted(set(ranks))
