"""Find the rank that broke a run, the call at which ranks diverge, and an even split of work."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

SIGTERM_STATUS = -15
ABORT_STATUS = -6
# A rank that timed out waited for another one, so this is no error of its own either.
ECHOES = ("closed by peer", "reset by peer", "Broken pipe", "Read error", "Timed out")


def first_failed_rank(ends: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the rank that failed first by itself; an end has ``rank status time error``.

    None means that the ends do not tell: an abort may be the effect of another rank's call.
    """
    # The launcher stops the other ranks with SIGTERM, or they lose their connection.
    failed = [end for end in ends if end["status"] not in (0, SIGTERM_STATUS, ABORT_STATUS)]
    own = [end for end in failed if not any(echo in end["error"] for echo in ECHOES)]
    return min(own, key=lambda end: end["time"])["rank"] if own else None


def first_diverging_call(logs: Sequence[Sequence[Any]]) -> tuple[int, list[int]] | None:
    """Return the first index at which the ranks' calls differ, with the minority; None if equal."""
    for index, calls in enumerate(zip_longest(*logs)):
        votes = Counter(calls)
        if len(votes) > 1:
            usual = votes.most_common(1)[0][0]
            return index, [rank for rank, each in enumerate(calls) if each != usual]
    return None


def balance_samples(lengths: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the indices of each rank's samples; the largest work is at most 4/3 of the optimum."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    # Each sample, longest first, goes to the rank with the least work so far. Source: Graham,
    # "Bounds on multiprocessing timing anomalies", 1969.
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        least = work.index(min(work))
        dealt[least].append(index)
        work[least] += lengths[index]
    return dealt
