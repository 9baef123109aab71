"""Intervals on a time line: which part of a transfer is not hidden behind other work."""

from collections.abc import Iterable, Iterator, Sequence


def uncovered(
    start: float, end: float, covers: Iterable[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """What is left of a stretch where ``covers``, ordered by start, do not reach."""
    for cover_start, cover_end in covers:
        if cover_start >= end:
            break
        if cover_start > start:
            yield start, cover_start
        start = max(start, cover_end)
    if start < end:
        yield start, end


def uncovered_in_turn(
    stretches: Sequence[tuple[float, float]], covers: Iterable[tuple[float, float]]
) -> Iterator[tuple[int, float, float]]:
    """What is left of each stretch where neither ``covers`` nor an earlier stretch reach: its
    place, start and end.
    """
    covered = list(covers)
    for place, stretch in enumerate(stretches):
        yield from ((place, *part) for part in uncovered(*stretch, sorted(covered)))
        covered.append(stretch)
