"""What the parameters of lab 3 cost in an all-gather, and what rounding does to them: bits, and who shares a scale."""

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy
from matplotlib.figure import Figure

import labkit
from labkit.plots import extensions as plots
from labkit.runs.result import RunResult
from labkit.theory import extensions as theory
from labkit.widgets.explorer import Control, Explorer

EXTENSION_BY_BITS = {
    "32": "fp32",
    "16 (bfloat16)": "bf16",
    "8 (float8)": "float8",
    "8 (int8)": "int8",
    "4 (int4)": "int4",
}
TRAINING_STEPS = 100


class GatherExplorer(Explorer):
    """The network of lab 3, whose weights are rounded for the all-gather and for nothing else."""

    title = "What do fewer bits save, and what do they cost?"
    controls: ClassVar = {
        "extension": Control("bits of a number", EXTENSION_BY_BITS, "int8"),
        "scales": Control(
            "one scale for", {"a shard": "shard", "a row": "row", "32 numbers": "group"}, "row"
        ),
        "steps": Control(
            "weights",
            {"before training": 0, f"trained for {TRAINING_STEPS} steps": TRAINING_STEPS},
            TRAINING_STEPS,
        ),
        "dim": Control("width", (128, 256), 128),
        "ranks": Control("ranks", (2, 4), 2),
        "reshard": Control("gathered in a step", {"twice": True, "once (kept)": False}, True),
    }
    formulas = (theory.gather_bytes, theory.held_bytes, theory.rounding_error)
    tolerances: ClassVar = {"weight_error": 0.001, "weight_rms_error": 0.001}
    size = (8.5, 4.0)

    def predict(self, **chosen: Any) -> dict[str, float]:
        extension, scales, ranks = chosen["extension"], _scale_sharing(**chosen), chosen["ranks"]
        shapes = _weight_shapes(chosen["dim"])
        largest, rms, _ = _rounding_errors(chosen["dim"], chosen["steps"], ranks, extension, scales)
        sent = theory.step_gather_bytes(
            shapes, ranks, extension, reshard=chosen["reshard"], scales=scales
        )
        held = sum(theory.held_bytes(shape, ranks, extension, scales=scales) for shape in shapes)
        return {
            "all_gather_bytes": sent,
            "held_bytes": held,
            "weight_error": largest,
            "weight_rms_error": rms,
        }

    def draw(
        self,
        figure: Figure,
        predicted: Mapping[str, float],
        result: RunResult | None,
        **chosen: Any,
    ) -> str:
        extension, scales, ranks = chosen["extension"], _scale_sharing(**chosen), chosen["ranks"]
        look = {"left": 0.07, "right": 0.985, "top": 0.83, "bottom": 0.18, "wspace": 0.25}
        narrow, wide = figure.subplots(1, 2, width_ratios=(1, 1.7), gridspec_kw=look)
        shapes, times = _weight_shapes(chosen["dim"]), 1 + chosen["reshard"]
        whole = theory.step_gather_bytes(shapes, ranks, "fp32", reshard=chosen["reshard"])
        sent = predicted["all_gather_bytes"]
        of_scales = times * sum(
            theory.scale_bytes(shape, ranks, extension, scales) for shape in shapes
        )
        bars = {
            "fp32": {"numbers": whole},
            extension: {"numbers": sent - of_scales, "scales": of_scales},
        }
        measured = {} if result is None else {extension: result.value("all_gather_bytes")}
        plots.gather_byte_bars(bars, measured, ax=narrow)
        *_, errors = _rounding_errors(chosen["dim"], chosen["steps"], ranks, extension, scales)
        found = None if result is None else result.value("weight_error")
        bound = theory.rounding_error(extension)
        plots.error_histogram(errors, bound, found, label=extension, result=result, ax=wide)
        return (
            f"{extension} hands {sent / whole:.3g} of float32's bytes to the all-gathers, "
            f"{of_scales / sent:.2%} of them scales; the errors of the worst parameter have an RMS of "
            f"{predicted['weight_rms_error']:.2%} of its weights'"
        )

    def launch(self, **chosen: Any) -> RunResult:
        return labkit.run(
            "allgather_extensions",
            nproc=chosen["ranks"],
            extension=chosen["extension"],
            scales=_scale_sharing(**chosen),
            dim=chosen["dim"],
            reshard_after_forward=chosen["reshard"],
            weights=str(_weights_file(chosen["dim"], chosen["steps"])),
            learning_rate=0.0,  # so that what is gathered are the weights whose errors are predicted
            batch=8,
            steps=1,
        )


@cache
def _weights_folder() -> tempfile.TemporaryDirectory[str]:
    """For weights that ranks start with; removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="labkit_")


@cache
def _weights_file(dim: int, steps: int) -> Path:
    import torch

    from labkit.models.tile_network import tile_network_weights

    path = Path(_weights_folder().name) / f"{dim}_{steps}.pt"
    torch.save(tile_network_weights(dim, steps), path)
    return path


def _scale_sharing(*, extension: str, scales: str, **_: Any) -> str:
    """What shares a scale; nothing where numbers have none."""
    return scales if extension in theory.SCALE_GRANULARITY else ""


@cache
def _weight_shapes(dim: int) -> list[tuple[int, ...]]:
    from labkit.models.tile_network import tile_network_weights

    return [tuple(weight.shape) for weight in tile_network_weights(dim, 0).values()]


@cache
def _rounding_errors(
    dim: int, steps: int, ranks: int, extension: str, scales: str
) -> tuple[float, float, numpy.ndarray]:
    """The largest error, the RMS error of the worst parameter, and each weight's over the largest of its parameter."""
    from labkit import tensors
    from labkit.models.tile_network import tile_network_weights

    codec = (
        tensors.make_quantised_extension(extension, scales)
        if scales
        else tensors.EXTENSIONS[extension]
    )
    pairs = [
        (tensors.gather_on_one_rank(exact, ranks, codec), exact)
        for exact in tile_network_weights(dim, steps).values()
    ]
    largest, rms = (
        max(map(float, each))
        for each in zip(*(tensors.rounding_errors(*pair) for pair in pairs), strict=True)
    )
    errors = [((rounded - exact) / exact.abs().max()).flatten().numpy() for rounded, exact in pairs]
    return largest, rms, numpy.concatenate(errors)
