"""Figures of measurements. Functions take results and ``ax=None``, draw, and return the Axes.

Plots compute nothing and launch nothing. Each figure is stamped with the device, ranks, cores and
torch version of its runs; CPU ranks beyond the cores are labelled "mechanism, not speed".
Throughout, ``result`` is a run, ``results`` are runs by label, ``predicted`` are theory's values by
label, and ``ax`` is where to draw, by default a new figure.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any


def _find_figures() -> dict[str, Callable[..., Any]]:
    # A lab only adds its file; nothing else lists the figures.
    found: dict[str, Callable[..., Any]] = {}
    for each in pkgutil.iter_modules(__path__):
        if each.name == "style":
            continue
        module = importlib.import_module(f"{__name__}.{each.name}")
        for name, value in inspect.getmembers(module, inspect.isfunction):
            if value.__module__ == module.__name__ and not name.startswith("_"):
                found[name] = value
    return found


globals().update(_find_figures())
__all__ = sorted(_find_figures())
