"""Compute what FSDP's all-gather sends when the parameter itself chooses the format.

A rank sends its rows of every parameter, padded to the longest shard: ceil(rows / ranks). In all
functions ``extension`` is a key of ``ELEMENT_BYTES``, ``shape`` that of the whole parameter, whose
rows the ``ranks`` share, and ``scales`` overrides which elements share a float32 scale: those of a
"shard", a "row", or a "group" of 32 in a row.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from labkit.theory.fsdp import FLOAT_BYTES, LinearLayer, MemoryLedger, resident_bytes
from labkit.theory.sizes import shard_elements

# Bytes per element that a rank hands to the all-gather.
EXTENSION_BYTES = {"fp32": 4, "bf16": 2, "float8": 1, "int8": 1, "two_tensor": 8}
ELEMENT_BYTES = EXTENSION_BYTES | {"int4": 0.5}
SCALE_BYTES = 4
# Which elements share a scale by default.
SCALE_GRANULARITY = {"float8": "shard", "int8": "row", "int4": "row"}
GROUP_SIZE = 32
# The network of lab 3 looks at tiles of 3 x 16 x 16 numbers, and tells ten regions apart.
TILE_NUMBERS, CLASSES = 768, 10
# The loss, and the weight that cross entropy divides by.
LOSS_BYTES = 8
# Largest relative difference between an extension's final loss and that of fp32.
LOSS_LIMITS = {"fp32": 0.0, "bf16": 0.02, "float8": 0.10, "int8": 0.10}
# The final loss is the mean over this many steps, because a single batch is noisy.
FINAL_STEPS = 10


def gather_bytes(shape: Sequence[int], ranks: int, extension: str, scales: str = "") -> int:
    """Return the bytes that one rank hands to one all-gather of a float32 parameter."""
    if extension not in ELEMENT_BYTES:
        raise ValueError(f"extension {extension!r} is none of {', '.join(ELEMENT_BYTES)}")
    elements = shard_elements(shape, ranks)
    return int(elements * ELEMENT_BYTES[extension]) + scale_bytes(shape, ranks, extension, scales)


def scale_bytes(shape: Sequence[int], ranks: int, extension: str, scales: str = "") -> int:
    """Return the bytes of the scales that are a part of ``gather_bytes``."""
    if scales and extension not in SCALE_GRANULARITY:
        known = " or ".join(SCALE_GRANULARITY)
        rule = f"extension {extension} has no scales to share in a {scales}"
        raise ValueError(f"{rule}: take {known}")
    rows = -(-shape[0] // ranks)
    groups = rows * -(-math.prod(shape[1:]) // GROUP_SIZE)
    counts = {"": 0, "shard": 1, "row": rows, "group": groups}
    return SCALE_BYTES * counts[scales or SCALE_GRANULARITY.get(extension, "")]


def step_gather_bytes(
    shapes: Sequence[Sequence[int]],
    ranks: int,
    extension: str,
    *,
    reshard: bool = True,
    scales: str = "",
) -> int:
    """Return the bytes that one rank hands to the all-gathers of a step, outside the root unit."""
    # Parameters that are freed after the forward pass are gathered again in the backward pass.
    return (1 + reshard) * sum(gather_bytes(shape, ranks, extension, scales) for shape in shapes)


def _computes_with_gathered(extension: str, compute_bytes: int) -> bool:
    return {"fp32": 4, "bf16": 2, "two_tensor": 4}.get(extension) == compute_bytes


def held_bytes(
    shape: Sequence[int], ranks: int, extension: str, *, compute_bytes: int = 4, scales: str = ""
) -> int:
    """Return the bytes that a rank holds of a parameter while computing with it, with padding.

    If the gathered buffer does not have the dtype of the computation, of ``compute_bytes`` per
    element, the rank also holds a decoded copy.
    """
    gathered = ranks * gather_bytes(shape, ranks, extension, scales)
    if _computes_with_gathered(extension, compute_bytes):
        return gathered
    copies = 2 if extension == "two_tensor" else 1
    return gathered + copies * ranks * shard_elements(shape, ranks) * compute_bytes


def pays_below(bytes_saved: float, coding_s: float, ranks: int) -> float:
    """Return the bandwidth in bytes/s below which a smaller all-gather saves time."""
    # Each rank of a ring sends (ranks - 1) / ranks of what is saved. Nothing hides the coding.
    return bytes_saved * (ranks - 1) / ranks / coding_s


def rounding_error(extension: str) -> float:
    """Return the largest error of a gathered weight, relative to the largest that shares its scale.

    With 7 bits of mantissa, bfloat16 is off by up to 2 ** -8 of its value. The scale of a float8
    e4m3fn makes the largest value 448, where neighbours are 32 apart. An int8 takes 127 steps to
    reach it, an int4 takes 7. Rounding misses by up to half a step. Sources: Micikevicius et al.,
    "FP8 Formats", 2022 (arXiv:2209.05433); Dettmers et al., "LLM.int8()", 2022 (arXiv:2208.07339).
    """
    floats = {"fp32": 0.0, "two_tensor": 0.0, "bf16": 2**-8, "float8": 16 / 448}
    return (floats | {"int8": 0.5 / 127, "int4": 0.5 / 7})[extension]


def tile_layers(dim: int) -> list[LinearLayer]:
    """Return the layers of labkit.models.tile_network, in its four units."""
    layers = [LinearLayer(TILE_NUMBERS, dim, "first", relu=False, bias=False)]
    for unit in ("mlp 1", "mlp 2"):
        layers += [LinearLayer(dim, 4 * dim, unit, bias=False)]
        layers += [LinearLayer(4 * dim, dim, unit, bias=False)]
    return [*layers, LinearLayer(dim, CLASSES, "last", relu=False, bias=False)]


def step_peak(
    dim: int, batch: int, ranks: int, extension: str, *, compute_bytes: int = 4
) -> dict[str, int]:
    """Return the bytes by category at the peak of a step of ``allgather_extensions``.

    They are those of a rank, with their sum as ``total``, see ``fsdp.step_ledger``. Without hooks
    the ``extension`` is "fp32" or, with a policy that computes in ``compute_bytes``, "bf16".
    """
    if extension == "two_tensor" and compute_bytes != FLOAT_BYTES:
        raise ValueError(f"a two_tensor in {compute_bytes} bytes has no ledger: take 4")
    return GatherLedger(tile_layers(dim), batch, ranks, extension, compute_bytes).peak


class GatherLedger(MemoryLedger):
    """What a rank holds after each event of a step whose units gather with an extension.

    An element is sent in one format and computed with in another. What has been gathered stays
    beside the decoded parameter until both are freed, and decoding makes copies on its way.
    """

    def __init__(
        self,
        layers: Sequence[LinearLayer],
        samples: int,
        ranks: int,
        extension: str,
        compute_bytes: int,
    ):
        self.extension, self.copies = extension, 2 if extension == "two_tensor" else 1
        # What was gathered is the parameter itself.
        self.is_shared = _computes_with_gathered(extension, compute_bytes)
        self.known: set[str] = set()
        self.sent = Counter[str]()
        for layer in layers:
            for shape in layer.shapes:
                self.sent[layer.unit] += ranks * gather_bytes(shape, ranks, extension)
        super().__init__(layers, samples, ranks, number_bytes=compute_bytes)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Both halves of a TwoTensor have a shard and Adam's numbers, and one step count.
        extra = self.copies - 1
        kept = resident_bytes(self.layers, self.ranks)["end_parameter_bytes"]
        added = {
            "parameter": extra * kept,
            "optstate": extra * 2 * kept,
            "activation": self.copies * LOSS_BYTES,
        }
        self.moments = [Counter(moment) + Counter(added) for moment in self.moments]

    def _activation_bytes(self, width: int) -> int:
        return self.copies * super()._activation_bytes(width)

    def run_forward(self) -> None:
        for layer, following in pairwise([*self.layers, None]):
            assert layer
            self._gather_unit(layer.unit)
            self._layer_forward(layer)
            if not following or following.unit != layer.unit:
                self._reshard_unit(layer.unit)
        self.change("all_gather", -self.buffer)

    def run_backward(self) -> None:
        # Only a layer's copy of the samples, in a short dtype, is kept for the backward pass.
        self.change("activation", -FLOAT_BYTES * self.samples * TILE_NUMBERS if self.short else 0)
        # The loss's gradient takes the place of the network's output.
        output = self._activation_bytes(self.layers[-1].outputs)
        self.change("activation", -output)
        self.change("temp", output)
        for index, layer in reversed(list(enumerate(self.layers))):
            self._regather_unit(layer.unit, ahead=self._preceding_unit(index))
            self._layer_backward(layer, first=index == 0, kept_as="activation")
            if index == 0 or self.layers[index - 1].unit != layer.unit:
                self._reduce_gradients(layer.unit)

    def _layer_backward(self, layer: LinearLayer, first: bool, kept_as: str) -> None:
        out, before = self._activation_bytes(layer.outputs), self._activation_bytes(layer.inputs)
        if first:
            before = self.number_bytes * self.samples * layer.inputs
        gradient = self.copies * self.number_bytes * layer.elements
        if layer.relu:
            # The gradient before the ReLU is made while the one behind it still exists.
            self.change("temp", out, -out)
            self.change(kept_as, -out)
        self.change("temp", gradient, 0 if first else before, -out)
        if first:
            self.change(kept_as, -before)
        elif self.layers.index(layer) == 1:
            # The first layer has no ReLU: its result is kept for this layer's gradient alone.
            self.change(kept_as, -before)

    def _sent_bytes(self, unit: str) -> int:
        return self.sent[unit]

    def _unshard_unit(self, unit: str) -> None:
        self.gathered.add(unit)
        self.change("unsharded_parameter", self.sent[unit])
        if self.is_shared:
            return
        if unit in self.known:
            # FSDP2 allocates the memory of the decoded parameters again, and they are filled.
            self.change("unsharded_parameter", self.full[unit])
        for layer in (each for each in self.layers if each.unit == unit):
            elements = self.ranks * shard_elements(layer.shapes[0], self.ranks)
            decoded = self.number_bytes * elements
            # Numbers become float32, are multiplied by their scales, and then cast.
            floats = FLOAT_BYTES * elements if self.extension in SCALE_GRANULARITY else 0
            cast = decoded if self.short or not floats else 0
            self.change("temp", floats, floats, cast, -2 * floats - cast)
            if unit not in self.known:
                self.change("unsharded_parameter", decoded)
        self.known.add(unit)

    def _reshard_unit(self, unit: str) -> None:
        decoded = 0 if self.is_shared else self.full[unit]
        self.change("unsharded_parameter", -self.sent[unit] - decoded)
        self.gathered.discard(unit)

    def _reduce_gradients(self, unit: str) -> None:
        kept, full = self.units[unit]
        elements = [layer.elements for layer in self.layers if layer.unit == unit]
        whole = [self.copies * self.number_bytes * each for each in elements]
        self._reshard_unit(unit)
        self.change("reduce_scatter", -self.reducing, full)
        # The last whole gradient is freed after the others.
        self.change("temp", -sum(whole[:-1]))
        self.change("gradient", kept)
        # Gloo copies what it reduces.
        self.change("temp", full, -full, -whole[-1])
        self.reducing = full
