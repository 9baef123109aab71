"""How the torchrun of one host meets itself: at once.

torch's own rendezvous is made for many hosts, which poll a store until all have come; on one host that was four fifths
of a short run. torch takes handlers of one's own: ``--rdzv-backend`` names one that was registered.

The store that is made here also serves the ranks' process group. It listens on 127.0.0.1 alone, at a port that the
system has given to it and to no other run; torch's own listens on every interface, without a login.
"""

import os
import socket

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from labkit.launcher.process import RENDEZVOUS

ADDRESS = "127.0.0.1"


class OneHost(RendezvousHandler):
    """The rendezvous of a torchrun that is alone. There is one round: labkit starts no rank a second time."""

    def __init__(self, run_id: str):
        self._run_id = run_id
        listening = socket.create_server((ADDRESS, 0))
        self.port = listening.getsockname()[1]
        self._listening: int | None = listening.detach()
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            ADDRESS, self.port, is_master=True, wait_for_workers=False, master_listen_fd=self._listening
        )
        os.register_at_fork(after_in_child=self._stop_listening)

    def _stop_listening(self) -> None:
        """In a rank, which is a fork: the store is not its own. In a fork of that one nothing is left to close."""
        if self._listening is not None:
            os.close(self._listening)
        self._listening = None

    @property
    def use_agent_store(self) -> bool:
        """The ranks join the store of this process."""
        return True

    def get_backend(self) -> str:
        return RENDEZVOUS

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(ADDRESS, self.port)
        return RendezvousInfo(self._store, rank=0, world_size=1, bootstrap_store_info=address)

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Let torchrun find OneHost by its name."""
    rendezvous_handler_registry.register(RENDEZVOUS, _create)


def _create(parameters: RendezvousParameters) -> OneHost:
    return OneHost(parameters.run_id)
