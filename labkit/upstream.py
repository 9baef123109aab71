"""What is known to be broken in PyTorch, by version, with the upstream issue. Imports no torch."""

from __future__ import annotations

import re
from importlib import metadata

NATIVE_CONVOLUTION = "pytorch/pytorch#191926"


def torch_version() -> tuple[int, int]:
    """Major and minor version of the installed torch."""
    found = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    assert found, metadata.version("torch")
    return int(found[1]), int(found[2])


def native_convolution_problem(version: tuple[int, int] | None = None) -> str:
    """Why DTensor's own spatially sharded convolution must not be used with this torch, or "" where it is right.

    Right on 2.11, wrong on 2.12 and 2.13. The upstream fix, #192147, covers only windows that do not overlap, so later
    versions count as wrong until they are measured.
    """
    version = version or torch_version()
    if version < (2, 12):
        return ""
    return (
        f"strategy native is refused on torch {version[0]}.{version[1]}: DTensor's spatially sharded convolution gives "
        f"wrong numbers, without an error ({NATIVE_CONVOLUTION}); use strategy local or dtensor"
    )


def refuse_if_broken(strategy: str) -> None:
    """Raises ValueError for the strategy ``native`` where DTensor's own spatially sharded convolution is wrong."""
    if strategy == "native" and (problem := native_convolution_problem()):
        raise ValueError(problem)
