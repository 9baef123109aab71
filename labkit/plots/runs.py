"""A table of predicted beside measured, and figures of times and of values by training step."""

from collections.abc import Mapping
from typing import Any

import pandas
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.plots import style
from labkit.plots.style import Numbers, Runs
from labkit.runs.result import RunResult

# Markers show each step where lines coincide, and would hide a longer line.
MAX_STEPS_WITH_MARKERS = 30
# The logarithmic axis has no place for 0.
SMALLEST_DIFFERENCE = 1e-9
EXPOSED_LOOK: dict[str, Any] = {"facecolor": "none", "edgecolor": "black", "hatch": "////", "lw": 0}


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
            said = {"yours": yours.get(name)}
            if predicted is not None:
                said["theory"] = expected
            rows[name] = comparison_row(said, column, value, tolerance)
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
    # There is no factor from or to 0, nor from one sign to the other.
    if predicted * measured <= 0:
        return "too large" if predicted > measured else "too small"
    factor = predicted / measured
    if abs(factor - 1) < 0.005:
        return "within 1%"
    return f"{factor:.3g} × too large" if factor > 1 else f"{1 / factor:.3g} × too small"


def _ratio_row(expected: float, measured: float, tolerance: float) -> dict[str, Any]:
    ratio = measured / expected if expected else float(measured == expected)
    close = f"within {tolerance:.0%}" if abs(ratio - 1) <= tolerance else "differs"
    verdict = "equal" if measured == expected else close
    numbers = {"predicted": expected, "measured": measured, "ratio": round(ratio, 4)}
    return numbers | {"verdict": verdict}


def comparison_row(
    said: dict[str, float | None], column: str, measured: float | None, tolerance: float
) -> dict[str, str]:
    """Return as text predictions by source, the measured value, and how far off each source is."""
    row = {name: _number_text(value) for name, value in (said | {column: measured}).items()}
    errors = {name: relative_error_text(said[name], measured, tolerance) for name in said}
    return row | {f"{name} is": text for name, text in errors.items()}


def _number_text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def latency_bars(
    results: Runs,
    *,
    predicted: Numbers | None = None,
    arithmetic: Numbers | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the time of a step, split into forward, backward and optimizer, one bar per run.

    Steps of programs that do not time these phases are drawn whole.
    ``predicted`` are theory's milliseconds of a step, drawn dashed across the bars. ``arithmetic``
    are milliseconds by phase: what a phase takes beyond them, exposed or overhead, is hatched.
    """
    ax = style.make_axes(ax, height=1.1 + 0.5 * len(results))
    phases, times = style.PHASE_COLOURS, {}
    if any("forward_ms" not in result.summary() for result in results.values()):
        phases = {"step": style.BLUE}
    for label, result in results.items():
        times[label] = {phase: result.value(f"{phase}_ms") for phase in phases}
    ends = [sum(parts.values()) for parts in times.values()]
    # Between its phases a step does a little more.
    steps = [f"{result.value('step_ms'):.0f} ms" for result in results.values()]
    style.draw_rows(ax, times, phases, steps)
    handles = style.legend_patches(phases)
    if arithmetic:
        for row, parts in enumerate(times.values()):
            _hatch_exposed(ax, row, parts, arithmetic)
        handles.append(Patch(**EXPOSED_LOOK, label="beyond arithmetic"))
    for row, label in enumerate(results):
        if predicted and label in predicted:
            ends.append(predicted[label])
            ax.plot([predicted[label]] * 2, [row - 0.4, row + 0.4], **style.PREDICTION_STYLE)
    if predicted:
        handles.append(style.prediction_handle("theory"))
    ax.set_xlabel("time of one training step, ms (median of the timed steps, slowest rank)")
    ax.set_xlim(0, max(ends) * 1.15)
    style.add_legend_above(ax, len(handles), handles)
    return style.add_stamp(ax, results.values())


def _hatch_exposed(ax: Axes, row: int, parts: Numbers, arithmetic: Numbers) -> None:
    start = 0.0
    for phase, took in parts.items():
        exposed = max(0.0, took - arithmetic[phase]) if phase in arithmetic else 0.0
        ax.barh(row, exposed, left=start + took - exposed, **EXPOSED_LOOK)
        start += took


def loss_curves(
    results: Runs,
    *,
    chance: float | None = None,
    ylabel: str = "loss (cross-entropy, nats)",
    ax: Axes | None = None,
) -> Axes:
    """Draw the loss by step, one line per run, and the loss of guessing, ``chance``, as a line.

    A run that resumed another's checkpoint continues its step numbers. If a run lost a host, the
    steps without the loss of every rank are left out.
    """
    ax = style.make_axes(ax)
    for index, (label, result) in enumerate(results.items()):
        # Losses of correct runs coincide: a line must show those that it lies on.
        line = ("-", "--", ":", "-.", (0, (5, 1)))[index % 5]
        _draw_curve(ax, index, label, result.losses, linestyle=line, lw=2)
    if chance is not None:
        ax.axhline(chance, color=style.GREY, lw=1)
        look = {"xycoords": ("axes fraction", "data"), "ha": "right", "color": style.GREY}
        style.add_note(ax, "guessing", (1, chance), (-2, 2), **look)
    ax.set(xlabel="timed step, after those of warm-up", ylabel=ylabel)
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
    ax.set(yscale="log", xlabel="timed step, after those of warm-up")
    ax.set_ylabel(f"relative difference\nfrom the loss of {name}")
    style.add_legend_above(ax, 2)
    return style.add_stamp(ax, [*results.values(), reference])


def _draw_curve(ax: Axes, index: int, label: str, values: pandas.Series, **look: Any) -> None:
    # Open markers that become smaller stay visible on top of each other.
    turn = index % 5
    if len(values) <= MAX_STEPS_WITH_MARKERS:
        look |= {"marker": "osD^v"[turn], "markersize": 10 - 1.6 * turn, "fillstyle": "none"}
    colour = "black" if turn == 4 else style.rank_colour(turn)
    ax.plot(values.index, values, label=label, color=colour, **look)
