"""Count what a process sends, at its process groups: whatever thread or library makes the call.

A ``TorchDispatchMode`` such as traffic.CommunicationCounter sees the calls of one thread. Here each
group of the process is a ``CountedGroup``, which notes each call and hands it on to gloo.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from labkit.torch_private import tree_leaves

BACKEND = "counted"
# A group's methods, each with the name of its collective and the place of what the rank hands over.
# torch 2.13 calls some by another name than earlier versions do.
METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
}
# What gloo calls those that it has under another name, or for one tensor only.
GLOO_METHODS = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


@dataclass(frozen=True)
class GroupCall:
    """One call of a collective or message: the group's name, and the bytes that the rank passed."""

    name: str
    group: str
    bytes: int
    dtype: str


# Every call of this process since it started, in order; threads only append.
calls: list[GroupCall] = []
# Told of each call as it is made.
listeners: list[Callable[[GroupCall], None]] = []
# A group that ended at once could break connections that others are still making.
_replaced_groups: list[ProcessGroup | None] = []


class Message(dist.Work):
    """A message under way, which notes whether somebody waited for it."""

    def __init__(self, work: dist.Work):
        super().__init__()
        self._work, self.waited = work, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the message has left or arrived."""
        self.waited = True
        return self._work.wait(timeout) if timeout else self._work.wait()

    def is_completed(self) -> bool:
        """Whether the message has left or arrived."""
        return self._work.is_completed()


# Every message of this process.
messages: list[Message] = []


class GroupTraffic:
    """The calls inside a ``with`` block, by this or any other thread."""

    def __enter__(self) -> "GroupTraffic":
        self._first, self._first_message = len(calls), len(messages)
        self._end: int | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self._end = len(calls)

    def count_unwaited(self) -> int:
        """Return how many sends and receives nobody has waited for."""
        return sum(not each.waited for each in messages[self._first_message :])

    def calls(self, group: str | None = None) -> list[GroupCall]:
        """Return the calls, in order, of all groups or of the one with this name."""
        return [each for each in calls[self._first : self._end] if group in (None, each.group)]

    def counts(self, group: str | None = None) -> dict[str, int]:
        """Return how often each collective or message was called."""
        return dict(Counter(each.name for each in self.calls(group)))

    def bytes(self, group: str | None = None) -> dict[str, int]:
        """Return the bytes that this rank passed to each, or received with ``recv``."""
        total: Counter[str] = Counter()
        for each in self.calls(group):
            total[each.name] += each.bytes
        return dict(total)

    def totals(self, group: str | None = None) -> dict[str, list[int]]:
        """Return the calls and the bytes of each."""
        sizes = self.bytes(group)
        return {name: [count, sizes[name]] for name, count in self.counts(group).items()}


class CountedGloo(dist.ProcessGroupGloo):
    """The backend of a CountedGroup, which notes what is called without the group."""

    group_name = ""


def hand_on_to(group: ProcessGroup, gloo: dist.ProcessGroupGloo) -> None:
    """Let a group of our own hand on to gloo what it does not do itself."""
    kind = ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_default_backend(kind)


class CountedGroup(ProcessGroup):
    """A process group of gloo's that notes every call."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo = CountedGloo(store, rank, size, timeout)
        hand_on_to(self, self.gloo)


def _note(method: str, group: str, args: tuple[Any, ...]) -> None:
    name, place = METHODS[method]
    given = [each for each in tree_leaves(args[place]) if isinstance(each, Tensor)]
    dtypes = {str(each.dtype).removeprefix("torch.") for each in given}
    size = sum(each.nbytes for each in given)
    noted = GroupCall(name, group, size, " and ".join(sorted(dtypes)))
    calls.append(noted)
    for listener in listeners:
        listener(noted)


def _noting_gloo(method: str) -> Callable[..., Any]:
    gloo_method = getattr(dist.ProcessGroupGloo, method)

    def call(self: CountedGloo, *args: Any) -> Any:
        _note(method, self.group_name, args)
        return gloo_method(self, *args)

    return call


def _noting(method: str) -> Callable[..., Any]:
    name, _ = METHODS[method]
    # Of the base class, because CountedGloo would note the call once more.
    gloo_method = getattr(dist.ProcessGroupGloo, GLOO_METHODS.get(method, method))

    def call(self: CountedGroup, *args: Any) -> Any:
        # gloo itself would crash or wait.
        if method in ("send", "recv") and not 0 <= args[1] < self.size():
            raise ValueError(f"{method}: there is no rank {args[1]} among {self.size()} ranks")
        self.gloo.group_name = str(self.group_name)
        _note(method, self.gloo.group_name, args)
        run = partial(gloo_method, self.gloo)
        if name in ("send", "recv"):
            messages.append(Message(run(*args)))
            return messages[-1]
        if method not in GLOO_METHODS or not method.endswith("coalesced"):
            return run(*args)
        # gloo sends one tensor at a time; whoever waits for the last has all.
        *first, last = zip(*args[:2], strict=True)
        for pair in first:
            run(*pair, *args[2:]).wait()
        return run(*last, *args[2:])

    return call


for _method in METHODS:
    setattr(CountedGroup, _method, _noting(_method))
    if hasattr(dist.ProcessGroupGloo, _method):
        setattr(CountedGloo, _method, _noting_gloo(_method))


def join_counted_group(store: Any, rank: int, world_size: int) -> None:
    """Replace this process's default group with a counted one, of the same ranks."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, CountedGroup, devices=["cpu"])
    _replaced_groups.append(dist.group.WORLD)
    dist.destroy_process_group()
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
