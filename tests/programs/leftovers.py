"""Notes how each rank begins, and leaves things to be done at its end; labkit.run and a bare torchrun are to agree.

Rank 0 comes to the end of the program, rank 1 ends through labkit's rank.run_main, rank 2 raises once the others are
gone.
"""

from __future__ import annotations

import atexit
import ctypes
import gzip
import json
import logging.handlers
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(os.environ["LEFTOVERS"])
RANK = int(os.environ["RANK"])
LEFT_OPEN = (FOLDER / f"{RANK}_left_open").open("w")
LEFT_OPEN_BINARY = (FOLDER / f"{RANK}_left_open_binary").open("wb")
COMPRESSED = gzip.open(FOLDER / f"{RANK}_compressed.gz", "wt")  # noqa: SIM115


@dataclass
class Config:
    pass


def begin() -> None:
    (FOLDER / f"{RANK}_pid").write_text(str(os.getpid()))
    handlers = [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)]
    facts = {
        "leader": os.getsid(0) == os.getpid(),
        "argv": sys.argv[1:],
        "handlers": handlers,
        "main": __name__,
        "threads": threading.active_count(),
        "world": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
    }
    (FOLDER / f"{RANK}_facts").write_text(json.dumps(facts))
    (FOLDER / f"{RANK}_random").write_text(str(random.random()))


def note_later(name: str) -> None:
    time.sleep(0.3)  # so that a rank that does not wait is gone before
    note(name)


def note(name: str) -> None:
    (FOLDER / f"{RANK}_{name}").write_text(name)


def fail() -> None:
    raise RuntimeError("an exit function that fails")


def leave_things() -> None:
    print(f"text of rank {RANK}", file=LEFT_OPEN)
    LEFT_OPEN_BINARY.write(b"bytes")
    print("text", file=COMPRESSED)
    atexit.register(note, "atexit")
    atexit.register(fail)
    weakref.finalize(Config, note, "finalizer")
    threading.Thread(target=note_later, args=["thread"]).start()
    multiprocessing.get_context("fork").Process(target=note_later, args=["process"]).start()
    memory = logging.handlers.MemoryHandler(100, target=logging.FileHandler(FOLDER / f"{RANK}_log"))
    logging.getLogger("leftovers").addHandler(memory)
    logging.getLogger("leftovers").warning("kept in memory")
    ctypes.CDLL(None).printf(b"printed by native code\n")


def wait_for_the_end_of(rank: int) -> None:
    path = FOLDER / f"{rank}_pid"
    while not path.exists() or not path.read_text():
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        while True:
            os.kill(int(path.read_text()), 0)
            time.sleep(0.02)


def main(config: Config) -> None:
    begin()
    if RANK == 2:
        wait_for_the_end_of(0)
        wait_for_the_end_of(1)
    leave_things()
    if RANK == 2:
        raise ValueError("rank 2 fails")


if __name__ == "__main__":
    if RANK == 1:
        from labkit import rank

        rank.run_main(main, Config)
    main(Config())
