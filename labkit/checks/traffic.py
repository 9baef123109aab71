"""Compare what a rank sent with what an exercise needs."""

from collections.abc import Mapping, Sequence

from labkit.checks.judge import expect

# Calls and bytes by collective, as from GroupTraffic.totals.
Totals = Mapping[str, Sequence[int]]


def expect_traffic(sent: Totals, right: Totals, said: str, hint: str = "") -> None:
    """Raise WrongAnswer unless a rank made these calls, with these bytes, and no others."""
    is_right = {name: [*each] for name, each in sent.items()} == right
    expect(is_right, f"{said} {traffic_text(sent)}", traffic_text(right), hint)


def traffic_text(totals: Totals) -> str:
    """Return such as "1 all_reduce of 48 bytes and 2 broadcast of 96 bytes"."""
    each = [f"{calls} {name} of {size:,} bytes" for name, (calls, size) in sorted(totals.items())]
    return " and ".join(each) or "nothing"
