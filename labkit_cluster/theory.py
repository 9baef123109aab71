"""What several hosts add: who is where, what leaves a host, and how often to save."""

import math


def host_and_local_rank(rank: int, nproc: int) -> tuple[int, int]:
    """Return the index of a rank's host and its local rank there, if torchrun starts ``nproc``
    ranks on each host.
    """
    return divmod(rank, nproc)


def host_egress_bytes(parameter_bytes: float, hosts: int, nproc: int, *, hybrid: bool) -> float:
    """Return the bytes on the wire that leave one host in a training step under FSDP, with each
    unit gathered twice.

    Rings follow the order of the ranks, so each of them leaves a host once. Sharded over all ranks,
    one ring does two all-gathers and a reduce-scatter of all parameters. Under HSDP they stay
    inside the hosts, and ``nproc`` rings, one for each local rank, do an all-reduce of a shard.
    Source: ``collectives.collective_wire_bytes``.

    Args:
        parameter_bytes: of the model; its gradients have as many.
        hosts: the number of hosts.
        nproc: ranks of each.
        hybrid: whether parameters are sharded inside a host, and replicated across hosts.
    """
    if hybrid:
        return 2 * (hosts - 1) / hosts * parameter_bytes
    ranks = hosts * nproc
    return 3 * (ranks - 1) / ranks * parameter_bytes if hosts > 1 else 0.0


def checkpoint_interval_s(save_s: float, between_failures_s: float) -> float:
    """Return how long to train between two saves so that the least time is lost, for saves that are
    short compared with the time between failures.

    Source: Young, "A first order approximation to the optimum checkpoint interval", 1974.

    Args:
        save_s: time of one save, during which no training is done.
        between_failures_s: mean time between two failures.
    """
    return math.sqrt(2 * save_s * between_failures_s)


def checkpoint_overhead_share(interval_s: float, save_s: float, between_failures_s: float) -> float:
    """Return the share of time lost to saves and repeated steps: one save per interval, half an
    interval per failure.
    """
    return save_s / interval_s + interval_s / 2 / between_failures_s
