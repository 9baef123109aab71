"""Of buckets: which gradients travel together, what hides them in a program, and what their size does to a step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit import inductor
from labkit.inductor import Bucket
from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory.sizes import byte_unit, readable_bytes

IN_FLIGHT_COLOUR, WAIT_COLOUR = inductor.KIND_COLOURS["collective"], inductor.KIND_COLOURS["wait"]
DOT_STYLE: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 3, "linestyle": ""}
TICK_STYLE: dict[str, Any] = {
    "color": WAIT_COLOUR,
    "marker": "|",
    "markersize": 12,
    "markeredgewidth": 2.5,
    "linestyle": "",
}
BOXES_SHARE, BOXES_GAP = 0.56, 0.05  # of the width: the boxes, and the space after them
LETTER_WIDTH = 0.0125  # of the width: a letter in a box
OUTLINE_LIMIT = 40  # messages, between which no white line would leave anything to see
MAX_LETTERS_BELOW = 60  # that fit below the boxes


def bucket_schedule(drawn: RunResult | Sequence[Bucket], *, ax: Axes | None = None) -> Axes:
    """A row a bucket. Left, its gradients, as wide as their bytes; right, when it is asked for and waited for.

    The scale on the right counts lines of the generated program, as ``inductor.Listing`` does. A dot is a kernel or a
    product of matrices that runs after the request and before the first wait: it hides the communication.

    Args:
        drawn: a run that kept its generated program as ``code`` and recorded its buckets; or buckets, from
            ``inductor.find_buckets``.
        ax: where to draw.

    Raises:
        FileNotFoundError: rank 0 of the run kept no code.
        ValueError: there is no bucket, or the records do not fit the code.
    """
    rows = _name_bucket_gradients(drawn) if isinstance(drawn, RunResult) else list(drawn)
    if not rows:
        raise ValueError(
            "no bucket to draw: the program holds no all-reduce; were gradients synchronised?"
        )
    ax = style.make_axes(ax, height=1.6 + 0.6 * len(rows))
    longest = max(bucket.bytes for bucket in rows)
    unit, size = byte_unit(longest)
    ax.set_xlim(0, longest / size / BOXES_SHARE)
    for row, bucket in enumerate(rows):
        _draw_gradient_boxes(ax, row, bucket, size)
    labels = [f"bucket {bucket.index}\n{readable_bytes(bucket.bytes)}" for bucket in rows]
    ax.set(yticks=range(len(rows)), yticklabels=labels, ylim=(len(rows) - 0.4, -0.5))
    ax.set_xticks([tick for tick in ax.get_xticks() if tick <= longest / size])
    ax.spines["bottom"].set_bounds(0, longest / size)
    ax.set_xlabel(f"gradients that travel together, {unit}", x=BOXES_SHARE / 2)
    ax.tick_params(axis="y", length=0)
    _draw_program_order(ax, rows)
    return style.add_stamp(ax, [drawn] if isinstance(drawn, RunResult) else [])


def backward_program(result: RunResult) -> inductor.ProgramListing:
    """What inductor wrote for rank 0's backward pass, each buffer with the name of what it holds, as far as is known.

    Raises:
        FileNotFoundError: rank 0 kept no code.
    """
    code = result.ranks[0].artifact("code")
    names = [
        gradient.name for bucket in _name_bucket_gradients(result) for gradient in bucket.gradients
    ]
    return inductor.ProgramListing(code, inductor.name_buffers(code, names))


def pass_seconds(result: RunResult) -> pandas.Series:
    """Seconds of forward and backward pass in each timed step, of the slowest rank; messages are in the latter."""
    spans = result.frame[
        (result.frame["kind"] == "span") & result.frame["name"].isin(["forward", "backward"])
    ]
    return spans.groupby(["rank", "step"])["dur_us"].sum().groupby("step").max() / 1e6


def pass_time_by_bucket_size(
    results: Mapping[str, RunResult], predicted_s: Mapping[str, float], *, ax: Axes | None = None
) -> Axes:
    """Forward and backward pass: the median of each run as a bar, each step as a dot, what was predicted dashed."""
    ax = style.make_axes(ax)
    steps = {label: pass_seconds(result) * 1e3 for label, result in results.items()}
    medians = {label: times.median() for label, times in steps.items()}
    predicted = {label: predicted_s[label] * 1e3 for label in results if label in predicted_s}
    top = 1.25 * max(*medians.values(), *predicted.values())
    for column, (label, times) in enumerate(steps.items()):
        first = column == 0
        ax.bar(
            column, medians[label], 0.5, color=style.BLUE, label="median step" if first else None
        )
        inside = times[times <= top]
        places = [
            column - 0.12 + 0.24 * index / max(1, len(inside) - 1) for index in range(len(inside))
        ]
        ax.plot(
            places, inside, ".", color=style.ORANGE, ms=3.5, label="each step" if first else None
        )
        text = f"{medians[label]:.3g}"
        if label in predicted:
            mark = "predicted" if first else None
            ax.plot(
                [column - 0.36, column + 0.36],
                [predicted[label]] * 2,
                label=mark,
                **style.PREDICTION_STYLE,
            )
            text += f" ({predicted[label]:.3g})"
        height = max(medians[label], predicted.get(label, 0.0), inside.max())
        place: dict[str, Any] = {
            "xytext": (0, 4),
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": 9,
        }
        ax.annotate(text, (column, height), **place)
        if len(inside) < len(times):
            above = f"+{len(times) - len(inside)} above"
            ax.text(column + 0.3, top, above, fontsize=7, ha="left", va="top", color=style.GREY)
    ax.set_xticks(range(len(results)), list(results))
    ax.set(ylabel="forward and backward pass, ms (predicted)", ylim=(0, 1.1 * top))
    style.add_legend_above(ax, 3)
    return style.add_stamp(ax, results.values())


def backward_timeline(
    journeys_s: Sequence[tuple[float, float]],
    backward_s: float,
    *,
    hidden: bool,
    measured_s: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A predicted backward pass over its messages, exposed ones in their own colour; a dashed line where it ends.

    Args:
        journeys_s: when each bucket leaves and arrives, as ``theory.ddp.journeys`` gives it, in seconds.
        backward_s: what the arithmetic takes by itself.
        hidden: whether messages travel beside the arithmetic, or hold it up.
        measured_s: what the backward pass took on real ranks: a bar below.
        ax: where to draw.
    """
    ax = style.make_axes(ax)
    messages = [(1e3 * leaves, 1e3 * arrives) for leaves, arrives in journeys_s]
    pauses = [] if hidden else messages
    starts, stops = [0.0, *(arrives for _, arrives in pauses)], [leaves for leaves, _ in pauses]
    computes_ms = 1e3 * backward_s
    stops.append(computes_ms + sum(arrives - leaves for leaves, arrives in pauses))
    ax.broken_barh(_nonempty_spans(starts, stops), (-0.3, 0.6), facecolor=style.ORANGE)
    ends = [min(arrives, computes_ms) if hidden else leaves for leaves, arrives in messages]
    look: dict[str, Any] = {
        "edgecolor": "white",
        "linewidth": 0.4 if len(messages) <= OUTLINE_LIMIT else 0.0,
    }
    for colour, first, last in (
        (style.COLLECTIVE_COLOURS["all_reduce"], [leaves for leaves, _ in messages], ends),
        (
            style.EXPOSURE_COLOUR,
            [max(leaves, end) for (leaves, _), end in zip(messages, ends, strict=True)],
            None,
        ),
    ):
        stop = [arrives for _, arrives in messages] if last is None else last
        ax.broken_barh(_nonempty_spans(first, stop), (0.7, 0.6), facecolor=colour, **look)
    end = max([stops[-1], *(arrives for _, arrives in messages)])
    ax.axvline(end, **style.PREDICTION_STYLE)
    labels = ["computes", style.count_text(len(messages), "bucket")]
    if measured_s is not None:
        ax.barh(2, 1e3 * measured_s, height=0.6, color=style.BLUE)
        ax.text(
            1e3 * measured_s,
            2,
            f" {style.short_number_text(1e3 * measured_s)}",
            va="center",
            fontsize=9,
        )
        labels.append("measured")
    longest = max(end, 1e3 * (measured_s or 0.0))
    ax.set_yticks(range(len(labels)), labels)
    ax.set(
        xlim=(0, 1.12 * longest),
        ylim=(len(labels) - 0.5, -0.9),
        xlabel="since the backward pass began, ms",
    )
    ax.tick_params(axis="y", length=0)
    ax.annotate(
        f"predicted {style.short_number_text(end)}",
        (end, -0.6),
        (-4, 0),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    named = {
        "arithmetic": style.ORANGE,
        "hidden message": style.COLLECTIVE_COLOURS["all_reduce"],
        "exposed": style.EXPOSURE_COLOUR,
    }
    style.add_legend_above(
        ax, 3, [Patch(color=colour, label=label) for label, colour in named.items()]
    )
    return ax


def _nonempty_spans(starts: Sequence[float], stops: Sequence[float]) -> list[tuple[float, float]]:
    """Start and length of each stretch that has a length."""
    return [
        (start, stop - start) for start, stop in zip(starts, stops, strict=True) if stop > start
    ]


def backward_time_by_bucket_size(
    predicted_s: Mapping[str, tuple[float, float]],
    chosen: str,
    *,
    measured_s: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A backward pass by the size of its buckets: arithmetic, and exposed messages on top; the chosen one in bold.

    All of it is predicted, and so in dashed frames; a dot is what was measured for the chosen size.

    Args:
        predicted_s: by label, seconds of arithmetic, and of messages that nothing hides.
        chosen: one of the labels.
        measured_s: of the chosen one.
        ax: where to draw.
    """
    ax = style.make_axes(ax)
    rows = range(len(predicted_s))
    parts = [[1e3 * part for part in parts] for parts in predicted_s.values()]
    left = [0.0] * len(parts)
    for index, colour in enumerate((style.ORANGE, style.EXPOSURE_COLOUR)):
        widths = [each[index] for each in parts]
        look: dict[str, Any] = {"edgecolor": "black", "linestyle": "--", "linewidth": 0.8}
        ax.barh(rows, widths, 0.6, left, color=colour, **look)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    where = list(predicted_s).index(chosen)
    for row, end in enumerate(left):
        beside = max(end, 1.03e3 * (measured_s or 0.0)) if row == where else end
        weight = "bold" if row == where else "normal"
        ax.text(
            beside, row, f" {style.short_number_text(end)}", va="center", fontsize=9, weight=weight
        )
    if measured_s is not None:
        ax.plot(1e3 * measured_s, where, "o", color=style.BLUE, markeredgecolor="white")
    ax.set_yticks(rows, list(predicted_s))
    ax.get_yticklabels()[where].set_fontweight("bold")
    ax.set(xlabel="backward pass, ms", xlim=(0, 1.25 * max([*left, 1e3 * (measured_s or 0.0)])))
    ax.set_title(
        "by size of bucket" + (", dot: measured" if measured_s else ""), fontsize=9, loc="left"
    )
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    return ax


def _draw_gradient_boxes(ax: Axes, row: int, bucket: Bucket, size: float) -> None:
    """One box a gradient, in units of so many bytes; names that are too long for their box stand below."""
    start, others = 0.0, []
    for gradient in bucket.gradients:
        width, name = gradient.bytes / size, gradient.name or gradient.buffer
        ax.barh(
            row, width, left=start, height=0.56, color=style.SKY, edgecolor="black", linewidth=0.5
        )
        if len(name) * LETTER_WIDTH < width / ax.get_xlim()[1]:
            ax.text(start + width / 2, row, name, ha="center", va="center", fontsize=8)
        else:
            others.append(name)
        start += width
    text = (
        f"also here: {', '.join(others)}"
        if len(others) < len(bucket.gradients)
        else ", ".join(others)
    )
    text = text if len(text) <= MAX_LETTERS_BELOW else f"also here: {len(others)} gradients"
    if others:
        ax.text(0, row + 0.31, f" {text}", va="top", fontsize=7, color=style.GREY)


def _draw_program_order(ax: Axes, rows: Sequence[Bucket]) -> None:
    """Beside the boxes, along the lines of the program: the request, compute, the waits."""
    order = ax.inset_axes((BOXES_SHARE + BOXES_GAP, 0, 1 - BOXES_SHARE - BOXES_GAP, 1), sharey=ax)
    for row, bucket in enumerate(rows):
        asked, hidden_by = bucket.request.number, [line.number for line in bucket.hidden_by]
        waits = [line.number for line in bucket.waits]
        until = max([asked, *waits, *hidden_by]) + 1
        order.barh(
            row,
            until - asked,
            left=asked,
            height=0.3,
            color=IN_FLIGHT_COLOUR,
            edgecolor="black",
            linewidth=0.5,
        )
        order.plot(hidden_by, [row] * len(hidden_by), **DOT_STYLE)
        order.plot(waits, [row] * len(waits), **TICK_STYLE)
        text = f"{len(hidden_by) or 'nothing'} in between" if waits else "never waited for"
        order.text(
            until,
            row - 0.2,
            text,
            ha="right",
            fontsize=7,
            color=style.GREY if waits else WAIT_COLOUR,
        )
    order.spines[["top", "right", "left"]].set_visible(False)
    order.tick_params(axis="y", length=0, labelleft=False)
    order.set_xlim(1, order.get_xlim()[1])
    order.set_xlabel("line of the generated program")
    handles = [
        Patch(facecolor=IN_FLIGHT_COLOUR, edgecolor="black", linewidth=0.5, label="on its way"),
        Line2D([], [], label="compute", **DOT_STYLE),
        Line2D([], [], label="wait", **TICK_STYLE),
    ]
    style.add_legend_above(order, 3, handles, fontsize=8, handlelength=1.2, columnspacing=1.0)


def _name_bucket_gradients(result: RunResult) -> list[Bucket]:
    """The buckets of rank 0's program with the names that the run recorded."""
    found = inductor.find_buckets(result.ranks[0].artifact("code"))
    frame = result.frame
    records = frame[(frame["rank"] == 0) & (frame["kind"] == "bucket")].drop_duplicates(
        ["index", "name"], keep="last"
    )
    coded = [(bucket.index, gradient.bytes) for bucket in found for gradient in bucket.gradients]
    if coded != list(zip(records["index"], records["bytes"], strict=True)):
        raise ValueError(
            f"the code of rank 0 sends {len(coded)} gradients in {len(found)} buckets, the run recorded "
            f"{len(records)} of other sizes: its records of buckets must follow the program's order"
        )
    names = iter(records["name"])
    return [
        replace(
            bucket,
            gradients=tuple(replace(gradient, name=next(names)) for gradient in bucket.gradients),
        )
        for bucket in found
    ]
