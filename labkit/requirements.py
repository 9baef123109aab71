"""What this machine and this torch have and cannot do, and the way round. Imports no torch.

The cores, PyTorch's known bugs with their upstream issues, and the C++ compiler that torch.compile
calls for a CPU.
"""

import errno
import os
import re
import shutil
import socket
import sys
from importlib import metadata
from typing import NamedTuple

NATIVE_CONVOLUTION = "pytorch/pytorch#191926"
LOOPBACK = "127.0.0.1"
LOOPBACK_FIX = "ip link set lo up, and a line `127.0.0.1 localhost` in /etc/hosts"
COMPILER_FIX = "apt-get install g++, xcode-select --install on a Mac, or conda install cxx-compiler"


class TorchFeature(NamedTuple):
    """What torch can do from some version on. Tests of it are skipped before that, and the doctor
    says so.
    """

    since: tuple[int, int]
    description: str
    issue: str
    """Upstream."""


UNEVEN_SEQUENCE = TorchFeature(
    (2, 13),
    "sequence parallelism over a sequence that the ranks cannot share evenly",
    "pytorch/pytorch#143748",
)
TORCH_FEATURES = (UNEVEN_SEQUENCE,)


def feature_problem(difference: TorchFeature, version: tuple[int, int] | None = None) -> str:
    """Why the installed torch cannot do this, or "" where it can."""
    if (version or torch_version()) >= difference.since:
        return ""
    major, minor = difference.since
    return f"{difference.description} needs torch {major}.{minor} ({difference.issue})"


def usable_cores() -> list[int]:
    """The CPU cores that this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def loopback_problem() -> str:
    """Why ranks of this machine cannot talk to each other, or "" where they can."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        return f"{LOOPBACK} does not answer ({error.strerror or error})"
    return ""


def torch_version() -> tuple[int, int]:
    """Major and minor version of the installed torch."""
    major, minor, *_ = parse_version(metadata.version("torch"))
    return major, minor


def parse_version(version: str) -> tuple[int, ...]:
    """The numbers of a version, such as (2, 13, 0) for ``2.13.0+cpu`` or (2, 14, 0) for
    ``2.14.0a0+git``.
    """
    return tuple(
        int(number) for number in re.split(r"[^\d.]", version)[0].strip(".").split(".")[:3]
    )


def native_convolution_problem(version: tuple[int, int] | None = None) -> str:
    """Why DTensor's own spatially sharded convolution must not be used with this torch.

    On 2.11 outputs are right, but ``_ring_send_recv_aggregate``
    (torch/distributed/tensor/_tp_conv.py) returns nothing: what comes back through a convolution
    with padding is lost, and only the residual's part of the gradient is left. On 2.12 and 2.13 the
    output is labelled wrongly. The upstream fix, #192147, covers only windows that do not overlap,
    so later versions count as wrong until they are measured.
    """
    version = version or torch_version()
    what = f"gives wrong numbers, without an error ({NATIVE_CONVOLUTION})"
    if version < (2, 12):
        what = (
            "drops gradients, without an error (_ring_send_recv_aggregate in _tp_conv.py returns"
            " nothing)"
        )
    return (
        f"strategy native is refused on torch {version[0]}.{version[1]}: DTensor's spatially"
        f" sharded convolution {what}; use strategy local or dtensor"
    )


def refuse_native_strategy(strategy: str) -> None:
    """Raises ValueError for the strategy ``native``: DTensor's own spatially sharded convolution is
    wrong.
    """
    if strategy == "native":
        raise ValueError(native_convolution_problem())


def compiler_name() -> str:
    """The program that inductor calls: $CXX, else g++, on a Mac clang++ (``cpp.cxx`` in
    torch/_inductor/config.py).
    """
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def compiler_problem() -> str:
    """What is missing, or "" where the compiler is there."""
    if shutil.which(compiler_name()):
        return ""
    if "CXX" in os.environ:
        return f"CXX is {compiler_name()!r}, which is no program"
    other = next((name for name in ("g++", "clang++") if shutil.which(name)), None)
    return f"no {compiler_name()}" + (
        f"; set CXX={other} to use the compiler that is here" if other else ""
    )


def refuse_without_compiler() -> None:
    """Raises ValueError where torch.compile would find no C++ compiler."""
    if seen := compiler_problem():
        raise ValueError(f"torch.compile needs a C++ compiler: {seen}; to get one: {COMPILER_FIX}")
