"""An immediate rendezvous for a torchrun that is alone.

torch's own rendezvous is made for hosts that come and go, which poll a store until enough have
come; on one host that was four fifths of a short run. ``torchrun.py`` registers the module that
``--rdzv-backend`` names: this one, or that of labkit_cluster for several hosts.

The store serves the ranks' process group. It listens at one address, and at a port that the system
gave to no other run; torch's own listens on every interface. It does not authenticate.
"""

import os
import socket
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from labkit import torch_private
from labkit.launcher import network_namespace

STORE_ADDRESS = "127.0.0.1"


class SingleHostHandler(StaticTCPRendezvous):
    """The rendezvous of a single torchrun, which waits for no other host."""

    def __init__(self, run_id: str):
        self._listening = socket.create_server((STORE_ADDRESS, 0))
        self.port = self._listening.getsockname()[1]
        super().__init__(STORE_ADDRESS, self.port, rank=0, world_size=1, run_id=run_id, timeout=0)
        # The store belongs to torchrun; a forked rank must not hold its socket.
        os.register_at_fork(after_in_child=self._listening.close)
        # A store has a thread, and a fork made while that thread holds a lock waits for it forever.
        # So the store starts after the last fork; until then the system queues those that connect.
        start = torch_private.get("SubprocessContext._start")

        def start_ranks_then_store(context: Any) -> None:
            start(context)
            self._store = make_tcp_store(STORE_ADDRESS, self.port, self._listening.detach())

        torch_private.replace("SubprocessContext._start", start_ranks_then_store)
        if network_namespace.is_namespace_requested():
            # c10d warns once per process that no name can be resolved there. Ranks are forks of
            # this process, so a store that is made here spares them the warning.
            make_tcp_store(STORE_ADDRESS, 0, socket.create_server((STORE_ADDRESS, 0)).detach())

    def get_backend(self) -> str:
        return __name__

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(STORE_ADDRESS, self.port)
        return RendezvousInfo(dist.HashStore(), rank=0, world_size=1, bootstrap_store_info=address)  # type: ignore[attr-defined]


def create_handler(parameters: RendezvousParameters) -> SingleHostHandler:
    """Create the handler for torchrun."""
    return SingleHostHandler(parameters.run_id)


def make_tcp_store(address: str, port: int, listening: int | None = None) -> Any:
    """Return the store at this address; it is this process's if that holds the listening socket."""
    options: dict[str, Any] = {"is_master": listening is not None, "master_listen_fd": listening}
    options["wait_for_workers"] = False
    return dist.TCPStore(address, port, **options)  # type: ignore[attr-defined]
