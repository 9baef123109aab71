"""Explorer of lab 3: what fewer bits save in an all-gather, and what rounding costs."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import labkit
from labkit import tensors
from labkit.models.tile_network import tile_network_weights
from labkit.plots import extensions as plots
from labkit.plots import style
from labkit.plots.memory import byte_bars
from labkit.runs.result import RunResult
from labkit.theory import extensions as theory
from labkit_course.widgets.explorer import Control, Explorer, Measured, Numbers

EXTENSION_BY_BITS = {
    "32": "fp32",
    "16 (bfloat16)": "bf16",
    "8 (float8)": "float8",
    "8 (int8)": "int8",
    "4 (int4)": "int4",
}
SCALE_SHARERS = {"a shard": "shard", "a row": "row", "32 numbers": "group"}
TRAINING_STEPS = 100
WEIGHTS = {"before training": 0, f"trained for {TRAINING_STEPS} steps": TRAINING_STEPS}
BYTE_COLOURS = {"numbers": style.SKY, "scales": style.VERMILION, "measured": style.GREY}


class GatherExplorer(Explorer):
    """The network of lab 3, whose weights are rounded for the all-gather alone."""

    title = "What do fewer bits save, and what do they cost?"
    controls: ClassVar = {
        "extension": Control("bits of a number", EXTENSION_BY_BITS, "int8"),
        "scales": Control("one scale for", SCALE_SHARERS, "row"),
        "steps": Control("weights", WEIGHTS, TRAINING_STEPS),
        "dim": Control("width", (128, 256), 128),
        "ranks": Control("ranks", (2, 4), 2),
        "reshard": Control("gathered in a step", {"twice": True, "once (kept)": False}, True),
    }
    formulas = (theory.gather_bytes, theory.held_bytes, theory.rounding_error)
    tolerances: ClassVar = {"weight_error": 0.001, "weight_rms_error": 0.001}
    size = (8.5, 4.0)

    def predict(self, **chosen: Any) -> dict[str, float]:
        extension, ranks, scales = chosen["extension"], chosen["ranks"], _scale_sharing(**chosen)
        shapes, reshard = _weight_shapes(chosen["dim"]), chosen["reshard"]
        how: dict[str, Any] = {"scales": scales, "reshard": reshard}
        sent = theory.step_gather_bytes(shapes, ranks, extension, **how)
        largest, rms, _ = _rounding_errors(chosen["dim"], chosen["steps"], ranks, extension, scales)
        held = sum(theory.held_bytes(shape, ranks, extension, scales=scales) for shape in shapes)
        errors = {"weight_error": largest, "weight_rms_error": rms}
        return {"all_gather_bytes": sent, "held_bytes": held, **errors}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        extension, ranks, scales = chosen["extension"], chosen["ranks"], _scale_sharing(**chosen)
        shapes, reshard = _weight_shapes(chosen["dim"]), chosen["reshard"]
        look = {"left": 0.07, "right": 0.985, "top": 0.83, "bottom": 0.18, "wspace": 0.25}
        narrow, wide = figure.subplots(1, 2, width_ratios=(1, 1.7), gridspec_kw=look)
        whole = theory.step_gather_bytes(shapes, ranks, "fp32", reshard=reshard)
        sent = predicted["all_gather_bytes"]
        once = sum(theory.scale_bytes(shape, ranks, extension, scales) for shape in shapes)
        # FSDP gathers a second time, for the backward pass, what it has resharded.
        of_scales = (1 + reshard) * once
        numbers = {"numbers": sent - of_scales, "scales": of_scales}
        bars = {"fp32": {"numbers": whole}, extension: numbers}
        measured, found = {}, None
        if result is not None:
            measured[extension] = {"measured": result.value("all_gather_bytes")}
            found = result.value("weight_error")
        what = "handed to the all-gathers of a step"
        byte_bars(bars, measured, BYTE_COLOURS, ylabel=what, columns=2, ax=narrow)
        *_, errors = _rounding_errors(chosen["dim"], chosen["steps"], ranks, extension, scales)
        bound = theory.rounding_error(extension)
        error_histogram(errors, bound, found, label=extension, ax=wide)
        return (
            f"{extension} hands {sent / whole:.3g} of float32's bytes to the all-gathers, "
            f"{of_scales / sent:.2%} of them scales; the errors of the worst parameter have "
            f"an RMS of {predicted['weight_rms_error']:.2%} of its weights'"
        )

    def launch(self, **chosen: Any) -> RunResult:
        how: dict[str, Any] = {"scales": _scale_sharing(**chosen), "extension": chosen["extension"]}
        how |= {"dim": chosen["dim"], "reshard_after_forward": chosen["reshard"]}
        # Without updates, the run gathers the weights whose errors are predicted.
        how |= {"learning_rate": 0.0, "batch": 8, "steps": 1}
        folder = _weights_folder(chosen["dim"], chosen["steps"])
        how["weights"] = str(Path(folder.name) / "weights.pt")
        return labkit.run("allgather_extensions", nproc=chosen["ranks"], **how)


@cache
def _weights_folder(dim: int, steps: int) -> tempfile.TemporaryDirectory[str]:
    # The folder is removed when the cache frees it, at the end of this process.
    folder = tempfile.TemporaryDirectory(prefix="labkit_")
    torch.save(tile_network_weights(dim, steps), Path(folder.name) / "weights.pt")
    return folder


def _scale_sharing(*, extension: str, scales: str, **_: Any) -> str:
    """Return what shares a scale, "" for an encoding without scales."""
    return scales if extension in theory.SCALE_GRANULARITY else ""


@cache
def _weight_shapes(dim: int) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in tile_network_weights(dim, 0).values()]


@cache
def _rounding_errors(
    dim: int, steps: int, ranks: int, extension: str, scales: str
) -> tuple[float, float, numpy.ndarray]:
    """Return the largest and the largest RMS error of a parameter, and each weight's error.

    A weight's error is relative to the largest weight of its parameter.
    """
    if scales:
        codec = tensors.make_quantised_extension(extension, scales)
    else:
        codec = tensors.EXTENSIONS[extension]
    of_parameters, errors = [], []
    for exact in tile_network_weights(dim, steps).values():
        rounded = tensors.gather_on_one_rank(exact, ranks, codec)
        of_parameters.append([float(each) for each in tensors.rounding_errors(rounded, exact)])
        errors.append(((rounded - exact) / exact.abs().max()).flatten().numpy())
    largest, rms = map(max, zip(*of_parameters, strict=True))
    return largest, rms, numpy.concatenate(errors)


def error_histogram(
    errors: numpy.ndarray,
    bound: float,
    measured: float | None = None,
    *,
    label: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the distribution of the errors of gathered weights, in percent.

    An error is relative to the largest weight of its parameter. ``bound`` is the largest that
    theory allows, ``measured`` the largest in a run; the encoding ``label`` sets the colour.
    """
    ax = style.make_axes(ax, 5.0, 3.6)
    # In percent, and a little beyond the bound; without rounding there is no bound.
    side = 115 * (bound or 0.001)
    shares, edges = numpy.histogram(100 * errors, bins=61, range=(-side, side))
    shares = 100 * shares / errors.size
    look: dict[str, Any] = {"color": plots.encoding_colour(label), "alpha": 0.45, "lw": 0}
    ax.fill_between(edges, [*shares, 0.0], step="post", **look)
    found: dict[str, Any] = {"color": style.VERMILION, "linewidth": 3, "alpha": 0.6, "zorder": 0}
    lines = (("theory", bound, style.PREDICTION_STYLE), ("measured", measured, found))
    for source, line, look in lines:
        if line is not None:
            ax.axvline(-100 * line, **look)
            ax.axvline(100 * line, label=f"{source}: at most {100 * line:.3g} %", **look)
    ax.set(xlim=(-side, side), ylim=(0, 1.05 * shares.max()), ylabel="share of the weights, %")
    ax.locator_params(axis="x", nbins=7)
    ax.set_xlabel("error of a gathered weight, as % of the largest in its parameter")
    style.add_legend_above(ax, 2)
    return ax
