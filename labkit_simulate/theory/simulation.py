"""Rules of lab 6: hosts that a model needs, groups across hosts, a ring, two streams, scaling.

The full models are ``theory.step_time`` and ``theory.transformer``; a test compares these rules
with them.
"""

import math
from collections.abc import Sequence

from labkit.theory.collectives import AlphaBeta


def fewest_hosts(
    shared_bytes: float, own_bytes: float, budget_bytes: float, devices: int = 8
) -> int | None:
    """Return the fewest hosts on which a model fits; None if it fits on no number of hosts.

    Args:
        shared_bytes: sharded over all ranks: parameters, gradients, optimizer state.
        own_bytes: held by each rank besides, such as activations.
        budget_bytes: memory of a rank.
        devices: ranks of a host.
    """
    room = budget_bytes - own_bytes
    return max(1, math.ceil(shared_bytes / (devices * room))) if room > 0 else None


def ring_s(
    shard_bytes: float, hosts: int, nproc: int, inside: AlphaBeta, between: AlphaBeta
) -> float:
    """Return the seconds of a ring all-gather over hosts of ``nproc`` ranks, each with a card.

    A shard makes a hop to every other rank, hosts - 1 of them between hosts. The rings together
    fill all cards of a host, so bytes take as long as on the slower of two links: between two ranks
    of a host, or over all cards together.
    """
    hops, crossing = hosts * nproc - 1, hosts - 1
    latency_s = (hops - crossing) * inside.alpha_s + crossing * between.alpha_s
    card = between.beta_s_per_byte / nproc if hosts > 1 else 0.0
    return latency_s + hops * shard_bytes * max(inside.beta_s_per_byte, card)


def forward_s(gathers_s: Sequence[float], computes_s: Sequence[float]) -> float:
    """Return the seconds of a forward pass that gathers each unit while the previous one computes.

    A unit computes once it is gathered and the previous unit has computed. Its gather starts once
    the previous unit is gathered and the one before that has computed, as there is room for two.
    """
    gathered, ends = 0.0, [0.0, 0.0]
    for gather_s, compute_s in zip(gathers_s, computes_s, strict=True):
        gathered = max(gathered, ends[-2]) + gather_s
        ends.append(max(ends[-1], gathered) + compute_s)
    return ends[-1]


def hosts_spanned(size: int, stride: int, nproc: int) -> int:
    """Return the number of hosts of the group of ranks 0, stride, 2 stride, …

    The stride of a mesh axis is the product of the axes after it; a host has ``nproc`` ranks.
    """
    return len({place * stride // nproc for place in range(size)})


def efficiencies(ranks: Sequence[int], tokens_per_s: Sequence[float]) -> list[float]:
    """Return a rank's throughput relative to the first measurement, from that of all ranks."""
    each = [total / count for count, total in zip(ranks, tokens_per_s, strict=True)]
    return [value / each[0] for value in each]
