"""The rendezvous of a torchrun among several hosts, which torchrun finds by this module's name.

The hosts have found each other already while torchrun was importing torch (host_rendezvous.py). The
store is that of host 0; it listens at the address that the hosts agreed on.
"""

import contextlib
import functools
import json
import os
import socket

from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from labkit.launcher.rendezvous_handlers import make_tcp_store

MAX_MESSAGE_BYTES = 4096


class MultiHostHandler(StaticTCPRendezvous):
    """Waits at a socket for the rendezvous result that host_torchrun.py sends."""

    def __init__(self, run_id: str, told: socket.socket):
        super().__init__("", 0, rank=0, world_size=0, run_id=run_id, timeout=0)
        self._told = told

    def get_backend(self) -> str:
        return __name__

    def next_rendezvous(self) -> RendezvousInfo:
        with self._told:
            word, listeners, *_ = socket.recv_fds(self._told, MAX_MESSAGE_BYTES, 1)
        if not word:
            raise SystemExit("the hosts did not meet")
        said = json.loads(word)
        os.environ.update(said["environment"])
        for listener in listeners:
            inode = os.fstat(listener).st_ino
            os.register_at_fork(
                after_in_child=functools.partial(_close_listener_in_fork, listener, inode)
            )
        store = make_tcp_store(said["address"], said["port"], *listeners)
        where = RendezvousStoreInfo(said["address"], said["port"])
        return RendezvousInfo(
            store, rank=said["index"], world_size=said["hosts"], bootstrap_store_info=where
        )


def create_handler(parameters: RendezvousParameters) -> MultiHostHandler:
    """Create the handler for torchrun; ``--rdzv-conf told=FD`` names the socket."""
    return MultiHostHandler(
        parameters.run_id, socket.socket(fileno=int(parameters.get("told", "")))
    )


def _close_listener_in_fork(listener: int, inode: int) -> None:
    """Close the listener in a rank, which is a fork."""
    # In a fork of the rank, the number may be another file's.
    with contextlib.suppress(OSError):
        if os.fstat(listener).st_ino == inode:
            os.close(listener)
