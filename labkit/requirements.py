"""Find cores and the C++ compiler, and list PyTorch's known bugs with their issues. No torch."""

import contextlib
import errno
import os
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

# As in pyproject.toml: from the first on, and below the second.
MIN_TORCH_VERSION, UNTESTED_TORCH_VERSION = (2, 11), (2, 14)
NVIDIA_FILES = ("/dev/nvidiactl", "/dev/dxg")
DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")
NATIVE_CONVOLUTION = "pytorch/pytorch#191926"
LOOPBACK = "127.0.0.1"
LOOPBACK_FIX = "ip link set lo up, and a line `127.0.0.1 localhost` in /etc/hosts"
COMPILER_FIX = "apt-get install g++, xcode-select --install on a Mac, or conda install cxx-compiler"


def torch_feature_problem() -> str:
    """Return what this torch cannot do, though only a skipped test needs it; "" for nothing."""
    if torch_version() >= (2, 13):
        return ""
    what = "sequence parallelism over a sequence that the ranks cannot share evenly"
    return f"{what} needs torch 2.13 (pytorch/pytorch#143748)"


def usable_cores() -> list[int]:
    """Return the CPU cores that this process may use, which can be fewer than the machine has."""
    # macOS has no affinity of processes to cores.
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def openmp_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which idle threads of OpenMP sleep soon, unless a user has chosen."""
    # They would spin for long, and where another program uses one core, the thread that computes
    # waits for its turn: a step of 9 ms on two threads took 300 to 900 ms, with this number 28.
    # Beside idle cores it takes as long as before; with OMP_WAIT_POLICY=passive it took 14.
    chosen = inherited.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    return {} if chosen else {"GOMP_SPINCOUNT": "1000"}


def loopback_problem() -> str:
    """Return why ranks of this machine cannot communicate, or "" if they can."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        # Too many open files say nothing about the loopback interface.
        if error.errno == errno.EMFILE:
            raise
        return f"{LOOPBACK} does not answer ({error.strerror or error})"
    return ""


def torch_version() -> tuple[int, int]:
    """Return major and minor version of the installed torch."""
    major, minor, *_ = parse_version(metadata.version("torch"))
    return major, minor


def untested_torch_problem() -> str:
    """Return that the installed torch is newer than all that were tested, or "" if it is not."""
    # The doctor speaks of a torch that is missing.
    with contextlib.suppress(metadata.PackageNotFoundError):
        if torch_version() >= UNTESTED_TORCH_VERSION:
            most = ".".join(map(str, UNTESTED_TORCH_VERSION))
            newer = (
                f"torch {metadata.version('torch')} is newer than all that labkit was tested with"
            )
            return f"{newer}: a lab may stop, or pip install 'torch<{most}'"
    return ""


def parse_version(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (2, 14, 0) for ``2.14.0a0+git``."""
    numbers = re.split(r"[^\d.]", version)[0].strip(".").split(".")
    return tuple(map(int, numbers[:3]))


def native_convolution_problem(version: tuple[int, int] | None = None) -> str:
    """Return why DTensor's own spatially sharded convolution must not be used with this torch."""
    version = version or torch_version()
    # On 2.12 and 2.13 the output has wrong placements. The upstream fix, #192147, covers only
    # windows that do not overlap, so later versions count as wrong until they are measured.
    what = f"gives wrong numbers, without an error ({NATIVE_CONVOLUTION})"
    # On 2.11 outputs are right, but a convolution with padding passes no gradient to its input, and
    # only the residual's part is left.
    if version < (2, 12):
        why = "_ring_send_recv_aggregate in _tp_conv.py returns nothing"
        what = f"drops gradients, without an error ({why})"
    refused = f"strategy native is refused on torch {version[0]}.{version[1]}"
    fix = "use strategy local or dtensor"
    return f"{refused}: DTensor's spatially sharded convolution {what}; {fix}"


def refuse_native_strategy(strategy: str) -> None:
    """Raise ValueError for the strategy ``native``, DTensor's own convolution, which is wrong."""
    if strategy == "native":
        raise ValueError(native_convolution_problem())


def compiler_name() -> str:
    """Return the C++ compiler that inductor calls."""
    # The rule is that of ``cpp.cxx`` in torch/_inductor/config.py.
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def compiler_problem() -> str:
    """Return what is missing, or "" if the compiler is there."""
    if shutil.which(compiler_name()):
        return ""
    if "CXX" in os.environ:
        return f"CXX is {compiler_name()!r}, which is no program"
    for other in ("g++", "clang++"):
        if shutil.which(other):
            return f"no {compiler_name()}; set CXX={other} to use the compiler that is here"
    return f"no {compiler_name()}"


def refuse_without_compiler() -> None:
    """Raise ValueError if torch.compile would find no C++ compiler."""
    if seen := compiler_problem():
        raise ValueError(f"torch.compile needs a C++ compiler: {seen}; to get one: {COMPILER_FIX}")


def has_nvidia_driver() -> bool:
    """Tell whether there is a driver of NVIDIA's, without asking it."""
    return any(map(os.path.exists, NVIDIA_FILES))


def driver_version() -> str:
    """Return the version of NVIDIA's driver, such as "580.159.04", or "" where there is none."""
    try:
        said = DRIVER_VERSION_FILE.read_text().partition("\n")[0]
    except OSError:
        return ""
    version = re.search(r"\d+(\.\d+)+", said)
    return version[0] if version else said


def usable_gpus() -> tuple[int, str]:
    """Return how many GPUs this torch can use, and why it cannot use those that are there."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = 0
        if torch.cuda.is_available():
            # Before it is initialised, torch counts cards, and of a card in MIG mode CUDA sees one
            # slice alone.
            torch.cuda.init()
            count = torch.cuda.device_count()
    if not count:
        # torch says that a driver is too old as a warning only.
        reason = " ".join(str(each.message).split(". ")[0] for each in said[:1])
        is_unused = has_nvidia_driver() and torch.version.cuda
        return 0, f"no GPU is used: {reason or 'torch finds none'}" if is_unused else ""
    versions = re.findall(r"sm_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        # Kernels serve later GPUs of the same generation as well.
        if not any(int(each) == major and int(least) <= minor for each, least in versions):
            built = f"this torch has kernels for sm_{', sm_'.join(map(''.join, versions))} alone"
            name = torch.cuda.get_device_name(index)
            return 0, f"no GPU is used: {name} is sm_{major}{minor}, and {built}"
    return count, ""
