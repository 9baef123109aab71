"""What fully sharded training holds and sends, as formulas: no torch, no ranks, numbers in and numbers out.

Parameters are float32 (4 bytes) and the optimizer is Adam: two more numbers for each parameter, and a 4-byte step count
for each tensor. Sources: Rajbhandari et al., "ZeRO", 2020 (arXiv:1910.02054) for who holds what; the order of events in
a step is that of PyTorch's ``fully_shard``, read from its code and held against measurements by the lab.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

FLOAT = 4
"""Bytes of a float32."""


def zero_bytes(parameters: int, ranks: int, stage: int) -> dict[str, float]:
    """Bytes that a rank holds between steps, float32 with Adam, when parameters divide evenly.

    Stages: 0 (DDP: nothing is sharded), 1 (the optimizer's state), 2 (and gradients) or 3 (and parameters: FSDP).

    Returns:
        Bytes of ``parameter``, ``gradient`` and ``optimizer``.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage {stage} is not 0 (DDP), 1, 2 or 3 (FSDP)")
    whole, share = FLOAT * parameters, FLOAT * parameters / ranks
    optimizer, gradient, parameter = (share if stage >= first else whole for first in (1, 2, 3))
    return {"parameter": parameter, "gradient": gradient, "optimizer": 2 * optimizer}


def wire_bytes(parameter_bytes: float, ranks: int, *, all_gathers: int = 2) -> dict[str, float]:
    """Bytes that a rank sends over the wire in one training step, in a ring, by collective.

    One pass over the parameters, an all-gather or a reduce-scatter, sends (ranks - 1) / ranks of their bytes: what the
    other ranks need. FSDP makes two all-gathers (one without resharding) and a reduce-scatter. DDP's all-reduce is one
    of each, so ``all_gathers=1`` is DDP too. Source: Rajbhandari et al., "ZeRO", 2020 (arXiv:1910.02054), section 7.
    """
    one_pass = (ranks - 1) / ranks * parameter_bytes
    return {"all_gather": all_gathers * one_pass, "reduce_scatter": one_pass}


def small_peak_bytes(units: Sequence[int], ranks: int) -> float:
    """The most that a rank holds in a step of ``parallel.small_fsdp``, without activations.

    Args:
        units: bytes of each unit's parameters, float32, in the order of the forward pass; the ranks divide them.
        ranks: who share them.

    A rank keeps its share of parameters and of Adam's two numbers. The backward pass goes from the last unit to the
    first. In each, the rank holds the flat copy of the unit's gradients and gloo's working copy of it (before that, the
    gradients themselves), and its share of the gradients from this unit on.
    """
    kept = 3 * sum(units) / ranks
    return kept + max(2 * size + sum(units[index:]) / ranks for index, size in enumerate(units))


def tokens_to_hide(flops_per_s: float, wire_bytes_per_s: float, ranks: int, number_bytes: int = 2) -> float:
    """Tokens of a rank in a step from which on FSDP's communication can hide behind its arithmetic.

    Training takes about 6 operations for each parameter and token (2 forward, 4 backward), and three passes over the
    parameters. The number of parameters is on both sides and drops out. Source of the 6: Kaplan et al., "Scaling laws
    for neural language models", 2020 (arXiv:2001.08361).
    """
    seconds_per_parameter = 3 * number_bytes * (ranks - 1) / ranks / wire_bytes_per_s
    return seconds_per_parameter * flops_per_s / 6


def shard_elements(shape: Sequence[int], ranks: int) -> int:
    """Numbers that the fullest rank keeps of a parameter cut along its first dimension: ceil(rows / ranks) rows."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


@dataclass(frozen=True)
class Layer:
    """A linear layer with bias, and ReLU after it where ``relu`` is set.

    Attributes:
        inputs: numbers in.
        outputs: numbers out.
        unit: name of the FSDP unit that it belongs to.
        block: name of the block that checkpointing would recompute, or "".
        relu: whether a ReLU follows.
    """

    inputs: int
    outputs: int
    unit: str
    block: str = ""
    relu: bool = True

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of its parameters: weight and bias."""
        return (self.outputs, self.inputs), (self.outputs,)


def toy_layers(
    wrap: str, hidden: int, narrow: int, inputs: int = 10, outputs: int = 5, tail: int = 7, skip: Sequence[int] = ()
) -> list[Layer]:
    """The layers of labkit.models.toy.ToyModel, assigned to the units that ``--wrap`` makes."""
    widths = [inputs, hidden, hidden, hidden, narrow] + [narrow] * tail + [outputs]
    last = len(widths) - 2
    layers = []
    for index, (a, b) in enumerate(pairwise(widths)):
        block = f"block {index - 2}" if 2 <= index < last and index - 2 not in skip else ""
        unit = {"block": block or "root", "layer": f"layer {index}"}.get(wrap, "root")
        layers.append(Layer(a, b, unit, f"block {index - 2}" if 2 <= index < last else "", relu=index < last))
    return layers


def mlp_stack_layers(wrap: str, dim: int, multipliers: Sequence[int] = (3, 4, 3)) -> list[Layer]:
    """The layers of labkit.models.mlp.MLPStack, two in each MLP, assigned to the units that ``--wrap`` makes."""
    layers = []
    for index, times in enumerate(multipliers):
        for part, (a, b) in enumerate(((dim, times * dim), (times * dim, dim))):
            unit = {"block": f"block {index}", "layer": f"layer {2 * index + part}"}.get(wrap, "root")
            layers.append(Layer(a, b, unit, f"block {index}"))
    return layers


def units_of(layers: Sequence[Layer], ranks: int) -> dict[str, tuple[int, int]]:
    """Bytes of each unit by name, in order: what a rank keeps of it, and what it holds while the unit is gathered."""
    kept: Counter[str] = Counter()
    for layer in layers:
        kept[layer.unit] += FLOAT * sum(shard_elements(shape, ranks) for shape in layer.shapes)
    return {unit: (shard, shard * ranks) for unit, shard in kept.items()}


def collectives(layers: Sequence[Layer], ranks: int, *, reshard_after_forward: bool = True) -> dict[str, int]:
    """Collectives of one training step and the bytes that a rank hands to them, by the names of ``result.value``.

    Every unit is gathered once for the forward pass. Resharding costs a second time in the backward pass, but for the
    root, which is not resharded since its backward pass comes next. Every unit's gradients are reduce-scattered once.
    """
    units = units_of(layers, ranks)
    again = {unit: sizes for unit, sizes in units.items() if reshard_after_forward and unit != "root"}
    return {
        "all_gather_count": len(units) + len(again),
        "all_gather_bytes": sum(kept for kept, _ in [*units.values(), *again.values()]),
        "reduce_scatter_count": len(units),
        "reduce_scatter_bytes": sum(full for _, full in units.values()),
    }


def hybrid_collectives(layers: Sequence[Layer], group: int, *, reshard_after_forward: bool = True) -> dict[str, int]:
    """The same for hybrid sharding, by axis: ``data`` inside a group of ranks, ``replicate`` from group to group.

    A group does what all ranks do without groups. Each of its ranks then holds the sum of the group's gradients for its
    shard, and sums that over the groups: one all-reduce a unit, of the shard's size.
    """
    inside = collectives(layers, group, reshard_after_forward=reshard_after_forward)
    shards = [shard for shard, _ in units_of(layers, group).values()]
    across = {"all_reduce_count": len(shards), "all_reduce_bytes": sum(shards)}
    return {f"data/{name}": value for name, value in inside.items()} | {
        f"replicate/{name}": value for name, value in across.items()
    }


def resident_bytes(layers: Sequence[Layer], ranks: int, *, frozen: Collection[str] = ()) -> dict[str, int]:
    """Bytes that the fullest rank holds after a step, gradients included, by the names of ``result.value``.

    Parameters of the units in ``frozen`` are not trained: they have neither gradient nor optimizer state.
    """
    units = units_of(layers, ranks)
    trained = sum(shard for unit, (shard, _) in units.items() if unit not in frozen)
    tensors = sum(len(layer.shapes) for layer in layers if layer.unit not in frozen)
    return {
        "end_parameter_bytes": sum(shard for shard, _ in units.values()),
        "end_gradient_bytes": trained,
        "end_optstate_bytes": 2 * trained + FLOAT * tensors,
    }


def step_peak(
    layers: Sequence[Layer],
    samples: int,
    ranks: int,
    *,
    reshard_after_forward: bool = True,
    checkpointing: bool = False,
) -> dict[str, int]:
    """Bytes by category at the moment of a training step when a rank holds most, and their sum as ``total``.

    It walks through one step, event by event. Categories: parameter, optstate and gradient (the rank's shards);
    unsharded_parameter; all_gather and reduce_scatter (communication buffers); activation; temp.

    The layers are in the order of the forward pass; ``samples`` are the rows of a rank's input, batch x sequence. With
    ``checkpointing`` blocks keep their input only, and compute the rest again in the backward pass.
    """
    walk = _Walk(layers, samples, ranks, reshard_after_forward, checkpointing)
    walk.forward()
    walk.backward()
    peak = {category: size for category, size in walk.peak.items() if size}
    return peak | {"total": sum(peak.values())}


def whole_step_peak(layers: Sequence[Layer], samples: int) -> dict[str, int]:
    """The same for DDP, where every rank holds everything: gradients stay where they were made, and at the end of the
    backward pass a flat bucket (temp) holds all of them once more, for the all-reduce.
    """
    walk = _WholeWalk(layers, samples, ranks=1, reshard=False, checkpointing=False)
    walk.forward()
    walk.backward()
    walk.take("temp", walk.now["gradient"])
    peak = {category: size for category, size in walk.peak.items() if size}
    return peak | {"total": sum(peak.values())}


class _Walk:
    """What one training step allocates and frees, event by event, as ``fully_shard`` orders them."""

    made_as = "temp"
    """Category of a parameter's whole gradient."""

    def __init__(self, layers: Sequence[Layer], samples: int, ranks: int, reshard: bool, checkpointing: bool):
        self.layers, self.samples, self.reshard, self.checkpointing = layers, samples, reshard, checkpointing
        self.units = units_of(layers, ranks)
        self.now: Counter[str] = Counter()  # bytes that are allocated, by category
        self.peak: Counter[str] = Counter()  # and when they were most
        self.gathered: set[str] = set()
        self.ahead: set[str] = set()  # gathered ahead of their use, still in the all-gather's buffer
        self.buffer = 0  # of the last all-gather of the forward pass
        self.reducing = 0  # input of the last reduce-scatter, kept until the next one starts
        held = resident_bytes(layers, ranks)
        self.take("parameter", held["end_parameter_bytes"])
        self.take("optstate", held["end_optstate_bytes"])
        self.take("activation", self._size(layers[0].inputs))

    def take(self, category: str, size: int) -> None:
        self.now[category] += size
        if self.now.total() > self.peak.total():
            self.peak = Counter(self.now)

    def free(self, category: str, size: int) -> None:
        self.now[category] -= size

    def _size(self, width: int) -> int:
        return FLOAT * self.samples * width

    def forward(self) -> None:
        if "root" in self.units:
            self._gather("root")
        for index, layer in enumerate(self.layers):
            self._gather(layer.unit)
            self._compute(layer)
            following = self.layers[index + 1] if index + 1 < len(self.layers) else None
            if self.checkpointing and layer.block and (following is None or following.block != layer.block):
                for inner in self._inner(layer.block):
                    self.free("activation", self._size(inner.outputs))
            if self.reshard and layer.unit != "root" and (following is None or following.unit != layer.unit):
                self._release(layer.unit)
        self.free("all_gather", self.buffer)
        self.take("activation", self._size(self.layers[-1].outputs))  # the loss keeps output - 1
        self.take("temp", self._size(self.layers[-1].outputs))  # and squares it
        self.free("temp", self._size(self.layers[-1].outputs))

    def _compute(self, layer: Layer, keep_as: str = "activation") -> None:
        out = self._size(layer.outputs)
        self.take(keep_as, out)
        if layer.relu:  # its result is kept, its input is not
            self.take(keep_as, out)
            self.free(keep_as, out)

    def _inner(self, block: str) -> list[Layer]:
        return [layer for layer in self.layers if layer.block == block][:-1]

    def backward(self) -> None:
        self.take("temp", self._size(self.layers[-1].outputs))  # gradient of the output
        self.free("activation", self._size(self.layers[-1].outputs))  # what the loss kept
        recomputed: set[str] = set()
        for index, layer in reversed(list(enumerate(self.layers))):
            self._gather_again(layer.unit, ahead=self._unit_before(index))
            if self.checkpointing and layer.block and layer.block not in recomputed:
                recomputed.add(layer.block)
                for inner in self._inner(layer.block):
                    self._compute(inner, keep_as="temp")
            again = layer.block in recomputed and layer in self._inner(layer.block)
            self._gradients(layer, first=index == 0, kept_as="temp" if again else "activation")
            if layer.unit != "root" and (index == 0 or self.layers[index - 1].unit != layer.unit):
                self._reduce(layer.unit)
        if "root" in self.units:
            self._reduce("root")

    def _unit_before(self, index: int) -> str:
        unit = self.layers[index].unit
        return next((each.unit for each in reversed(self.layers[:index]) if each.unit not in (unit, "root")), "")

    def _gradients(self, layer: Layer, first: bool, kept_as: str) -> None:
        out, before = self._size(layer.outputs), self._size(layer.inputs)
        if layer.relu:
            self.take("temp", out)  # gradient before the ReLU
            self.free("temp", out)
        self.free(kept_as, out)
        if not first:
            self.take("temp", before)
        self.take(self.made_as, FLOAT * sum(math.prod(shape) for shape in layer.shapes))
        self.free("temp", out)

    def _gather(self, unit: str) -> None:
        """For the forward pass. The buffer that the ranks' shards arrive in lives on until the next one is filled."""
        if unit not in self.gathered:
            self.take("all_gather", self.units[unit][1])
            self.free("all_gather", self.buffer)
            self._unshard(unit)
            self.buffer = self.units[unit][1]

    def _gather_again(self, unit: str, ahead: str) -> None:
        """For the backward pass: the next unit's shards are under way while this one computes."""
        for needed in (unit, ahead):
            if needed and needed not in self.gathered | self.ahead:
                self.take("all_gather", self.units[needed][1])
                self.ahead.add(needed)
            if needed == unit and unit not in self.gathered:
                self._unshard(unit)
                self.free("all_gather", self.units[unit][1])
                self.ahead.discard(unit)

    def _unshard(self, unit: str) -> None:
        self.take("unsharded_parameter", self.units[unit][1])
        self.gathered.add(unit)

    def _release(self, unit: str) -> None:
        self.free("unsharded_parameter", self.units[unit][1])
        self.gathered.discard(unit)

    def _reduce(self, unit: str) -> None:
        kept, full = self.units[unit]
        self._release(unit)
        self.free("reduce_scatter", self.reducing)
        self.take("reduce_scatter", full)
        gradients = FLOAT * sum(math.prod(s) for layer in self.layers if layer.unit == unit for s in layer.shapes)
        self.free("temp", gradients)
        self.take("gradient", kept)
        self.reducing = full


class _WholeWalk(_Walk):
    """The same where nothing is gathered, freed or reduced."""

    made_as = "gradient"

    def _gather(self, unit: str) -> None:
        pass

    def _gather_again(self, unit: str, ahead: str) -> None:
        pass

    def _release(self, unit: str) -> None:
        pass

    def _reduce(self, unit: str) -> None:
        pass
