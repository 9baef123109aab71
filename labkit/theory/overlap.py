"""Find the parts of transfers on a time line that no other work hides."""

from collections.abc import Iterable, Iterator, Sequence


def uncovered_in_turn(
    stretches: Sequence[tuple[float, float]], covers: Iterable[tuple[float, float]]
) -> Iterator[tuple[int, float, float]]:
    """Yield (index, start, end) of the parts outside ``covers`` and outside earlier intervals."""
    covered = list(covers)
    for index, (start, end) in enumerate(stretches):
        for cover_start, cover_end in sorted(covered):
            if start < min(cover_start, end):
                yield index, start, min(cover_start, end)
            start = max(start, cover_end)
        if start < end:
            yield index, start, end
        covered.append(stretches[index])
