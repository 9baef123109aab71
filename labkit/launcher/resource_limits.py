"""Recognise an exhausted resource by the text of an error, and say what to do.

A system's limits show up in the notebook's process, in torchrun and in ranks, and always as
somebody else's error: a store that finds no event loop, a thread that does not start. They share a
few phrases.
"""

import contextlib
import resource
from collections.abc import Iterator

from labkit.errors import LabError, MemoryCapExceeded

FILE_LIMIT_WORDS = ("Too many open files", "Failed to init uv loop")
PROCESS_LIMIT_WORDS = (
    "can't start new thread",
    "Resource temporarily unavailable",
    "std::system_error",
)
GPU_LIMIT_WORDS = ("CUDA out of memory", "device(s) is/are busy")
MEMORY_LIMIT_WORDS = (
    "MemoryError",
    "Cannot allocate memory",
    "can't allocate memory",
    "std::bad_alloc",
)
MEMORY_CAP_WORDS = MemoryCapExceeded.__name__
"""An error of labkit that says itself what to do."""


def shortage_fix(text: str) -> str:
    """Return what to do about a shortage that this text mentions, as a sentence on a line of its
    own; "" for none.
    """
    if any(words in text for words in FILE_LIMIT_WORDS):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"\nno more files may be opened here: raise the limit, now {limit}, with `ulimit -n"
            " 1024` or more"
        )
    if any(words in text for words in PROCESS_LIMIT_WORDS):
        return (
            "\nno more processes or threads may be started here: take fewer ranks, end other"
            " programs, or raise the limit, that of `ulimit -u` or of the container (--pids-limit)"
        )
    if any(words in text for words in GPU_LIMIT_WORDS):
        return (
            "\nthe GPU has no room: see in `nvidia-smi` who uses it, take a smaller model or batch,"
            " or device='cpu'"
        )
    if any(words in text for words in MEMORY_LIMIT_WORDS) and MEMORY_CAP_WORDS not in text:
        return (
            "\nthere was no more memory: take fewer ranks, a smaller model or batch, end other"
            " programs, or raise the limit of the container or of `ulimit -v`"
        )
    return ""


@contextlib.contextmanager
def explain_shortage() -> Iterator[None]:
    """Turn an error of this process that mentions a shortage into a LabError that says what to
    do.
    """
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        found = shortage_fix(f"{type(error).__name__}: {error}")
        if not found or isinstance(error, LabError):
            raise
        raise LabError(f"the run cannot be started or watched: {error}{found}") from error
