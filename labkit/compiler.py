"""The C++ compiler that torch.compile calls for code on a CPU: is there one, and how to get one. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sys

FIX = "apt-get install g++, xcode-select --install on a Mac, or conda install cxx-compiler"


def wanted() -> str:
    """The program that inductor calls: $CXX, else g++, on a Mac clang++ (``cpp.cxx`` in torch/_inductor/config.py)."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def problem() -> str:
    """What is missing, or "" where the compiler is there."""
    if shutil.which(wanted()):
        return ""
    if "CXX" in os.environ:
        return f"CXX is {wanted()!r}, which is no program"
    other = next((name for name in ("g++", "clang++") if shutil.which(name)), None)
    return f"no {wanted()}" + (f"; set CXX={other} to use the compiler that is here" if other else "")


def refuse_if_missing() -> None:
    """Raises ValueError where torch.compile would find no C++ compiler."""
    if seen := problem():
        raise ValueError(f"torch.compile needs a C++ compiler: {seen}; to get one: {FIX}")
