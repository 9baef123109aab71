"""Estimate what collectives cost, from their bytes and the network's latency and bandwidth.

    time of n messages of b bytes in total = n alpha + b beta

The bytes *handed to the call* are those of the tensor that a rank gives to a collective. The bytes
*on the wire* leave the rank; they follow from the first and the number of ranks, assuming a ring.
Source: Hockney, "The communication challenge for MPP", 1994.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import mul


def all_reduce_bytes(elements: int, element_bytes: int = 4) -> int:
    """Return the bytes that a rank hands to an all-reduce: the whole tensor, for any world size."""
    return elements * element_bytes


WIRE_FRACTIONS: Mapping[str, Callable[[int], tuple[int, int]]] = {
    # A reduce-scatter followed by an all-gather.
    "all_reduce": lambda ranks: (2 * (ranks - 1), ranks),
    "reduce_scatter": lambda ranks: (ranks - 1, ranks),
    # A rank hands in one shard of the result, and shards travel through the whole ring.
    "all_gather": lambda ranks: (ranks - 1, 1),
    "all_to_all": lambda ranks: (ranks - 1, ranks),
    # Every rank but the last passes the tensor on: this is the mean over the ranks.
    "broadcast": lambda ranks: (ranks - 1, ranks),
    "reduce": lambda ranks: (ranks - 1, ranks),
    "send": lambda ranks: (1, 1),
    "recv": lambda ranks: (0, 1),
}
"""Bytes on the wire per byte handed to the call, as (numerator, denominator), by collective."""


def collective_wire_bytes(collective: str, handed_bytes: float, ranks: int) -> float:
    """Return the bytes that leave a rank during one collective in a ring, or during one message.

    No algorithm sends less for an all-reduce. Source: Patarasuk and Yuan, "Bandwidth optimal all-
    reduce algorithms for clusters of workstations", 2009.
    """
    if collective not in WIRE_FRACTIONS or ranks < 1:
        known = ", ".join(WIRE_FRACTIONS)
        raise ValueError(f"{collective} of {ranks} ranks: take 1 rank or more, and one of {known}")
    numerator, denominator = WIRE_FRACTIONS[collective](ranks)
    return handed_bytes * numerator / denominator


@dataclass(frozen=True)
class AlphaBeta:
    """Latency of a message in seconds, and seconds per byte, for one kind of message."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, total_bytes: float, messages: int = 1) -> float:
        """Return the time to send ``total_bytes`` in equal messages, one after another."""
        return messages * (self.alpha_s + total_bytes / messages * self.beta_s_per_byte)

    @property
    def break_even_bytes(self) -> float:
        """The size of a message whose bytes take as long as its latency; inf if beta is 0."""
        return self.alpha_s / self.beta_s_per_byte if self.beta_s_per_byte else math.inf


def ring_step_count(collective: str, ranks: int) -> int:
    """Return a rank's number of successive messages for a collective in a ring."""
    if ranks == 1:
        return 0
    return {"all_reduce": 2 * (ranks - 1), "send": 1, "recv": 1}.get(collective, ranks - 1)


def ring_s(
    collective: str,
    handed_bytes: float,
    ranks: int,
    *,
    inside: AlphaBeta,
    between: AlphaBeta,
    hosts: int = 1,
) -> float:
    """Return the seconds of a collective in a ring of ranks that are spread over hosts.

    Every step between hosts takes their latency, every other that of ``inside``; the slower of the
    two links passes the bytes, because the steps of a ring happen at the same time.
    """
    crossing = ring_step_count(collective, hosts)
    latency_s = (ring_step_count(collective, ranks) - crossing) * inside.alpha_s
    slowest = max(inside.beta_s_per_byte, between.beta_s_per_byte if hosts > 1 else 0.0)
    leaving = collective_wire_bytes(collective, handed_bytes, ranks)
    return latency_s + crossing * between.alpha_s + leaving * slowest


def fit_alpha_beta(times_s: Mapping[int, float]) -> AlphaBeta:
    """Fit alpha and beta by least squares to median seconds by message size, neither negative."""
    if len(times_s) < 2:
        raise ValueError(f"{len(times_s)} sizes cannot tell latency from bytes: measure at least 2")
    for size, time_s in times_s.items():
        if size <= 0 or time_s <= 0:
            raise ValueError(f"{size} bytes in {time_s} s: a size and a time must be positive")
    # Minimise the sum of (alpha / time + beta size / time - 1)^2. The error is relative because the
    # absolute error of the largest message would decide alone.
    per_alpha = [1 / time_s for time_s in times_s.values()]
    per_beta = [size / time_s for size, time_s in times_s.items()]
    aa = sum(map(mul, per_alpha, per_alpha))
    ab = sum(map(mul, per_alpha, per_beta))
    bb = sum(map(mul, per_beta, per_beta))
    determinant = aa * bb - ab * ab
    alpha_s = (sum(per_alpha) * bb - sum(per_beta) * ab) / determinant
    beta = (sum(per_beta) * aa - sum(per_alpha) * ab) / determinant
    # The best fit that is not negative has the other number alone.
    if alpha_s < 0:
        return AlphaBeta(0.0, sum(per_beta) / bb)
    return AlphaBeta(alpha_s, beta) if beta >= 0 else AlphaBeta(sum(per_alpha) / aa, 0.0)
