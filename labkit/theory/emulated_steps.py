"""Predict the time of emulated steps, from the numbers for which ranks and links wait.

On gloo, a rank's own thread requests messages and computes: what it does not ask for ahead of time
is exposed, and FSDP2 waits for each reduce-scatter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.theory import ddp, extensions, fsdp, spatial, two_dim
from labkit.theory.collectives import collective_wire_bytes
from labkit.theory.emulated import GIGA, Emulated
from labkit.theory.two_dim import CARD_BYTES_PER_S, H100_FLOPS_PER_S, NVLINK_BYTES_PER_S


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


def ddp_step_s(
    hardware: Emulated,
    ranks: int,
    *,
    dim: int,
    layers: int,
    bucket_mb: float,
    way: ddp.CompileMode = "eager",
) -> float:
    """Return the seconds of DDP's step of a LinearChain: buckets travel during the backward."""
    backward_s = layers * hardware.unit_backward_ms / 1e3
    buckets = ddp.chain_buckets(dim, bucket_mb, layers=layers, way=way)
    takes_s = [hardware.collective_s("all_reduce", sum(b.values()), ranks) for b in buckets]
    ready_s = ddp.bucket_ready_times(buckets, layers, backward_s)
    last_s = ddp.arrivals(ready_s, takes_s)[-1]
    return layers * hardware.forward_ms / 1e3 + max(backward_s, last_s)


def gather_hardware(
    ranks: int, layer_bytes: int, *, alpha_ms: float, bytes_ms: float, forward_ms: float
) -> Emulated:
    """Return hardware by the costs of gathering a layer: latency of one gather, and all bytes."""
    steps = ranks - 1
    return Emulated(
        latency_us=1e3 * alpha_ms / steps,
        gb_per_s=steps / ranks * layer_bytes / (bytes_ms / 1e3) / GIGA,
        forward_ms=forward_ms,
    )


def ddp_hardware(
    ranks: int,
    *,
    dim: int,
    layers: int,
    alpha_ms: float,
    bytes_ms: float,
    backward_ms: float,
    forward_ms: float = 0.0,
) -> Emulated:
    """Return hardware for a LinearChain, by the costs of its step.

    Args:
        ranks: number of ranks.
        dim: width of the chain.
        layers: number of its layers.
        alpha_ms: latency of one all-reduce.
        bytes_ms: time of all gradients' bytes together.
        backward_ms: backward pass of the whole chain.
        forward_ms: forward pass of the whole chain.
    """
    total = sum(size for _, size in ddp.chain_gradients(dim, layers=layers))
    # A ring takes 2 (n - 1) steps, in each of which a rank sends one of n parts.
    steps = 2 * (ranks - 1)
    return Emulated(
        latency_us=1e3 * alpha_ms / steps,
        gb_per_s=steps / ranks * total / (bytes_ms / 1e3) / GIGA,
        forward_ms=forward_ms / layers,
        backward_ms=backward_ms / layers,
    )


@dataclass(frozen=True)
class FSDPUnit:
    """A unit of FSDP: bytes of a rank's shard, and how many blocks of the model it holds.

    A gather may send ``sent_bytes`` instead of the shard, with time to encode and to decode them.
    """

    shard_bytes: float
    blocks: int = 1
    sent_bytes: float | None = None
    encode_s: float = 0.0
    decode_s: float = 0.0


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
    return _fsdp_moments_s(hardware, ranks, units, root=root, prefetch=prefetch)[1]


def fsdp_forward_s(
    hardware: Emulated, ranks: int, units: Sequence[FSDPUnit], *, prefetch: bool = False
) -> float:
    """Return the seconds of the forward pass of ``fsdp_step_s``."""
    return _fsdp_moments_s(hardware, ranks, units, root=None, prefetch=prefetch)[0]


def two_wires(
    ranks: int, dim: int, *, layers: int = 6, parameters: float = 200e6, tokens: int = 2048
) -> tuple[dict[str, dict[str, Any]], dict[str, float], dict[str, float]]:
    """Return lab 2's experiment: FSDP on H100s that NVLink or a network card links.

    In slow motion the forward pass of a block takes 20 ms. The ratio of its gather's time to that
    is the H100s', where blocks have this many parameters and send 2 bytes for each.

    Args:
        ranks: number of ranks.
        dim: width of the stack that real ranks train.
        layers: its blocks.
        parameters: of a block on the H100s.
        tokens: of a rank.

    Returns:
        Options of fsdp_wrap by label, and milliseconds by label of a step and of a forward pass.
    """
    stack = fsdp.unit_bytes(fsdp.mlp_stack_layers("block", dim, layers), ranks)
    units = [FSDPUnit(shard) for shard, _ in stack.values()]
    forward_ms = 20.0
    slower = forward_ms / 1e3 / (2 * parameters * tokens / H100_FLOPS_PER_S)
    options: dict[str, dict[str, Any]] = {}
    step_ms: dict[str, float] = {}
    forward: dict[str, float] = {}
    for wire, wire_bytes_per_s in (
        ("NVLink", NVLINK_BYTES_PER_S),
        ("network card", CARD_BYTES_PER_S),
    ):
        hide = fsdp.tokens_to_hide(H100_FLOPS_PER_S, wire_bytes_per_s, ranks, 2)
        # Of a block of mean size, since the stack's blocks differ.
        gather_s = forward_ms / 1e3 * hide / tokens
        sent = (ranks - 1) * sum(unit.shard_bytes for unit in units) / layers
        device = Emulated(
            gb_per_s=sent / gather_s / GIGA,
            forward_ms=forward_ms,
            hardware=f"{ranks} H100s, {wire}",
            slower=slower,
        )
        for how, prefetch in (("no prefetch", False), ("prefetch", True)):
            label = f"{wire}, {how}"
            options[label] = {"emulate": device, "prefetch": prefetch}
            forward[label] = 1e3 * fsdp_forward_s(device, ranks, units, prefetch=prefetch)
            step_ms[label] = 1e3 * fsdp_step_s(device, ranks, units, prefetch=prefetch)
    return options, step_ms, forward


def _fsdp_moments_s(
    hardware: Emulated,
    ranks: int,
    units: Sequence[FSDPUnit],
    *,
    root: FSDPUnit | None,
    prefetch: bool,
) -> tuple[float, float]:
    """Return when the forward pass of the units and the step end."""
    passes = [(unit, hardware.forward_ms, False) for unit in units]
    passes += [(unit, hardware.unit_backward_ms, True) for unit in reversed(units)]
    now_s = free_s = forward_s = 0.0
    arrived_s: dict[int, float] = {}

    def send(collective: str, handed_bytes: float) -> float:
        nonlocal free_s
        took_s = hardware.collective_s(collective, handed_bytes, ranks)
        free_s = max(now_s, free_s) + took_s
        return free_s

    def request(unit: FSDPUnit) -> float:
        nonlocal now_s
        now_s += unit.encode_s
        return send("all_gather", unit.shard_bytes if unit.sent_bytes is None else unit.sent_bytes)

    if root:
        now_s = request(root) + root.decode_s
    for index, (unit, block_ms, in_backward) in enumerate(passes):
        # The first gather of the backward pass is asked for by none before it.
        if index not in arrived_s:
            arrived_s[index] = request(unit)
        now_s = max(now_s, arrived_s[index]) + unit.decode_s
        following = index + 1
        if prefetch and following < len(passes) and following != len(units):
            arrived_s[following] = request(passes[following][0])
        now_s += unit.blocks * block_ms / 1e3
        if in_backward:
            now_s = send("reduce_scatter", ranks * unit.shard_bytes)
        else:
            forward_s = now_s
    if root:
        now_s += root.blocks * (hardware.forward_ms + hardware.unit_backward_ms) / 1e3
        now_s = send("reduce_scatter", ranks * root.shard_bytes)
    return forward_s, now_s


def extension_unit(
    hardware: Emulated, ranks: int, shapes: Sequence[Sequence[int]], extension: str = "fp32"
) -> FSDPUnit:
    """Return a unit of parameters of these shapes, and what its gathers send and take to code."""
    own, sent = (
        sum(extensions.gather_bytes(shape, ranks, kind) for shape in shapes)
        for kind in ("fp32", extension)
    )
    encode_s = 0.0
    if extension != "fp32" and hardware.memory_gb_per_s:
        # Encoding reads the rank's share and writes what is sent, decoding the same of all ranks.
        encode_s = (own + sent) / (hardware.memory_gb_per_s * GIGA)
    return FSDPUnit(own, sent_bytes=sent, encode_s=encode_s, decode_s=ranks * encode_s)


def extension_step_s(
    hardware: Emulated,
    ranks: int,
    units: Sequence[Sequence[Sequence[int]]],
    extension: str,
    *,
    prefetch: bool = False,
) -> float:
    """Return the seconds of FSDP2's step on gloo with an all-gather extension.

    ``units`` are the shapes of each unit's parameters, which are gathered in both passes; with
    ``prefetch`` while the unit before computes.
    """
    coded = [extension_unit(hardware, ranks, shapes, extension) for shapes in units]
    return fsdp_step_s(hardware, ranks, coded, prefetch=prefetch)


def mesh_step_s(
    hardware: Emulated, pairs: two_dim.LayerPairs, tokens: int, *, data: int, tp: int
) -> float:
    """Return the seconds of a step of a stack on a mesh (data, tp), with FSDP along ``data``.

    ``tokens`` are those of one line of ``tp``. A unit's emulated time is that of all tokens on one
    device. Nothing overlaps, as on gloo.
    """
    ranks = data * tp
    sent = two_dim.step_collectives_by_axis(pairs, tokens, data=data, tp=tp)
    step_s = compute_s(hardware, len(pairs), 1 / ranks)
    # Ranks of a line are neighbours, and those of a column are tp apart.
    for axis, group in (("tp", range(tp)), ("data", range(0, ranks, tp))):
        along = {
            name.removeprefix(f"{axis}/"): value
            for name, value in sent.items()
            if name.startswith(f"{axis}/")
        }
        step_s += collectives_s(hardware, along, len(group), hardware.count_hosts(group))
    return step_s


def slow_h100s(
    pairs: two_dim.LayerPairs, tokens: int, inner: int, *, step_ms: float, ranks_per_host: int
) -> Emulated:
    """Return H100s in slow motion, on which a small stack is like one of this inner width.

    Along each axis, its messages and its arithmetic are in the ratio of pairs of that width in
    bfloat16 on NVLink (450 GB/s) inside a host, and a card of 50 GB/s for each GPU between hosts.

    Args:
        pairs: of the small stack.
        tokens: of all ranks in a step of it.
        inner: inner width of the large stack.
        step_ms: arithmetic of a step on one device, in slow motion.
        ranks_per_host: ranks that share a host.
    """
    pair_s = step_ms / 1e3 / len(pairs)
    # Two ranks stand for any number, because the ratio depends on it in the same way.
    handed = 2 * fsdp.FLOAT_BYTES * tokens * pairs[0][0]
    share = two_dim.message_share(
        inner, 2, H100_FLOPS_PER_S, NVLINK_BYTES_PER_S, two_dim.BFLOAT16_BYTES
    )
    gb_per_s = collective_wire_bytes("all_reduce", handed, 2) / (share * pair_s / 2) / GIGA
    return Emulated(
        gb_per_s=gb_per_s,
        between_gb_per_s=gb_per_s * CARD_BYTES_PER_S / NVLINK_BYTES_PER_S,
        ranks_per_host=ranks_per_host,
        forward_ms=1e3 * pair_s / 3,
        hardware=f"H100s in slow motion, {ranks_per_host} a host",
    )


def spatial_step_s(
    hardware: Emulated,
    *,
    height: int,
    width: int,
    depths: Sequence[int],
    dims: Sequence[int],
    batch: int,
    data: int = 1,
    space: int = 1,
    num_classes: int = 10,
) -> float:
    """Return the seconds of a step of a ConvNeXt whose samples and strips are shared.

    A unit's emulated time is that of the whole batch on one device. ``data`` ranks share the
    samples, and ``space`` ranks the width of each image. A rank waits for the halos of each
    neighbour before each block, in both passes.
    """
    own, ranks = batch // data, data * space
    count, size = spatial.spatial_all_reduces(
        strategy="local", depths=depths, dims=dims, num_classes=num_classes, batch=own,
        space_ranks=space, data_ranks=data,
    )  # fmt: skip
    # Strips add up the means of their pixels, a message of its own.
    means = 4 * own * dims[-1] if space > 1 else 0
    reduced = [size - means, means][:count]
    step_s = compute_s(hardware, sum(depths), 1 / ranks)
    step_s += sum(hardware.collective_s("all_reduce", each, ranks) for each in reduced)
    for stage in spatial.convnext_stages(height, width, depths, dims):
        halo = spatial.halo_bytes(
            rows=stage.height, halo=spatial.HALO, channels=stage.channels, batch=own
        )
        exchanges = stage.depth * 2 * min(space - 1, 2)
        step_s += exchanges * hardware.collective_s("send", halo, 2)
    return step_s
