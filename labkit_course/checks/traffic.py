"""Compare what a rank sent with what an exercise needs."""

from collections.abc import Mapping, Sequence

from labkit_course.checks.judge import expect

# Calls and bytes by collective, as from GroupTraffic.totals.
Totals = Mapping[str, Sequence[int]]


def expect_traffic(sent: Totals, right: Totals, said: str, hint: str = "") -> None:
    """Raise WrongAnswer unless a rank made these calls, with these bytes, and no others."""
    besides = {name: each for name, each in sent.items() if name not in right}
    seen = f"{traffic_text(besides)} besides" if right and besides else traffic_text(sent)
    is_right = {name: [*each] for name, each in sent.items()} == right
    expect(is_right, f"{said} {seen}", traffic_text(right), hint)


def traffic_text(totals: Totals) -> str:
    """Return such as "1 all_reduce call with 48 bytes and 2 broadcast calls with 96 bytes"."""
    each = [
        f"{calls} {name} call{'s' * (calls != 1)} with {size:,} bytes"
        for name, (calls, size) in sorted(totals.items())
    ]
    return " and ".join(each) or "nothing"
