"""Extrapolate memory and time of a deep model from two simulations with few blocks.

From a few blocks on, each further one adds the same to the peak and to the step time, as long as
the peak stays at the same moment of the step. So the whole model lies on the line through two
simulations. The allocator's reserved memory does not, and is estimated.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import compress
from pathlib import Path

from labkit import config
from labkit.errors import ParameterError
from labkit.launcher.run import resolve_params
from labkit_simulate.run_simulation import SimulationRequest
from labkit_simulate.search_result import Candidate, SearchResult

SMALL_BLOCK_COUNTS = (4, 6)
"""Blocks of the two simulations: with 2, the peak of Llama 2 7B is at another moment of the
step.
"""
MAX_BLOCKS_TO_SIMULATE_WHOLE = 12
"""Models of no more blocks than that are simulated whole."""
EXTRAPOLATION_TOLERANCE = 0.01
"""Where a whole simulation differs by more from what was continued, it is said."""
NUMBER_PATTERN = re.compile(r"\d+")


def make_small_requests(whole: SimulationRequest) -> dict[int, SimulationRequest]:
    """Return the requests for few blocks, by their number; {} if the program takes no small
    model.
    """
    path = Path(whole.program_path)
    name = config.read_config(path).ALIKE  # type: ignore[union-attr]  # it has counted them
    try:
        how = {
            few: resolve_params(path, whole.params | {name: few}, whole.nproc)
            for few in SMALL_BLOCK_COUNTS
        }
    except ParameterError:
        return {}
    return {
        few: replace(whole, params=params, given_params=given, hardware=None)
        for few, (params, given) in how.items()
    }


def extrapolate_candidate(small: Mapping[int, Candidate]) -> Candidate:
    """Extrapolate a candidate to all its blocks from simulations with ``FEW`` of them.

    If their peaks are at different moments there is no line; the candidate's ``note`` says so.
    """
    few, more = (small[blocks] for blocks in SMALL_BLOCK_COUNTS)
    if few.reason or more.reason:
        return few if few.reason else more

    def extrapolate_value(low: float, high: float) -> float:
        return high + (high - low) * (more.blocks - SMALL_BLOCK_COUNTS[1]) / (
            SMALL_BLOCK_COUNTS[1] - SMALL_BLOCK_COUNTS[0]
        )

    sizes = {
        name: round(extrapolate_value(few.sizes[name], more.sizes[name]))
        for name in ("peak", "ahead")
    }
    sizes["reserved"] = round(sizes["peak"] * more.sizes["reserved"] / more.sizes["peak"])
    times = {
        name: extrapolate_times(few.times[name], more.times[name], extrapolate_value)
        for name in more.times
    }
    known = replace(
        more, folder="", sizes=sizes, times=times, continued_from=list(SMALL_BLOCK_COUNTS)
    )
    if not is_same_moment(few.peak_in, more.peak_in):
        return replace(
            known,
            note=(
                f"the peak of {SMALL_BLOCK_COUNTS[0]} blocks is in {few.peak_in}, "
                f"of {SMALL_BLOCK_COUNTS[1]} in {more.peak_in}"
            ),
        )
    numbers = map(int, NUMBER_PATTERN.findall(few.peak_in))
    peak_in = NUMBER_PATTERN.sub(
        lambda found: f"{extrapolate_value(next(numbers), int(found[0])):.0f}", more.peak_in
    )
    return replace(known, peak_in=peak_in)


def extrapolate_times(
    few: dict[str, float], more: dict[str, float], line: Callable[[float, float], float]
) -> dict[str, float]:
    """Extrapolate time and model FLOPs for a kind of hosts."""
    seconds = [name for name in more if name.endswith("_s")]
    times = {name: line(few[name], more[name]) for name in seconds}
    mfu = line(few["mfu"] * few["step_s"], more["mfu"] * more["step_s"]) / times["step_s"]
    return times | {"mfu": mfu, "memory_bytes": more["memory_bytes"]}


def is_same_moment(few: str, more: str) -> bool:
    """Tell whether two peaks are in the same block, counted from the first or the last."""
    apart = [
        int(high) - int(low)
        for low, high in zip(
            NUMBER_PATTERN.findall(few), NUMBER_PATTERN.findall(more), strict=False
        )
    ]
    return NUMBER_PATTERN.split(few) == NUMBER_PATTERN.split(more) and set(apart) <= {
        0,
        SMALL_BLOCK_COUNTS[1] - SMALL_BLOCK_COUNTS[0],
    }


def extrapolation_error_text(line: Candidate, whole: Candidate) -> str:
    """Describe how the whole simulation differs from the extrapolation; "" if they agree."""
    pairs: dict[str, tuple[float, float]] = {"peak": (line.sizes["peak"], whole.sizes["peak"])}
    pairs |= {
        f"step on {name}": (line.times[name]["step_s"], each["step_s"])
        for name, each in whole.times.items()
    }
    said = (
        f"{what} {high / low - 1:+.0%} of what was continued" for what, (low, high) in pairs.items()
    )
    apart = [abs(high / low - 1) > EXTRAPOLATION_TOLERANCE for low, high in pairs.values()]
    return next(compress(said, apart), "")


def candidates_to_simulate_whole(found: SearchResult, best: int) -> list[int]:
    """Choose the extrapolated candidates to simulate whole: the best per kind of hosts, and noted
    ones.

    The best include one that only the estimated share of the allocator keeps from fitting.
    """
    noted = {
        place for place, each in enumerate(found.candidates) if each.continued_from and each.note
    }
    if not found.hardware_names:
        return []
    # replace() builds the table again, which is cached.
    rows = replace(found).frame.query("step_s.notna()")
    spare_bytes = (rows["reserved_bytes"] - rows["peak_bytes"]).mask(rows["whole"], 0)
    may_fit = rows[rows["margin_bytes"] + spare_bytes >= 0].sort_values("step_s", kind="stable")
    first = may_fit.groupby("hardware").head(best)
    return sorted(noted | {*first.loc[~first["whole"], "candidate"]})
