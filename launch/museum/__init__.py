"""Twelve published bugs that give wrong gradients while the loss looks normal, a room each.

A room is a module of this package, in code of its own that has the mistake of the thread it names:

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
from collections.abc import Mapping
from typing import Any

ROOMS = (
    *("norm", "counts", "experts", "tokens", "router", "gathered"),
    *("extra", "clip", "tied", "accumulate", "unwaited", "bfloat"),
)
# Float32 rounds to 1e-7; a gradient that is this far from one device's is wrong.
TOLERANCE = 1e-4


def open_room(name: str) -> Any:
    """Return a room's module."""
    return importlib.import_module(f"launch.museum.{name}")


def read(name: str) -> Any:
    """Show the step of a room and where its bug was published, in a notebook."""
    from IPython.display import Code

    source = inspect.getsource(open_room(name).step)
    return Code(f"# {', '.join(thread(name))}\n{source}", language="python")


def thread(name: str) -> tuple[str, str]:
    """Return where a room's bug was published, and when, from the end of its module's text."""
    where, _, when = (open_room(name).__doc__ or "").strip().splitlines()[-1].partition(", ")
    return where, when.rstrip(".")


def gradient_table(reported: Mapping[str, Any], mine: Mapping[str, float | None]) -> Any:
    """Return each weight's gradient beside one device's, and what the learner committed to.

    ``reported`` is what a rank of ``silent_bugs`` reports; ``mine`` holds 1 for a wrong gradient,
    0 for a right one, and None.
    """
    import pandas

    words = {None: "–", 0.0: "right", 1.0: "wrong"}
    rows = {
        name: {
            "gradient / right": f"{reported['ratios'][name]:.2f}",
            "off by": f"{error:.1%}" if error > TOLERANCE else "rounding",
            "parity": words[float(name in reported["wrong"])],
            "you": words.get(mine.get(name), "–"),
        }
        for name, error in reported["errors"].items()
    }
    return pandas.DataFrame.from_dict(rows, orient="index")
