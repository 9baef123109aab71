"""What several hosts add: what leaves a host, whether it hides, and how often to save."""

import math


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


CARD_BYTES_PER_S = 50e9
"""Of a network card, in each direction: 400 Gbit/s."""
GPU_FLOPS_PER_S = 400e12
"""Of an H100 in good programs; see lab 0."""


def pass_ms(
    *, hosts: int, cards: int, tokens: int, gpus: int = 8, parameters: float = 8e9
) -> dict[str, tuple[float, float]]:
    """Return how many milliseconds the forward and the backward pass compute, and how long a host's
    network cards are busy in each under FSDP over all GPUs and under HSDP, without latency.

    A parameter and token take 2 operations in the forward pass and 4 in the backward pass. FSDP
    gathers in both and reduces in the backward pass; HSDP's all-reduces come in the backward pass.

    Args:
        hosts: the number of hosts.
        cards: network cards of each.
        tokens: of a step, on each GPU.
        gpus: of each host.
        parameters: of the model, in bfloat16, as are their gradients.
    """
    busy_ms = {
        name: 1e3
        * host_egress_bytes(2 * parameters, hosts, gpus, hybrid=name == "hsdp")
        / (cards * CARD_BYTES_PER_S)
        for name in ("fsdp", "hsdp")
    }
    forward_ms = 1e3 * 2 * parameters * tokens / GPU_FLOPS_PER_S
    return {
        "computing": (forward_ms, 2 * forward_ms),
        "fsdp": (busy_ms["fsdp"] / 3, 2 * busy_ms["fsdp"] / 3),
        "hsdp": (0.0, busy_ms["hsdp"]),
    }


def step_ms(*, hosts: int, cards: int, tokens: int, gpus: int = 8) -> dict[str, float]:
    """Return the milliseconds of a step under FSDP and HSDP if in each pass all bytes hide behind
    computing that can; see ``pass_ms``.
    """
    passes = pass_ms(hosts=hosts, cards=cards, tokens=tokens, gpus=gpus)
    computing = passes["computing"]
    return {
        name: sum(max(pair) for pair in zip(passes[name], computing, strict=True))
        for name in ("fsdp", "hsdp")
    }


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
