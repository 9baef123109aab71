"""Figures of measurements. Functions take results and ``ax=None``, draw, and return the Axes.

Plots compute nothing and launch nothing. Each figure is stamped with the device, ranks, cores and
torch version of its runs; CPU ranks beyond the cores are labelled "mechanism, not speed".
Throughout, ``result`` is a run, ``results`` are runs by label, ``predicted`` are theory's values by
label, and ``ax`` is where to draw, by default a new figure.
"""

import importlib
import inspect
import pkgutil
from typing import Any

# A lab only adds its file; nothing else lists the figures.
_found: dict[str, Any] = {}
for _file in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_file.name}")
    for _name, _value in inspect.getmembers(_module, inspect.isfunction):
        if _value.__module__ == _module.__name__ and _name[0] != "_" and _file.name != "style":
            _found[_name] = _value
globals().update(_found)
__all__ = sorted(_found)
