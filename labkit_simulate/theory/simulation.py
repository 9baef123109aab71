"""Rules of labs 6 and 6b: hosts that a model needs, two streams, choices among networks.

The full models are ``theory.step_time`` and ``theory.transformer``; a test compares these rules
with them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from labkit_simulate.theory.hardware import Hardware
from labkit_simulate.theory.transformer import LLAMA_2_7B, TrainingSetup

ALLOCATOR_FACTOR, RESERVED_GIB = 1.1, 1.8
"""The most that a GPU's allocator takes, as a multiple of the tensors, and what lies beside it."""


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


def backward_s(
    gathers_s: Sequence[float], computes_s: Sequence[float], reduces_s: Sequence[float]
) -> float:
    """Return the seconds of a backward pass, whose gathers and reduce-scatters share a stream.

    The stream's order is gather 0, gather 1, reduce 0, gather 2, reduce 1, gather 3 and so on. A
    unit computes once it is gathered and the previous unit has computed; its reduce-scatter starts
    once it has computed.

    Args:
        gathers_s: seconds of each unit's gather, in the order of the backward pass.
        computes_s: the same of its computation.
        reduces_s: the same of its reduce-scatter.
    """
    gathered = sent = gathers_s[0]
    computed = 0.0
    for compute_s, reduce_s, next_s in zip(
        computes_s, reduces_s, [*gathers_s[1:], 0.0], strict=True
    ):
        sent += next_s
        computed = max(computed, gathered) + compute_s
        gathered, sent = sent, max(sent, computed) + reduce_s
    return sent


def unbeaten(steps: Mapping[str, Mapping[str, float]], margin: float = 0.0) -> list[str]:
    """Return the ways that are left when each one is dropped that some other way beats.

    The other is nowhere slower by more than the margin, and on some network quicker by more.

    Args:
        steps: seconds by way and network; every way has the same networks.
        margin: the smallest difference that counts, as a fraction.
    """

    def beats(other: Mapping[str, float], mine: Mapping[str, float]) -> bool:
        never_slower = all(other[each] <= (1 + margin) * mine[each] for each in mine)
        return never_slower and any((1 + margin) * other[each] < mine[each] for each in mine)

    return [
        way
        for way, mine in steps.items()
        if not any(beats(other, mine) for other in steps.values())
    ]


def sharded_step_s(
    shard_over: int | None,
    ranks: int,
    layers: int | None,
    sequence: int,
    hosts: Hardware,
    batch: int = 1,
) -> float:
    """Return the seconds of a step of Llama 2 7B, or of its first blocks, by its shape alone.

    Args:
        shard_over: neighbouring ranks that share one copy of the model; None for all.
        ranks: of the job.
        layers: number of blocks; None for all.
        sequence: tokens of a sequence.
        hosts: the hardware.
        batch: sequences of a rank.
    """
    model = replace(LLAMA_2_7B, layers=layers or LLAMA_2_7B.layers)
    setup = TrainingSetup(
        model, batch, sequence, ranks, "none", shard_ranks=shard_over, last_regathered=True
    )
    return setup.estimate_step(hosts).time.step_s


def sharded_step_gib(ranks: int, sequence: int, batch: int = 1) -> float:
    """Return the GiB that a GPU needs for ``sharded_step_s`` of the whole model sharded over all.

    The allocator and what lies outside it count, too, by the most that was seen on an H100.
    """
    setup = TrainingSetup(LLAMA_2_7B, batch, sequence, ranks, "none")
    return ALLOCATOR_FACTOR * setup.peak_memory_bytes() / 2**30 + RESERVED_GIB
