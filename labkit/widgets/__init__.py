"""Explorers: turn a knob and see what theory says at once; press a button and real ranks confirm it.

No maths here: ``theory`` computes, ``plots`` draws, ``launcher`` runs. See explorer.py for what all of them share.
"""

import importlib
import inspect
import pkgutil

from labkit.widgets.explorer import Explorer


def _find_explorers() -> dict[str, type[Explorer]]:
    """Find the explorers of this folder's modules by name, so that a lab only adds its file."""
    found: dict[str, type[Explorer]] = {}
    for each in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{each.name}")
        for name, value in inspect.getmembers(module, inspect.isclass):
            if (
                issubclass(value, Explorer)
                and value is not Explorer
                and value.__module__ == module.__name__
            ):
                found[name] = value
    return found


globals().update(_find_explorers())
__all__ = sorted(_find_explorers())
