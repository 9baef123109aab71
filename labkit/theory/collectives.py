"""Estimate what collectives cost, from their bytes and the network's latency and bandwidth.

    time of n messages of b bytes in total = n alpha + b beta

Source: Hockney, "The communication challenge for MPP", 1994.

Bytes are counted in two places. The bytes *handed to the call* are those of the tensor that a rank
gives to a collective. The bytes *on the wire* are those that leave the rank; they follow from the
first and the number of ranks, assuming a ring.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


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

    A ring of n ranks sends (n - 1) / n of a tensor for a reduce-scatter and as much for an
    all-gather. An all-reduce is both, and no algorithm sends less. Source: Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    Args:
        collective: a key of ``WIRE_FRACTIONS``.
        handed_bytes: size of the tensor that this rank hands to the call.
        ranks: size of the group.

    Raises:
        ValueError: the collective is unknown, or the group is empty.
    """
    if collective not in WIRE_FRACTIONS or ranks < 1:
        raise ValueError(
            f"{collective} of {ranks} ranks: take 1 rank or more, "
            f"and one of {', '.join(WIRE_FRACTIONS)}"
        )
    part, of = WIRE_FRACTIONS[collective](ranks)
    return handed_bytes * part / of


def message_s(payload_bytes: float, *, alpha_s: float, beta_s_per_byte: float) -> float:
    """Return the seconds that one message takes: its latency plus its bytes times beta."""
    return alpha_s + payload_bytes * beta_s_per_byte


@dataclass(frozen=True)
class AlphaBeta:
    """Latency of a message in seconds, and seconds per byte, for one kind of message."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, total_bytes: float, messages: int = 1) -> float:
        """Return the time to send ``total_bytes`` in equal messages, one after another."""
        return messages * message_s(
            total_bytes / messages, alpha_s=self.alpha_s, beta_s_per_byte=self.beta_s_per_byte
        )

    @property
    def break_even_bytes(self) -> float:
        """The size of a message whose bytes take as long as its latency; inf if beta is 0."""
        return self.alpha_s / self.beta_s_per_byte if self.beta_s_per_byte else math.inf


def fit_alpha_beta(times_s: Mapping[int, float]) -> AlphaBeta:
    """Fit alpha and beta to measured times by least squares, keeping both non-negative.

    Args:
        times_s: median seconds by message size in bytes. A mean would let one disturbed round
            bend the line.

    Raises:
        ValueError: there are fewer than two sizes, or a size or time is not positive.
    """
    if len(times_s) < 2:
        raise ValueError(f"{len(times_s)} sizes cannot tell latency from bytes: measure at least 2")
    for size, time_s in times_s.items():
        if size <= 0 or time_s <= 0:
            raise ValueError(f"{size} bytes in {time_s} s: a size and a time must be positive")
    # Minimise the sum of (alpha u + beta v - 1)^2, with u = 1 / time and v = size / time. The
    # error is relative because the absolute error of the largest message would decide alone.
    u = [1 / time_s for time_s in times_s.values()]
    v = [size / time_s for size, time_s in times_s.items()]
    uu, uv, vv = _dot_product(u, u), _dot_product(u, v), _dot_product(v, v)
    determinant = uu * vv - uv * uv
    alpha_s = (sum(u) * vv - sum(v) * uv) / determinant
    beta = (sum(v) * uu - sum(u) * uv) / determinant
    if alpha_s < 0:
        return AlphaBeta(0.0, sum(v) / vv)
    if beta < 0:
        return AlphaBeta(sum(u) / uu, 0.0)
    return AlphaBeta(alpha_s, beta)


def _dot_product(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
