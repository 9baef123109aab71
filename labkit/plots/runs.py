"""A table of predicted beside measured, and figures of latency, memory and loss."""

from collections.abc import Mapping
from typing import Any

import pandas
from matplotlib.axes import Axes

from labkit.plots import style
from labkit.plots.style import Numbers, Runs, Stacks
from labkit.runs.result import RunResult
from labkit.theory.sizes import byte_unit

# Markers show each step where lines coincide, and would hide a longer line.
MAX_STEPS_WITH_MARKERS = 30
BYTE_UNITS = {"MB": 1e6, "GB": 1e9}
# White behind numbers keeps them legible where a line crosses them.
WHITE_BOX: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
# The logarithmic axis has no place for 0.
SMALLEST_DIFFERENCE = 1e-9


def comparison_table(
    measured: RunResult | Numbers,
    predicted: Numbers | None = None,
    *,
    yours: Mapping[str, float | None] | None = None,
    tolerance: float = 0.0,
    column: str = "measured",
) -> pandas.DataFrame:
    """Return a table of predicted beside measured, one row per value, with a verdict on each.

    Args:
        measured: a run, whose values are looked up by ``result.value``, or a mapping.
        predicted: theory's values by name; without it, ``yours`` stand beside the measured ones.
        yours: your own predictions; None, a number that you have not committed to, is shown as –.
        tolerance: how far a prediction may be off, as a fraction; 0 asks for equality.
        column: heading of the measured values, such as "simulated".
    """
    theory: Mapping[str, Any] | None = yours if predicted is None else predicted
    if theory is None:
        raise ValueError(
            "nothing to compare with what was measured: give predicted, yours, or both"
        )
    if unknown := (yours or {}).keys() - theory.keys():
        raise ValueError(
            f"yours has {', '.join(sorted(unknown))}, which theory has not: {', '.join(theory)}"
        )
    rows: dict[str, dict[str, Any]] = {}
    for name, expected in theory.items():
        value = measured.value(name) if isinstance(measured, RunResult) else measured[name]
        if yours is None:
            rows[name] = _ratio_row(expected, value, tolerance)
        else:
            said = {"yours": yours.get(name), "theory": expected}
            rows[name] = _text_row(said, column, value, tolerance)
    table = pandas.DataFrame.from_dict(rows, orient="index")
    return table if predicted is not None else table.drop(columns=["theory", "theory is"])


def text_comparison_table(
    predicted: Numbers, result: RunResult | None, tolerances: Numbers
) -> pandas.DataFrame:
    """Return predicted beside measured as text, one row per value; – where nothing was measured.

    ``tolerances`` are fractions by name; values without one must be equal.
    """
    rows = {}
    for name, expected in predicted.items():
        measured, tolerance = result.value(name) if result else None, tolerances.get(name, 0.0)
        rows[name] = _text_row({"theory": expected}, "measured", measured, tolerance)
    return pandas.DataFrame.from_dict(rows, orient="index")


def relative_error_text(
    predicted: float | None, measured: float | None, tolerance: float = 0.0
) -> str:
    """Return how far off a prediction is: "right", "within 5%", "2 × too large", – if unknown."""
    if predicted is None or measured is None:
        return "–"
    if predicted == measured:
        return "right"
    if measured and abs(predicted / measured - 1) <= tolerance:
        return f"within {tolerance:.0%}"
    if not predicted or not measured or (predicted < 0) != (measured < 0):
        return "too large" if predicted > measured else "too small"
    if abs(predicted) > abs(measured):
        return f"{predicted / measured:.3g} × too large"
    return f"{measured / predicted:.3g} × too small"


def _ratio_row(expected: float, measured: float, tolerance: float) -> dict[str, Any]:
    ratio = measured / expected if expected else float(measured == expected)
    close = f"within {tolerance:.0%}" if abs(ratio - 1) <= tolerance else "differs"
    verdict = "equal" if measured == expected else close
    numbers = {"predicted": expected, "measured": measured, "ratio": round(ratio, 4)}
    return numbers | {"verdict": verdict}


def _text_row(
    said: dict[str, float | None], column: str, measured: float | None, tolerance: float
) -> dict[str, str]:
    """Return predictions, what was measured, and how far off each prediction is, as text."""
    row = {name: _number_text(value) for name, value in (said | {column: measured}).items()}
    for name, value in said.items():
        row[f"{name} is"] = relative_error_text(value, measured, tolerance)
    return row


def _number_text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def latency_bars(results: Runs, *, ax: Axes | None = None) -> Axes:
    """Draw the time of a step, split into forward, backward and optimizer, one bar per run."""
    ax = style.make_axes(ax, height=1.1 + 0.5 * len(results))
    phases, times = style.PHASE_COLOURS, {}
    for label, result in results.items():
        times[label] = {phase: result.value(f"{phase}_ms") for phase in phases}
    ends = [sum(parts.values()) for parts in times.values()]
    style.draw_rows(ax, times, phases, [f"{end:.0f} ms" for end in ends])
    ax.set_xlabel("time of one training step, ms (mean of the timed steps, slowest rank)")
    ax.set_xlim(0, max(ends) * 1.15)
    style.add_legend_above(ax, 3, style.legend_patches(phases))
    return style.add_stamp(ax, results.values())


def memory_by_category(
    results: Runs, *, predicted: Numbers | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the peak memory of the fullest rank by category, in MB, one bar per run.

    ``predicted`` are bytes of activations, by label, drawn as dashed lines.
    """
    ax = memory_comparison({}, results, ax=style.make_axes(ax, height=4.0))
    for column, (label, result) in enumerate(results.items()):
        size = peak_bytes_by_category(result)["activations"] / 1e6
        ax.text(column, size / 2, f"{size:.3g}", fontsize=8, color="white", **style.CENTRED)
        if predicted and label in predicted:
            style.mark_prediction(ax, column, 0.3, predicted[label] / 1e6)
    # A figure has one legend, so the line of theory joins that of the categories.
    legend: Any = ax.get_legend()
    handles = list(legend.legend_handles)
    if predicted:
        handles.append(style.prediction_handle("activations, predicted"))
    style.add_legend_above(ax, 3, handles)
    ax.set_xlim(-0.6, len(results) - 0.4)
    return ax


def memory_comparison(
    predicted: Stacks,
    measured: Runs | None = None,
    *,
    bound: float | None = None,
    unit: str = "MB",
    ax: Axes | None = None,
    ylabel: str = "peak memory of a rank",
) -> Axes:
    """Draw stacked bars of memory by category, predicted beside the peaks of measured runs.

    Predicted are bytes such as ``theory.fsdp.fsdp_step_peak`` gives them. ``bound``, in bytes, is a
    dotted line; ``unit`` is MB or GB, and ``ylabel`` comes before it.
    """
    measured, size = measured or {}, BYTE_UNITS[unit]
    ax = style.make_axes(ax, width=8.0, height=4.2)
    bars = {label: sum_by_category(sizes) for label, sizes in predicted.items()}
    peaks = {label: peak_bytes_by_category(result) for label, result in measured.items()}
    style.draw_bar_stacks(ax, bars, peaks, style.MEMORY_COLOURS, size, columns=4)
    if bound is not None:
        for text in ax.texts:
            text.set_bbox(WHITE_BOX)
        style.draw_limit(ax, "bound", bound / size, unit)
    ax.set_ylabel(f"{ylabel}, {unit}")
    ax.margins(y=0.06)
    return style.add_stamp(ax, measured.values())


def peak_bytes_by_category(result: RunResult) -> dict[str, float]:
    """Return the bytes of a run's peak by the categories of ``style.MEMORY_CATEGORIES``."""
    peaks = {name: result.value(name) for name in result.summary() if name.startswith("peak_")}
    return sum_by_category({name[len("peak_") : -len("_bytes")]: peaks[name] for name in peaks})


def sum_by_category(sizes: Numbers) -> dict[str, float]:
    """Sum bytes by recorded category to those of ``style.MEMORY_CATEGORIES``."""
    categories = style.MEMORY_CATEGORIES.items()
    return {name: sum(sizes.get(part, 0) for part in parts) for name, (parts, _) in categories}


def byte_bars(
    predicted: Stacks,
    measured: Stacks,
    colours: Mapping[str, str],
    *,
    ylabel: str,
    budget: float | None = None,
    ax: Axes | None = None,
    **look: Any,
) -> Axes:
    """Draw bytes by label and part, predicted beside measured; ``budget`` is a dotted line.

    ``look`` are ``legend`` and ``columns`` of ``style.draw_bar_stacks``.
    """
    ax = style.make_axes(ax, 3, 3)
    found = [sum(parts.values()) for parts in (*predicted.values(), *measured.values())]
    most = max([*found, budget or 0]) or 1
    unit, size = byte_unit(most)
    style.draw_bar_stacks(ax, predicted, measured, colours, size, **{"columns": 1, **look})
    columns = len(predicted.keys() | measured.keys())
    ax.set(xlim=(-0.5, max(columns, 2) - 0.5), ylim=(0, 1.12 * most / size))
    ax.set_ylabel(f"{ylabel}, {unit}")
    ax.locator_params(axis="y", nbins=4)
    if budget is not None:
        style.draw_limit(ax, "budget", budget / size, unit)
    return ax


def loss_curves(results: Runs, *, chance: float | None = None, ax: Axes | None = None) -> Axes:
    """Draw the loss by step, one line per run, and the loss of guessing, ``chance``, as a line.

    A run that resumed another's checkpoint continues its step numbers. If a run lost a host, the
    steps without the loss of every rank are left out.
    """
    ax = style.make_axes(ax)
    for index, (label, result) in enumerate(results.items()):
        line = ("-", "--", ":", "-.")[index % 4]
        _draw_curve(ax, index, label, result.losses, linestyle=line, lw=2)
    if chance is not None:
        ax.axhline(chance, color=style.GREY, lw=1)
        look = {"xycoords": ("axes fraction", "data"), "ha": "right", "color": style.GREY}
        style.add_note(ax, "guessing", (1, chance), (-2, 2), **look)
    ax.set(xlabel="training step", ylabel="loss (cross-entropy, nats)")
    ax.legend(frameon=False, fontsize=9)
    return style.add_stamp(ax, results.values())


def loss_difference_curves(
    results: Runs, reference: RunResult, *, name: str = "one device", ax: Axes | None = None
) -> Axes:
    """Draw the relative difference of each run's loss from the reference's, called ``name``."""
    ax = style.make_axes(ax)
    for index, (label, result) in enumerate(results.items()):
        difference = (result.losses / reference.losses - 1).abs().clip(lower=SMALLEST_DIFFERENCE)
        _draw_curve(ax, index, label, difference, lw=1.2)
    ax.set(yscale="log", xlabel="training step")
    ax.set_ylabel(f"relative difference\nfrom the loss of {name}")
    style.add_legend_above(ax, 2)
    return style.add_stamp(ax, [*results.values(), reference])


def _draw_curve(ax: Axes, index: int, label: str, values: pandas.Series, **look: Any) -> None:
    turn = index % 4
    if len(values) <= MAX_STEPS_WITH_MARKERS:
        look |= {"marker": "osD^"[turn], "markersize": 10 - 2 * turn, "fillstyle": "none"}
    ax.plot(values.index, values, label=label, color=style.rank_colour(index), **look)
