"""Predict the time of emulated steps, from the numbers for which ranks and links wait.

On gloo, a rank's own thread requests messages and computes: what it does not ask for ahead of time
is exposed, and FSDP2 waits for each reduce-scatter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.theory import ddp
from labkit.theory.emulated import Emulated


def collectives_s(hardware: Emulated, sent: Mapping[str, float], ranks: int, hosts: int) -> float:
    """Return the seconds of a step's collectives one after another, by ``result.value`` names."""
    names = {name.rpartition("_")[0] for name in sent}
    total_s = 0.0
    for name in names:
        count = sent[f"{name}_count"]
        each = sent[f"{name}_bytes"] / count if count else 0
        total_s += count * hardware.collective_s(name, each, ranks, hosts=hosts)
    return total_s


def compute_s(hardware: Emulated, units: int, share: float = 1.0) -> float:
    """Return the seconds of both passes of some units, of which a rank does this share."""
    return units * share * (hardware.forward_ms + hardware.unit_backward_ms) / 1e3


def ddp_step_s(hardware: Emulated, ranks: int, *, dim: int, layers: int, bucket_mb: float) -> float:
    """Return the seconds of DDP's step of a LinearChain: buckets travel during the backward."""
    backward_s = layers * hardware.unit_backward_ms / 1e3
    buckets = ddp.chain_buckets(dim, bucket_mb, layers=layers)
    takes_s = [hardware.collective_s("all_reduce", sum(b.values()), ranks) for b in buckets]
    ready_s = ddp.bucket_ready_times(buckets, layers, backward_s)
    last_s = ddp.arrivals(ready_s, takes_s)[-1]
    return layers * hardware.forward_ms / 1e3 + max(backward_s, last_s)


@dataclass(frozen=True)
class FSDPUnit:
    """A unit of FSDP: bytes of a rank's shard, and how many blocks of the model it holds."""

    shard_bytes: float
    blocks: int = 1


def fsdp_step_s(
    hardware: Emulated,
    ranks: int,
    units: Sequence[FSDPUnit],
    *,
    root: FSDPUnit | None = None,
    prefetch: bool = False,
) -> float:
    """Return the seconds of FSDP2's step on gloo.

    Args:
        hardware: links and devices.
        ranks: number of ranks, on one host.
        units: in the order of the forward pass.
        root: what is in no other unit; it is gathered once.
        prefetch: whether a unit is gathered while the one before it computes.
    """
    passes = [(unit, hardware.forward_ms, False) for unit in units]
    passes += [(unit, hardware.unit_backward_ms, True) for unit in reversed(units)]
    now_s = free_s = 0.0
    arrived_s: dict[int, float] = {}

    def send(collective: str, handed_bytes: float) -> float:
        nonlocal free_s
        took_s = hardware.collective_s(collective, handed_bytes, ranks)
        free_s = max(now_s, free_s) + took_s
        return free_s

    if root:
        now_s = send("all_gather", root.shard_bytes)
    for index, (unit, block_ms, in_backward) in enumerate(passes):
        # The first gather of the backward pass is asked for by none before it.
        if index not in arrived_s:
            arrived_s[index] = send("all_gather", unit.shard_bytes)
        now_s = max(now_s, arrived_s[index])
        following = index + 1
        if prefetch and following < len(passes) and following != len(units):
            arrived_s[following] = send("all_gather", passes[following][0].shard_bytes)
        now_s += unit.blocks * block_ms / 1e3
        if in_backward:
            now_s = send("reduce_scatter", ranks * unit.shard_bytes)
    if root:
        now_s += root.blocks * (hardware.forward_ms + hardware.unit_backward_ms) / 1e3
        now_s = send("reduce_scatter", ranks * root.shard_bytes)
    return now_s


def halo_step_s(
    hardware: Emulated, ranks: int, *, blocks: int, halo_bytes: Sequence[float], all_reduce_s: float
) -> float:
    """Return the seconds of a step of strips with neighbours on both sides.

    ``halo_bytes`` are those to one neighbour of every block; both messages leave over one link, in
    the forward pass and in the backward pass.
    """
    exchanges_s = sum(4 * hardware.collective_s("send", each, 2) for each in halo_bytes)
    return compute_s(hardware, blocks, 1 / ranks) + exchanges_s + all_reduce_s
