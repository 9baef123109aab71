"""What can be told of a run that broke: who began it, where ranks part, and how to share work
evenly.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

SIGTERM_STATUS = -15
CONNECTION_LOST_TEXT = "Connection closed by peer"


def first_failed_rank(ends: Sequence[Mapping[str, Any]]) -> int:
    """The rank that failed first by itself.

    Args:
        ends: of each rank its ``rank``; its exit ``status``, negative for a signal; the ``time`` of
            its end, in seconds; its ``error`` as text, "" for none.

    Raises:
        ValueError: no rank failed by itself.
    """
    own = [
        end
        for end in ends
        if end["status"] not in (0, SIGTERM_STATUS)
        and CONNECTION_LOST_TEXT not in str(end.get("error", ""))
    ]
    if not own:
        raise ValueError(
            "no rank failed by itself: each ended well, was ended, or lost a connection"
        )
    return int(min(own, key=lambda end: end["time"])["rank"])


def first_diverging_call(logs: Sequence[Sequence[Any]]) -> tuple[int, list[int]] | None:
    """The first place at which ranks made different calls, and the ranks that were fewest in
    theirs; None for none.

    Args:
        logs: of each rank its calls, in order. A rank whose log is shorter made no call there.
    """
    for place, calls in enumerate(zip_longest(*logs)):
        votes = Counter(calls)
        if len(votes) > 1:
            usual = votes.most_common(1)[0][0]
            return place, [rank for rank, each in enumerate(calls) if each != usual]
    return None


def balance_samples(lengths: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices of samples for each rank, so that all have about as much to do.

    The longest first, each to the rank that has least so far: at most 4/3 of what is possible.
    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        least = work.index(min(work))
        dealt[least].append(index)
        work[least] += lengths[index]
    return dealt


def break_even_slowdown(
    hours_between: float, hours_lost: float, hours_lost_with_aid: float
) -> float:
    """The slowdown, as a part of the step, up to which an aid pays that shortens the search after
    each failure.
    """
    return (hours_lost - hours_lost_with_aid) / hours_between


def is_only_rounding(apart32: float, apart64: float) -> bool:
    """Whether a difference in float32 is rounding: in float64, with 29 bits more, a millionth of it
    is left at most.
    """
    return apart64 <= apart32 / 1e6
