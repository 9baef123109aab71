"""Tell which collectives of this rank are not done, at the moment when a run is stopped.

A Python stack ends where the program waits. On a GPU this is the next synchronisation, and not the
collective that hangs, which only torch's flight recorder names.
"""

import _thread
import contextlib
import json
import os
import signal
import sys
import time
from typing import IO, Any

from labkit import torch_private

ASKING_SIGNAL = signal.SIGUSR2
PENDING_WORDS = "not done:"


def answer_on_signal(answer: IO[Any]) -> None:
    """Write this process's pending calls to a file whenever it gets SIGUSR2."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The interpreter writes the signal's number at once, also while the main thread waits in C++,
    # where no handler of Python's could run.
    signal.signal(ASKING_SIGNAL, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def serve() -> None:
        while got := os.read(reader, 1):
            if got[0] == ASKING_SIGNAL:
                # The blank line parts them from the stacks.
                answer.write("\n".join(["", *describe_pending_calls(), "", ""]))
                answer.flush()

    # Not of the module threading, where a program would find a thread that it has not started.
    _thread.start_new_thread(serve, ())


def describe_pending_calls() -> list[str]:
    """Return a line for each collective of this process that is not done."""
    # Programs need not use torch, and it may lack the recorder.
    found: list[dict[str, Any]] = []
    if "torch.distributed" in sys.modules:
        with contextlib.suppress(RuntimeError, ValueError):
            found = json.loads(torch_private.dump_fr_trace_json(True, False)).get("entries", [])
    return [_describe(entry) for entry in found if not entry["retired"]]


def _describe(entry: dict[str, Any]) -> str:
    sizes = ", ".join(
        f"{dtype.lower()}{size}"
        for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    )
    called_s = time.time() - entry["time_created_ns"] / 1e9
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    group = entry["process_group"][-1]
    name = entry["profiling_name"]
    of_sizes = f" of {sizes}" if sizes else ""  # a barrier brings no tensor
    return f"{PENDING_WORDS} {name}{of_sizes}, call {number} of {group}, {called_s:.1f} s ago"
