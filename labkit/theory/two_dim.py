"""Compute what tensor parallelism sends and holds, alone and on a mesh with data parallelism.

A pair is two linear layers with bias, from ``width`` to ``inner`` features and back. The axis
``tp`` shards the inner features, the axis ``data`` the samples and, with FSDP, the parameters. To
FSDP or DDP a rank's part of the model is a thinner model, so ``theory.fsdp`` applies. Arguments:

    pairs               width and inner features of every pair; activations need equal widths
    tokens              of a rank in a step: samples times sequence length
    data, tp            sizes of these axes
    plan                fsdp_tp or ddp_tp
    sequence_parallel   tokens are sharded between the pairs, too
    checkpointing       each pair keeps only its input

Sources: Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053); Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022 (arXiv:2205.05198).
"""

from collections.abc import Mapping, Sequence

from labkit.theory import fsdp
from labkit.theory.collectives import AlphaBeta
from labkit.theory.sizes import even_share

LayerPairs = Sequence[tuple[int, int]]
# The course's reference cluster; of the data sheet's arithmetic, a good program reaches 40 %.
H100_FLOPS_PER_S, NVLINK_BYTES_PER_S, CARD_BYTES_PER_S = 400e12, 450e9, 50e9
BFLOAT16_BYTES = 2
BLOCK_SUMS = 2 + 5
"""All-reduces along tp of a transformer block in a step: forward one for attention and one for the
MLP; backward one for each of query, key, value, gate and up, as PyTorch's plan sums them apart."""


def mlp_pairs(dim: int, multipliers: Sequence[int] = (3, 4, 3)) -> list[tuple[int, int]]:
    """Return the pairs of labkit.models.mlp.MLPStack."""
    return [(dim, times * dim) for times in multipliers]


def chain_pairs(dim: int) -> list[tuple[int, int]]:
    """Return the pairs of labkit.models.chain.LinearChain: four layers make two pairs."""
    return [(dim, dim)] * 2


def rank_layers(pairs: LayerPairs, tp: int) -> list[fsdp.LinearLayer]:
    """Return the layers that one rank of ``tp`` holds; each pair is a unit of FSDP."""
    layers = []
    for index, (width, inner) in enumerate(pairs):
        share = even_share(inner, tp, "the inner width")
        unit = f"block {index}"
        # The first is sharded by output features, bias included. The second is sharded by input
        # features, and its bias is whole.
        layers.append(fsdp.LinearLayer(width, share, unit, unit))
        layers.append(fsdp.LinearLayer(share, width, unit, unit))
    return layers


def activation_collectives(
    pairs: LayerPairs,
    tokens: int,
    tp: int,
    *,
    sequence_parallel: bool = False,
    checkpointing: bool = False,
) -> dict[str, int]:
    """Return a step's collectives along ``tp`` and the bytes that a rank hands over, for all
    tokens.

    A pair all-reduces its output, and in the backward pass its input's gradient. Sequence
    parallelism makes each a reduce-scatter after a pair and an all-gather before the next, or the
    reverse.
    """
    if tp == 1:
        return {}
    token_bytes = fsdp.FLOAT_BYTES * pairs[0][0]
    # The first pair's inputs are samples, which have no gradient. A checkpointed pair repeats its
    # forward pass with its communication.
    sums = (2 + checkpointing) * len(pairs) - 1
    whole = tokens * token_bytes
    if not sequence_parallel:
        return {"tp/all_reduce_count": sums, "tp/all_reduce_bytes": sums * whole}
    # Two more where the whole sequence enters and leaves the model.
    gathers = sums + 2
    return {
        "tp/all_gather_count": gathers,
        "tp/all_gather_bytes": gathers * even_share(tokens, tp, "tokens") * token_bytes,
        "tp/reduce_scatter_count": sums,
        "tp/reduce_scatter_bytes": sums * whole,
    }


def parameter_collectives(
    pairs: LayerPairs, *, data: int, tp: int, plan: str = "fsdp_tp"
) -> dict[str, int]:
    """Return the collectives of a step along ``data``, and the bytes that a rank hands over."""
    layers = rank_layers(pairs, tp)
    if data == 1:
        return {}
    if plan == "fsdp_tp":
        sent = fsdp.step_collectives(layers, data)
        return {f"data/{name}": value for name, value in sent.items()}
    # DDP's count depends on its buckets.
    return {"data/all_reduce_bytes": fsdp.FLOAT_BYTES * parameter_count(layers)}


def step_collectives_by_axis(
    pairs: LayerPairs, tokens: int, *, data: int, tp: int, plan: str = "fsdp_tp", **how: bool
) -> dict[str, int]:
    """Return all collectives of a step by axis; ``how`` is that of ``activation_collectives``."""
    along_tp = activation_collectives(pairs, tokens, tp, **how)
    return along_tp | parameter_collectives(pairs, data=data, tp=tp, plan=plan)


def parameter_count(layers: Sequence[fsdp.LinearLayer]) -> int:
    """Return the number of parameters of some layers."""
    return sum(layer.elements for layer in layers)


def mesh_resident_bytes(
    pairs: LayerPairs, *, data: int, tp: int, plan: str = "fsdp_tp"
) -> dict[str, int]:
    """Return the bytes that the fullest rank holds after an Adam step, by ``result.value`` name."""
    return fsdp.resident_bytes(rank_layers(pairs, tp), data if plan == "fsdp_tp" else 1)


def axis_wire_bytes(sent: Mapping[str, float], *, data: int, tp: int) -> dict[str, float]:
    """Return the bytes that one rank of a ring puts on the wire along each axis.

    In a ring of n ranks, a rank that hands s bytes to an all-gather sends (n - 1) s; to a reduce-
    scatter (n - 1) / n of s; to an all-reduce 2 (n - 1) / n of s. ``sent`` has bytes handed over by
    the names of ``result.value``, predicted or measured; other values are ignored.
    """
    return {
        axis: sum(fsdp.stage_wire_bytes(_on_axis(sent, axis), ranks).values())
        for axis, ranks in (("tp", tp), ("data", data))
    }


def _on_axis(values: Mapping[str, float], axis: str) -> dict[str, float]:
    start = f"{axis}/"
    return {n.removeprefix(start): size for n, size in values.items() if n.startswith(start)}


def tp_activation_bytes(
    pairs: LayerPairs,
    tokens: int,
    tp: int,
    *,
    sequence_parallel: bool = False,
    checkpointing: bool = False,
) -> int:
    """Return the bytes of activations of an MLPStack on a rank at the end of its forward pass."""
    width = pairs[0][0]
    whole = tokens * width
    kept = gathered = 0
    # A checkpointed pair keeps only its input. Others keep a share of the inner features, too.
    if not checkpointing:
        kept = sum(tokens * even_share(inner, tp, "the inner width") for _, inner in pairs)
        # ColwiseParallel also keeps the gathered input for the gradient of its weights, so sequence
        # parallelism saves memory only with checkpointing, or if more than a ReLU lies between the
        # pairs. Megatron-LM gathers again in the backward pass instead.
        gathered = len(pairs) * whole
    # Between the pairs every rank holds the same: inputs, the last output, and the loss's.
    if not sequence_parallel:
        return fsdp.FLOAT_BYTES * (kept + (len(pairs) + 2 - checkpointing) * whole)
    between = len(pairs) * even_share(tokens, tp, "tokens") * width
    # The samples enter whole, and the loss is that of all tokens.
    return fsdp.FLOAT_BYTES * (kept + gathered + between + 2 * whole)


def tp_step_peak(pairs: LayerPairs, tokens: int, tp: int, **how: bool) -> dict[str, int]:
    """Return the bytes by category at the peak of an Adam step, the start of the backward pass."""
    kept = mesh_resident_bytes(pairs, data=1, tp=tp)
    return {
        "parameter": kept["end_parameter_bytes"],
        "optstate": kept["end_optstate_bytes"],
        "activation": tp_activation_bytes(pairs, tokens, tp, **how),
        # The gradient of the loss, a mean of squares, takes four tensors of the output's size.
        "temp": 4 * fsdp.FLOAT_BYTES * tokens * pairs[0][0],
    }


def message_share(
    inner: float, tp: int, flops_per_s: float, wire_bytes_per_s: float, number_bytes: int
) -> float:
    """Return a pair's communication time along ``tp``, relative to its computing time on a rank."""
    # A token of width d takes 12 d inner operations in a pair, of which a rank does 1 / tp, and two
    # all-reduces of d elements. Tokens and d cancel. Latency is ignored.
    compute_s = 12 * inner / tp / flops_per_s
    messages_s = 2 * (2 * (tp - 1) / tp) * number_bytes / wire_bytes_per_s
    return messages_s / compute_s


def step_seconds(
    pairs: LayerPairs,
    tokens: int,
    *,
    data: int,
    tp: int,
    flops_per_s: float,
    links: Mapping[str, AlphaBeta],
    number_bytes: int = fsdp.FLOAT_BYTES,
) -> dict[str, float]:
    """Return the seconds of a step with FSDP along ``data``, if nothing overlaps, by part.

    Parts: ``compute``, 6 operations for each weight of a rank and each token; ``tp`` and ``data``,
    the collectives. ``links`` has alpha of a collective and beta of a byte on the wire for each
    axis; ``number_bytes`` is the size of an element that is sent.
    """
    sent = step_collectives_by_axis(pairs, tokens, data=data, tp=tp)
    wire = axis_wire_bytes(sent, data=data, tp=tp)
    seconds = {"compute": step_flops_per_token(pairs) / tp * tokens / flops_per_s}
    for axis in ("tp", "data"):
        handed = _on_axis(sent, axis)
        calls = int(sum(count for name, count in handed.items() if name.endswith("_count")))
        size = wire[axis] * number_bytes / fsdp.FLOAT_BYTES
        seconds[axis] = links[axis].seconds(size, calls) if calls else 0.0
    return seconds


def step_flops_per_token(pairs: LayerPairs) -> int:
    """Return a step's operations per token on all ranks: 6 a weight (Kaplan, arXiv:2001.08361)."""
    return 6 * sum(2 * width * inner for width, inner in pairs)


def count_tp_lines(ranks: int, tp: int, sequence_parallel: bool) -> int:
    """Return the number of lines of ``tp`` ranks, or raise ValueError if there is no whole one."""
    if ranks % tp:
        rule = f"{ranks} ranks cannot be cut into lines of tp = {tp}"
        raise ValueError(f"{rule}: it must divide them")
    if sequence_parallel and tp == 1:
        raise ValueError("seq cuts the sequence over tp, but tp is 1: take 2 or more")
    return ranks // tp


def valid_tp_sizes(ranks: int, samples: int, lengths: Sequence[int]) -> list[int]:
    """Return the sizes of ``tp`` that divide the ranks, and let ``data`` divide the samples."""
    return [tp for tp in lengths if ranks % tp == 0 and samples % (ranks // tp) == 0]


def seconds_after_overlap(seconds: Mapping[str, float], overlap: bool) -> dict[str, float]:
    """Return the seconds of ``step_seconds`` that a rank spends computing or waiting.

    With ``overlap``, computation hides transfers along ``data``, but never those along ``tp``.
    """
    hidden = seconds["compute"] if overlap else 0.0
    return {**seconds, "data": max(0.0, seconds["data"] - hidden)}


def host_link(card: AlphaBeta, inside: AlphaBeta, group: int, apart: int, host: int) -> AlphaBeta:
    """Return the link of a ring of ``group`` ranks, ``apart`` from each other, on several hosts."""
    # A ring visits all ranks of its group in one host, then the next host. Rings run side by side,
    # one per card, and a group with k ranks in a host has k cards there to itself.
    if (group - 1) * apart < host:
        return inside
    cards = max(1, min(group, host // apart))
    return AlphaBeta(card.alpha_s, max(inside.beta_s_per_byte, card.beta_s_per_byte / cards))


def cluster_links(
    card_bytes_per_s: float, host: int, *, data: int, tp: int
) -> dict[str, AlphaBeta]:
    """Return the link of each axis on hosts of ``host`` H100s, each with a network card."""
    speeds = card_bytes_per_s, NVLINK_BYTES_PER_S
    card, inside = (AlphaBeta(0.0, 1 / speed) for speed in speeds)
    # Ranks along tp are neighbours.
    return {
        "tp": host_link(card, inside, tp, 1, host),
        "data": host_link(card, inside, data, tp, host),
    }


def cluster_steps(
    pairs: LayerPairs,
    tokens: int,
    sizes: Sequence[int],
    *,
    ranks: int,
    host: int,
    card_bytes_per_s: float = CARD_BYTES_PER_S,
) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]:
    """Return bytes on the wire by axis, and seconds by part, of a bfloat16 step by size of ``tp``.

    Args:
        pairs: the network.
        tokens: of all ranks in a step.
        sizes: ranks along tp, of which each divides ``ranks``.
        ranks: H100s.
        host: H100s of a host; see ``cluster_links``.
        card_bytes_per_s: bandwidth of each one's card; by default that of the course's cluster.
    """
    wires, seconds = {}, {}
    for tp in sizes:
        data, own = ranks // tp, tokens * tp // ranks
        handed = step_collectives_by_axis(pairs, own, data=data, tp=tp)
        sent = axis_wire_bytes(handed, data=data, tp=tp)
        wires[tp] = {axis: size * BFLOAT16_BYTES / fsdp.FLOAT_BYTES for axis, size in sent.items()}
        seconds[tp] = step_seconds(
            pairs,
            own,
            data=data,
            tp=tp,
            flops_per_s=H100_FLOPS_PER_S,
            links=cluster_links(card_bytes_per_s, host, data=data, tp=tp),
            number_bytes=BFLOAT16_BYTES,
        )
    return wires, seconds
