"""Colours, units, bars, legends and the stamp that all figures share."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Annotation

from labkit.runs import result
from labkit.runs.result import RunResult

Runs = Mapping[str, RunResult]  # by label
Numbers = Mapping[str, float]
Stacks = Mapping[str, Numbers]  # by label and part
Colours = Mapping[str, Any]
Point = tuple[float, float]

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

# Dashed lines and frames are reserved for predictions.
PREDICTION_STYLE: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.3}
FRAME_STYLE: dict[str, Any] = {"edgecolor": "black", "linestyle": "--", "linewidth": 0.8}
GUIDE_STYLE: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": ":"}
CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}
ON_TOP: dict[str, Any] = {"ha": "center", "va": "bottom"}
SMALL_LEGEND: dict[str, Any] = {"fontsize": 8, "handlelength": 1.2, "columnspacing": 1.0}


def rank_colour(rank: int) -> str:
    """Return the colour of a rank; every fifth rank reuses one."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def mix_with_white(colour: str, strength: float = 0.35) -> tuple[float, ...]:
    """Return a tint on which black digits can be read."""
    return tuple(strength * channel + 1 - strength for channel in to_rgb(colour))


def text_colour(background: Any) -> str:
    """Return the colour of text that can be read on ``background``."""
    red, green, blue = to_rgb(background)
    # The weights of the channels are those of perceived brightness (ITU-R BT.601).
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"


def colours_in_use(colours: Colours, drawn: Iterable[Numbers]) -> Colours:
    """Return those ``colours`` whose part is not 0 in all of ``drawn``."""
    used = {name for parts in drawn for name, size in parts.items() if size}
    return {name: colour for name, colour in colours.items() if name in used}


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


def make_panels(names: Iterable[str], width: float, height: float) -> list[Axes]:
    """Return a row of new Axes, one per name, each of this size in inches with its title."""
    names = list(names)
    axes = make_row(len(names), width * len(names), height)
    for ax, name in zip(axes, names, strict=True):
        make_axes(ax).set_title(name, fontsize=10, loc="left", pad=22)
    return axes


def legend_patches(colours: Colours) -> list[Any]:
    """Return one legend handle per label, with hyphens for underscores."""
    return [Patch(color=colours[name], label=name.replace("_", "-")) for name in colours]


def prediction_handle(label: str) -> Any:
    """Return a dashed line for the legend."""
    return Line2D([], [], label=label, **PREDICTION_STYLE)


def add_legend_above(
    ax: Axes, columns: int, handles: list[Any] | None = None, *, middle: float = 0.5, **look: Any
) -> None:
    """Add a legend above the axes, centred at ``middle``, a fraction of their width."""
    look = {"frameon": False, "fontsize": 9, "handles": handles, **look}
    ax.legend(loc="lower center", bbox_to_anchor=(middle, 1.0), ncols=columns, **look)


def add_figure_legend(ax: Axes, side: str, colours: Colours, fontsize: float) -> None:
    """Add one legend for all panels of the figure of ``ax``, at its "upper" or "lower" side."""
    look: dict[str, Any] = {"ncols": len(colours), "frameon": False, "fontsize": fontsize}
    look["loc"] = f"outside {side} center"
    ax.figure.legend(handles=legend_patches(colours), **look)


def add_note(ax: Axes, text: str, point: Point, shift: Point, **look: Any) -> Annotation:
    """Write ``text`` at ``point``, moved by ``shift``, in points of the figure."""
    look = {"ha": "center", "fontsize": 9, **look}
    return ax.annotate(text, point, shift, textcoords="offset points", **look)


def draw_arrow(ax: Axes, start: Point, end: Point, head: str = "->", lw: float = 1) -> None:
    """Draw an arrow from ``start`` to ``end``."""
    ax.annotate("", end, start, arrowprops={"arrowstyle": head, "lw": lw})


def add_box(ax: Axes, left: float, top: float, width: float, height: float, **look: Any) -> None:
    """Add a rectangle, filled and with a white edge by default."""
    ax.add_patch(Rectangle((left, top), width, height, **{"edgecolor": "white", **look}))


def draw_cells(
    ax: Axes, numbers: Any, corner: Point, colour: Any, size: Point = (1.0, 1.0), **look: Any
) -> None:
    """Draw a matrix of numbers from its upper left ``corner``, each in a box of this size."""
    width, height = size
    for (row, column), number in numpy.ndenumerate(numpy.atleast_2d(numbers)):
        x, y, text = corner[0] + column * width, corner[1] + row * height, f"{number:g}"
        add_box(ax, x, y, width, height, facecolor=colour, **look)
        said = ax.text(x + width / 2, y + height / 2, text, **CENTRED)
        said.set_color(text_colour(colour))
        # A cell is little wider than three digits.
        said.set_fontsize(8.5 if len(text) < 4 else 7.5)


def mark_prediction(ax: Axes, middle: float, reach: float, value: float, **look: Any) -> Any:
    """Draw a dashed line across the bar at ``middle`` and return it."""
    return ax.plot([middle - reach, middle + reach], [value] * 2, **PREDICTION_STYLE | look)[0]


def draw_limit(ax: Axes, name: str, value: float, unit: str) -> None:
    """Draw a dotted line across the axes, with its name and value at the right edge."""
    ax.axhline(value, color="black", lw=1, ls=":")
    look: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "center"}
    add_note(ax, f"{name}\n{value:.3g} {unit}", (1, value), (3, 0), **look)


def draw_stack(
    draw: Any, place: float, parts: Numbers, colours: Colours, width: float = 0.6, **look: Any
) -> float:
    """Stack parts in the order of ``colours``, by ``ax.bar`` or ``ax.barh``; return the end."""
    end = 0.0
    for name, colour in colours.items():
        if name in parts:
            draw(place, parts[name], width, end, facecolor=colour, **look)
            end += parts[name]
    return end


def draw_rows(ax: Axes, rows: Stacks, colours: Colours, texts: Iterable[str], **look: Any) -> None:
    """Draw a bar across for each label, from the top down, with a text at its end."""
    for row, (parts, text) in enumerate(zip(rows.values(), texts, strict=True)):
        end = draw_stack(ax.barh, row, parts, colours, **look)
        ax.text(end, row, f"  {text}", va="center", fontsize=9)
    ax.set(yticks=range(len(rows)), yticklabels=list(rows))
    ax.invert_yaxis()


def draw_rows_with_choice(
    ax: Axes, rows: Stacks, colours: Colours, chosen: str, measured: float = 0.0
) -> None:
    """Draw a bar across for each label with its sum, one label in bold, and a dot if measured."""
    where, ends = list(rows).index(chosen), [sum(parts.values()) for parts in rows.values()]
    draw_rows(ax, rows, colours, map(short_number_text, ends), **FRAME_STYLE)
    # Beyond the dot, which would hide the number.
    ax.texts[where].set(x=max(ends[where], 1.03 * measured), weight="bold")
    ax.get_yticklabels()[where].set_fontweight("bold")
    if measured:
        ax.plot(measured, where, "o", color=BLUE, markeredgecolor="white")
    ax.set_xlim(0, 1.25 * max(*ends, measured))
    ax.tick_params(axis="y", length=0)


def draw_bar_stacks(
    ax: Axes,
    predicted: Stacks,
    measured: Stacks,
    colours: Colours,
    size: float,
    *,
    legend: Colours | None = None,
    columns: int = 0,
) -> None:
    """Draw stacked bars, one per label, with their sums on top: predicted left, measured right.

    Predicted bars have a dashed frame, and are pale beside measured ones. ``size`` is the unit of
    the axis. The legend has this many ``columns``, and by default the parts in use.
    """
    # In the order of their first mention.
    labels = list(dict.fromkeys([*predicted, *measured]))
    solid: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
    pale = {name: (colour, 0.45) for name, colour in colours.items()}
    bars = (
        (-1, predicted, pale if measured else colours, FRAME_STYLE),
        (1, measured, colours, solid),
    )
    for column, label in enumerate(labels):
        offset = 0.2 if label in predicted and label in measured else 0.0
        for side, drawn, tints, look in bars:
            if label not in drawn:
                continue
            # The frame of an empty part would be a line across the stack.
            parts = {name: amount / size for name, amount in drawn[label].items() if amount}
            place = column + side * offset
            top = draw_stack(ax.bar, place, parts, tints, 0.36, **look)
            ax.text(place, top, f"{top:.3g}", fontsize=8, **ON_TOP)
    ax.set_xticks(range(len(labels)), labels)
    # Panels of one figure may share a legend instead.
    if columns:
        shown = colours_in_use(colours, [*predicted.values(), *measured.values()])
        handles = legend_patches(shown if legend is None else legend)
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
    devices = {each.device for each in drawn} & {"cpu", "cuda"}
    if len(devices) > 1:
        rule = "a figure compares runs on one kind of device, and these were on the CPU and on GPUs"
        raise ValueError(f"{rule}: run all with device='cpu', or set LABKIT_DEVICE=cpu")
    if drawn:
        ax.figure.supxlabel(result.stamp_text(drawn), fontsize=7, color=GREY, x=0.99, ha="right")
    return ax
