"""Colours, units, legends and the stamp that all figures share."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Annotation

from labkit.runs import result
from labkit.runs.result import RunResult

# Okabe and Ito's palette ("Color Universal Design", 2008): distinct in print and to the
# colour-blind.
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
VERMILION, YELLOW, GREY = "#D55E00", "#F0E442", "#8A8A8A"
RANK_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)

# The name of each category, the recorded categories that it sums, and its colour.
MEMORY_CATEGORIES: dict[str, tuple[tuple[str, ...], str]] = {
    "activations": (("activation",), GREEN),
    "parameters": (("parameter",), BLUE),
    "optimizer state": (("optstate", "optimizer"), PURPLE),
    "gradients": (("gradient",), ORANGE),
    "gathered parameters": (("unsharded_parameter",), SKY),
    "communication buffers": (("all_gather", "reduce_scatter"), VERMILION),
    "temporary": (("temp", "unsharded_gradient", "inputs", "buffer", "other"), GREY),
}
MEMORY_COLOURS = {name: colour for name, (_, colour) in MEMORY_CATEGORIES.items()}
PHASE_COLOURS = {"forward": BLUE, "backward": ORANGE, "optimizer": PURPLE}
COLLECTIVE_COLOURS = {"all_gather": SKY, "reduce_scatter": GREEN, "all_reduce": YELLOW}
EXPOSURE_COLOUR = VERMILION

PREDICTION_STYLE: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.3}
FRAME_STYLE: dict[str, Any] = {"edgecolor": "black", "linestyle": "--", "linewidth": 0.8}
GUIDE_STYLE: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": ":"}
CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}
ON_TOP: dict[str, Any] = {"ha": "center", "va": "bottom"}


def rank_colour(rank: int) -> str:
    """Return the colour of a rank; every fifth rank reuses one."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def mix_with_white(colour: str, strength: float = 0.35) -> tuple[float, ...]:
    """Return a tint on which black digits can be read."""
    return tuple(strength * channel + 1 - strength for channel in to_rgb(colour))


def memory_colours_in_use(sizes: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """Return the colours of the memory categories that some of ``sizes`` has bytes of."""
    used = {name for each in sizes for name, size in each.items() if size}
    return {name: colour for name, colour in MEMORY_COLOURS.items() if name in used}


def make_axes(ax: Axes | None, width: float = 7.0, height: float = 3.6) -> Axes:
    """Return ``ax``, or the Axes of a new figure of this size in inches."""
    if ax is None:
        ax = pyplot.subplots(figsize=(width, height), layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def make_row(count: int, width: float, height: float, **look: Any) -> list[Axes]:
    """Return the Axes of a new figure with ``count`` panels in a row; its size is in inches."""
    look = {"figsize": (width, height), "squeeze": False, "layout": "constrained", **look}
    return list(pyplot.subplots(1, count, **look)[1][0])


def make_panels(
    given: Sequence[Axes] | None, names: Iterable[str], width: float, height: float
) -> list[Axes]:
    """Return one titled Axes per name: those given, or new ones of this size in inches."""
    names = list(names)
    axes = list(given or make_row(len(names), width * len(names), height))
    for ax, name in zip(axes, names, strict=True):
        make_axes(ax).set_title(name, fontsize=10, loc="left", pad=22)
    return axes


def legend_patches(colours: Mapping[str, str]) -> list[Any]:
    """Return one legend handle per label."""
    return [Patch(color=colour, label=label) for label, colour in colours.items()]


def add_legend_above(
    ax: Axes, columns: int, handles: list[Any] | None = None, *, middle: float = 0.5, **look: Any
) -> None:
    """Add a legend above the axes, centred at ``middle``, a fraction of their width."""
    look = {"frameon": False, "fontsize": 9, "handles": handles, **look}
    ax.legend(loc="lower center", bbox_to_anchor=(middle, 1.0), ncols=columns, **look)


def add_note(
    ax: Axes, text: str, point: tuple[float, float], shift: tuple[float, float], **look: Any
) -> Annotation:
    """Write ``text`` at ``point``, moved by ``shift``, in points of the figure."""
    look = {"ha": "center", "fontsize": 9, **look}
    return ax.annotate(text, point, shift, textcoords="offset points", **look)


def add_box(
    ax: Axes, left: float, top: float, width: float, height: float, **look: Any
) -> Rectangle:
    """Add a rectangle, filled and with a white edge by default."""
    box = Rectangle((left, top), width, height, **{"edgecolor": "white", **look})
    ax.add_patch(box)
    return box


def mark_prediction(
    ax: Axes, middle: float, reach: float, value: float, label: str | None = None, **look: Any
) -> Any:
    """Draw a dashed line across the bar at ``middle`` and return it."""
    look = PREDICTION_STYLE | look
    return ax.plot([middle - reach, middle + reach], [value] * 2, label=label, **look)[0]


def draw_limit(ax: Axes, name: str, value: float, unit: str) -> None:
    """Draw a dotted line across the axes, with its name and value at the right edge."""
    ax.axhline(value, color="black", lw=1, ls=":")
    look: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "center"}
    add_note(ax, f"{name}\n{value:.3g} {unit}", (1, value), (3, 0), **look)


def draw_bar_stacks(
    ax: Axes,
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    size: float,
    legend: Mapping[str, str],
    columns: int,
) -> None:
    """Draw stacked bars, one per label, with their sums on top: predicted left, measured right.

    Beside measured bars, predicted ones are pale in a dashed frame.

    Args:
        ax: where to draw.
        predicted: bytes by label and part.
        measured: bytes by label and part.
        colours: the parts' colours, from the bottom up.
        size: bytes in the unit of the axis.
        legend: colours by their meaning.
        columns: columns of the legend.
    """
    labels = list(dict.fromkeys([*predicted, *measured]))
    for column, label in enumerate(labels):
        offset = 0.2 if label in predicted and label in measured else 0.0
        for side, drawn in ((-1, predicted), (1, measured)):
            if label not in drawn:
                continue
            place, top = column + side * offset, 0.0
            for part, colour in colours.items():
                height = drawn[label].get(part, 0) / size
                look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5}
                if drawn is predicted and measured:
                    look = {"facecolor": (colour, 0.45)} | FRAME_STYLE
                ax.bar(place, height, 0.36, top, **look)
                top += height
            ax.text(place, top, f"{top:.3g}", fontsize=8, **ON_TOP)
    ax.set_xticks(range(len(labels)), labels)
    handles = legend_patches(legend)
    if predicted and measured:
        look = {"facecolor": "#EEEEEE", "edgecolor": "black", "linestyle": "--"}
        handles.append(Patch(label="predicted", **look))
    add_legend_above(ax, columns, handles)


def short_number_text(value: float) -> str:
    """Return a number with three digits, or all digits of a large one, with commas."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def time_unit(longest_s: float) -> tuple[str, float]:
    """Return the unit for times up to ``longest_s``, and its seconds."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    return next(((name, size) for name, size in units if longest_s >= size), units[-1])


def duration_text(seconds: float) -> str:
    """Return a time in the unit that reads best: ``7.33 ms``."""
    unit, size = time_unit(seconds)
    return f"{short_number_text(seconds / size)} {unit}"


def count_text(number: float, thing: str) -> str:
    """Return ``1 bucket``, ``2 buckets``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# The axes of one figure may be drawn in several calls, whose runs share one stamp.
_runs_by_figure: weakref.WeakKeyDictionary[Any, list[RunResult]] = weakref.WeakKeyDictionary()


def add_stamp(ax: Axes, results: Iterable[RunResult]) -> Axes:
    """Write below the figure where its numbers come from, one line per machine; return ``ax``."""
    drawn = _runs_by_figure.setdefault(ax.figure, [])
    drawn.extend(results)
    if drawn:
        ax.figure.supxlabel(result.stamp_text(drawn), fontsize=7, color=GREY, x=0.99, ha="right")
    return ax
