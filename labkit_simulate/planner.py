"""Search meshes, wrapping, checkpointing and precision: simulate all candidates and rank them.

    found = labkit.plan(model="llama_2_7b", sequence=4096, world_size=64, hardware="h100-8x",
                        budget_gib=75)
    found              # those that fit, the fastest first, and why the others do not
    found.best         # the row of the first of them
    found.frame        # all candidates, a row each

Memory is simulated to the byte, and step time is estimated for a kind of host. All candidates train
on the same samples per step, so that their step times compare. Of deep models with equal blocks,
only the best are simulated whole; the others are extrapolated from a few blocks (extrapolate.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
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
from labkit_simulate.estimate import (
    StepEvents,
    estimate_rank_step,
    ranks_on_each_host,
    read_events,
    resolve_hardware,
)
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
    """Simulate every combination of these values, and rank those that fit by step time.

    Args:
        program: as for ``simulate``.
        world_size: number of ranks, or a list of numbers.
        hardware: kind of hosts by name or as ``Hardware``; several in a list are estimated from the
            same simulations.
        budget_gib: memory of a device that a rank may use, in GiB; by default all of it.
        dollars_per_hour: price of a device; None omits dollars.
        samples: of all ranks in a step, divided into the program's ``batch``; by default one per
            rank of the largest world. If ``batch`` is given, every candidate takes that instead.
        limit: refuse more candidates than this before anything starts.
        timeout_s: of each simulation.
        whole: how many of the best candidates per kind of hosts are simulated with all blocks; None
            simulates all. The others are extrapolated from a few blocks, if the program says by
            ``Config.ALIKE``, the parameter that counts them, and ``Config.blocks()`` that its
            blocks are equal.
        **params: parameters of the program; a list holds values to try. ``Config.CANDIDATES`` of
            the program may list values for parameters that are not given.

    Returns:
        All candidates, stored in ``.folder``; the row of one that was refused or failed says why.

    Raises:
        ParameterError: an argument is wrong, the program accepts no candidate, or there are too
            many.
        KeyboardInterrupt: an interrupt; the message says where the results so far are stored.
    """
    if whole is not None:
        whole = require_positive("whole", whole, int, "number of candidates (None means all)")
    for name, number, unit in (
        ("budget_gib", budget_gib, "GiB"),
        ("dollars_per_hour", dollars_per_hour, "dollars"),
    ):
        if number is not None and not (is_number(number) and 0 < number < math.inf):
            raise ParameterError(f"{name} = {number!r}: give a positive number of {unit}, or None")
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
    return run_search(found, [request for _, request in checked], machines, whole)


def is_number(value: Any) -> bool:
    """Tell whether a value is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def as_list(value: Any) -> list[Any]:
    """Return the values to try."""
    return list(value) if isinstance(value, list | range) else [value]


def check_candidate_count(values: Mapping[str, Sequence[Any]], count: int, limit: int) -> None:
    """Raise ParameterError if there are no candidates, or more than the limit."""
    require_positive("limit", limit, int, "number of candidates")
    if not 0 < count <= limit:
        factors = [f"{len(each)} {name}" for name, each in values.items() if len(each) != 1]
        raise ParameterError(
            f"{' x '.join(factors)} = {count} candidates, but 1 to {limit} are allowed: change the"
            " lists, or limit"
        )


def check_candidate(
    program: str | Path,
    values: Mapping[str, Any],
    samples: int | None,
    machines: Sequence[Hardware],
    timeout_s: float,
) -> tuple[Candidate, SimulationRequest | None]:
    """Return a candidate, and its request if the program accepts it and its ranks fill hosts."""
    params = dict(values)
    world_size = params.pop("world_size")
    config_class = config.read_config(find_program(program)[0])
    try:
        if samples is not None:
            replicas = world_size // params.get("tp", getattr(config_class, "tp", 1))
            shares = max(1, replicas * params.get("accumulate", 1))
            params["batch"] = even_share(samples, shares, "samples =")
        for machine in machines:
            ranks_on_each_host(world_size, machine.devices, machine)
        request = make_simulation_request(
            program,
            world_size=world_size,
            hardware=machines[0],
            timeout_s=timeout_s,
            warm=True,
            **params,
        )
    except ValueError as error:
        return Candidate(world_size, params, samples, reason=str(error)), None
    made = config.build_config(config_class, params) if config_class else None
    count_tokens = getattr(made, "tokens", None)
    tokens = count_tokens() if callable(count_tokens) else None
    blocks = made.blocks() if made and hasattr(made, "ALIKE") else 0
    return Candidate(world_size, params, samples, tokens, blocks=blocks), request


def run_search(
    found: SearchResult,
    requests: Sequence[SimulationRequest | None],
    machines: Sequence[Hardware],
    whole: int | None,
) -> SearchResult:
    """Simulate the accepted candidates, and store the results in a folder after each."""
    accepted = {place: request for place, request in enumerate(requests) if request}
    if not accepted:
        raise ParameterError(
            f"the program accepts no candidate; of the first it says: {found.candidates[0].reason}"
        )
    folder = make_search_folder(found.program)
    found = replace(found, candidates=list(found.candidates), folder=folder)
    deep = [
        place for place in accepted if found.candidates[place].blocks > MAX_BLOCKS_TO_SIMULATE_WHOLE
    ]
    small = {}
    if whole and len(deep) > whole:
        small = {place: make_small_requests(accepted[place]) for place in deep}
    first = [
        (place, blocks, request)
        for place in accepted
        for blocks, request in (small.get(place) or {0: accepted[place]}).items()
    ]
    try:
        simulate_candidates(found, first, machines)
        while whole and (places := candidates_to_simulate_whole(found, whole)):
            simulate_candidates(found, [(place, 0, accepted[place]) for place in places], machines)
    except KeyboardInterrupt:
        kept = f"labkit.SearchResult.load({str(found.folder)!r})"
        raise KeyboardInterrupt(f"interrupted; what was simulated is kept: {kept}") from None
    # replace() builds the cached table again.
    return replace(found)


def simulate_candidates(
    found: SearchResult,
    asked: Sequence[tuple[int, int, SimulationRequest]],
    machines: Sequence[Hardware],
) -> None:
    """Run requests (index of the candidate, number of blocks or 0 for all, request)."""
    candidates = found.candidates
    assert isinstance(candidates, list)
    small: dict[int, dict[int, Candidate]] = {}

    def update_candidate(index: int, outcome: SimulationOutcome) -> str:
        place, blocks, _ = asked[index]
        before = candidates[place]
        now = candidate_with_outcome(before, outcome, machines)
        if blocks:
            pair = small.setdefault(place, {})
            pair[blocks] = now
            now = extrapolate_candidate(pair) if len(pair) == len(SMALL_BLOCK_COUNTS) else before
        elif before.continued_from and not now.reason:
            now = replace(now, note=extrapolation_error_text(before, now))
        candidates[place] = now
        found.save()
        return replace(found).best_so_far_text()

    requests = [request for *_, request in asked]
    simulate_many(requests, f"plan of {found.program}", update_candidate)


def candidate_with_outcome(
    candidate: Candidate, outcome: SimulationOutcome, machines: Sequence[Hardware]
) -> Candidate:
    """Return the candidate with the results of its simulation."""
    candidate = replace(candidate, continued_from=[], note="")
    try:
        if not isinstance(outcome, RunResult):
            raise outcome
        sizes = {
            "peak": int(outcome.value("peak_total_bytes")),
            "reserved": int(outcome.value("gpu_reserved_bytes")),
            "ahead": largest_prefetch_bytes(outcome),
        }
        peak_in = " ".join(filter(None, peak_phase_and_block(outcome)))
        events = read_events(outcome)
        times = {machine.name: estimate_times(outcome, machine, events) for machine in machines}
    # The simulation failed, reported no memory, or the hardware has no rate for a dtype.
    except (LabError, ValueError) as error:
        return replace(candidate, reason=str(error).partition("\n")[0])
    return replace(
        candidate, reason="", folder=str(outcome.folder), sizes=sizes, peak_in=peak_in, times=times
    )


def estimate_times(result: RunResult, machine: Hardware, events: StepEvents) -> dict[str, float]:
    """Return the estimates of a step on a kind of hosts, and its memory."""
    step = estimate_rank_step(result, machine, events=events)
    return {
        "step_s": step.time.step_s,
        "step_low_s": step.low_s,
        "step_high_s": step.high_s,
        "compute_s": step.time.compute_s,
        "exposed_s": step.time.exposed_s,
        "mfu": step.model_flops_share,
        "memory_bytes": step.hardware.memory_bytes,
    }


def make_search_folder(program: str) -> Path:
    """Create a folder for a search among the runs; raise LabError if that is impossible."""
    folder = runs_folder() / f"plan-{make_run_name(program)}"
    try:
        private_files.make_private_folder(folder.parent)
        folder.mkdir(mode=private_files.FOLDER_MODE)
    except OSError as error:
        fix = "set LABKIT_RUNS to a folder that can be written"
        raise LabError(f"cannot write to {folder.parent} ({error.strerror}): {fix}") from error
    return folder


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
    """Search the largest value of a parameter, such as ``batch``, with which a rank fits.

    The value is doubled until nothing fits, then the gap is halved: about ten simulations.

    Args:
        parameter: a parameter of the program with which memory grows.
        program: as for ``simulate``.
        world_size: number of ranks.
        hardware: kind of hosts.
        budget_gib: memory of a device that a rank may use, in GiB; by default all of it.
        at_most: the largest value to try.
        step: try only multiples of this.
        **params: other parameters of the program.

    Returns:
        The value; 0 if not even the smallest fits.
    """
    machine = resolve_hardware(hardware)
    budget_gib = budget_gib or machine.memory_bytes / GIB

    def can_fit(steps: int) -> bool:
        chosen: dict[str, Any] = params | {parameter: steps * step}
        result = simulate(program, world_size=world_size, hardware=machine, warm=True, **chosen)
        return bool(memory_fit(result, budget_gib))

    low, high = 0, 1
    while high * step <= at_most and can_fit(high):
        low, high = high, 2 * high
    high = min(high, at_most // step + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if can_fit(middle) else (low, middle)
    return low * step
