"""Hold messages back for the time that an emulated link would take.

gloo moves the numbers as soon as all ranks have called, much faster than the emulated link. From
that moment on the message occupies this rank's link, after those that are already on it, and only
then its ``Work`` is done. All groups of a rank share its links: one to ranks on the same host, and
a network card to the others.
"""

import contextlib
import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.futures import Future
from torch.profiler import record_function

from labkit import torch_private
from labkit.session.counted_group import METHODS, hand_on_to
from labkit.session.timeline import WAIT_MARK
from labkit.session.traffic import STAMP_TAG
from labkit.theory.emulated import Emulated
from labkit.torch_private import tree_leaves

BACKEND = "emulated"
# Names of methods up to torch 2.12, and since.
NEW_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


class Clock:
    """Calls functions at given times, in a thread of its own."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, daemon=True).start()

    def call_at(self, moment_s: float, function: Callable[[], None]) -> None:
        """Call ``function`` at a time of ``time.monotonic``, or at once if it has passed."""
        with self._changed:
            heapq.heappush(self._due, (moment_s, next(self._number), function))
            self._changed.notify()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._due or (left_s := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left_s if self._due else None)
                _, _, function = heapq.heappop(self._due)
            function()


class Wire:
    """The links of this rank."""

    def __init__(self, hardware: Emulated):
        self.hardware = hardware
        # By which messages' bytes are multiplied, see ``Emulated.unit_bytes``.
        self.size_factor = 1.0
        # False: nothing of this rank takes emulated time, see ``Session.without_waiting``.
        self.waits = True
        # Until when this rank has waited for a message.
        self.waited_until_s = 0.0
        # When each message was on a link, in order, while ``note_transfers`` is at work.
        self._noted: list[tuple[float, float]] | None = None
        self._free_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._clock: Clock | None = None

    def occupy(self, link: str, cost_s: float) -> float:
        """Put a message on a link after those that it carries; return when it is through."""
        with self._lock:
            start_s = max(time.monotonic(), self._free_s.get(link, 0.0))
            self._free_s[link] = end_s = start_s + cost_s * self.waits
            if self._noted is not None:
                self._noted.append((start_s, end_s))
        return end_s

    @contextlib.contextmanager
    def note_transfers(self) -> Iterator[list[tuple[float, float]]]:
        """Note when messages are on a link inside the block: start and end, ``time.monotonic``."""
        noted: list[tuple[float, float]] = []
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted = None

    def call_at(self, moment_s: float, function: Callable[[], None]) -> None:
        """Call ``function`` at a time of ``time.monotonic``."""
        if moment_s <= time.monotonic():
            function()
            return
        with self._lock:
            self._clock = self._clock or Clock()
        self._clock.call_at(moment_s, function)

    def sleep_until(self, moment_s: float) -> None:
        """Wait for a message that is through at this time; the device computes only then."""
        now_s = time.monotonic()
        time.sleep(max(0.0, moment_s - now_s))
        self.waited_until_s = max(self.waited_until_s, now_s, moment_s)


class WireWork(dist.Work):
    """A message that gloo moves, and that arrives when the emulated link has carried it."""

    def __init__(self, wire: Wire, work: dist.Work, arrive: Callable[[], float]):
        super().__init__()
        self._wire, self._work, self._arrive = wire, work, arrive
        self._lock = threading.Lock()
        self._end_s: float | None = None

    def settle(self) -> float:
        """Return when the message is through; gloo has moved its numbers."""
        with self._lock:
            if self._end_s is None:
                self._end_s = self._arrive()
            return self._end_s

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the message has arrived."""
        called_s = time.monotonic()
        with record_function(WAIT_MARK):
            done = self._work.wait(timeout) if timeout else self._work.wait()
            end_s = self.settle()
            # Also a rank that waited for another one could not compute meanwhile.
            if end_s > called_s:
                self._wire.sleep_until(end_s)
        return done

    def is_completed(self) -> bool:
        """Whether the message has arrived."""
        return self._work.is_completed() and self.settle() <= time.monotonic()

    def get_future(self) -> Future[Any]:
        """Return a future of the message's tensors, which is done when it has arrived."""
        arrived: Future[Any] = Future()

        def hand_over() -> None:
            try:
                # Raises what gloo has met.
                self._work.wait()
                arrived.set_result(self.result())
            except Exception as error:
                arrived.set_exception(error)

        when_moved(self._work, lambda: self._wire.call_at(self.settle(), hand_over))
        return arrived

    def result(self) -> list[Tensor]:
        """Return the message's tensors."""
        # Not by the work's own ``result``, which warns on every rank that it is deprecated.
        tensors: list[Tensor] = self._work.get_future().value()
        return tensors


# Messages that gloo moves, with what to do once they have moved.
_moving: queue.Queue[tuple[dist.Work, Callable[[], object]]] = queue.Queue()


def when_moved(work: dist.Work, function: Callable[[], object]) -> None:
    """Call a function in another thread as soon as gloo has moved a message's numbers."""
    # Not by a future of gloo's, whose thread would need Python's lock: some methods hold it while
    # they wait for that thread (reduce_scatter_single_coalesced, torch 2.13). So messages that
    # finish out of order are seen late, unless their rank waits for them.
    _start_waiting_thread()
    _moving.put((work, function))


def release_last_message() -> None:
    """Let the thread that waits for messages drop the last one, whose memory it keeps."""
    nothing: Any = Future()
    nothing.set_result(None)
    when_moved(nothing, bool)


@cache
def _start_waiting_thread() -> None:
    def serve() -> None:
        while True:
            # The last message is kept until the next one comes. Else gloo's thread might drop it
            # last, and wait for Python's lock, while the next call holds that and waits for gloo's.
            work, function = _moving.get()
            # Who waits for the message gets its error.
            with contextlib.suppress(Exception):
                work.wait()
            function()

    threading.Thread(target=serve, daemon=True).start()


# The links of this process: torch makes groups without an argument that could carry them.
current_wire: Wire | None = None


class EmulatedGroup(ProcessGroup):
    """A process group over gloo whose messages take the time of emulated links."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]
        assert current_wire, "join_emulated_group comes first"
        self.wire = current_wire
        hand_on_to(self, dist.ProcessGroupGloo(store, rank, size, timeout))

    def link_and_hosts(self, other: int | None = None) -> tuple[str, int]:
        """Return the link of the group, or of a message to one of it, and the hosts it spans."""
        ranks = distributed_c10d.get_process_group_ranks(self)
        if other is not None:
            ranks = [ranks[self.rank()], ranks[other]]
        hosts = self.wire.hardware.count_hosts(ranks)
        return ("card" if hosts > 1 else "inside"), hosts


def _handed_bytes(method: str, args: tuple[Any, ...]) -> int:
    # Only one rank hands tensors to a scatter; every rank gets one.
    place = 0 if method == "scatter" else METHODS[method][1]
    return sum(each.nbytes for each in tree_leaves(args[place]) if isinstance(each, Tensor))


_in_call = threading.local()


def _holding_back(method: str) -> Callable[..., Any]:
    name, _ = METHODS[method]
    plain = getattr(ProcessGroup, method)

    def call(self: EmulatedGroup, *args: Any) -> Any:
        # torch implements some methods by others.
        if getattr(_in_call, "active", False):
            return plain(self, *args)
        _in_call.active = True
        try:
            if name in ("send", "recv"):
                return _pass_message(self, plain, name, args)
            link, hosts = self.link_and_hosts()
            wire, size = self.wire, _handed_bytes(method, args) * self.wire.size_factor
            cost_s = wire.hardware.collective_s(name, size, self.size(), hosts=hosts)
            work = WireWork(wire, plain(self, *args), lambda: wire.occupy(link, cost_s))
            # Not when somebody waits: the message goes on while the rank computes.
            when_moved(work._work, work.settle)
            return work
        finally:
            _in_call.active = False

    # pybind11 takes a method that is called from one of its own name for the base class's.
    call.__code__ = call.__code__.replace(co_name=method)
    return call


def _pass_message(
    group: EmulatedGroup, plain: Callable[..., Any], name: str, args: tuple[Any, ...]
) -> WireWork:
    """Send or receive a tensor, and with it the time of arrival, which the sender knows."""
    tensors, other, tag = args
    stamp = torch.zeros(1, dtype=torch.float64)
    wire = group.wire
    if name == "recv":
        work = plain(group, tensors, other, tag)
        stamped = plain(group, [stamp], other, tag + STAMP_TAG)

        def arrive() -> float:
            stamped.wait()
            return float(stamp)

        return WireWork(wire, work, arrive)
    link, hosts = group.link_and_hosts(other)
    size = sum(each.nbytes for each in tensors) * wire.size_factor
    cost_s = wire.hardware.collective_s("send", size, 2, hosts=hosts)
    end_s = wire.occupy(link, cost_s)
    work = plain(group, tensors, other, tag)
    stamp.fill_(end_s)
    stamped = plain(group, [stamp], other, tag + STAMP_TAG)

    def leave() -> float:
        # gloo drops a message whose work is dropped before it has left.
        stamped.wait()
        return end_s

    return WireWork(wire, work, leave)


for _method in METHODS:
    # Of those with a new name, torch implements the old by the new.
    is_replaced = hasattr(ProcessGroup, NEW_NAMES.get(_method, "absent"))
    if hasattr(ProcessGroup, _method) and not is_replaced and _method != "recv_anysource":
        setattr(EmulatedGroup, _method, _holding_back(_method))


@cache
def _emulate_gathers_in_place() -> torch.library.Library:
    """Let the operator with which inductor joins gathers call the groups' methods, too."""
    # torch's own goes past a group that is written in Python.
    operators = torch.library.Library("_c10d_functional", "IMPL")

    def gather(x: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
        group = torch_private.get("_resolve_process_group")(group_name)
        method = getattr(group, NEW_NAMES["_allgather_base"], group._allgather_base)
        torch_private.get("_register_work")(out, method(out, x))
        return out

    operators.impl("all_gather_into_tensor_out", gather, "CPU")
    return operators


def use_wire(hardware: Emulated) -> Wire:
    """Let the groups that this process makes from now on be emulated; return their links."""
    global current_wire
    _emulate_gathers_in_place()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, EmulatedGroup, devices=["cpu"])
    current_wire = Wire(hardware)
    return current_wire


def emulate_all_groups(hardware: Emulated) -> None:
    """Let groups be emulated whatever their backend, for the rest of this process."""
    use_wire(hardware)
    join = torch_private.get("distributed:init_process_group")

    def join_emulated(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        join(BACKEND, *args, **kwargs)

    for module in ("distributed", "device_mesh"):
        torch_private.replace(f"{module}:init_process_group", join_emulated)
