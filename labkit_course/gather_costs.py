"""Lab 3's experiments: what rounding does to a loss, what a decode holds, and when coding pays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

from labkit import Emulated
from labkit.models.tile_network import tile_batch, tile_network
from labkit.parity import sample_seed
from labkit.plots.memory import sum_by_category
from labkit.tensors import rounding_errors
from labkit.theory import emulated_steps
from labkit.theory import extensions as theory
from labkit.torch_private import unsafe_preserve_version_counter

CODING_S = 40e-3
"""Emulated time of encoding a rank's rows and decoding all, once."""
HIDING_MS = 50
"""Emulated forward pass of a unit that hides any gather here, the first of a pass excepted."""
CASES = {"narrow, exposed": (0.5, 0), "wide, exposed": (4, 0), "narrow, hidden": (0.5, HIDING_MS)}
"""Bandwidth as a multiple of the one below which coding pays, and milliseconds of a unit."""
Shape = tuple[int, int]


def trained_network(dim: int) -> torch.nn.Sequential:
    """Train the lab's network on one device for 60 steps, as exact weights."""
    torch.manual_seed(0)
    model = tile_network(dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    slower = LinearLR(optimizer, 1.0, 0.0, total_iters=60)
    for step in range(60):
        images, labels = tile_batch(128, sample_seed(step, 0))
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        slower.step()
    return model


@torch.no_grad()
def rounded_losses(
    model: torch.nn.Module, formats: Mapping[str, Callable[[Tensor], Tensor]]
) -> pandas.DataFrame:
    """Return both errors of a network's rounded weights, and by how many % its loss rises.

    The loss is that of 2048 unseen tiles. The errors are those of the worst matrix.
    """
    exact = dict(model.named_parameters())
    images, labels = tile_batch(2048, sample_seed(999, 0))
    right = cross_entropy(model(images), labels)
    rows = {}
    for name, round_weight in formats.items():
        rounded = {key: round_weight(weight) for key, weight in exact.items()}
        errors = [torch.stack(rounding_errors(rounded[key], exact[key])) for key in exact]
        largest, rms = torch.stack(errors).amax(dim=0).tolist()
        loss = cross_entropy(functional_call(model, rounded, (images,)), labels)
        rows[name] = {
            "largest": largest,
            "RMS": rms,
            "loss rises by %": float(100 * (loss / right - 1)),
        }
    return pandas.DataFrame.from_dict(rows, orient="index")


def round_to(steps: int) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds each row to this many steps up to its largest weight."""

    def rounded(weight: Tensor) -> Tensor:
        step = weight.abs().amax(dim=1, keepdim=True) / steps
        return (weight / step).round() * step

    return rounded


def clip_at(times: float) -> Callable[[Tensor], Tensor]:
    """Return a function that cuts what lies beyond this many times the RMS of the matrix."""

    def clipped(weight: Tensor) -> Tensor:
        limit = times * float(weight.square().mean().sqrt())
        return weight.clamp(-limit, limit)

    return clipped


COARSE = {
    "8 bits": round_to(127),
    "3 bits": round_to(3),
    "2 bits": round_to(1),
    "clip at 2 RMS": clip_at(2),
    "clip at 1.5 RMS": clip_at(1.5),
}
"""Ways to round trained weights, of which neither error tells the harm, for ``rounded_losses``."""


@contextmanager
def quietly(out: Tensor) -> Iterator[None]:
    """Let ``out`` be written to without telling autograd, which may have saved it."""
    with torch.no_grad(), unsafe_preserve_version_counter(out):
        yield


def lean_decoder(block: int) -> Callable[..., Any]:
    """Return a post-all-gather hook that decodes int8 this many rows at a time, see exercise 3."""

    def post_all_gather(
        gathered: Sequence[Tensor], note: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        numbers, scales = gathered
        whole = torch.empty_like(numbers, dtype=dtype) if out is None else out
        with quietly(whole):
            for start in range(0, len(whole), block):
                rows = slice(start, min(start + block, len(whole)))
                whole[rows] = numbers[rows].float() * scales[rows]
        return (whole, (whole,)) if out is None else None

    return post_all_gather


def ledger_mb(
    predicted: Mapping[str, Mapping[str, int]], measured: Mapping[str, float]
) -> pandas.DataFrame:
    """Return peaks of ``step_peak`` in MB, by the figure's categories, and the measured sums."""
    columns = {label: sum_by_category(sizes) for label, sizes in predicted.items()}
    table = pandas.DataFrame(columns)
    table.loc["sum"] = table.sum()
    table.loc["sum, measured"] = pandas.Series(measured)
    return (table / 1e6).round(3).rename_axis("MB")


def decoding_bytes(
    peaks: Mapping[str, Mapping[str, int]], shape: Shape, batch: int, ranks: int
) -> dict[str, float]:
    """Return the bytes a number while the first matrix is decoded, from ``step_peak`` by label.

    The labels are "int8", which computes in float32, and "both", in bfloat16.
    """
    rows, columns = shape
    numbers, found = -(-rows // ranks) * ranks * columns, {}
    for label, size in (("int8", 4), ("both", 2)):
        held = sum(peaks[label].get(part, 0) for part in ("unsharded_parameter", "temp"))
        # Beside it lies the gradient of the layer's result.
        found[label] = (held - batch * rows * size) / numbers
    return found


def _sent_bytes(shapes: Sequence[Shape], ranks: int) -> tuple[int, int]:
    """Return what a rank sends of all matrices in float32, and in int8."""
    whole, coded = (
        sum(theory.gather_bytes(each, ranks, kind) for each in shapes) for kind in ("fp32", "int8")
    )
    return whole, coded


def _by_unit(shapes: Sequence[Shape]) -> list[Sequence[Shape]]:
    return [shapes[:1], shapes[1:3], shapes[3:5], shapes[5:]]


def saved_bytes(shapes: Sequence[Shape], ranks: int) -> int:
    """Return by how many bytes a gather of all matrices is smaller in int8 than in float32."""
    whole, coded = _sent_bytes(shapes, ranks)
    return ranks * (whole - coded)


def wire_cases(
    shapes: Sequence[Shape], ranks: int, add_hooks: Callable[..., Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Return options of allgather_extensions for ``CASES``, and each step's milliseconds in theory.

    Each case has a step in float32 and one with these hooks; both gather a unit ahead.
    """
    units = _by_unit(shapes)
    threshold = theory.pays_below(saved_bytes(shapes, ranks), CODING_S, ranks)
    yours = {"extension": "your_hooks", "use": {"add_hooks": add_hooks}}
    options, step_ms = {}, {}
    for case, (times, forward_ms) in CASES.items():
        hardware = Emulated(
            gb_per_s=times * threshold / 1e9,
            forward_ms=forward_ms,
            memory_gb_per_s=(1 + ranks) * sum(_sent_bytes(shapes, ranks)) / CODING_S / 1e9,
        )
        for name, kind, how in (
            ("float32", "fp32", {"extension": "none"}),
            ("yours", "int8", yours),
        ):
            label = f"{name}, {case}"
            options[label] = {**how, "emulate": hardware, "prefetch": True}
            step_s = emulated_steps.extension_step_s(hardware, ranks, units, kind, prefetch=True)
            step_ms[label] = 1e3 * step_s
    return options, step_ms


def saved_ms(step_ms: Mapping[str, float]) -> dict[str, float]:
    """Return how many ms the hooks save in each case of ``wire_cases``."""
    return {case: step_ms[f"float32, {case}"] - step_ms[f"yours, {case}"] for case in CASES}


def step_parts(
    expected_ms: Mapping[str, float],
    variants: Mapping[str, Mapping[str, Any]],
    shapes: Sequence[Shape],
    ranks: int,
    *,
    emulated: Mapping[str, float],
) -> pandas.DataFrame:
    """Return what each step of ``wire_cases`` waits for in theory, in ms, and what it took.

    A gather waits for what is left: the rest of it hides behind arithmetic.
    """
    whole, _ = _sent_bytes(shapes, ranks)
    rows = {}
    for label, options in variants.items():
        hardware = options["emulate"]
        units = len(_by_unit(shapes)) * (hardware.forward_ms + hardware.unit_backward_ms)
        reduced = 1e3 * hardware.collective_s("reduce_scatter", ranks * whole, ranks)
        coding = 2e3 * CODING_S if "use" in options else 0.0
        rows[label] = {
            "arithmetic": units,
            "gathers": expected_ms[label] - units - coding - reduced,
            "coding": coding,
            "reduce-scatters": reduced,
            "theory": expected_ms[label],
            "emulated": emulated[label],
        }
    return pandas.DataFrame.from_dict(rows, orient="index").round().astype(int)
