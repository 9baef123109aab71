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
    """Why DTensor's own spatially sharded convolution must not be used with this torch.

    On 2.11 outputs are right, but ``_ring_send_recv_aggregate`` (torch/distributed/tensor/_tp_conv.py) returns nothing:
    what comes back through a convolution with padding is lost, and only the residual's part of the gradient is left. On
    2.12 and 2.13 the output is labelled wrongly. The upstream fix, #192147, covers only windows that do not overlap, so
    later versions count as wrong until they are measured.
    """
    version = version or torch_version()
    what = f"gives wrong numbers, without an error ({NATIVE_CONVOLUTION})"
    if version < (2, 12):
        what = "drops gradients, without an error (_ring_send_recv_aggregate in _tp_conv.py returns nothing)"
    return (
        f"strategy native is refused on torch {version[0]}.{version[1]}: DTensor's spatially sharded convolution "
        f"{what}; use strategy local or dtensor"
    )


def refuse_if_broken(strategy: str) -> None:
    """Raises ValueError for the strategy ``native``: DTensor's own spatially sharded convolution is wrong."""
    if strategy == "native":
        raise ValueError(native_convolution_problem())
