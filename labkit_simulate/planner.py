"""Which mesh, wrapping, checkpointing and precision? All that come into question are simulated, and
ranked.

    found = labkit.plan(model="llama_2_7b", sequence=4096, world_size=64, hardware="h100-8x",
    budget_gib=75) found              # those that fit, the fastest first, and why the others do not
    found.best         # the row of the first of them
    found.frame        # all of them, a row each

What a candidate holds is simulated to the byte, and the time of its step is reckoned for a kind of
host. All train with the same samples in a step, so that their step times compare. Of a deep model
whose blocks are alike only the best are simulated whole; the others are continued from a few
blocks, see ``continued``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit import config
from labkit.errors import LabError, ParameterError
from labkit.launcher.run import argument_combinations, find_program, make_run_name, require_positive
from labkit.runs import private_files
from labkit.runs.folder import runs_folder
from labkit.runs.result import RunResult
from labkit.theory.sizes import even_share
from labkit_simulate.block_memory import peak_phase_and_block
from labkit_simulate.estimate import estimate_rank_step, ranks_on_each_host, resolve_hardware
from labkit_simulate.extrapolate import (
    MAX_BLOCKS_TO_SIMULATE_WHOLE,
    SMALL_BLOCK_COUNTS,
    candidates_to_simulate_whole,
    extrapolate_candidate,
    extrapolation_error_text,
    make_small_requests,
)
from labkit_simulate.memory_fit import GIB, largest_prefetch_bytes, memory_fit
from labkit_simulate.run_simulation import SimulationRequest, make_simulation_request, simulate
from labkit_simulate.search_result import Candidate, SearchResult
from labkit_simulate.simulate_many import SimulationOutcome, simulate_many
from labkit_simulate.theory.hardware import Hardware

SIZE_VALUE_NAMES = {"peak": "peak_total", "reserved": "gpu_reserved"}
HardwareChoice = str | Hardware | Sequence[str | Hardware]


def plan(
    program: str | Path = "decoder",
    *,
    world_size: int | Sequence[int] = 64,
    hardware: HardwareChoice = "h100-8x",
    budget_gib: float | None = None,
    dollars_per_hour: float | None = None,
    samples: int | None = None,
    limit: int = 100,
    timeout_s: float = 600,
    whole: int | None = 3,
    **params: Any,
) -> SearchResult:
    """Simulate every combination of these values, and rank those that fit by the time of a step.

    Args:
        program: as for ``simulate``.
        world_size: how many ranks, or several numbers of them in a list.
        hardware: the kind of hosts, by name or as ``Hardware``; several in a list are reckoned for
            the same simulations.
        budget_gib: what a rank may take of its device, in GiB; by default all that the device has.
        dollars_per_hour: what a device costs in an hour; None leaves dollars out.
        samples: of all ranks in a step, shared out as the program's ``batch``; by default one for
            each of the most ranks. Where ``batch`` is given, that is taken instead, for every
            candidate.
        limit: more candidates than that are refused, before anything starts.
        timeout_s: of each simulation.
        whole: how many of the best that fit each kind of hosts are simulated with all their blocks;
            None simulates all so. The others are continued from a few blocks where there are many
            and the program says that they are alike, by ``Config.ALIKE``, the parameter that counts
            them, and ``Config.blocks()``.
        **params: parameters of the program. A list holds values to try, anything else is one value.
            For those that are not given, ``Config.CANDIDATES`` of the program may say what to try.

    Returns:
        All candidates; where the program refuses one, or it fails, its row says why. It is kept in
        ``.folder``.

    Raises:
        ParameterError: an argument is wrong, the program accepts no candidate, or there are too
            many.
        KeyboardInterrupt: an interrupt; the message says where the results so far are kept.
    """
    if whole is not None:
        whole = require_positive(
            "whole",
            whole,
            int,
            "not a number of candidates: give an int of at least 1, or None for all",
        )
    machines = [resolve_hardware(each) for each in as_list(hardware)]
    config_class = config.read_config(find_program(program)[0])
    to_try = getattr(config_class, "CANDIDATES", {}) | {"world_size": world_size} | params
    values = {name: as_list(each) for name, each in to_try.items()}
    asked = argument_combinations(values, {})
    check_candidate_count(values, len(asked), limit)
    if "batch" in params or not hasattr(config_class, "batch"):
        samples = None
    elif samples is None:
        samples = max(values["world_size"])
    checked = [check_candidate(program, one, samples, machines, timeout_s) for one in asked]
    varied = [name for name, each in values.items() if len(each) > 1 and name != "world_size"]
    candidates = [candidate for candidate, _ in checked]
    found = SearchResult(Path(program).stem, varied, candidates, budget_gib, dollars_per_hour)
    return run_search(found, [simulation for _, simulation in checked], machines, whole)


def check_candidate_count(values: Mapping[str, Sequence[Any]], count: int, limit: int) -> None:
    """Raise ParameterError where there are more candidates than the limit, or none."""
    require_positive("limit", limit, int, "not a number of candidates: give an int of at least 1")
    if not 0 < count <= limit:
        product = " x ".join(
            f"{len(each)} {name}" for name, each in values.items() if len(each) != 1
        )
        rule = f"{count} candidates, but 1 to {limit} are allowed: change the lists, or limit"
        raise ParameterError(f"{product} = {rule}")


def run_search(
    found: SearchResult,
    simulations: Sequence[SimulationRequest | None],
    machines: Sequence[Hardware],
    whole: int | None,
) -> SearchResult:
    """Simulate what was accepted, and keep what is known in a folder after each of them."""
    accepted = {place: simulation for place, simulation in enumerate(simulations) if simulation}
    if not accepted:
        raise ParameterError(
            f"the program accepts no candidate; of the first it says: {found.candidates[0].reason}"
        )
    found = replace(
        found, candidates=list(found.candidates), folder=make_search_folder(found.program)
    )
    deep = [
        place for place in accepted if found.candidates[place].blocks > MAX_BLOCKS_TO_SIMULATE_WHOLE
    ]
    small = (
        {place: make_small_requests(accepted[place]) for place in deep}
        if whole and len(deep) > whole
        else {}
    )
    first = [
        (place, few, one)
        for place in accepted
        for few, one in (small.get(place) or {0: accepted[place]}).items()
    ]
    try:
        simulate_candidates(found, first, machines)
        while whole and (places := candidates_to_simulate_whole(found, whole)):
            simulate_candidates(found, [(place, 0, accepted[place]) for place in places], machines)
    except KeyboardInterrupt:
        kept = f"labkit.SearchResult.load({str(found.folder)!r})"
        raise KeyboardInterrupt(f"interrupted; what was simulated is kept: {kept}") from None
    # replace() builds the table again, which is cached.
    return replace(found)


def simulate_candidates(
    found: SearchResult,
    asked: Sequence[tuple[int, int, SimulationRequest]],
    machines: Sequence[Hardware],
) -> None:
    """Simulate each for the candidate at its place: with a few of its blocks, or with all where
    that number is 0.
    """
    candidates = found.candidates
    assert isinstance(candidates, list)
    small: dict[int, dict[int, Candidate]] = {}

    def update_candidate(index: int, outcome: SimulationOutcome) -> str:
        place, few, _ = asked[index]
        before, now = (
            candidates[place],
            candidate_with_outcome(candidates[place], outcome, machines),
        )
        if few:
            pair = small.setdefault(place, {})
            pair[few] = now
            now = extrapolate_candidate(pair) if len(pair) == len(SMALL_BLOCK_COUNTS) else before
        elif before.continued_from and not now.reason:
            now = replace(now, note=extrapolation_error_text(before, now))
        candidates[place] = now
        found.save()
        return replace(found).best_so_far_text()

    simulate_many(
        [simulation for *_, simulation in asked], f"plan of {found.program}", update_candidate
    )


def candidate_with_outcome(
    candidate: Candidate, outcome: SimulationOutcome, machines: Sequence[Hardware]
) -> Candidate:
    """The candidate with what its simulation says."""
    candidate = replace(candidate, continued_from=[], note="")
    try:
        if not isinstance(outcome, RunResult):
            raise outcome
        sizes = {
            name: int(outcome.value(f"{value}_bytes")) for name, value in SIZE_VALUE_NAMES.items()
        }
        sizes["ahead"] = largest_prefetch_bytes(outcome)
        peak_in = " ".join(filter(None, peak_phase_and_block(outcome)))
        times = {machine.name: estimate_times(outcome, machine) for machine in machines}
    # The simulation failed, reported no memory, or refused these numbers.
    except (LabError, ValueError) as error:
        return replace(candidate, reason=str(error).partition("\n")[0])
    return replace(
        candidate, reason="", folder=str(outcome.folder), sizes=sizes, peak_in=peak_in, times=times
    )


def estimate_times(result: RunResult, machine: Hardware) -> dict[str, float]:
    """What is reckoned for a kind of hosts, and the memory that it has."""
    step = estimate_rank_step(result, machine)
    times = {
        "step_s": step.time.step_s,
        "compute_s": step.time.compute_s,
        "exposed_s": step.time.exposed_s,
    }
    return times | {"mfu": step.model_flops_share, "memory_bytes": step.hardware.memory_bytes}


def as_list(value: Any) -> list[Any]:
    """The values to try."""
    return list(value) if isinstance(value, list | range) else [value]


def make_search_folder(program: str | Path) -> Path:
    """A new folder for a plan, among the runs. Raises LabError where it cannot be made."""
    folder = runs_folder() / f"plan-{make_run_name(Path(program).stem)}"
    try:
        private_files.make_private_folder(folder.parent)
        folder.mkdir(mode=private_files.FOLDER_MODE)
    except OSError as error:
        fix = "set LABKIT_RUNS to a folder that can be written"
        raise LabError(f"cannot write to {folder.parent} ({error.strerror}): {fix}") from error
    return folder


def check_candidate(
    program: str | Path,
    one: Mapping[str, Any],
    samples: int | None,
    machines: Sequence[Hardware],
    timeout_s: float,
) -> tuple[Candidate, SimulationRequest | None]:
    """A candidate, and its simulation where the program accepts it and its ranks fill hosts."""
    world_size, params = (
        one["world_size"],
        {name: value for name, value in one.items() if name != "world_size"},
    )
    config_class = config.read_config(find_program(program)[0])
    try:
        if samples is not None:
            lines = world_size // params.get("tp", getattr(config_class, "tp", 1))
            params["batch"] = even_share(
                samples, max(1, lines * params.get("accumulate", 1)), "samples ="
            )
        for machine in machines:
            ranks_on_each_host(world_size, machine.devices, machine)
        how = {
            "world_size": world_size,
            "hardware": machines[0],
            "timeout_s": timeout_s,
            "warm": True,
        }
        simulation = make_simulation_request(program, **how, **params)
    except ValueError as error:
        return Candidate(world_size, params, samples, reason=str(error)), None
    made = config.build_config(config_class, params) if config_class else None
    tokens = made.tokens() if made and hasattr(made, "tokens") else None
    blocks = made.blocks() if made and hasattr(made, "ALIKE") else 0
    return Candidate(world_size, params, samples, tokens, blocks=blocks), simulation


def largest_fitting_value(
    parameter: str,
    program: str | Path = "decoder",
    *,
    world_size: int = 64,
    hardware: str | Hardware = "h100-8x",
    budget_gib: float | None = None,
    at_most: int = 2**20,
    step: int = 1,
    **params: Any,
) -> int:
    """The largest value of a parameter with which a rank fits, such as ``batch`` or ``sequence``.

    It is doubled until nothing fits, and then the gap is halved: some ten simulations, one after
    another.

    Args:
        parameter: a parameter of the program with which memory grows.
        program: as for ``simulate``.
        world_size: how many ranks.
        hardware: the kind of hosts.
        budget_gib: what a rank may take of its device, in GiB; by default all that the device has.
        at_most: larger values are not tried.
        step: only multiples of this are.
        **params: other parameters of the program.

    Returns:
        The value; 0 where not even the smallest fits.
    """
    machine = resolve_hardware(hardware)
    budget_gib = budget_gib or machine.memory_bytes / GIB

    def can_fit(steps: int) -> bool:
        how: dict[str, Any] = params | {parameter: steps * step}
        return bool(
            memory_fit(
                simulate(program, world_size=world_size, hardware=machine, warm=True, **how),
                budget_gib,
            )
        )

    low, high = 0, 1
    while high * step <= at_most and can_fit(high):
        low, high = high, 2 * high
    high = min(high, at_most // step + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if can_fit(middle) else (low, middle)
    return low * step
