"""One rank does something bad while the others wait for it. Without --group it needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labkit.session.payload import load_config


@dataclass
class Config:
    how: Literal["wait", "raise", "exit", "sys.exit", "kill", "abort", "linger", "stay", "spawn", "finish"] = "wait"
    """What the rank does."""
    rank: int = 1
    """Which rank does it."""
    group: bool = False
    """Whether the ranks form a process group, and the others wait in an all-reduce."""
    deaf: bool = False
    """Whether the others ignore SIGTERM."""
    orphan: bool = False
    """Whether the rank first starts a process that outlives its parent, in a session of its own."""
    bare: bool = False
    """Whether the rank first starts a child without its environment, in a session of its own."""
    stray: bool = False
    """Whether the rank first starts a process that is both."""
    pids: str = ""
    """A file for the ids of all processes of the run: torchrun, ranks, what ranks start."""


def note_pids(path: str, *pids: int) -> None:
    with Path(path).open("a") as file:
        file.write("".join(f"{pid}\n" for pid in pids))


def wait_for_godot() -> None:
    time.sleep(600)


def widths_must_agree() -> None:
    raise ValueError("width 3 is not width 4")


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def start_orphan(pids: str, environment: str = "None") -> None:
    starter = (
        "import subprocess, sys; null = subprocess.DEVNULL\n"
        f"print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=null, env={environment}).pid)"
    )
    answer = subprocess.run([sys.executable, "-c", starter, *SLEEP], stdout=subprocess.PIPE, text=True, check=True)
    note_pids(pids, int(answer.stdout))


def start_bare_child(pids: str) -> None:
    note_pids(pids, subprocess.Popen(SLEEP, env={}, start_new_session=True).pid)


def spawn_child(pids: str) -> None:
    """Start a child with multiprocessing, which must find the program as its main module."""
    import multiprocessing

    child = multiprocessing.get_context("spawn").Process(target=note_own_pid, args=[pids])
    child.start()
    child.join()
    assert child.exitcode == 0


def note_own_pid(pids: str) -> None:
    note_pids(pids, os.getpid())


def misbehave(config: Config) -> None:
    if config.orphan:
        start_orphan(config.pids)
    if config.bare:
        start_bare_child(config.pids)
    if config.stray:
        start_orphan(config.pids, environment="{}")
    if config.how == "raise":
        widths_must_agree()
    elif config.how == "exit":
        os._exit(3)
    elif config.how == "sys.exit":
        sys.exit(4)
    elif config.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif config.how == "abort":
        os.abort()
    elif config.how == "linger":  # fails, but cannot leave
        threading.Thread(target=wait_for_godot).start()
        widths_must_agree()
    elif config.how == "stay":  # comes to its end, but cannot leave
        threading.Thread(target=wait_for_godot).start()
    elif config.how == "spawn":
        spawn_child(config.pids)
    elif config.how == "wait":
        wait_for_godot()


def main(config: Config) -> None:
    rank = int(os.environ["RANK"])
    if config.group:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
    if config.deaf and rank != config.rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"rank {rank} is ready")
    if config.pids:
        note_pids(config.pids, os.getppid(), os.getpid())
    if rank == config.rank:
        misbehave(config)
    elif config.group:
        dist.all_reduce(torch.ones(1))
    elif config.how not in ("spawn", "finish"):
        wait_for_godot()


if __name__ == "__main__":
    main(load_config(Config))
