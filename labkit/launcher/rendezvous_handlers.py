"""Immediate rendezvous for the torchruns of a run.

torch's own rendezvous is made for hosts that come and go, which poll a store until enough have
come; on one host that was four fifths of a short run. torch accepts other handlers:
``--rdzv-backend`` names a registered one. A single host waits for nobody. Several have found each
other already, while torchrun was importing torch (labkit_cluster/host_rendezvous.py).

The store that is made here serves the ranks' process group, and the torchruns of several hosts. It
listens at one address, 127.0.0.1 or the one that the hosts agreed on, and at a port that the system
gave to no other run; torch's own listens on every interface. It does not authenticate.
"""

import contextlib
import functools
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from labkit import torch_private
from labkit.launcher import network_namespace
from labkit.launcher.process import ONE_HOST, SEVERAL_HOSTS

STORE_ADDRESS = "127.0.0.1"
MAX_MESSAGE_BYTES = 4096
"""Of what a torchrun is told of a meeting."""


class SingleRoundHandler(RendezvousHandler):
    """A rendezvous with one round: labkit never restarts a rank."""

    def __init__(self, run_id: str):
        self._run_id = run_id

    @property
    def use_agent_store(self) -> bool:
        """Let the ranks join the store of this process."""
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class SingleHostHandler(SingleRoundHandler):
    """The rendezvous of a single torchrun.

    A store has a thread, and a fork made while that thread holds a lock waits for it forever. So
    the store starts after all ranks are forked; until then the system queues those that connect.
    """

    def __init__(self, run_id: str):
        super().__init__(run_id)
        self._listening = socket.create_server((STORE_ADDRESS, 0))
        self.port = self._listening.getsockname()[1]
        # The store belongs to torchrun; a forked rank must not hold its socket.
        os.register_at_fork(after_in_child=self._listening.close)
        _call_after_ranks_start(self._start_store)
        if network_namespace.is_namespace_requested():
            # c10d says once per process that nobody knows names there, and ranks are forks of this
            # one
            _make_tcp_store(STORE_ADDRESS, 0, socket.create_server((STORE_ADDRESS, 0)).detach())

    def get_backend(self) -> str:
        return ONE_HOST

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(STORE_ADDRESS, self.port)
        return RendezvousInfo(dist.HashStore(), rank=0, world_size=1, bootstrap_store_info=address)  # type: ignore[attr-defined]

    def _start_store(self) -> None:
        self._store = _make_tcp_store(STORE_ADDRESS, self.port, self._listening.detach())


class MultiHostHandler(SingleRoundHandler):
    """The rendezvous of one torchrun among several hosts. The store is that of host 0."""

    def __init__(self, run_id: str, told: socket.socket):
        super().__init__(run_id)
        self._told = told

    def get_backend(self) -> str:
        return SEVERAL_HOSTS

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the result that labkit_cluster/host_torchrun.py sends."""
        with self._told:
            word, doors, *_ = socket.recv_fds(self._told, MAX_MESSAGE_BYTES, 1)
        if not word:
            raise SystemExit("the hosts did not meet")
        said = json.loads(word)
        os.environ.update(said["environment"])
        address, port = said["address"], said["port"]
        for door in doors:
            inode = os.fstat(door).st_ino
            os.register_at_fork(
                after_in_child=functools.partial(_close_listener_in_fork, door, inode)
            )
        store = _make_tcp_store(address, port, *doors)
        where = RendezvousStoreInfo(address, port)
        return RendezvousInfo(
            store, rank=said["index"], world_size=said["hosts"], bootstrap_store_info=where
        )


def _make_tcp_store(address: str, port: int, listening: int | None = None) -> Any:
    """Return the store at this address: of this process if it has the listening socket, otherwise
    of another.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=listening is not None,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _call_after_ranks_start(serve: Callable[[], None]) -> None:
    """Let torchrun call this when it has started all ranks."""
    start = torch_private.get("SubprocessContext._start")

    def start_then_call(context: Any) -> None:
        start(context)
        serve()

    torch_private.replace("SubprocessContext._start", start_then_call)


def _close_listener_in_fork(listening: int, inode: int) -> None:
    """Close the listener in a rank, which is a fork. In a fork of the rank, the number may be
    another file's.
    """
    with contextlib.suppress(OSError):
        if os.fstat(listening).st_ino == inode:
            os.close(listening)


def register_handlers() -> None:
    """Register both handlers by their names."""
    rendezvous_handler_registry.register(
        ONE_HOST, lambda parameters: SingleHostHandler(parameters.run_id)
    )
    rendezvous_handler_registry.register(SEVERAL_HOSTS, _make_multi_host_handler)


def _make_multi_host_handler(parameters: RendezvousParameters) -> MultiHostHandler:
    return MultiHostHandler(
        parameters.run_id, socket.socket(fileno=int(parameters.get("told", "")))
    )
