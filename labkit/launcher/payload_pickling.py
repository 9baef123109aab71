"""Pack what a notebook sends to its ranks: by value, with everything it uses from other cells.

session/payload.py unpacks it in the ranks.
"""

import contextlib
import inspect
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from labkit.errors import ParameterError, shorten


class PayloadError(ParameterError):
    """Something that should be sent to the ranks cannot be pickled."""


def pack_payload(given: Mapping[str, Any]) -> bytes:
    """Pack values and functions for ``payload.unpack_payload``, or raise PayloadError."""
    # Here, because a run that sends no function needs no cloudpickle.
    import cloudpickle

    file = io.BytesIO()
    here = os.getcwd()
    pickle.dump({"path": [path or here for path in sys.path], "sources": _cell_sources()}, file)
    # Functions, classes and modules of the notebook are pickled by value, since a rank may not find
    # their file, or would run too much of it; those of installed packages by name.
    known = {*sys.stdlib_module_names, *cloudpickle.list_registry_pickle_by_value()}
    names = {getattr(value, "__module__", None) or "" for value in given.values()}
    modules = [sys.modules[name] for name in names if name in sys.modules]
    with contextlib.ExitStack() as afterwards:
        for module in modules:
            if not module.__package__ and module.__name__ not in known:
                cloudpickle.register_pickle_by_value(module)
                afterwards.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            cloudpickle.dump(dict(given), file)
        except Exception as error:
            text = shorten(f"{type(error).__name__}: {error}", 300)
            bad = " and ".join(name for name, value in given.items() if not _is_picklable(value))
            what = f"{bad} cannot be sent to the ranks with what is used there"
            raise PayloadError(f"{what}: {text}") from error
    return file.getvalue()


def _is_picklable(value: Any) -> bool:
    import cloudpickle

    with contextlib.suppress(Exception):
        return bool(cloudpickle.dumps(value))
    return False


def _cell_sources() -> dict[str, list[str]]:
    # Cells are in no file; linecache has their lines under the file name of their code.
    cached = {name: entry[2] for name, entry in list(linecache.cache.items()) if len(entry) > 2}
    return {name: lines for name, lines in cached.items() if lines and not os.path.exists(name)}


def function_source(function: Callable[..., Any]) -> str:
    """Return the source of a function for the run's folder, if it can be found."""
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(function)
    return repr(function)


def validate_replacements(
    given: Any, wanted: Mapping[str, inspect.Signature], program: str
) -> None:
    """Raise ParameterError unless the program can call each function instead of its own."""
    if not isinstance(given, Mapping):
        fix = "give functions by name, such as {'name': function}"
        raise ParameterError(f"use = {given!r} is no dict: {fix}")
    for name, function in given.items():
        if name not in wanted:
            can = ", ".join(f"{each}{signature}" for each, signature in wanted.items())
            rule = f"{program} lets replace {can or 'no function'}"
            raise ParameterError(f"use= gives {name!r}, and {rule}")
        if not callable(function):
            rule = "which is no function: give it by its name"
            raise ParameterError(f"use= gives {name} = {function!r}, {rule}")
        if not _accepts_signature(function, wanted[name]):
            gives = f"use= gives {name}{inspect.signature(function)}"
            rule = f"{program} calls {name}{wanted[name]}: take the same arguments"
            raise ParameterError(f"{gives}, and {rule}")


def _accepts_signature(function: Callable[..., Any], wanted: inspect.Signature) -> bool:
    kinds = {name: each.kind for name, each in wanted.parameters.items()}
    by_name = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    by_place = [name for name in kinds if name not in by_name]
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):
        # Native code, for example, has no source to look at.
        return True
    with contextlib.suppress(TypeError):
        return bool(takes.bind(*by_place, **dict.fromkeys(by_name)))
    return False
