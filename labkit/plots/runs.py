"""Of runs: a table of predicted beside measured; figures of latency, memory by category, loss."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import pandas
from matplotlib.axes import Axes

from labkit.plots import style
from labkit.result import RunResult

SPANS = {"forward": style.BLUE, "backward": style.ORANGE, "optimizer": style.PURPLE}
CATEGORIES = {
    "activation": ("activation", style.GREEN),
    "parameter": ("parameter", style.BLUE),
    "optstate": ("optimizer", style.PURPLE),
    "gradient": ("gradient", style.ORANGE),
    "temp": ("temporary", style.SKY),
}


def table(
    result: RunResult,
    predicted: Mapping[str, float],
    *,
    yours: Mapping[str, float | None] | None = None,
    tolerance: float = 0.0,
) -> pandas.DataFrame:
    """Predicted beside measured, one row a value, with a verdict on each.

    Predicted values come by the names that ``result.value`` takes. Measured ones may be off by ``tolerance``, as a part
    of predicted; 0 wants equality. With ``yours``, your own predictions come first, and the last columns say how far
    yours and theory's are off; None, for a number that you have not committed to, is shown as –.
    """
    if yours is None:
        rows = {name: _held(expected, result.value(name), tolerance) for name, expected in predicted.items()}
        return pandas.DataFrame.from_dict(rows, orient="index")
    unknown = yours.keys() - predicted.keys()
    if unknown:
        raise ValueError(f"yours has {', '.join(sorted(unknown))}, which theory has not: {', '.join(predicted)}")
    lines = {}
    for name, expected in predicted.items():
        mine, measured = yours.get(name), result.value(name)
        lines[name] = {
            "yours": "–" if mine is None else _digits(mine),
            "theory": _digits(expected),
            "measured": _digits(measured),
            "yours is": "–" if mine is None else off(mine, measured, tolerance),
            "theory is": off(expected, measured, tolerance),
        }
    return pandas.DataFrame.from_dict(lines, orient="index")


def off(predicted: float, measured: float, tolerance: float = 0.0) -> str:
    """How far a prediction is from what was measured, in words: "right", "within 5%", "2 × too large"."""
    if predicted == measured:
        return "right"
    if measured and abs(predicted / measured - 1) <= tolerance:
        return f"within {tolerance:.0%}"
    if not predicted or not measured or (predicted < 0) != (measured < 0):
        return "too large" if predicted > measured else "too small"
    factor, side = (
        (predicted / measured, "large") if abs(predicted) > abs(measured) else (measured / predicted, "small")
    )
    return f"{factor:.3g} × too {side}"


def _held(expected: float, measured: float, tolerance: float) -> dict[str, float | str]:
    ratio = measured / expected if expected else float(measured == expected)
    close = f"within {tolerance:.0%}" if abs(ratio - 1) <= tolerance else "differs"
    verdict = "equal" if measured == expected else close
    return {"predicted": expected, "measured": measured, "ratio": round(ratio, 4), "verdict": verdict}


def _digits(value: float) -> str:
    """A number with commas, and no more digits than it needs."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def latency(results: Mapping[str, RunResult], *, ax: Axes | None = None) -> Axes:
    """Time of a step, split into forward, backward and optimizer, one bar a run."""
    ax = style.axes(ax, height=1.1 + 0.5 * len(results))
    ends = numpy.zeros(len(results))
    for span, colour in SPANS.items():
        durations = [result.value(f"{span}_ms") for result in results.values()]
        ax.barh(list(results), durations, left=ends, color=colour, label=span, height=0.6)
        ends = ends + durations
    for row, end in enumerate(ends):
        ax.text(end, row, f"  {end:.0f} ms", va="center", fontsize=9)
    ax.set(xlabel="time of one training step, ms (mean of the timed steps, slowest rank)", xlim=(0, max(ends) * 1.15))
    ax.invert_yaxis()
    style.legend_above(ax, 3)
    return style.stamp(ax, results.values())


def memory(
    results: Mapping[str, RunResult], *, predicted: Mapping[str, float] | None = None, ax: Axes | None = None
) -> Axes:
    """Peak memory of the fullest rank by category, one bar a run; a mark where theory puts the activations' bytes."""
    ax = style.axes(ax)
    tops = numpy.zeros(len(results))
    for category, (label, colour) in CATEGORIES.items():
        sizes = [result.value(f"peak_{category}_bytes") / 1e6 for result in results.values()]
        ax.bar(list(results), sizes, bottom=tops, width=0.55, color=colour, label=label)
        tops = tops + sizes
    for column, (label, expected) in enumerate((predicted or {}).items()):
        mark = "activations, predicted" if column == 0 else None
        middle = list(results).index(label)
        ax.plot([middle - 0.38, middle + 0.38], [expected / 1e6] * 2, "k--", lw=1.5, label=mark)
    for column, top in enumerate(tops):
        ax.text(column, top, f"{top:.1f}", ha="center", va="bottom", fontsize=9)
    ax.set(ylabel="peak memory of a rank, MB", ylim=(0, 1.08 * max(tops)))
    style.legend_above(ax, 3)
    return style.stamp(ax, results.values())


def loss(results: Mapping[str, RunResult], *, chance: float | None = None, ax: Axes | None = None) -> Axes:
    """The loss by step, one line a run. ``chance`` draws the loss of guessing, such as ln(classes)."""
    ax = style.axes(ax)
    markers: Sequence[str] = ("-", "--", ":", "-.")
    for index, (label, result) in enumerate(results.items()):
        losses = result.frame.query("kind == 'scalar' and name == 'loss' and step >= 0").groupby("step")["value"].mean()
        ax.plot(losses.index, losses, markers[index % 4], color=style.RANK_COLOURS[index % 4], lw=2, label=label)
    if chance is not None:
        ax.axhline(chance, color=style.GREY, lw=1)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
        ax.annotate("guessing", (1, chance), (-2, 2), fontsize=9, color=style.GREY, **place)
    ax.set(xlabel="training step", ylabel="loss (cross-entropy, nats)")
    ax.legend(frameon=False, fontsize=9)
    return style.stamp(ax, results.values())
