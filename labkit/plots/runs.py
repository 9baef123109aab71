"""Of runs: a table of predicted beside measured; figures of latency, memory by category, loss."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import pandas
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.plots import style
from labkit.runs.result import RunResult

MAX_STEPS_WITH_MARKERS = 30
"""Lines of so many steps have a marker at each."""


def comparison_table(
    measured: RunResult | Mapping[str, float],
    predicted: Mapping[str, float] | None = None,
    *,
    yours: Mapping[str, float | None] | None = None,
    tolerance: float = 0.0,
    column: str = "measured",
) -> pandas.DataFrame:
    """Predicted beside measured, one row a value, with a verdict on each.

    Predicted values come by the names that ``measured`` has: those of ``result.value`` for a run, the keys of a
    mapping. Measured ones may be off by ``tolerance``, as a part of predicted; 0 wants equality. With ``yours``,
    your own predictions come first, and the last columns say how far yours and theory's are off; None, for a number
    that you have not committed to, is shown as –. Without ``predicted``, yours stand beside the measured ones alone.
    ``column`` names these where they come from elsewhere ("simulated").

    Raises:
        ValueError: there is nothing to compare with; yours has a name that the others have not.
    """
    if predicted is None:
        if yours is None:
            raise ValueError(
                "nothing to compare with what was measured: give predicted, yours, or both"
            )
        table = comparison_table(
            measured, dict.fromkeys(yours, 0.0), yours=yours, tolerance=tolerance, column=column
        )
        return table.drop(columns=["theory", "theory is"])
    values = {
        name: measured.value(name) if isinstance(measured, RunResult) else measured[name]
        for name in predicted
    }
    if yours is None:
        rows = {
            name: _comparison_row(expected, values[name], tolerance)
            for name, expected in predicted.items()
        }
        return pandas.DataFrame.from_dict(rows, orient="index")
    unknown = yours.keys() - predicted.keys()
    if unknown:
        raise ValueError(
            f"yours has {', '.join(sorted(unknown))}, which theory has not: {', '.join(predicted)}"
        )
    lines = {}
    for name, expected in predicted.items():
        mine, value = yours.get(name), values[name]
        lines[name] = {
            "yours": "–" if mine is None else _number_text(mine),
            "theory": _number_text(expected),
            column: _number_text(value),
            "yours is": "–" if mine is None else relative_error_text(mine, value, tolerance),
            "theory is": relative_error_text(expected, value, tolerance),
        }
    return pandas.DataFrame.from_dict(lines, orient="index")


def text_comparison_table(
    predicted: Mapping[str, float], result: RunResult | None, tolerances: Mapping[str, float]
) -> pandas.DataFrame:
    """Predicted beside measured, one row a value, as text; – where nothing was measured yet.

    ``tolerances`` are those of ``off``, by name; what is not named is wanted equal.
    """
    lines = {}
    for name, expected in predicted.items():
        measured = None if result is None else result.value(name)
        lines[name] = {
            "theory": _number_text(expected),
            "measured": "–" if measured is None else _number_text(measured),
            "theory is": "–"
            if measured is None
            else relative_error_text(expected, measured, tolerances.get(name, 0.0)),
        }
    return pandas.DataFrame.from_dict(lines, orient="index")


def relative_error_text(predicted: float, measured: float, tolerance: float = 0.0) -> str:
    """How far a prediction is from what was measured, in words: "right", "within 5%", "2 × too large"."""
    if predicted == measured:
        return "right"
    if measured and abs(predicted / measured - 1) <= tolerance:
        return f"within {tolerance:.0%}"
    if not predicted or not measured or (predicted < 0) != (measured < 0):
        return "too large" if predicted > measured else "too small"
    factor, side = (
        (predicted / measured, "large")
        if abs(predicted) > abs(measured)
        else (measured / predicted, "small")
    )
    return f"{factor:.3g} × too {side}"


def _comparison_row(expected: float, measured: float, tolerance: float) -> dict[str, float | str]:
    ratio = measured / expected if expected else float(measured == expected)
    close = f"within {tolerance:.0%}" if abs(ratio - 1) <= tolerance else "differs"
    verdict = "equal" if measured == expected else close
    return {
        "predicted": expected,
        "measured": measured,
        "ratio": round(ratio, 4),
        "verdict": verdict,
    }


def _number_text(value: float) -> str:
    """A number with commas, and no more digits than it needs."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def latency_bars(results: Mapping[str, RunResult], *, ax: Axes | None = None) -> Axes:
    """Time of a step, split into forward, backward and optimizer, one bar a run."""
    ax = style.make_axes(ax, height=1.1 + 0.5 * len(results))
    ends = numpy.zeros(len(results))
    for span, colour in style.PHASE_COLOURS.items():
        durations = [result.value(f"{span}_ms") for result in results.values()]
        ax.barh(list(results), durations, left=ends, color=colour, label=span, height=0.6)
        ends = ends + durations
    for row, end in enumerate(ends):
        ax.text(end, row, f"  {end:.0f} ms", va="center", fontsize=9)
    ax.set(
        xlabel="time of one training step, ms (mean of the timed steps, slowest rank)",
        xlim=(0, max(ends) * 1.15),
    )
    ax.invert_yaxis()
    style.add_legend_above(ax, 3)
    return style.add_stamp(ax, results.values())


def memory_by_category(
    results: Mapping[str, RunResult],
    *,
    predicted: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Peak memory of the fullest rank by category, one bar a run; a dashed line where theory puts the activations.

    Numbers are MB: what the bar comes to, and the activations at its foot.
    """
    ax = style.make_axes(ax, height=4.0)
    peaks = {label: peak_bytes_by_category(result) for label, result in results.items()}
    style.draw_bar_stacks(
        ax,
        {},
        peaks,
        {name: colour for name, (_, colour) in style.MEMORY_CATEGORIES.items()},
        1e6,
        {},
        1,
    )
    for column, parts in enumerate(peaks.values()):
        activations = parts["activations"] / 1e6
        ax.text(
            column,
            activations / 2,
            f"{activations:.3g}",
            ha="center",
            va="center",
            fontsize=8,
            color="white",
        )
    shown = [
        name for name in style.MEMORY_CATEGORIES if any(parts[name] for parts in peaks.values())
    ]
    handles: list[Any] = [
        Patch(color=style.MEMORY_CATEGORIES[name][1], label=name) for name in shown
    ]
    for label, expected in (predicted or {}).items():
        middle = list(results).index(label)
        (line,) = ax.plot(
            [middle - 0.3, middle + 0.3], [expected / 1e6] * 2, **style.PREDICTION_STYLE
        )
    if predicted:
        line.set_label("activations, predicted")
        handles.append(line)
    ax.set(ylabel="peak memory of a rank, MB", xlim=(-0.6, len(results) - 0.4))
    ax.margins(y=0.08)
    style.add_legend_above(ax, 3, handles)
    return style.add_stamp(ax, results.values())


def peak_bytes_by_category(result: RunResult) -> dict[str, float]:
    """The bytes of a run's peak by what they are used for, as ``style.MEMORY_CATEGORIES`` names it."""
    known = result.summary()
    return {
        name: sum(
            result.value(f"peak_{part}_bytes") for part in parts if f"peak_{part}_bytes" in known
        )
        for name, (parts, _) in style.MEMORY_CATEGORIES.items()
    }


def loss_curves(
    results: Mapping[str, RunResult], *, chance: float | None = None, ax: Axes | None = None
) -> Axes:
    """The loss by step, one line a run. ``chance`` draws the loss of guessing, such as ln(classes).

    A run that went on from the checkpoints of another counts on: its line begins where the other's ends. Of a run that
    lost a host, the steps are left out of which some rank's loss is missing.
    """
    ax = style.make_axes(ax)
    dashes: Sequence[str] = ("-", "--", ":", "-.")
    for index, (label, result) in enumerate(results.items()):
        losses = result.losses
        look: dict[str, Any] = {
            "color": style.RANK_COLOURS[index % 4],
            "linestyle": dashes[index % 4],
            "lw": 2,
        }
        if (
            len(losses) <= MAX_STEPS_WITH_MARKERS
        ):  # each step is seen, also where lines lie on each other
            look |= {
                "marker": "osD^"[index % 4],
                "markersize": 10 - 2 * (index % 4),
                "fillstyle": "none",
            }
        ax.plot(losses.index, losses, label=label, **look)
    if chance is not None:
        ax.axhline(chance, color=style.GREY, lw=1)
        place: dict[str, Any] = {
            "xycoords": ("axes fraction", "data"),
            "textcoords": "offset points",
            "ha": "right",
        }
        ax.annotate("guessing", (1, chance), (-2, 2), fontsize=9, color=style.GREY, **place)
    ax.set(xlabel="training step", ylabel="loss (cross-entropy, nats)")
    ax.legend(frameon=False, fontsize=9)
    return style.add_stamp(ax, results.values())
