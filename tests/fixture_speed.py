"""How fast the machine is at the moment, for limits in milliseconds that a slow one cannot meet."""

import time

ADDITIONS = 1_000_000
USUAL_S = 0.03
"""What so many take, in a function, on the machine on which the limits were set; outside of one it took 0.07 s."""


def slowness() -> float:
    """By how much plain Python is slower now than there; at least 1."""
    begun = time.perf_counter()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return max(1.0, (time.perf_counter() - begun) / USUAL_S)
