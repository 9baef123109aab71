"""Small rules of lab 6: how many hosts a model needs, which groups cross hosts, a ring, two
streams, how a run scales.

Numbers in, numbers out. The whole models are ``theory.step_time`` and ``theory.transformer``; a
test holds these rules against them.
"""

import math
from collections.abc import Sequence

from labkit.theory.collectives import AlphaBeta


def fewest_hosts(
    shared_bytes: float, own_bytes: float, budget_bytes: float, devices: int = 8
) -> int | None:
    """The fewest hosts on which each rank finds room; None where no number of them is enough.

    Args:
        shared_bytes: what all ranks share evenly, such as sharded parameters, gradients and
            optimizer state.
        own_bytes: what each rank holds beside its share, whatever their number, such as
            activations.
        budget_bytes: what a rank may hold.
        devices: ranks of a host.
    """
    room = budget_bytes - own_bytes
    return max(1, math.ceil(shared_bytes / (devices * room))) if room > 0 else None


def ring_s(
    shard_bytes: float, hosts: int, nproc: int, inside: AlphaBeta, between: AlphaBeta
) -> float:
    """Seconds of an all-gather in rings over hosts of ``nproc`` ranks, each with a network card of
    its own.

    A shard makes a hop to every other rank, hosts - 1 of them from host to host. The rings together
    fill all cards of a host, so its slower link decides on bytes: one rank's to its neighbour, or
    all cards together.

    Args:
        shard_bytes: what a rank brings.
        hosts: how many.
        nproc: ranks of each.
        inside: a link inside a host.
        between: that of one card.
    """
    hops, crossing = hosts * nproc - 1, hosts - 1
    latency_s = (hops - crossing) * inside.alpha_s + crossing * between.alpha_s
    card = between.beta_s_per_byte / nproc if hosts > 1 else 0.0
    return latency_s + hops * shard_bytes * max(inside.beta_s_per_byte, card)


def forward_s(gathers_s: Sequence[float], computes_s: Sequence[float]) -> float:
    """When a forward pass is over in which each unit is gathered while the one before it computes.

    A unit computes once it is gathered and the unit before it has computed. It is gathered once the
    unit before it is gathered, and the unit before that has computed: there is room for two.

    Args:
        gathers_s: of each unit, in order.
        computes_s: likewise.
    """
    gathered, ends = 0.0, [0.0, 0.0]
    for gather_s, compute_s in zip(gathers_s, computes_s, strict=True):
        gathered = max(gathered, ends[-2]) + gather_s
        ends.append(max(ends[-1], gathered) + compute_s)
    return ends[-1]


def hosts_spanned(size: int, stride: int, nproc: int) -> int:
    """On how many hosts the ranks of a group are: 0, stride, 2 stride, ... of a world that fills
    host after host.

    Args:
        size: of the group.
        stride: from one of its ranks to the next: the product of the mesh's axes behind it.
        nproc: ranks of a host.
    """
    return len({place * stride // nproc for place in range(size)})


def efficiencies(ranks: Sequence[int], tokens_per_s: Sequence[float]) -> list[float]:
    """The throughput of a rank at each size, as a part of that at the first.

    Args:
        ranks: how many, for each measurement.
        tokens_per_s: of all of them together.
    """
    each = [total / count for count, total in zip(ranks, tokens_per_s, strict=True)]
    return [value / each[0] for value in each]
