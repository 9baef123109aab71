"""Figures of what was measured. Each function takes results and ``ax=None``, draws, and returns the Axes.

Plots compute nothing and launch nothing. Each figure is stamped with the device, ranks, cores and torch version of its
runs; CPU ranks beyond the cores are labelled "mechanism, not speed". Everywhere ``result`` is a run and ``results`` are
runs by label; ``predicted`` is what theory says, likewise by label; ``ax`` is where to draw, by default a new figure.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any


def _find_figures() -> dict[str, Callable[..., Any]]:
    """Find the public functions of this folder's modules by name, so that a lab only adds its file."""
    found: dict[str, Callable[..., Any]] = {}
    for each in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{each.name}")
        for name, value in inspect.getmembers(module, inspect.isfunction):
            if (
                value.__module__ == module.__name__
                and not name.startswith("_")
                and each.name != "style"
            ):
                found[name] = value
    return found


globals().update(_find_figures())
__all__ = sorted(_find_figures())
