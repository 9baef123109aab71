"""Sockets by which the hosts of a run reach each other; they answer only to the run's token.

A host listens at each of its addresses and probes those of the others. The socket at the address
that all have reached becomes that of torchrun's store, so that no other process can take its port.
The connection to it stays open, and carries heartbeats between the hosts.
"""

import contextlib
import hashlib
import hmac
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

PROBE_TIMEOUT_S = 4.0
# A host that has answered at one address gets this long to answer at its others.
EXTRA_PROBE_TIMEOUT_S = 0.5
HEARTBEAT_PERIOD_S = 1.0
# A peer is lost after so many own heartbeats without one from it. Counting own heartbeats, not
# seconds, spares a host that was suspended itself.
HEARTBEAT_MISS_LIMIT = 8
MAX_LINE_BYTES = 200
HEARTBEAT_BYTE, SHUTDOWN_BYTE = b".", b"!"

# The index of a host, and one of its addresses.
Endpoint = tuple[int, str]


class Listeners:
    """The listening sockets of one host, which answer probes in a thread until closed.

    Attributes:
        ports: by address.
        links: the accepted connections, by the other host's index and the address.
    """

    def __init__(self, token: str, addresses: Iterable[str]):
        self._token = token
        self._sockets = {
            address: found for address in addresses if (found := _create_listener(address))
        }
        self.ports: dict[str, int] = {
            address: each.getsockname()[1] for address, each in self._sockets.items()
        }
        self.links: dict[Endpoint, socket.socket] = {}
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._accept_probes, daemon=True)

    def __enter__(self) -> "Listeners":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close all sockets, and all connections that were not taken."""
        self._stop_serving()
        self._stop_serving()
        for each in (
            self._wake_receiver,
            self._wake_sender,
            *self._sockets.values(),
            *self.links.values(),
        ):
            each.close()

    def take_listener(self, address: str) -> tuple[socket.socket, dict[int, socket.socket]]:
        """Stop answering; return the listening socket at this address, and its connections."""
        self._stop_serving()
        links = {
            index: self.links.pop((index, at)) for index, at in list(self.links) if at == address
        }
        return self._sockets.pop(address), links

    def _stop_serving(self) -> None:
        self._wake_sender.sendall(b"!")
        self._thread.join()

    def _accept_probes(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            for address, listener in self._sockets.items():
                selector.register(listener, selectors.EVENT_READ, address)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake_receiver:
                        return
                    # The peer has left again.
                    with contextlib.suppress(OSError):
                        peer, _ = self._sockets[key.data].accept()
                        threading.Thread(
                            target=self._answer_probe, args=[key.data, peer], daemon=True
                        ).start()

    def _answer_probe(self, address: str, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # a stranger
            peer.settimeout(PROBE_TIMEOUT_S)
            index, proof = _receive_line(peer).split()
            if hmac.compare_digest(proof, _hmac_proof(self._token, b"probe", index)):
                self.links[int(index), address] = peer
                moment = repr(time.time()).encode()
                peer.sendall(moment + b" " + _hmac_proof(self._token, b"host", moment) + b"\n")
                return
        peer.close()


def _create_listener(address: str) -> socket.socket | None:
    """Return a socket at this address and a free port; None if the address cannot be used now."""
    try:
        listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
    except OSError:
        return None
    # Otherwise accept() would wait for a peer who has left.
    listener.setblocking(False)
    return listener


@dataclass
class ProbeResult:
    """The outcome of a probe.

    Attributes:
        problem: why it failed; "" if it succeeded.
        link: the connection to the listener.
        local_address: this host's own address on the connection.
        clock_ahead_s: how far the clock there is ahead of the one here.
    """

    problem: str = ""
    link: socket.socket | None = None
    local_address: str = ""
    clock_ahead_s: float = 0.0


def probe_listeners(
    places: Mapping[Endpoint, int], token: str, index: int
) -> dict[Endpoint, ProbeResult]:
    """Probe all these addresses at once. ``index`` is this host's."""
    threads = ThreadPoolExecutor(max_workers=max(1, len(places)))
    tries = {
        place: threads.submit(_probe_listener, place[1], port, token, index)
        for place, port in places.items()
    }
    hosts = {host for host, _ in places}
    give_up, pending = time.monotonic() + PROBE_TIMEOUT_S, set(tries.values())
    while pending and (left := give_up - time.monotonic()) > 0:
        pending = wait(pending, left, FIRST_COMPLETED).not_done
        if {host for (host, _), each in tries.items() if _has_answered(each)} == hosts:
            pending = wait(pending, min(left, EXTRA_PROBE_TIMEOUT_S)).not_done
            break
    threads.shutdown(wait=False, cancel_futures=True)
    return {
        place: each.result() if each.done() else ProbeResult("no answer")
        for place, each in tries.items()
    }


def _has_answered(attempt: "Future[ProbeResult]") -> bool:
    return attempt.done() and not attempt.result().problem


def _probe_listener(address: str, port: int, token: str, index: int) -> ProbeResult:
    begun, name = time.time(), str(index).encode()
    try:
        link = socket.create_connection((address, port), timeout=PROBE_TIMEOUT_S)
        link.sendall(name + b" " + _hmac_proof(token, b"probe", name) + b"\n")
        moment, proof = _receive_line(link).split()
    except TimeoutError:
        return ProbeResult("no answer")
    except OSError as error:
        return ProbeResult(error.strerror or str(error))
    except ValueError:
        moment, proof = b"", b""
    if not hmac.compare_digest(proof, _hmac_proof(token, b"host", moment)):
        link.close()
        return ProbeResult("somebody else answers there")
    return ProbeResult(
        "", link, str(link.getsockname()[0]), float(moment) - (begun + time.time()) / 2
    )


def _hmac_proof(token: str, speaker: bytes, message: bytes) -> bytes:
    """Return a proof of knowing the token, without revealing it."""
    return hmac.new(token.encode(), speaker + b" " + message, hashlib.sha256).hexdigest().encode()


def _receive_line(link: socket.socket) -> bytes:
    """Receive one line; raise ValueError if the peer disconnects or sends too much."""
    message = b""
    while not message.endswith(b"\n"):
        part = link.recv(MAX_LINE_BYTES)
        if not part or len(message) > MAX_LINE_BYTES:
            raise ValueError("no message")
        message += part
    return message


class Heartbeats:
    """The open connections to other hosts, which carry heartbeats; all hosts connect to host 0."""

    def __init__(self, links: Mapping[str, socket.socket]):
        self._links = dict(links)
        self._missed = dict.fromkeys(links, 0)
        self._beaten = 0.0
        for link in links.values():
            link.setblocking(False)

    def unreachable_peers(self) -> list[str]:
        """Return the peers that disconnected or are silent; call it several times a second."""
        if time.monotonic() - self._beaten > HEARTBEAT_PERIOD_S:
            self._beaten = time.monotonic()
            self._send_to_all(HEARTBEAT_BYTE)
            self._missed = {name: missed + 1 for name, missed in self._missed.items()}
        gone = [name for name in list(self._links) if not self._receive_heartbeat(name)]
        # These are reported together with a peer that has been silent for even longer.
        silent = [name for name, missed in self._missed.items() if missed >= HEARTBEAT_MISS_LIMIT]
        return gone or (
            silent if any(self._missed[name] > HEARTBEAT_MISS_LIMIT for name in silent) else []
        )

    def _receive_heartbeat(self, name: str) -> bool:
        """Receive heartbeats; tell whether the peer is alive or has shut down properly."""
        try:
            received = self._links[name].recv(4096)
        except ConnectionError:
            return False
        except OSError:
            # Nothing listens yet, or the network is unreachable for the moment.
            return True
        if SHUTDOWN_BYTE in received:
            self._links.pop(name).close()
            del self._missed[name]
        elif received:
            self._missed[name] = 0
        return bool(received)

    def close(self) -> None:
        """Send a shutdown message: this host's part is done."""
        self._send_to_all(SHUTDOWN_BYTE)
        for link in self._links.values():
            link.close()

    def _send_to_all(self, message: bytes) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(message)
