"""What tensor parallelism sends and holds, alone and on a mesh with data parallelism: formulas,
without torch.

A pair is two linear layers with bias, ``width`` to ``inner`` and back. Its inner features are
shared out over the axis ``tp``. Samples are shared out over the axis ``data``, and so are the
parameters where FSDP does it. To FSDP and DDP, what a rank of ``tp`` holds is simply a thinner
model: their formulas are those of ``theory.fsdp``. In all formulas:

    pairs               width and inner features of every pair; all of one width where activations
    are counted tokens              of a rank in a step: its samples times their places
    data, tp            lengths of these axes
    plan                fsdp_tp or ddp_tp
    sequence_parallel   tokens between the pairs are shared out, too
    checkpointing       each pair keeps its input only

Sources: Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053) for the pair; Korthikanti et al.,
    "Reducing Activation
Recomputation in Large Transformer Models", 2022 (arXiv:2205.05198) for the sequence.
"""

import math
from collections.abc import Mapping, Sequence

from labkit.theory import fsdp
from labkit.theory.collectives import AlphaBeta
from labkit.theory.sizes import even_share

LayerPairs = Sequence[tuple[int, int]]


def mlp_pairs(dim: int, multipliers: Sequence[int] = (3, 4, 3)) -> list[tuple[int, int]]:
    """Those of labkit.models.mlp.MLPStack."""
    return [(dim, times * dim) for times in multipliers]


def chain_pairs(dim: int) -> list[tuple[int, int]]:
    """Those of labkit.models.chain.LinearChain: four layers make two pairs."""
    return [(dim, dim)] * 2


def rank_layers(pairs: LayerPairs, tp: int) -> list[fsdp.LinearLayer]:
    """What one rank of ``tp`` holds of the model, as layers of their own; each pair is a unit of
    FSDP.

    The first layer of a pair is cut by columns of its output, bias included. The second is cut by
    its inputs, and its bias is whole.

    Raises:
        ValueError: the ranks cannot share an inner width evenly.
    """
    layers = []
    for index, (width, inner) in enumerate(pairs):
        share = even_share(inner, tp, "the inner width")
        unit = f"block {index}"
        layers += [
            fsdp.LinearLayer(width, share, unit, unit),
            fsdp.LinearLayer(share, width, unit, unit),
        ]
    return layers


def activation_collectives(
    pairs: LayerPairs,
    tokens: int,
    tp: int,
    *,
    sequence_parallel: bool = False,
    checkpointing: bool = False,
) -> dict[str, int]:
    """Collectives of one training step along ``tp``, and the bytes that a rank hands to them.

    Forward, every pair adds its ranks' results up: an all-reduce of all tokens. Backward, every
    pair but the first adds up the gradients of its input; the first one's input are samples, which
    have no gradient.

    With sequence parallelism an all-reduce becomes a reduce-scatter behind a pair and an all-gather
    before the next. Backward, each becomes the other. At the two ends, where the whole sequence
    comes in and goes out, this takes two all-gathers more. A checkpointed pair repeats its forward
    pass, communication included.

    Raises:
        ValueError: the ranks cannot share the tokens evenly.
    """
    if tp == 1:
        return {}
    token_bytes, sums = fsdp.FLOAT_BYTES * pairs[0][0], (2 + checkpointing) * len(pairs) - 1
    whole = tokens * token_bytes
    if not sequence_parallel:
        return {"tp/all_reduce_count": sums, "tp/all_reduce_bytes": sums * whole}
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
    """Collectives of one training step along ``data``, and the bytes that a rank hands to them.

    FSDP gathers each pair's thin parameters twice and reduce-scatters their gradients. DDP
    all-reduces the gradients; into how many messages it packs them is a matter of its buckets, so
    only bytes are given.
    """
    layers = rank_layers(pairs, tp)
    if data == 1:
        return {}
    if plan == "fsdp_tp":
        return {
            f"data/{name}": value for name, value in fsdp.step_collectives(layers, data).items()
        }
    return {"data/all_reduce_bytes": fsdp.FLOAT_BYTES * parameter_count(layers)}


def step_collectives_by_axis(
    pairs: LayerPairs, tokens: int, *, data: int, tp: int, plan: str = "fsdp_tp", **how: bool
) -> dict[str, int]:
    """All collectives of one training step by axis, by the names of ``result.value``: the two
    functions above.

    ``how`` is ``sequence_parallel`` and ``checkpointing``, both False by default.
    """
    return activation_collectives(pairs, tokens, tp, **how) | parameter_collectives(
        pairs, data=data, tp=tp, plan=plan
    )


def parameter_count(layers: Sequence[fsdp.LinearLayer]) -> int:
    """How many numbers some layers hold."""
    return sum(math.prod(shape) for layer in layers for shape in layer.shapes)


def mesh_resident_bytes(
    pairs: LayerPairs, *, data: int, tp: int, plan: str = "fsdp_tp"
) -> dict[str, int]:
    """Bytes that the fullest rank holds after a step with Adam, by the names of
    ``result.value``.
    """
    return fsdp.resident_bytes(rank_layers(pairs, tp), data if plan == "fsdp_tp" else 1)


def axis_wire_bytes(sent: Mapping[str, float], *, data: int, tp: int) -> dict[str, float]:
    """Bytes that one rank puts on the wire along each axis if every collective runs in a ring.

    Of n ranks' ring, a rank that hands s bytes to an all-gather sends (n - 1) s; to a
    reduce-scatter (n - 1) / n of s; to an all-reduce, which is one of each, 2 (n - 1) / n of s.
    Source: ``theory.collectives.wire_bytes``. What was ``sent`` comes by the names of
        ``result.value``, from ``collectives`` or measured; others are left out.
    """
    wire = {}
    for axis, ranks in (("tp", tp), ("data", data)):
        parts = {
            "all_gather": ranks - 1,
            "reduce_scatter": (ranks - 1) / ranks,
            "all_reduce": 2 * (ranks - 1) / ranks,
        }
        wire[axis] = sum(part * sent.get(f"{axis}/{name}_bytes", 0) for name, part in parts.items())
    return wire


def tp_activation_bytes(
    pairs: LayerPairs,
    tokens: int,
    tp: int,
    *,
    sequence_parallel: bool = False,
    checkpointing: bool = False,
) -> int:
    """Bytes of activations that a rank holds of an MLPStack when its forward pass ends.

    A pair keeps its input, its inner features after the first ReLU, of which a rank has its share,
    and its result after the second, which is the next one's input. The loss keeps one tensor more.
    Between the pairs every rank holds the same. A checkpointed pair keeps its input only.

    With sequence parallelism a rank holds its tokens alone between the pairs. But torch's
    ColwiseParallel keeps the input that it has gathered, too, for the gradient of its weights: this
    saves memory only where the pairs are checkpointed, or where more than a ReLU lies between them.
    (Megatron-LM gathers again in the backward pass instead.)

    Raises:
        ValueError: the ranks cannot share an inner width or the tokens evenly.
    """
    width = pairs[0][0]
    whole = tokens * width
    kept = (
        0
        if checkpointing
        else sum(tokens * even_share(inner, tp, "the inner width") for _, inner in pairs)
    )
    if not sequence_parallel:
        return fsdp.FLOAT_BYTES * (kept + (len(pairs) + 2 - checkpointing) * whole)
    gathered = 0 if checkpointing else len(pairs) * whole
    between = len(pairs) * even_share(tokens, tp, "tokens") * width
    return fsdp.FLOAT_BYTES * (
        kept + gathered + between + 2 * whole
    )  # the samples come in whole, and the loss is of all


def tp_step_peak(pairs: LayerPairs, tokens: int, tp: int, **how: bool) -> dict[str, int]:
    """Bytes by category at the peak of a step without data parallelism, Adam's state included.

    The peak lies where the backward pass begins, as long as activations outweigh gradients: all
    activations are there, and the gradient of the loss, a mean of squares, takes four tensors of
    the output's size (temp) to work out. ``how`` is that of ``activation_bytes``.
    """
    kept = mesh_resident_bytes(pairs, data=1, tp=tp)
    return {
        "parameter": kept["end_parameter_bytes"],
        "optstate": kept["end_optstate_bytes"],
        "activation": tp_activation_bytes(pairs, tokens, tp, **how),
        "temp": 4 * fsdp.FLOAT_BYTES * tokens * pairs[0][0],
    }


def message_share(
    inner: float, tp: int, flops_per_s: float, wire_bytes_per_s: float, number_bytes: int
) -> float:
    """Time of a pair's messages along ``tp``, as a part of the time that a rank computes for it.

    For each token of width d a pair takes 12 d inner operations in a training step, of which a rank
    does 1 / tp. It takes two all-reduces, forward and backward, of d numbers. Tokens and d drop
    out. Latency is left out.
    """
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
    """Seconds of a training step with FSDP along ``data``, on one rank, as if nothing ran at the
    same time.

    Args:
        pairs: of the stack.
        tokens: of a rank.
        data: length of that axis.
        tp: length of that one.
        flops_per_s: operations that a rank does in a second.
        links: of each axis, alpha of a collective and beta of a byte that a rank puts on the wire.
        number_bytes: of a parameter, gradient or activation that travels.

    Returns:
        ``compute``, 6 operations for each number of a rank's matrices and each token; ``tp`` and
        ``data``, messages.
    """
    sent = step_collectives_by_axis(pairs, tokens, data=data, tp=tp)
    wire = axis_wire_bytes(sent, data=data, tp=tp)
    seconds = {"compute": step_flops_per_token(pairs) / tp * tokens / flops_per_s}
    for axis in ("tp", "data"):
        calls = sum(
            count
            for name, count in sent.items()
            if name.startswith(f"{axis}/") and name.endswith("_count")
        )
        size = wire[axis] * number_bytes / fsdp.FLOAT_BYTES
        seconds[axis] = links[axis].seconds(size, calls) if calls else 0.0
    return seconds


def step_flops_per_token(pairs: LayerPairs) -> int:
    """Operations of a training step for each token, of all ranks together: 6 for each number of the
    matrices.

    Source: Kaplan et al., "Scaling laws for neural language models", 2020 (arXiv:2001.08361).
    """
    return 6 * sum(2 * width * inner for width, inner in pairs)


def valid_tp_sizes(ranks: int, samples: int, lengths: Sequence[int]) -> list[int]:
    """Those lengths of ``tp`` that divide the ranks, and leave each line of them as many of the
    samples.
    """
    return [tp for tp in lengths if ranks % tp == 0 and samples % (ranks // tp) == 0]


def seconds_after_overlap(seconds: Mapping[str, float], overlap: bool) -> dict[str, float]:
    """What a rank spends of a step: it computes, then waits for what nothing hides.

    With ``overlap`` messages along ``data`` travel while the rank computes. Those along ``tp`` are
    waited for.
    """
    hidden = seconds["compute"] if overlap else 0.0
    return {**seconds, "data": max(0.0, seconds["data"] - hidden)}


def host_link(card: AlphaBeta, inside: AlphaBeta, group: int, apart: int, host: int) -> AlphaBeta:
    """The link of a ring of ranks, where every host has ``host`` ranks and a network card for each
    of them.

    A ring goes through all ranks of its group in a host, then to the next host. Several rings run
    side by side, one for each card: a group that has k ranks in a host has k cards to itself there.

    Args:
        card: link of one card.
        inside: link between ranks of one host.
        group: ranks of the group.
        apart: 1 if they are neighbours, n if every n-th rank is one of them.
        host: ranks of a host.
    """
    if (group - 1) * apart < host:
        return inside
    cards = max(1, min(group, host // apart))
    return AlphaBeta(card.alpha_s, max(inside.beta_s_per_byte, card.beta_s_per_byte / cards))
