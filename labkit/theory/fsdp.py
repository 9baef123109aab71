"""Compute what fully sharded training holds and sends.

Parameters are float32 and the optimizer is Adam, which keeps two more elements for each parameter
and a 4-byte step count for each tensor. Sources: Rajbhandari et al., "ZeRO", 2020
(arXiv:1910.02054) for who holds what; ``fully_shard`` for the order of events in a step.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, pairwise, takewhile

from labkit.theory.collectives import collective_wire_bytes as collective_wire_bytes
from labkit.theory.ddp import DEFAULT_BUCKET_MB, bucket_plan
from labkit.theory.sizes import shard_elements as shard_elements

FLOAT_BYTES = 4


def zero_bytes(parameters: int, ranks: int, stage: int) -> dict[str, float]:
    """Return the bytes of ``parameter``, ``gradient`` and ``optimizer`` on a rank between steps."""
    _check_stage(stage)
    whole, share = FLOAT_BYTES * parameters, FLOAT_BYTES * parameters / ranks
    # The optimizer state is sharded from stage 1 on, gradients from 2, parameters from 3.
    optimizer, gradient, parameter = (share if stage >= first else whole for first in (1, 2, 3))
    return {"parameter": parameter, "gradient": gradient, "optimizer": 2 * optimizer}


def _check_stage(stage: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage {stage} is not 0 (DDP), 1, 2 or 3 (FSDP)")


def wire_bytes(parameter_bytes: float, ranks: int, *, all_gathers: int = 2) -> dict[str, float]:
    """Return the bytes that a rank of a ring sends in a step, by collective ("ZeRO", section 7)."""
    # FSDP makes two all-gathers, or one without resharding, and a reduce-scatter. DDP's all-reduce
    # is one of each.
    one_pass = (ranks - 1) / ranks * parameter_bytes
    return {"all_gather": all_gathers * one_pass, "reduce_scatter": one_pass}


def small_fsdp_peak_bytes(units: Sequence[int], ranks: int) -> float:
    """Return the peak bytes of a step of ``small_fsdp``, without activations, from units' bytes."""
    # The shards of the parameters and of Adam's two states.
    kept = 3 * sum(units) / ranks
    # In its backward pass a unit has a flat gradient and gloo's copy of it, beside the shards of
    # the gradients from this unit on.
    return kept + max(2 * size + sum(units[index:]) / ranks for index, size in enumerate(units))


def tokens_to_hide(
    flops_per_s: float, wire_bytes_per_s: float, ranks: int, number_bytes: int = 2
) -> float:
    """Return the tokens per rank and step from which FSDP's arithmetic hides its communication."""
    # Training takes about 6 operations per parameter and token (Kaplan et al., 2020,
    # arXiv:2001.08361) and three passes over the parameters, so their number cancels.
    seconds_per_parameter = 3 * number_bytes * (ranks - 1) / ranks / wire_bytes_per_s
    return seconds_per_parameter * flops_per_s / 6


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer in an FSDP unit, and in a ``block`` that checkpointing repeats."""

    inputs: int
    outputs: int
    unit: str
    block: str = ""
    relu: bool = True
    bias: bool = True

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of weight and bias."""
        return ((self.outputs, self.inputs), (self.outputs,))[: 1 + self.bias]

    @property
    def elements(self) -> int:
        """Elements of weight and bias."""
        return sum(map(math.prod, self.shapes))


def toy_layers(wrap: str, hidden: int, narrow: int, skip: Sequence[int] = ()) -> list[LinearLayer]:
    """Return the layers of models.toy.ToyModel by ``wrap``; blocks of ``skip`` stay in the root."""
    widths = [10, *[hidden] * 3, *[narrow] * 8, 5]
    last = len(widths) - 2
    layers = []
    for index, (a, b) in enumerate(pairwise(widths)):
        block = f"block {index - 2}" if 2 <= index < last else ""
        wrapped = "root" if index - 2 in skip or not block else block
        unit = {"block": wrapped, "layer": f"layer {index}"}.get(wrap, "root")
        layers.append(LinearLayer(a, b, unit, block, relu=index < last))
    return layers


def mlp_stack_layers(wrap: str, dim: int, blocks: int = 3) -> list[LinearLayer]:
    """Return the layers of labkit.models.mlp.MLPStack, two per MLP, in the units of ``wrap``."""
    layers = []
    for index, times in enumerate(islice(cycle((3, 4, 3)), blocks)):
        block = f"block {index}"
        for part, (a, b) in enumerate(((dim, times * dim), (times * dim, dim))):
            unit = {"block": block, "layer": f"layer {2 * index + part}"}.get(wrap, "root")
            layers.append(LinearLayer(a, b, unit, block))
    return layers


def unit_bytes(layers: Sequence[LinearLayer], ranks: int) -> dict[str, tuple[int, int]]:
    """Return (bytes of a rank's shard, bytes when gathered) of each unit, by name."""
    kept: Counter[str] = Counter()
    for layer in layers:
        kept[layer.unit] += FLOAT_BYTES * sum(shard_elements(each, ranks) for each in layer.shapes)
    return {unit: (shard, shard * ranks) for unit, shard in kept.items()}


def step_collectives(
    layers: Sequence[LinearLayer],
    ranks: int,
    *,
    reshard_after_forward: bool = True,
    frozen: Collection[str] = (),
) -> dict[str, int]:
    """Return the collectives of a step and the bytes handed over, by ``result.value`` name."""
    units = unit_bytes(layers, ranks)
    gathered = list(units.values())
    # Frozen units at the beginning need no backward pass, but their last is gathered ahead.
    spared = max(0, len(list(takewhile(frozen.__contains__, units))) - 1)
    # A unit that was resharded is gathered again for the backward pass. The root's comes next, so
    # it is not resharded.
    if reshard_after_forward:
        gathered += [sizes for unit, sizes in [*units.items()][spared:] if unit != "root"]
    reduced = [full for unit, (_, full) in units.items() if unit not in frozen]
    return {
        "all_gather_count": len(gathered),
        "all_gather_bytes": sum(kept for kept, _ in gathered),
        "reduce_scatter_count": len(reduced),
        "reduce_scatter_bytes": sum(reduced),
    }


def prefetched_forward(takes: Sequence[float], computes: Sequence[float]) -> float:
    """Return the end of a forward pass that starts each gather before it waits for the last one.

    Args:
        takes: time of each bucket's gather.
        computes: time of the arithmetic that needs it and nothing later, in the same unit.
    """
    ends, arrived = [0.0, 0.0], 0.0
    for take, compute in zip(takes, computes, strict=True):
        arrived = max(ends[-2], arrived) + take
        ends.append(max(ends[-1], arrived) + compute)
    return ends[-1]


def stage_collectives(
    layers: Sequence[LinearLayer], ranks: int, *, stage: int, number_bytes: int = FLOAT_BYTES
) -> dict[str, int]:
    """Return the collectives of a step in each stage of ``step_ledger``, and the bytes handed over.

    Stage 0 makes one all-reduce per bucket of 25 MiB. Stage 1 reduces every gradient onto the rank
    that updates its parameter, then gathers the updated parameters ("ZeRO", section 7.1); only its
    bytes are given. Stages 2 and 3 gather ``number_bytes`` per element.
    """
    sizes = [FLOAT_BYTES * math.prod(shape) for layer in layers for shape in layer.shapes]
    if stage == 0:
        buckets = bucket_plan(sizes[::-1], first_mb=DEFAULT_BUCKET_MB)
        return {"all_reduce_count": len(buckets), "all_reduce_bytes": sum(sizes)}
    if stage == 1:
        return {"all_gather_bytes": sum(sizes) // ranks, "reduce_scatter_bytes": sum(sizes)}
    sent = step_collectives(layers, ranks, reshard_after_forward=stage == 3)
    return sent | {"all_gather_bytes": sent["all_gather_bytes"] * number_bytes // FLOAT_BYTES}


def stage_wire_bytes(handed: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Return the bytes that leave a rank in a step, by collective.

    ``handed`` has the bytes handed to the calls, by names such as ``all_gather_bytes``.
    """
    return {
        name: collective_wire_bytes(name, handed[f"{name}_bytes"], ranks)
        for name in ("all_gather", "reduce_scatter", "all_reduce")
        if f"{name}_bytes" in handed
    }


def hybrid_collectives(
    layers: Sequence[LinearLayer], group: int, *, reshard_after_forward: bool = True
) -> dict[str, int]:
    """Return the collectives of a hybrid-sharded step and the bytes handed over, by axis."""
    inside = step_collectives(layers, group, reshard_after_forward=reshard_after_forward)
    # Each rank all-reduces the gradient of its shard of every unit over the groups.
    shards = [shard for shard, _ in unit_bytes(layers, group).values()]
    return {f"data/{name}": value for name, value in inside.items()} | {
        "replicate/all_reduce_count": len(shards),
        "replicate/all_reduce_bytes": sum(shards),
    }


def resident_bytes(
    layers: Sequence[LinearLayer], ranks: int, *, frozen: Collection[str] = ()
) -> dict[str, int]:
    """Return the bytes that the fullest rank holds after a step, by ``result.value`` name."""
    units = unit_bytes(layers, ranks)
    # Frozen units have neither gradients nor optimizer state.
    trained = sum(shard for unit, (shard, _) in units.items() if unit not in frozen)
    tensors = sum(len(layer.shapes) for layer in layers if layer.unit not in frozen)
    return {
        "end_parameter_bytes": sum(shard for shard, _ in units.values()),
        "end_gradient_bytes": trained,
        "end_optstate_bytes": 2 * trained + FLOAT_BYTES * tensors,
    }


@dataclass
class MemoryLedger:
    """What a rank holds after each event of a training step, in the order of ``fully_shard``."""

    layers: Sequence[LinearLayer]
    samples: int
    ranks: int
    stage: int = 3
    checkpointing: bool = False
    number_bytes: int = FLOAT_BYTES
    moments: list[Mapping[str, int]] = field(default_factory=list)
    """Bytes by category after each event."""
    backward: int = 0
    """Index of the first moment of the backward pass."""

    def __post_init__(self) -> None:
        # Stages 0 and 1 gather nothing, and reduce nothing before the end of the step.
        self.sharded, self.short = self.stage >= 2, self.number_bytes != FLOAT_BYTES
        self.units = unit_bytes(self.layers, self.ranks)
        sizes = self.units.items()
        self.full = {unit: full * self.number_bytes // FLOAT_BYTES for unit, (_, full) in sizes}
        self.loss_bytes = FLOAT_BYTES * self.samples * self.layers[-1].outputs
        self.gathered: set[str] = set()
        # Units that were prefetched and are still in the all-gather's buffer.
        self.ahead: set[str] = set()
        # Bytes of the forward pass's last all-gather, whose buffer lives until the next is read.
        self.buffer = 0
        # Bytes of the last reduce-scatter's input, which is kept until the next one starts.
        self.reducing = 0
        held = resident_bytes(self.layers, self.ranks if self.sharded else 1)
        state = resident_bytes(self.layers, self.ranks if self.stage else 1)["end_optstate_bytes"]
        self.now = Counter(parameter=held["end_parameter_bytes"])
        self.change("optstate", state)
        inputs = self.layers[0].inputs
        self.change("activation", FLOAT_BYTES * self.samples * inputs)
        # The samples are float32, and mixed precision makes a copy of them.
        if self.short:
            self.change("activation", self._activation_bytes(inputs))
        self.run_forward()
        self.backward = len(self.moments)
        self.run_backward()

    @property
    def peak_index(self) -> int:
        """Index of the first moment at which the rank holds most."""
        totals = [sum(moment.values()) for moment in self.moments]
        return totals.index(max(totals))

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category at the peak, with their sum as ``total``."""
        held = {category: size for category, size in self.moments[self.peak_index].items() if size}
        return held | {"total": sum(held.values())}

    def change(self, category: str, *sizes: int) -> None:
        """Allocate bytes, or free negative ones, one after another."""
        for size in sizes:
            self.now[category] += size
            self.moments.append(dict(self.now))

    def _activation_bytes(self, width: int) -> int:
        return self.number_bytes * self.samples * width

    def _inner_layers(self, block: str) -> list[LinearLayer]:
        return [layer for layer in self.layers if layer.block == block][:-1]

    def run_forward(self) -> None:
        if "root" in self.units:
            self._gather_unit("root")
        for layer, following in pairwise([*self.layers, None]):
            assert layer
            self._gather_unit(layer.unit)
            self._layer_forward(layer)
            ends_block = not following or following.block != layer.block
            if self.checkpointing and layer.block and ends_block:
                for inner in self._inner_layers(layer.block):
                    self.change("activation", -self._activation_bytes(inner.outputs))
            ends_unit = not following or following.unit != layer.unit
            if self.stage == 3 and layer.unit != "root" and ends_unit:
                self._reshard_unit(layer.unit)
        self.change("all_gather", -self.buffer)
        # The mean square of output - 1 in float32 keeps output - 1; a short output is cast first.
        size = self.loss_bytes
        cast = size if self.short else 0
        self.change("temp", cast)
        self.change("activation", size)
        self.change("temp", -cast, size, -size)

    def run_backward(self) -> None:
        size = self.loss_bytes
        # Autograd holds the mean's gradient, output - 1, twice that, and their product at once.
        self.change("temp", 4 * size, -3 * size)
        self.change("activation", -size)
        if self.short:
            self.change("temp", size * self.number_bytes // FLOAT_BYTES, -size)
        recomputed: set[str] = set()
        for index, layer in reversed(list(enumerate(self.layers))):
            self._regather_unit(layer.unit, ahead=self._preceding_unit(index))
            if self.checkpointing and layer.block and layer.block not in recomputed:
                recomputed.add(layer.block)
                for inner in self._inner_layers(layer.block):
                    self._layer_forward(inner, keep_as="temp")
            again = layer.block in recomputed and layer in self._inner_layers(layer.block)
            self._layer_backward(layer, first=index == 0, kept_as="temp" if again else "activation")
            starts_unit = index == 0 or self.layers[index - 1].unit != layer.unit
            if layer.unit != "root" and starts_unit:
                self._reduce_gradients(layer.unit)
        if "root" in self.units:
            self._reduce_gradients("root")
        if not self.sharded:
            self.change("temp", self.now["gradient"])

    def _layer_forward(self, layer: LinearLayer, keep_as: str = "activation") -> None:
        out = self._activation_bytes(layer.outputs)
        self.change(keep_as, out)
        # ReLU's backward pass needs its result and not its input, which is freed.
        if layer.relu:
            self.change(keep_as, out, -out)

    def _layer_backward(self, layer: LinearLayer, first: bool, kept_as: str) -> None:
        out, before = self._activation_bytes(layer.outputs), self._activation_bytes(layer.inputs)
        gradient = "temp" if self.sharded else "gradient"
        # The gradient before the ReLU is made while the one behind it still exists.
        if layer.relu:
            self.change("temp", out, -out)
        self.change(kept_as, -out)
        if not first:
            self.change("temp", before)
        self.change(gradient, self.number_bytes * layer.elements)
        self.change("temp", -out)
        # The samples belong to the caller, but their low-precision copy is freed.
        if first and self.short:
            self.change("activation", -before)

    def _preceding_unit(self, index: int) -> str:
        earlier = (layer.unit for layer in reversed(self.layers[:index]))
        return next((unit for unit in earlier if unit not in (self.layers[index].unit, "root")), "")

    def _gather_unit(self, unit: str) -> None:
        if self.sharded and unit not in self.gathered:
            self.change("all_gather", self._sent_bytes(unit))
            self._unshard_unit(unit)
            self.change("all_gather", -self.buffer)
            self.buffer = self._sent_bytes(unit)

    def _regather_unit(self, unit: str, ahead: str) -> None:
        # Backward prefetch: the next unit is gathered before this one computes.
        for needed in (unit, ahead) if self.sharded else ():
            if needed and needed not in self.gathered | self.ahead:
                self.change("all_gather", self._sent_bytes(needed))
                self.ahead.add(needed)
            if needed == unit and unit not in self.gathered:
                self._unshard_unit(unit)
                self.change("all_gather", -self._sent_bytes(unit))
                self.ahead.discard(unit)

    def _sent_bytes(self, unit: str) -> int:
        """Return the bytes of what is gathered of a unit."""
        return self.full[unit]

    def _unshard_unit(self, unit: str) -> None:
        self.change("unsharded_parameter", self.full[unit])
        self.gathered.add(unit)

    def _reshard_unit(self, unit: str) -> None:
        self.change("unsharded_parameter", -self.full[unit])
        self.gathered.discard(unit)

    def _reduce_gradients(self, unit: str) -> None:
        if not self.sharded:
            return
        kept, full = self.units[unit]
        self._reshard_unit(unit)
        self.change("reduce_scatter", -self.reducing, full)
        # bfloat16 gradients are copied into the order of the ranks before they become float32.
        copied = self.full[unit] if self.short else 0
        self.change("temp", copied)
        self.change("gradient", kept)
        elements = sum(layer.elements for layer in self.layers if layer.unit == unit)
        # The whole gradients are freed last.
        self.change("temp", -copied - self.number_bytes * elements)
        self.reducing = full


def step_ledger(
    layers: Sequence[LinearLayer],
    samples: int,
    ranks: int,
    *,
    stage: int = 3,
    checkpointing: bool = False,
    number_bytes: int = FLOAT_BYTES,
) -> MemoryLedger:
    """Return what a rank holds after each event of a training step, by category.

    Categories: parameter, optstate and gradient, which stay on the rank; unsharded_parameter;
    all_gather and reduce_scatter, which are communication buffers; activation; temp.

    Args:
        layers: in the order of the forward pass.
        samples: rows of a rank's input, batch x sequence.
        ranks: number of ranks that share what is sharded.
        stage: 3 is FSDP. 2 keeps gathered parameters until the backward pass. 1 is DDP with a
            sharded optimizer. 0 is DDP, which also copies all gradients into a flat bucket (temp).
        checkpointing: blocks keep only their input, and recompute the rest in the backward pass.
        number_bytes: per element of gathered parameters, activations and their gradients: 4, or 2
            with bfloat16. Shards, reduced gradients and the loss stay float32.
    """
    _check_stage(stage)
    if stage < 2 and number_bytes != FLOAT_BYTES:
        rule = f"stage {stage} gathers no parameters, so none in {number_bytes} bytes"
        raise ValueError(f"{rule}: take float32, or stage 2 or 3")
    return MemoryLedger(layers, samples, ranks, stage, checkpointing, number_bytes)


def fsdp_step_peak(
    layers: Sequence[LinearLayer],
    samples: int,
    ranks: int,
    *,
    reshard_after_forward: bool = True,
    checkpointing: bool = False,
) -> dict[str, int]:
    """Return the bytes at the peak of an FSDP step, as ``step_ledger(…).peak``."""
    stage = 3 if reshard_after_forward else 2
    return step_ledger(layers, samples, ranks, stage=stage, checkpointing=checkpointing).peak


def ddp_step_peak(layers: Sequence[LinearLayer], samples: int) -> dict[str, int]:
    """Return the bytes at the peak of a DDP step, as ``step_ledger(…).peak``."""
    return step_ledger(layers, samples, 1, stage=0).peak
