"""Find the parts of transfers on a time line that no other work hides."""

from collections.abc import Iterable, Iterator, Sequence


def uncovered(
    start: float, end: float, covers: Iterable[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yield the parts of an interval outside ``covers``, which are ordered by start."""
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
    """Yield (index, start, end) of the parts outside ``covers`` and outside earlier intervals."""
    covered = list(covers)
    for place, stretch in enumerate(stretches):
        yield from ((place, *part) for part in uncovered(*stretch, sorted(covered)))
        covered.append(stretch)
