"""Figures of runs: predicted beside measured, latency, memory by category, loss."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import pandas
from matplotlib.axes import Axes

from labkit.plots import style
from labkit.result import RunResult
from labkit.theory.sizes import readable_bytes

SPANS = {"forward": style.BLUE, "backward": style.ORANGE, "optimizer": style.PURPLE}
CATEGORIES = {
    "activation": ("activation", style.GREEN),
    "parameter": ("parameter", style.BLUE),
    "optstate": ("optimizer", style.PURPLE),
    "gradient": ("gradient", style.ORANGE),
    "temp": ("temporary", style.SKY),
}


def compare(
    result: RunResult, predicted: Mapping[str, float], *, tolerance: float = 0.0, ax: Axes | None = None
) -> Axes:
    """Predicted beside measured, one pair of bars a value, with a verdict on each.

    Predicted values come by the names that ``result.value`` takes. Measured ones may be off by ``tolerance``, as a part
    of predicted; 0 wants equality.
    """
    ax = style.axes(ax, height=0.9 + 0.75 * len(predicted))
    verdicts = table(result, predicted, tolerance=tolerance)
    for row, (name, line) in enumerate(verdicts.iterrows()):
        largest = max(line["predicted"], line["measured"]) or 1
        for offset, colour, kind in ((-0.2, style.GREY, "predicted"), (0.2, style.BLUE, "measured")):
            ax.barh(row + offset, line[kind] / largest, height=0.36, color=colour, label=kind if row == 0 else None)
            ax.text(line[kind] / largest + 0.01, row + offset, amount(str(name), line[kind]), va="center", fontsize=9)
        ax.text(1.3, row, line["verdict"], va="center", fontsize=9, weight="bold")
    ax.set(xlim=(0, 1.62), yticks=range(len(verdicts)), yticklabels=list(verdicts.index), xticks=[])
    ax.invert_yaxis()
    ax.spines["bottom"].set_visible(False)
    style.legend_above(ax, 2, middle=0.4)
    return style.stamp(ax, [result])


def table(result: RunResult, predicted: Mapping[str, float], *, tolerance: float = 0.0) -> pandas.DataFrame:
    """The same as text: one row a value with predicted, measured, their ratio and a verdict."""
    rows = {}
    for name, expected in predicted.items():
        measured = result.value(name)
        ratio = measured / expected if expected else float(measured == expected)
        verdict = (
            "equal" if measured == expected else f"within {tolerance:.0%}" if abs(ratio - 1) <= tolerance else "differs"
        )
        rows[name] = {"predicted": expected, "measured": measured, "ratio": round(ratio, 4), "verdict": verdict}
    return pandas.DataFrame.from_dict(rows, orient="index")


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
    ax.set(ylabel="peak memory of a rank, MB")
    ax.legend(loc="upper right", frameon=False, fontsize=9)
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


def amount(name: str, value: float) -> str:
    """A value with its unit, which its name ends in."""
    if name.endswith("_bytes"):
        return readable_bytes(value)
    return f"{value:.4g} ms" if name.endswith("_ms") else f"{value:g}"
