"""End a rank's process as Python does, but without tearing down the interpreter.

gloo's threads can crash or deadlock while the interpreter is torn down around them, so a rank
leaves with os._exit. Before that, its threads are joined, atexit functions run (multiprocessing's
own joins its children), and open files are flushed.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import logging
import multiprocessing.util
import os
import sys
import threading
import traceback
import weakref
from typing import Any, NoReturn

# isinstance() is faster with the C base class.
IO_BASE_TYPE: Any = io.IOBase.__mro__[1]


def exit_process(status: int) -> NoReturn:
    """End this process with this status, after its threads, atexit functions and open files."""
    try:
        for last in (threading._shutdown, atexit._run_exitfuncs, flush_open_files):  # type: ignore[attr-defined]
            try:
                last()
            except BaseException:
                # As in Python, an exit function that fails does not keep the others from running.
                traceback.print_exc()
    finally:
        # The system keeps these eight bits, and os._exit refuses some larger numbers.
        os._exit(status & 0xFF)


def exit_status(error: BaseException) -> int:
    """Return the exit status that Python gives a process that ended with this exception."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return (error.code or 0) & 0xFF
    return 1


def print_error_and_status(error: BaseException) -> int:
    """Print this exception to stderr as Python does, and return the exit status."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    elif not isinstance(error.code, int | None):
        print(error.code, file=sys.stderr)
    return exit_status(error)


def flush_open_files() -> None:
    """Write out the buffers of all open files of this process."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if IO_BASE_TYPE in kind.__mro__}
    files = [each for each in objects if type(each) in kinds]
    # A compressed file may lie under text, and a plain one under either.
    files.sort(key=lambda file: (not isinstance(file, io.TextIOBase), not _is_compressed(file)))
    for file in [*files, sys.stdout, sys.stderr]:
        # The stream is closed, its pipe has no reader, or the disk is full.
        with contextlib.suppress(Exception):
            if _is_compressed(file):
                # A .gz file needs closing, because it has a trailer of its own.
                file.close()
            else:
                file.flush()
    # This writes what native code has printed with printf.
    ctypes.CDLL(None).fflush(None)


def reset_exit_handlers() -> None:
    """Drop the exit handlers that a forked process inherited: they belong to its parent."""
    # Hide the parent's objects, open files among them, from gc.get_objects.
    gc.freeze()
    atexit._clear()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    # A new Python registers these when it imports the modules, which a fork does not import again.
    atexit.register(logging.shutdown)
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _is_compressed(file: Any) -> bool:
    return isinstance(file, io.BufferedIOBase) and type(file).__module__ != "_io"
