"""A table of predicted beside measured, and figures of latency, memory and loss."""

from collections.abc import Mapping
from typing import Any

import numpy
import pandas
from matplotlib.axes import Axes

from labkit.plots import style
from labkit.runs.result import RunResult

# Markers show each step where lines coincide, and would hide a longer line.
MAX_STEPS_WITH_MARKERS = 30


def comparison_table(
    measured: RunResult | Mapping[str, float],
    predicted: Mapping[str, float] | None = None,
    *,
    yours: Mapping[str, float | None] | None = None,
    tolerance: float = 0.0,
    column: str = "measured",
) -> pandas.DataFrame:
    """Return a table of predicted beside measured, one row per value, with a verdict on each.

    Args:
        measured: a run, whose values are looked up by ``result.value``, or a mapping.
        predicted: theory's values by name; without it, ``yours`` stand beside the measured ones.
        yours: your own predictions, in the first column; None, a number that you have not
            committed to, is shown as –.
        tolerance: how far a prediction may be off, as a fraction; 0 asks for equality.
        column: heading of the measured values, such as "simulated".

    Raises:
        ValueError: there is nothing to compare with; yours has a name that theory has not.
    """
    if predicted is None:
        if yours is None:
            raise ValueError(
                "nothing to compare with what was measured: give predicted, yours, or both"
            )
        placeholder = dict.fromkeys(yours, 0.0)
        table = comparison_table(
            measured, placeholder, yours=yours, tolerance=tolerance, column=column
        )
        return table.drop(columns=["theory", "theory is"])
    look_up = measured.value if isinstance(measured, RunResult) else measured.__getitem__
    unknown = (yours or {}).keys() - predicted.keys()
    if unknown:
        raise ValueError(
            f"yours has {', '.join(sorted(unknown))}, which theory has not: {', '.join(predicted)}"
        )
    rows: dict[str, dict[str, Any]] = {}
    for name, expected in predicted.items():
        value = look_up(name)
        if yours is None:
            rows[name] = _comparison_row(expected, value, tolerance)
        else:
            mine = yours.get(name)
            rows[name] = {
                "yours": _number_text(mine),
                "theory": _number_text(expected),
                column: _number_text(value),
                "yours is": _error_text(mine, value, tolerance),
                "theory is": _error_text(expected, value, tolerance),
            }
    return pandas.DataFrame.from_dict(rows, orient="index")


def text_comparison_table(
    predicted: Mapping[str, float], result: RunResult | None, tolerances: Mapping[str, float]
) -> pandas.DataFrame:
    """Return predicted beside measured as text, one row per value; – where nothing was measured.

    ``tolerances`` are fractions by name; values without one must be equal.
    """
    rows = {}
    for name, expected in predicted.items():
        measured = None if result is None else result.value(name)
        rows[name] = {
            "theory": _number_text(expected),
            "measured": _number_text(measured),
            "theory is": _error_text(expected, measured, tolerances.get(name, 0.0)),
        }
    return pandas.DataFrame.from_dict(rows, orient="index")


def relative_error_text(predicted: float, measured: float, tolerance: float = 0.0) -> str:
    """Return how far off a prediction is: "right", "within 5%", "2 × too large"."""
    if predicted == measured:
        return "right"
    if measured and abs(predicted / measured - 1) <= tolerance:
        return f"within {tolerance:.0%}"
    if not predicted or not measured or (predicted < 0) != (measured < 0):
        return "too large" if predicted > measured else "too small"
    if abs(predicted) > abs(measured):
        return f"{predicted / measured:.3g} × too large"
    return f"{measured / predicted:.3g} × too small"


def _error_text(predicted: float | None, measured: float | None, tolerance: float) -> str:
    if predicted is None or measured is None:
        return "–"
    return relative_error_text(predicted, measured, tolerance)


def _comparison_row(expected: float, measured: float, tolerance: float) -> dict[str, Any]:
    ratio = measured / expected if expected else float(measured == expected)
    close = f"within {tolerance:.0%}" if abs(ratio - 1) <= tolerance else "differs"
    verdict = "equal" if measured == expected else close
    numbers = {"predicted": expected, "measured": measured, "ratio": round(ratio, 4)}
    return numbers | {"verdict": verdict}


def _number_text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def latency_bars(results: Mapping[str, RunResult], *, ax: Axes | None = None) -> Axes:
    """Draw the time of a step, split into forward, backward and optimizer, one bar per run."""
    ax = style.make_axes(ax, height=1.1 + 0.5 * len(results))
    ends = numpy.zeros(len(results))
    for span, colour in style.PHASE_COLOURS.items():
        durations = [result.value(f"{span}_ms") for result in results.values()]
        ax.barh(list(results), durations, left=ends, color=colour, label=span, height=0.6)
        ends = ends + durations
    for row, end in enumerate(ends):
        ax.text(end, row, f"  {end:.0f} ms", va="center", fontsize=9)
    ax.set_xlabel("time of one training step, ms (mean of the timed steps, slowest rank)")
    ax.set_xlim(0, max(ends) * 1.15)
    ax.invert_yaxis()
    style.add_legend_above(ax, 3)
    return style.add_stamp(ax, results.values())


def memory_by_category(
    results: Mapping[str, RunResult],
    *,
    predicted: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the peak memory of the fullest rank by category, in MB, one bar per run.

    ``predicted`` are bytes of activations, by label, drawn as dashed lines.
    """
    ax = style.make_axes(ax, height=4.0)
    peaks = {label: peak_bytes_by_category(result) for label, result in results.items()}
    style.draw_bar_stacks(ax, {}, peaks, style.MEMORY_COLOURS, 1e6, {}, 1)
    for column, parts in enumerate(peaks.values()):
        size = parts["activations"] / 1e6
        look: dict[str, Any] = {"fontsize": 8, "color": "white"} | style.CENTRED
        ax.text(column, size / 2, f"{size:.3g}", **look)
    handles = style.legend_patches(style.memory_colours_in_use(peaks.values()))
    for label, expected in (predicted or {}).items():
        line = style.mark_prediction(ax, list(results).index(label), 0.3, expected / 1e6)
    if predicted:
        line.set_label("activations, predicted")
        handles.append(line)
    ax.set(ylabel="peak memory of a rank, MB", xlim=(-0.6, len(results) - 0.4))
    ax.margins(y=0.08)
    style.add_legend_above(ax, 3, handles)
    return style.add_stamp(ax, results.values())


def peak_bytes_by_category(result: RunResult) -> dict[str, float]:
    """Return the bytes of a run's peak by the categories of ``style.MEMORY_CATEGORIES``."""
    known = result.summary()
    peaks = {}
    for name, (parts, _) in style.MEMORY_CATEGORIES.items():
        columns = [f"peak_{part}_bytes" for part in parts]
        peaks[name] = sum(result.value(column) for column in columns if column in known)
    return peaks


def loss_curves(
    results: Mapping[str, RunResult], *, chance: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the loss by step, one line per run.

    A run that resumed another's checkpoint continues its step numbers. If a run lost a host, the
    steps without the loss of every rank are left out.

    Args:
        results: runs by label.
        chance: the loss of guessing, such as ln(classes), drawn as a line.
        ax: where to draw.
    """
    ax = style.make_axes(ax)
    for index, (label, result) in enumerate(results.items()):
        losses, turn = result.losses, index % 4
        look: dict[str, Any] = {"linestyle": ("-", "--", ":", "-.")[turn], "lw": 2}
        if len(losses) <= MAX_STEPS_WITH_MARKERS:
            look |= {"marker": "osD^"[turn], "markersize": 10 - 2 * turn, "fillstyle": "none"}
        ax.plot(losses.index, losses, label=label, color=style.rank_colour(index), **look)
    if chance is not None:
        ax.axhline(chance, color=style.GREY, lw=1)
        look = {"xycoords": ("axes fraction", "data"), "ha": "right", "color": style.GREY}
        style.add_note(ax, "guessing", (1, chance), (-2, 2), **look)
    ax.set(xlabel="training step", ylabel="loss (cross-entropy, nats)")
    ax.legend(frameon=False, fontsize=9)
    return style.add_stamp(ax, results.values())
