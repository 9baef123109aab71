"""Find files that hide PyTorch, or a module of Python, from every import.

This imports only what Python itself has loaded before, which no such file can hide.
"""

import os
import sys
from collections.abc import Iterable

OURS = ("torch", "numpy", "pandas", "psutil", "tyro", "cloudpickle")
PYTHONS_OWN_FOLDER = os.path.dirname(os.__file__)
MAX_FILES = 3


def hiding_files(folders: Iterable[str]) -> str:
    """Name the files in these folders of a path that hide a module, with a fix; "" for none."""
    found = []
    for folder in map(os.path.abspath, folders):
        # What comes after it on the path hides nothing of Python's, and lies beside PyTorch.
        if folder == PYTHONS_OWN_FOLDER:
            break
        names = os.listdir(folder) if os.path.isdir(folder) else []
        hidden = {f"{name}.py" for name in (*OURS, *sys.stdlib_module_names)}
        found += [os.path.join(folder, name) for name in sorted(hidden.intersection(names))]
    if not found:
        return ""
    rule = "hides the module of that name: rename it, or take its folder off PYTHONPATH"
    return f"{', '.join(found[:MAX_FILES])} {rule}"


def ranks_hiding_files() -> str:
    """Name the files on PYTHONPATH, which ranks inherit, that hide a module; "" for none."""
    return hiding_files(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
