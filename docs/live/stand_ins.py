"""Let the explorers' modules be imported where there is neither torch nor numpy nor matplotlib.

What an explorer needs in order to predict and to draw is real: its own module, labkit's theory and figures. What it
needs in order to measure is not there, and stands in as a name that nobody calls.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from docs.live import figure

MISSING = (
    "torch",
    "numpy",
    "pandas",
    "matplotlib",
    "PIL",
    "psutil",
    "labkit.runs.result",
    "labkit.launcher",
)
MISSING += ("labkit_cluster.local_hosts", "labkit.requirements")
# Their __init__ imports all of their modules, of which a page needs a few.
BARE = (
    "labkit",
    "labkit.plots",
    "labkit_course",
    "labkit_course.widgets",
    "labkit_cluster",
    "labkit_simulate",
)
BARE += ("labkit_simulate.theory", "launch")


class Nothing:
    """A class that can be named and subclassed."""

    def __class_getitem__(cls, _: Any) -> type:
        return cls


class _StandIn(ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str, path: Sequence[str] = ()):
        super().__init__(name)
        self.__path__ = list(path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or any(Path(folder, f"{name}.py").exists() for folder in self.__path__):
            raise AttributeError(name)  # so that the import of a real module goes on
        return type(name, (Nothing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path):
        self.root = root

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name in BARE or any(name == each or name.startswith(each + ".") for each in MISSING):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        is_bare = spec.name in BARE
        return _StandIn(spec.name, [str(self.root / spec.name.replace(".", "/"))] if is_bare else [])

    def exec_module(self, module: ModuleType) -> None:
        for name, value in REAL.get(module.__name__, {}).items():
            setattr(module, name, value)


def geomspace(first: float, last: float, count: int) -> list[float]:
    """Return values from first to last, each the same times the one before."""
    return [first * (last / first) ** (place / (count - 1)) for place in range(count)]


REAL: dict[str, dict[str, Any]] = {
    "numpy": {"geomspace": geomspace},
    "matplotlib.colors": {"to_rgb": figure.to_rgb},
    "matplotlib.patches": {"Patch": figure.patch},
    "matplotlib.lines": {"Line2D": figure.line_2d},
    "matplotlib.ticker": {"PercentFormatter": figure.PercentFormatter},
}


def install(root: Path) -> None:
    """Have what is missing stand in from now on, in this process; ``root`` holds labkit's folders."""
    if loaded := sorted({name.partition(".")[0] for name in sys.modules} & {"labkit", "torch", "numpy", "matplotlib"}):
        raise ImportError(f"{', '.join(loaded)} is imported already: stand-ins need a process of their own")
    sys.meta_path.insert(0, _Finder(root))
    sys.path.insert(0, str(root))
