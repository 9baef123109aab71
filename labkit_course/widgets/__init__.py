"""Explorers: choose values, see what theory predicts, and confirm it on real ranks.

They do no maths: ``theory`` computes, ``plots`` draws, ``launcher`` runs. See explorer.py.
"""

import importlib
import pkgutil

from labkit_course.widgets.explorer import Explorer

# A lab only adds its file; nothing else lists the explorers.
for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
_found = {
    kind.__name__: kind
    for kind in Explorer.__subclasses__()
    if kind.__module__.startswith(__name__)
}
globals().update(_found)
__all__ = sorted(_found)
