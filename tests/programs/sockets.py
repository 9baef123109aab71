"""Between two collectives, rank 0 prints which sockets the processes of this run listen at, and may wait for a file."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from labkit.session.payload import load_config


@dataclass
class Config:
    until: str = ""
    """A file to wait for, "" for none."""


def listening() -> list[tuple[str, str, int]]:
    """Who listens, at which address and port. A socket of the file system has its path for an address."""
    torchrun = psutil.Process(os.getppid())
    parent = torchrun.parent()
    who = {torchrun: "torchrun"} | dict.fromkeys(torchrun.children(recursive=True), "rank")
    if "labkit.launcher.fork_server" in parent.cmdline():
        who[parent] = "parent"
    sockets = [(name, found) for process, name in who.items() for found in process.net_connections("all")]
    inet = [(name, *found.laddr) for name, found in sockets if found.status == psutil.CONN_LISTEN]
    return inet + [(name, found.laddr, 0) for name, found in sockets if isinstance(found.laddr, str) and found.laddr]


def main(config: Config) -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        print(json.dumps(listening()), flush=True)
        while config.until and not Path(config.until).exists():
            time.sleep(0.02)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main(load_config(Config))
