"""Explorers: choose values, see what theory predicts, and confirm it on real ranks.

They do no maths: ``theory`` computes, ``plots`` draws, ``launcher`` runs. See explorer.py.
"""

import importlib
import inspect
import pkgutil

from labkit.widgets.explorer import Explorer


def _find_explorers() -> dict[str, type[Explorer]]:
    # A lab only adds its file; nothing else lists the explorers.
    found: dict[str, type[Explorer]] = {}
    for each in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{each.name}")
        for name, value in inspect.getmembers(module, inspect.isclass):
            own = value.__module__ == module.__name__
            if own and issubclass(value, Explorer) and value is not Explorer:
                found[name] = value
    return found


globals().update(_find_explorers())
__all__ = sorted(_find_explorers())
