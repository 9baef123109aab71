"""Twelve published bugs that give wrong gradients while the loss looks normal, a room each.

A room is a module of this package, in code of its own that has the mistake of the thread it names;
the room ``scale`` has none:

    HELD          how weights lie on the ranks: the dimension that is cut, or the one stage that
                  has the weight, "first" or "last"; every rank holds a weight without an entry
    SHAPES        the whole weights
    batch         inputs and targets of a step, for all ranks together
    one_device    leaves the right gradients in ``.grad``, and returns the loss
    step          does so on every rank, with the mistake, and returns the loss that a run logs

``launch/silent_bugs.py`` runs a room on real ranks; lab 7b walks through them.
"""

import importlib
import inspect
import math
from collections.abc import Mapping
from typing import Any

ROOMS = (
    *("norm", "counts", "experts", "tokens", "router", "gathered"),
    *("smoothing", "extra", "clip", "tied", "unwaited", "bfloat", "scale"),
)
# Float32 rounds to 1e-7; a gradient that is this far from one device's is wrong.
TOLERANCE = 1e-4


def open_room(name: str) -> Any:
    """Return a room's module."""
    return importlib.import_module(f"launch.museum.{name}")


def read(name: str) -> Any:
    """Show the step of a room, in a notebook, below the shapes of what one device has."""
    from IPython.display import Code

    room = open_room(name)
    inputs, targets = (list(each.shape) for each in room.batch(0))
    held = [f"{each} {list(shape)}{_held_text(room, each)}" for each, shape in room.SHAPES.items()]
    shapes = f"# inputs {inputs}, targets {targets}; weights:\n# {'; '.join(held)}\n"
    return Code(shapes + inspect.getsource(room.step), language="python")


def _held_text(room: Any, weight: str) -> str:
    how = room.HELD.get(weight)
    if how is None:
        return ""
    return f", {how} stage only" if isinstance(how, str) else f", cut along {how}"


def thread(name: str) -> tuple[str, str]:
    """Return where a room's bug was published, and when, from the end of its module's text.

    Both are empty for the room that has no bug.
    """
    last = (open_room(name).__doc__ or "").strip().splitlines()[-1]
    where, _, when = last.partition(", ")
    return (where, when.rstrip(".")) if "#" in where else ("", "")


def cut_weights(name: str) -> dict[str, int]:
    """Return the weights of a room that are cut over the ranks, and along which dimension."""
    return {weight: how for weight, how in open_room(name).HELD.items() if isinstance(how, int)}


def gradient_table(reported: Mapping[str, Any], mine: Mapping[str, float | None]) -> Any:
    """Return each weight's gradient beside one device's, and what the learner committed to.

    ``reported`` is what a rank of ``silent_bugs`` reports; ``mine`` holds 1 for a wrong gradient,
    0 for a right one, and None.
    """
    import pandas

    words = {None: "–", 0.0: "right", 1.0: "wrong"}
    rows = {
        name: {
            "off by": _percent(error),
            "factor": f"{reported['ratios'][name]:.3f}",
            "rest": _percent(unexplained(error, reported["ratios"][name])),
            "ranks differ by": _percent(reported["spread"].get(name)),
            "verdict": words[float(name in reported["wrong"])],
            "you": words.get(mine.get(name), "–"),
        }
        for name, error in reported["errors"].items()
    }
    return pandas.DataFrame.from_dict(rows, orient="index")


def table_rows(reported: Mapping[str, Any]) -> dict[str, tuple[float, float, float | None]]:
    """Return each weight's numbers unrounded: off by, factor, and ranks differ by, None if cut."""
    ratios, spread = reported["ratios"], reported["spread"]
    errors = reported["errors"].items()
    return {name: (error, ratios[name], spread.get(name)) for name, error in errors}


def unexplained(error: float, factor: float) -> float:
    """Return what is left of an error when the right gradient has been taken times the factor.

    The two parts of the error are at a right angle, because the factor is that of the projection.
    """
    rest = math.sqrt(max(0.0, error**2 - (factor - 1) ** 2))
    # A difference of squares of float32 numbers is no better than this.
    return rest if rest > 3e-3 * error else 0.0


def _percent(part: float | None) -> str:
    if part is None:
        return "–"
    return f"{part:.1%}" if part >= 5 * TOLERANCE else "0"
