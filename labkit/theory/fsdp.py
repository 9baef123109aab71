"""What fully sharded training holds and sends, as formulas: no torch, no ranks, numbers in and
numbers out.

Parameters are float32 (4 bytes) and the optimizer is Adam: two more numbers for each parameter, and
a 4-byte step count for each tensor. Sources: Rajbhandari et al., "ZeRO", 2020 (arXiv:1910.02054)
for who holds what; the order of events in a step is that of PyTorch's ``fully_shard``, read from
its code and held against measurements by the lab.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

from labkit.theory.collectives import collective_wire_bytes as collective_wire_bytes
from labkit.theory.ddp import DEFAULT_BUCKET_MB, bucket_plan

FLOAT_BYTES = 4
"""Bytes of a float32."""


def zero_bytes(parameters: int, ranks: int, stage: int) -> dict[str, float]:
    """Bytes that a rank holds between steps, float32 with Adam, when parameters divide evenly.

    Stages: 0 (DDP: nothing is sharded), 1 (the optimizer's state), 2 (and gradients) or 3 (and
        parameters: FSDP).

    Returns:
        Bytes of ``parameter``, ``gradient`` and ``optimizer``.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage {stage} is not 0 (DDP), 1, 2 or 3 (FSDP)")
    whole, share = FLOAT_BYTES * parameters, FLOAT_BYTES * parameters / ranks
    optimizer, gradient, parameter = (share if stage >= first else whole for first in (1, 2, 3))
    return {"parameter": parameter, "gradient": gradient, "optimizer": 2 * optimizer}


def wire_bytes(parameter_bytes: float, ranks: int, *, all_gathers: int = 2) -> dict[str, float]:
    """Bytes that a rank sends over the wire in one training step, in a ring, by collective.

    One pass over the parameters, an all-gather or a reduce-scatter, sends (ranks - 1) / ranks of
    their bytes: what the other ranks need. FSDP makes two all-gathers (one without resharding) and
    a reduce-scatter. DDP's all-reduce is one of each, so ``all_gathers=1`` is DDP too. Source:
    Rajbhandari et al., "ZeRO", 2020 (arXiv:1910.02054), section 7.
    """
    one_pass = (ranks - 1) / ranks * parameter_bytes
    return {"all_gather": all_gathers * one_pass, "reduce_scatter": one_pass}


def small_fsdp_peak_bytes(units: Sequence[int], ranks: int) -> float:
    """The most that a rank holds in a step of ``parallel.small_fsdp``, without activations.

    Args:
        units: bytes of each unit's parameters, float32, in the order of the forward pass; the ranks
            divide them.
        ranks: who share them.

    A rank keeps its share of parameters and of Adam's two numbers. The backward pass goes from the
    last unit to the first. In each, the rank holds the flat copy of the unit's gradients and gloo's
    working copy of it (before that, the gradients themselves), and its share of the gradients from
    this unit on.
    """
    kept = 3 * sum(units) / ranks
    return kept + max(2 * size + sum(units[index:]) / ranks for index, size in enumerate(units))


def tokens_to_hide(
    flops_per_s: float, wire_bytes_per_s: float, ranks: int, number_bytes: int = 2
) -> float:
    """Tokens of a rank in a step from which on FSDP's communication can hide behind its arithmetic.

    Training takes about 6 operations for each parameter and token (2 forward, 4 backward), and
    three passes over the parameters. The number of parameters is on both sides and drops out.
    Source of the 6: Kaplan et al., "Scaling laws for neural language models", 2020
    (arXiv:2001.08361).
    """
    seconds_per_parameter = 3 * number_bytes * (ranks - 1) / ranks / wire_bytes_per_s
    return seconds_per_parameter * flops_per_s / 6


def shard_elements(shape: Sequence[int], ranks: int) -> int:
    """Numbers that the fullest rank keeps of a parameter cut along its first dimension: ceil(rows /
    ranks) rows.
    """
    return -(-shape[0] // ranks) * math.prod(shape[1:])


@dataclass(frozen=True)
class LinearLayer:
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
    wrap: str,
    hidden: int,
    narrow: int,
    inputs: int = 10,
    outputs: int = 5,
    tail: int = 7,
    skip: Sequence[int] = (),
) -> list[LinearLayer]:
    """The layers of labkit.models.toy.ToyModel, assigned to the units that ``--wrap`` makes."""
    widths = [inputs, hidden, hidden, hidden, narrow] + [narrow] * tail + [outputs]
    last = len(widths) - 2
    layers = []
    for index, (a, b) in enumerate(pairwise(widths)):
        block = f"block {index - 2}" if 2 <= index < last and index - 2 not in skip else ""
        unit = {"block": block or "root", "layer": f"layer {index}"}.get(wrap, "root")
        layers.append(
            LinearLayer(
                a, b, unit, f"block {index - 2}" if 2 <= index < last else "", relu=index < last
            )
        )
    return layers


def mlp_stack_layers(wrap: str, dim: int, blocks: int = 3) -> list[LinearLayer]:
    """The layers of labkit.models.mlp.MLPStack, two in each MLP, assigned to the units that
    ``--wrap`` makes.
    """
    layers = []
    for index, times in zip(range(blocks), cycle((3, 4, 3))):  # a cycle has no end
        for part, (a, b) in enumerate(((dim, times * dim), (times * dim, dim))):
            unit = {"block": f"block {index}", "layer": f"layer {2 * index + part}"}.get(
                wrap, "root"
            )
            layers.append(LinearLayer(a, b, unit, f"block {index}"))
    return layers


def unit_bytes(layers: Sequence[LinearLayer], ranks: int) -> dict[str, tuple[int, int]]:
    """Bytes of each unit by name, in order: what a rank keeps of it, and what it holds while the
    unit is gathered.
    """
    kept: Counter[str] = Counter()
    for layer in layers:
        kept[layer.unit] += FLOAT_BYTES * sum(
            shard_elements(shape, ranks) for shape in layer.shapes
        )
    return {unit: (shard, shard * ranks) for unit, shard in kept.items()}


def step_collectives(
    layers: Sequence[LinearLayer], ranks: int, *, reshard_after_forward: bool = True
) -> dict[str, int]:
    """Collectives of one training step and the bytes that a rank hands to them, by the names of
    ``result.value``.

    Every unit is gathered once for the forward pass. Resharding costs a second time in the backward
    pass, but for the root, which is not resharded since its backward pass comes next. Every unit's
    gradients are reduce-scattered once.
    """
    units = unit_bytes(layers, ranks)
    again = {
        unit: sizes for unit, sizes in units.items() if reshard_after_forward and unit != "root"
    }
    return {
        "all_gather_count": len(units) + len(again),
        "all_gather_bytes": sum(kept for kept, _ in [*units.values(), *again.values()]),
        "reduce_scatter_count": len(units),
        "reduce_scatter_bytes": sum(full for _, full in units.values()),
    }


def stage_collectives(
    layers: Sequence[LinearLayer], ranks: int, *, stage: int, number_bytes: int = FLOAT_BYTES
) -> dict[str, int]:
    """The same for each stage of ``step_ledger``, with gathers of ``number_bytes`` a number.

    Stage 0 is one all-reduce a bucket of 25 MiB. Stage 1 reduces every gradient onto the rank that
    updates its parameter, and gathers the updated ones: bytes alone, as Rajbhandari et al., 2020,
    section 7.1, count them.
    """
    whole = sum(FLOAT_BYTES * math.prod(shape) for layer in layers for shape in layer.shapes)
    if stage == 0:
        coming = [
            FLOAT_BYTES * math.prod(shape)
            for layer in reversed(layers)
            for shape in reversed(layer.shapes)
        ]
        buckets = bucket_plan(coming, first_mb=DEFAULT_BUCKET_MB)
        return {"all_reduce_count": len(buckets), "all_reduce_bytes": whole}
    if stage == 1:
        return {"all_gather_bytes": whole // ranks, "reduce_scatter_bytes": whole}
    sent = step_collectives(layers, ranks, reshard_after_forward=stage == 3)
    return sent | {"all_gather_bytes": sent["all_gather_bytes"] * number_bytes // FLOAT_BYTES}


def stage_wire_bytes(handed: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Bytes that leave a rank in a step, by collective, from those handed to the calls by
    ``..._bytes``.
    """
    names = [
        name for name in ("all_gather", "reduce_scatter", "all_reduce") if f"{name}_bytes" in handed
    ]
    return {name: collective_wire_bytes(name, handed[f"{name}_bytes"], ranks) for name in names}


def hybrid_collectives(
    layers: Sequence[LinearLayer], group: int, *, reshard_after_forward: bool = True
) -> dict[str, int]:
    """The same for hybrid sharding, by axis: ``data`` inside a group of ranks, ``replicate`` from
    group to group.

    A group does what all ranks do without groups. Each of its ranks then holds the sum of the
    group's gradients for its shard, and sums that over the groups: one all-reduce a unit, of the
    shard's size.
    """
    inside = step_collectives(layers, group, reshard_after_forward=reshard_after_forward)
    shards = [shard for shard, _ in unit_bytes(layers, group).values()]
    across = {"all_reduce_count": len(shards), "all_reduce_bytes": sum(shards)}
    return {f"data/{name}": value for name, value in inside.items()} | {
        f"replicate/{name}": value for name, value in across.items()
    }


def resident_bytes(
    layers: Sequence[LinearLayer], ranks: int, *, frozen: Collection[str] = ()
) -> dict[str, int]:
    """Bytes that the fullest rank holds after a step, gradients included, by the names of
    ``result.value``.

    Parameters of the units in ``frozen`` are not trained: they have neither gradient nor optimizer
    state.
    """
    units = unit_bytes(layers, ranks)
    trained = sum(shard for unit, (shard, _) in units.items() if unit not in frozen)
    tensors = sum(len(layer.shapes) for layer in layers if layer.unit not in frozen)
    return {
        "end_parameter_bytes": sum(shard for shard, _ in units.values()),
        "end_gradient_bytes": trained,
        "end_optstate_bytes": 2 * trained + FLOAT_BYTES * tensors,
    }


@dataclass(frozen=True)
class MemoryLedger:
    """What a rank holds in the course of one training step.

    Attributes:
        moments: bytes by category after each event, in the order of the step.
        backward: the index of the first moment of the backward pass.
    """

    moments: Sequence[Mapping[str, int]]
    backward: int

    @property
    def peak_index(self) -> int:
        """The index of the first moment at which the rank holds most."""
        totals = [sum(moment.values()) for moment in self.moments]
        return totals.index(max(totals))

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category at that moment, and their sum as ``total``."""
        held = {category: size for category, size in self.moments[self.peak_index].items() if size}
        return held | {"total": sum(held.values())}


def step_ledger(
    layers: Sequence[LinearLayer],
    samples: int,
    ranks: int,
    *,
    stage: int = 3,
    checkpointing: bool = False,
    number_bytes: int = FLOAT_BYTES,
) -> MemoryLedger:
    """What a rank holds after each event of one training step, by category.

    Categories: parameter, optstate and gradient (what stays on the rank); unsharded_parameter;
        all_gather and
    reduce_scatter (communication buffers); activation; temp.

    Args:
        layers: in the order of the forward pass.
        samples: rows of a rank's input, batch x sequence.
        ranks: who share what is sharded.
        stage: 3 is FSDP; 2 is FSDP that keeps what it has gathered until the backward pass; 1 is
            DDP with a sharded optimizer; 0 is DDP, where gradients stay where they were made, and
            at the end of the backward pass a flat bucket (temp) holds all of them once more, for
            the all-reduce.
        checkpointing: blocks keep their input only, and compute the rest again in the backward
            pass.
        number_bytes: of a number in gathered parameters, activations and their gradients: 4, or 2
            with bfloat16. Shards, reduced gradients and the loss stay float32.

    Raises:
        ValueError: another stage; 2 bytes in a stage that gathers nothing.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage {stage} is not 0 (DDP), 1, 2 or 3 (FSDP)")
    if stage < 2:
        if number_bytes != FLOAT_BYTES:
            raise ValueError(
                f"stage {stage} gathers no parameters, so none are gathered in {number_bytes}"
                " bytes: take float32, or stage 2 or 3"
            )
        walk: _StepMemory = _DDPStepMemory(
            layers, samples, ranks, False, checkpointing, FLOAT_BYTES, shard_optimizer=stage == 1
        )
    else:
        walk = _StepMemory(layers, samples, ranks, stage == 3, checkpointing, number_bytes)
    walk.forward()
    backward = len(walk.moments)
    walk.backward()
    return MemoryLedger(walk.moments, backward)


def fsdp_step_peak(
    layers: Sequence[LinearLayer],
    samples: int,
    ranks: int,
    *,
    reshard_after_forward: bool = True,
    checkpointing: bool = False,
) -> dict[str, int]:
    """Bytes by category at the moment of an FSDP step when a rank holds most, and their sum as
    ``total``.

    See ``step_ledger``, which walks through the step event by event.
    """
    stage = 3 if reshard_after_forward else 2
    return step_ledger(layers, samples, ranks, stage=stage, checkpointing=checkpointing).peak


def ddp_step_peak(layers: Sequence[LinearLayer], samples: int) -> dict[str, int]:
    """The same for DDP, where every rank holds everything."""
    return step_ledger(layers, samples, 1, stage=0).peak


class _StepMemory:
    """What one training step allocates and frees, event by event, as ``fully_shard`` orders
    them.
    """

    gradient_category = "temp"
    """Category of a parameter's whole gradient."""

    def __init__(
        self,
        layers: Sequence[LinearLayer],
        samples: int,
        ranks: int,
        reshard: bool,
        checkpointing: bool,
        number_bytes: int,
    ):
        self.layers, self.samples, self.reshard, self.checkpointing = (
            layers,
            samples,
            reshard,
            checkpointing,
        )
        self.ranks, self.number_bytes = ranks, number_bytes
        self.short = number_bytes != FLOAT_BYTES
        self.units = unit_bytes(layers, ranks)
        self.now: Counter[str] = Counter()  # bytes that are allocated, by category
        self.moments: list[Mapping[str, int]] = []
        self.gathered: set[str] = set()
        self.ahead: set[str] = (
            set()
        )  # gathered ahead of their use, still in the all-gather's buffer
        self.buffer = 0  # of the last all-gather of the forward pass
        self.reducing = 0  # input of the last reduce-scatter, kept until the next one starts
        self.add_initial_state()
        self.allocate("activation", self._float_activation_bytes(layers[0].inputs))
        if self.short:  # the samples are float32, their copy is not
            self.allocate("activation", self._activation_bytes(layers[0].inputs))

    def add_initial_state(self) -> None:
        """What is there before the step."""
        held = resident_bytes(self.layers, self.ranks)
        self.set_resident_bytes(held["end_parameter_bytes"], held["end_optstate_bytes"])

    def set_resident_bytes(self, parameters: int, state: int) -> None:
        """The first moment: what stays from step to step."""
        self.now["parameter"] = parameters
        self.allocate("optstate", state)

    def allocate(self, category: str, size: int) -> None:
        self.now[category] += size
        self.moments.append(dict(self.now))

    def free(self, category: str, size: int) -> None:
        self.allocate(category, -size)

    def _activation_bytes(self, width: int) -> int:
        return self.number_bytes * self.samples * width

    def _float_activation_bytes(self, width: int) -> int:
        return FLOAT_BYTES * self.samples * width

    def _full_unit_bytes(self, unit: str) -> int:
        """Bytes of a unit's parameters while they are gathered."""
        return self.units[unit][1] * self.number_bytes // FLOAT_BYTES

    def forward(self) -> None:
        if "root" in self.units:
            self._gather_unit("root")
        for index, layer in enumerate(self.layers):
            self._gather_unit(layer.unit)
            self._layer_forward(layer)
            following = self.layers[index + 1] if index + 1 < len(self.layers) else None
            if (
                self.checkpointing
                and layer.block
                and (following is None or following.block != layer.block)
            ):
                for inner in self._inner_layers(layer.block):
                    self.free("activation", self._activation_bytes(inner.outputs))
            if (
                self.reshard
                and layer.unit != "root"
                and (following is None or following.unit != layer.unit)
            ):
                self._reshard_unit(layer.unit)
        self.free("all_gather", self.buffer)
        self._loss_forward(self._float_activation_bytes(self.layers[-1].outputs))

    def _loss_forward(self, size: int) -> None:
        """The mean square of output - 1, in float32; it keeps output - 1."""
        if self.short:
            self.allocate("temp", size)
        self.allocate("activation", size)
        if self.short:
            self.free("temp", size)
        self.allocate("temp", size)
        self.free("temp", size)

    def _loss_backward(self, size: int) -> None:
        """The gradient of the output. On the way there are the mean's, output - 1, twice that, and
        their product.
        """
        self.allocate("temp", 4 * size)
        self.free("temp", 3 * size)
        self.free("activation", size)
        if self.short:
            short = size * self.number_bytes // FLOAT_BYTES
            self.allocate("temp", short)
            self.free("temp", size)

    def _layer_forward(self, layer: LinearLayer, keep_as: str = "activation") -> None:
        out = self._activation_bytes(layer.outputs)
        self.allocate(keep_as, out)
        if layer.relu:  # its result is kept, its input is not
            self.allocate(keep_as, out)
            self.free(keep_as, out)

    def _inner_layers(self, block: str) -> list[LinearLayer]:
        return [layer for layer in self.layers if layer.block == block][:-1]

    def backward(self) -> None:
        self._loss_backward(self._float_activation_bytes(self.layers[-1].outputs))
        recomputed: set[str] = set()
        for index, layer in reversed(list(enumerate(self.layers))):
            self._regather_unit(layer.unit, ahead=self._preceding_unit(index))
            if self.checkpointing and layer.block and layer.block not in recomputed:
                recomputed.add(layer.block)
                for inner in self._inner_layers(layer.block):
                    self._layer_forward(inner, keep_as="temp")
            again = layer.block in recomputed and layer in self._inner_layers(layer.block)
            self._layer_backward(layer, first=index == 0, kept_as="temp" if again else "activation")
            if layer.unit != "root" and (index == 0 or self.layers[index - 1].unit != layer.unit):
                self._reduce_gradients(layer.unit)
        if "root" in self.units:
            self._reduce_gradients("root")

    def _preceding_unit(self, index: int) -> str:
        unit = self.layers[index].unit
        return next(
            (
                each.unit
                for each in reversed(self.layers[:index])
                if each.unit not in (unit, "root")
            ),
            "",
        )

    def _layer_backward(self, layer: LinearLayer, first: bool, kept_as: str) -> None:
        out, before = self._activation_bytes(layer.outputs), self._activation_bytes(layer.inputs)
        if layer.relu:
            self.allocate("temp", out)  # gradient before the ReLU
            self.free("temp", out)
        self.free(kept_as, out)
        if not first:
            self.allocate("temp", before)
        self.allocate(
            self.gradient_category,
            self.number_bytes * sum(math.prod(shape) for shape in layer.shapes),
        )
        self.free("temp", out)
        if first and self.short:  # the samples' copy; they themselves are the caller's
            self.free("activation", before)

    def _gather_unit(self, unit: str) -> None:
        """For the forward pass. The buffer that the ranks' shards arrive in lives on until the next
        one is read.
        """
        if unit not in self.gathered:
            self.allocate("all_gather", self._full_unit_bytes(unit))
            self._unshard_unit(unit)
            self.free("all_gather", self.buffer)
            self.buffer = self._full_unit_bytes(unit)

    def _regather_unit(self, unit: str, ahead: str) -> None:
        """For the backward pass: the next unit's shards are under way while this one computes."""
        for needed in (unit, ahead):
            if needed and needed not in self.gathered | self.ahead:
                self.allocate("all_gather", self._full_unit_bytes(needed))
                self.ahead.add(needed)
            if needed == unit and unit not in self.gathered:
                self._unshard_unit(unit)
                self.free("all_gather", self._full_unit_bytes(unit))
                self.ahead.discard(unit)

    def _unshard_unit(self, unit: str) -> None:
        self.allocate("unsharded_parameter", self._full_unit_bytes(unit))
        self.gathered.add(unit)

    def _reshard_unit(self, unit: str) -> None:
        self.free("unsharded_parameter", self._full_unit_bytes(unit))
        self.gathered.discard(unit)

    def _reduce_gradients(self, unit: str) -> None:
        kept, full = self.units[unit]
        self._reshard_unit(unit)
        self.free("reduce_scatter", self.reducing)
        self.allocate("reduce_scatter", full)
        copied = (
            self._full_unit_bytes(unit) if self.short else 0
        )  # put in order of the ranks, before they become float32
        self.allocate("temp", copied)
        self.allocate("gradient", kept)
        numbers = sum(
            math.prod(s) for layer in self.layers if layer.unit == unit for s in layer.shapes
        )
        self.free(
            "temp", copied + self.number_bytes * numbers
        )  # the whole gradients are the last to go
        self.reducing = full


class _DDPStepMemory(_StepMemory):
    """The same where nothing is gathered, freed or reduced before all gradients are there."""

    gradient_category = "gradient"

    def __init__(self, *how: Any, shard_optimizer: bool):
        self.shard_optimizer = shard_optimizer
        super().__init__(*how)

    def add_initial_state(self) -> None:
        held, share = resident_bytes(self.layers, 1), resident_bytes(self.layers, self.ranks)
        self.set_resident_bytes(
            held["end_parameter_bytes"],
            (share if self.shard_optimizer else held)["end_optstate_bytes"],
        )

    def backward(self) -> None:
        super().backward()
        self.allocate("temp", self.now["gradient"])

    def _gather_unit(self, unit: str) -> None:
        pass

    def _regather_unit(self, unit: str, ahead: str) -> None:
        pass

    def _reshard_unit(self, unit: str) -> None:
        pass

    def _reduce_gradients(self, unit: str) -> None:
        pass
