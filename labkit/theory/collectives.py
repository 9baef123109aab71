"""What messages cost: a latency alpha each, and beta for every byte. No torch, no ranks: numbers
in, numbers out.

    time of n messages of b bytes in all = n alpha + b beta

Source: Hockney, "The communication challenge for MPP", 1994.

Bytes are counted in two ways, and each has its name. Bytes *handed to the call* are those of the
tensor that a rank gives to a collective: ``all_reduce_bytes``. These are counted. Bytes *on the
wire* are those that leave a rank: ``all_reduce_wire_bytes``. These are computed from the first and
the size of the group, for a ring of ranks.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


def all_reduce_bytes(elements: int, element_bytes: int = 4) -> int:
    """Bytes that a rank hands to an all-reduce: the whole tensor, whatever the number of ranks."""
    return elements * element_bytes


WIRE_FRACTIONS: Mapping[str, Callable[[int], tuple[int, int]]] = {
    "all_reduce": lambda ranks: (2 * (ranks - 1), ranks),  # a reduce-scatter and an all-gather
    "reduce_scatter": lambda ranks: (ranks - 1, ranks),
    "all_gather": lambda ranks: (ranks - 1, 1),  # what is handed in is one part of what comes out
    "all_to_all": lambda ranks: (ranks - 1, ranks),  # all but the part that stays
    "broadcast": lambda ranks: (
        ranks - 1,
        ranks,
    ),  # every rank but the last passes it on: the mean over the ranks
    "reduce": lambda ranks: (ranks - 1, ranks),
    "send": lambda ranks: (1, 1),
    "recv": lambda ranks: (0, 1),
}
"""By collective or message, the part of the bytes handed to the call that leaves a rank: numerator,
denominator.
"""


def collective_wire_bytes(collective: str, handed_bytes: float, ranks: int) -> float:
    """Bytes that leave a rank for one collective or message, in a ring of these ranks.

    A ring of n sends (n - 1) / n of a tensor for its reduce-scatter, and as much for its
    all-gather. An all-reduce is both, and none can do with less. For a broadcast it is the mean
    over the ranks. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations", 2009.

    Args:
        collective: a name such as "all_reduce", see ``ON_THE_WIRE``.
        handed_bytes: of the tensor that this rank hands to the call.
        ranks: of the group.

    Raises:
        ValueError: a collective of another name, or a group of no rank.
    """
    if collective not in WIRE_FRACTIONS or ranks < 1:
        raise ValueError(
            f"{collective} of {ranks} ranks: take 1 rank or more, and one of"
            f" {', '.join(WIRE_FRACTIONS)}"
        )
    part, of = WIRE_FRACTIONS[collective](ranks)
    return handed_bytes * part / of


def message_s(payload_bytes: float, *, alpha_s: float, beta_s_per_byte: float) -> float:
    """Time of one message: latency alpha plus size times beta, seconds. Source: Hockney, 1994."""
    return alpha_s + payload_bytes * beta_s_per_byte


@dataclass(frozen=True)
class AlphaBeta:
    """The two numbers of a network, for one kind of message.

    Attributes:
        alpha_s: latency of a message, whatever its size, in seconds.
        beta_s_per_byte: what each byte adds, in seconds.
    """

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, total_bytes: float, messages: int = 1) -> float:
        """Time of ``total_bytes`` in so many equal messages, one after another."""
        one = message_s(
            total_bytes / messages, alpha_s=self.alpha_s, beta_s_per_byte=self.beta_s_per_byte
        )
        return messages * one

    @property
    def break_even_bytes(self) -> float:
        """The size of a message whose bytes take as long as its latency; infinite where bytes cost
        nothing.
        """
        return self.alpha_s / self.beta_s_per_byte if self.beta_s_per_byte else math.inf


def fit_alpha_beta(times_s: Mapping[int, float]) -> AlphaBeta:
    """Alpha and beta from measured times: least squares of the relative error, neither of them
    negative.

    The relative error counts because times span orders of magnitude: by absolute error the largest
    message alone would decide, and the latency would be what is left over.

    Args:
        times_s: seconds by size of the message in bytes; not means, since one disturbed round would
            bend the line.

    Raises:
        ValueError: fewer than two sizes, or a size or time that is not positive.
    """
    if len(times_s) < 2:
        raise ValueError(f"{len(times_s)} sizes cannot tell latency from bytes: measure at least 2")
    for size, time_s in times_s.items():
        if size <= 0 or time_s <= 0:
            raise ValueError(f"{size} bytes in {time_s} s: a size and a time must be positive")
    # Minimise the sum of (alpha u + beta v - 1)^2, with u = 1 / time and v = size / time.
    u = [1 / time_s for time_s in times_s.values()]
    v = [size / time_s for size, time_s in times_s.items()]
    uu, uv, vv = _dot_product(u, u), _dot_product(u, v), _dot_product(v, v)
    determinant = uu * vv - uv * uv
    alpha_s, beta = (
        (sum(u) * vv - sum(v) * uv) / determinant,
        (sum(v) * uu - sum(u) * uv) / determinant,
    )
    if alpha_s < 0:
        return AlphaBeta(0.0, sum(v) / vv)
    if beta < 0:
        return AlphaBeta(sum(u) / uu, 0.0)
    return AlphaBeta(alpha_s, beta)


def _dot_product(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
