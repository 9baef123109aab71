"""Recognise an exhausted resource by the text of an error, and say what to do.

A system's limits appear in all processes of a run, as errors of others: a store that finds no event
loop, a thread that does not start. Their texts share a few phrases.
"""

import contextlib
import resource
from collections.abc import Iterator

from labkit.compile_cache import PARTIAL_LIBRARY_FIX, PARTIAL_LIBRARY_WORDS
from labkit.errors import LabError, MemoryCapExceeded

# The first match counts. {files} is the limit of open files.
FIXES_BY_WORDS = {
    ("shared memory segment", "/dev/shm/nccl"): (
        "NCCL has too little shared memory: a container's /dev/shm is 64 MiB by default; start it"
        " with `--shm-size 1g`, or in Kubernetes mount an emptyDir of medium Memory there"
    ),
    ("Too many open files", "Failed to init uv loop"): (
        "no more files may be opened here: raise the limit, now {files}, with `ulimit -n 1024` or"
        " more"
    ),
    ("No space left on device", "PytorchStreamWriter failed writing"): (
        "a disk is full, or your part of it: delete files there, or write to another disk"
    ),
    ("can't start new thread", "Resource temporarily unavailable", "std::system_error"): (
        "no more processes or threads may be started here: take fewer ranks, end other"
        " programs, or raise the limit, that of `ulimit -u` or of the container (--pids-limit)"
    ),
    ("CUDA out of memory", "device(s) is/are busy"): (
        "the GPU has no room: see in `nvidia-smi` who uses it, take a smaller model or batch,"
        " or device='cpu'"
    ),
    PARTIAL_LIBRARY_WORDS: PARTIAL_LIBRARY_FIX,
    # An error of labkit that says itself what to do.
    (MemoryCapExceeded.__name__,): "",
    ("MemoryError", "Cannot allocate memory", "can't allocate memory", "std::bad_alloc"): (
        "there was no more memory: take fewer ranks, a smaller model or batch, end other"
        " programs, or raise the limit of the container or of `ulimit -v`"
    ),
}


def shortage_fix(text: str) -> str:
    """Return what to do about a shortage in this text, on a line of its own; "" for none."""
    for known, fix in FIXES_BY_WORDS.items():
        if any(words in text for words in known):
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return fix and "\n" + fix.format(files=files)
    return ""


@contextlib.contextmanager
def explain_shortage() -> Iterator[None]:
    """Turn an error of this process that mentions a shortage into a LabError with its fix."""
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        found = shortage_fix(f"{type(error).__name__}: {error}")
        if not found or isinstance(error, LabError):
            raise
        raise LabError(f"the run cannot be started or watched: {error}{found}") from error
