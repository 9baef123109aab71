"""Figures of runs: predicted beside measured, latency, memory by category, loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas
from matplotlib.axes import Axes

from labkit.plots import style
from labkit.result import RunResult

SPANS = {"forward": style.BLUE, "backward": style.ORANGE, "optimizer": style.PURPLE}


def compare(
    result: RunResult, predicted: Mapping[str, float], *, tolerance: float = 0.0, ax: Axes | None = None
) -> Axes:
    """Predicted beside measured, one pair of bars a value, with a verdict on each.

    Args:
        result: the run.
        predicted: what theory says, by the names that ``result.value`` takes.
        tolerance: how far measured may be from predicted, as a part of predicted; 0 wants equality.
        ax: where to draw.
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
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2, frameon=False, fontsize=9)
    style.stamp(ax, [result])
    return ax


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
    """Time of a step, split into forward, backward and optimizer, one bar a run.

    Args:
        results: runs by label.
        ax: where to draw.
    """
    ax = style.axes(ax, height=1.1 + 0.5 * len(results))
    starts = dict.fromkeys(results, 0.0)
    for span, colour in SPANS.items():
        durations = {label: result.value(f"{span}_ms") for label, result in results.items()}
        ax.barh(
            list(results), list(durations.values()), left=list(starts.values()), color=colour, label=span, height=0.6
        )
        starts = {label: start + durations[label] for label, start in starts.items()}
    for row, end in enumerate(starts.values()):
        ax.text(end, row, f"  {end:.0f} ms", va="center", fontsize=9)
    ax.set(
        xlabel="time of one training step, ms (mean of the timed steps, slowest rank)",
        xlim=(0, max(starts.values()) * 1.15),
    )
    ax.invert_yaxis()
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=9)
    style.stamp(ax, list(results.values()))
    return ax


def memory(
    results: Mapping[str, RunResult], *, predicted: Mapping[str, float] | None = None, ax: Axes | None = None
) -> Axes:
    """Peak memory of the fullest rank by category, one bar a run; a mark where theory puts the activations.

    Args:
        results: runs by label.
        predicted: activation bytes by label.
        ax: where to draw.
    """
    ax = style.axes(ax)
    bottoms = dict.fromkeys(results, 0.0)
    for category in ("activation", "parameter", "optstate", "gradient", "temp"):
        sizes = {label: result.value(f"peak_{category}_bytes") / 1e6 for label, result in results.items()}
        ax.bar(
            list(results), list(sizes.values()), bottom=list(bottoms.values()), width=0.55,
            color=style.CATEGORY_COLOURS[category], label={"optstate": "optimizer", "temp": "temporary"}.get(category,
            category),
        )  # fmt: skip
        bottoms = {label: bottom + sizes[label] for label, bottom in bottoms.items()}
    for column, (label, expected) in enumerate((predicted or {}).items()):
        mark = "activations, predicted" if column == 0 else None
        ax.plot(
            [list(results).index(label) - 0.38, list(results).index(label) + 0.38],
            [expected / 1e6] * 2,
            "k--",
            lw=1.5,
            label=mark,
        )
    ax.set(ylabel="peak memory of a rank, MB")
    ax.legend(loc="upper right", frameon=False, fontsize=9)
    style.stamp(ax, list(results.values()))
    return ax


def loss(results: Mapping[str, RunResult], *, chance: float | None = None, ax: Axes | None = None) -> Axes:
    """The loss by step, one line a run. ``chance`` draws the loss of guessing, such as ln(classes)."""
    ax = style.axes(ax)
    markers: Sequence[str] = ("-", "--", ":", "-.")
    for index, (label, result) in enumerate(results.items()):
        losses = result.frame.query("kind == 'scalar' and name == 'loss' and step >= 0").groupby("step")["value"].mean()
        ax.plot(losses.index, losses, markers[index % 4], color=style.RANK_COLOURS[index % 4], lw=2, label=label)
    if chance is not None:
        ax.axhline(chance, color=style.GREY, lw=1)
        ax.annotate("guessing", (1, chance), (-2, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
                    ha="right", fontsize=9, color=style.GREY)  # fmt: skip
    ax.set(xlabel="training step", ylabel="loss (cross-entropy, nats)")
    ax.legend(frameon=False, fontsize=9)
    style.stamp(ax, list(results.values()))
    return ax


def amount(name: str, value: float) -> str:
    """A value with its unit, which its name ends in."""
    if name.endswith("_bytes"):
        return style.readable_bytes(value)
    return f"{value:.4g} ms" if name.endswith("_ms") else f"{value:g}"
