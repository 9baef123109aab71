"""Record the events of a simulated rank's step, independent of any hardware.

    {"work": "layers.0", "phase": "forward", "operators": [["mm", 4096.0, 1664, "bfloat16", 3],
    ...]}
    {"call": "all_gather", "of": "layers.1", "bytes": 1024, "group": 0, "axis": "data", "early":
    true}
    {"wait": 1}
    {"turn": "backward"}

Work is a run of operators between two other events: name, FLOPs, bytes moved, dtype, count. A wait
names the index of its call.

The recording is made on the CPU, where FSDP waits for each collective at once. On a GPU it waits
where it needs the result, and marks that place for the profiler: all-gathers at
``all_gather_copy_out``, reduce-scatters at the next ``post_backward_rs_wait``, all of them at the
end of the backward pass. The waits are recorded there. All-gathers are ``early``: their parameters
exist long before.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import Work, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from labkit.runs.folder import RunFolder, write_text
from labkit.runs.records import RecordWriter
from labkit.session.timeline import ROOT_UNIT, UNIT_RANGE_PATTERN, unit_name
from labkit.session.traffic import (
    COMMUNICATION_NAMESPACES,
    NON_TRAFFIC_OPS,
    CommunicationCounter,
    collective_inputs,
    group_name_and_ranks,
)
from labkit.torch_private import FakeWork, current_graph_task_id, tree_leaves
from labkit_simulate.artifacts import ARTIFACT_EVENTS
from labkit_simulate.flop_counter import NON_COMPUTE_NAMESPACES, make_operator, operator_model_flops

FSDP_RANGES = ("FSDP::", "FullyShardedDataParallel._")
GRADIENT_SUM_RANGES = ("FSDP::post_backward", "FullyShardedDataParallel._post_backward")
"""Ranges in which FSDP2 and FSDP1 gather and sum, and sum alone."""
GATHER_USE_RANGE, FSDP1_GATHER_USE_RANGES = (
    "FSDP::all_gather_copy_out",
    ("FullyShardedDataParallel._pre_forward", "FullyShardedDataParallel._pre_backward_hook"),
)
"""Where what was gathered is needed: of this unit; in FSDP1 of the next unit."""

StepEvent = dict[str, Any]


class EventRecorder(CommunicationCounter):
    """Count communication like the parent class, and record all events of the step.

    Args:
        mesh: as for the parent.
        modules: torch's ModTracker, which names the running modules; without it names are empty.

    Attributes:
        events: as above, with a Counter of operators.
        model_flops: FLOPs of matrix products that the model needs, without recomputation.
    """

    def __init__(self, mesh: DeviceMesh | None = None, modules: Any = None):
        super().__init__(mesh)
        self._modules = modules
        self._ranges: list[str] = []
        self._groups: dict[tuple[int, ...], int] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all events."""
        super().reset()
        self.events: list[StepEvent] = []
        self.model_flops = 0.0
        self._phase, self._block, self._buckets = "forward", "", 0
        # The object is kept beside its calls, so that its id() is not used again.
        self._works: dict[int, tuple[Work, list[int]]] = {}
        # The calls behind the results of functional collectives, by storage.
        self._results: dict[int, list[int]] = {}
        # FSDP's reductions that nothing has waited for yet.
        self._sums: list[int] = []
        self._gathers: dict[str, list[int]] = {}  # likewise, by unit
        self._seen: set[str] = set()  # modules at work
        # The calls in the order in which they began.
        self._order: list[str] = []
        self._innermost = ROOT_UNIT

    def __enter__(self) -> Any:
        self._wrapped = contextlib.ExitStack()
        for kind in (Work, FakeWork):
            self._wrapped.enter_context(
                patch.object(kind, "wait", self._add_wait_recording(kind.wait))
            )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._wrapped.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # Half of all calls only ask for a tensor's device, so they leave early.
        if func.namespace == "prim" or result is NotImplemented:
            return result
        self._record_operator(func, args, kwargs or {}, result)
        return result

    def _record_operator(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        namespace, _, name = func.name().split(".")[0].partition("::")
        if namespace == "profiler":
            self._update_ranges(name, args)
        elif name == "wait_tensor":
            self._record_waits(self._results.pop(storage_id(args[0]), []))
        elif namespace in COMMUNICATION_NAMESPACES:
            if name not in NON_TRAFFIC_OPS:
                self._record_collective(namespace, name, args, result)
        elif namespace not in NON_COMPUTE_NAMESPACES:
            self._record_compute(func, tuple(args), kwargs, result)

    def _update_ranges(self, name: str, args: Sequence[Any]) -> None:
        """Follow the profiler ranges that begin and end."""
        if name != "_record_function_enter_new":
            self._ranges = self._ranges[:-1]
            return
        begun = args[0]
        self._ranges.append(begun)
        if begun.startswith("FSDP::post_backward_rs_wait"):
            self._record_sum_waits(within_groups=True)
        elif begun.startswith(GATHER_USE_RANGE):
            self._record_waits(
                self._gathers.pop(self._unit_for_collective("all_gather", begun), [])
            )
        elif begun.startswith(FSDP1_GATHER_USE_RANGES):
            self._record_gather_waits()

    def current_phase_and_block(self) -> tuple[str, str]:
        """Return the current phase of the step and the running block."""
        phase = self._phase
        if current_graph_task_id() != -1:
            phase = "backward"
        elif any(each.startswith("Optimizer.") for each in self._ranges):
            phase = "optimizer"
        elif self._modules and len(self._modules.parents) > 1:
            phase = "forward"
        return phase, "" if phase == "optimizer" else self._current_block()

    def _update_phase(self) -> None:
        before = self._phase
        self._phase, self._block = self.current_phase_and_block()
        if before != "backward" and self._phase == "backward":
            self.events.append({"turn": "backward"})
        if before == "backward" and self._phase != "backward":
            self._record_sum_waits()

    def _record_compute(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self._update_phase()
        operator = make_operator(func, args, kwargs, result)
        recomputed = current_graph_task_id() != -1 and torch.is_grad_enabled()
        if operator.flops and not recomputed:
            self.model_flops += operator_model_flops(func, args, kwargs, result)
        where = {"work": self._block, "phase": self._phase}
        last = self.events[-1] if self.events else {}
        if {key: last.get(key) for key in where} != where:
            last = where | {"operators": Counter()}
            self.events.append(last)
        last["operators"][operator.name, operator.flops, operator.moved_bytes, operator.dtype] += 1

    def _record_collective(
        self, namespace: str, name: str, args: Sequence[Any], result: Any
    ) -> None:
        self._update_phase()
        group, ranks = group_name_and_ranks(args)
        own, sums = self._innermost_range(FSDP_RANGES), self._innermost_range(GRADIENT_SUM_RANGES)
        places: list[int] = []
        for (label, given), peers in zip(
            collective_inputs(namespace, name, args),
            participant_ranks(name, args, ranks),
            strict=True,
        ):
            size = sum(
                each.numel() * each.element_size()
                for each in tree_leaves(given)
                if isinstance(each, Tensor)
            )
            event = {
                "call": label,
                "of": self._unit_for_collective(label, own),
                "bytes": size,
                "group": self._group_index(peers),
            }
            event |= {
                "axis": self._axes.get(group, ""),
                "early": bool(own) and label == "all_gather",
            }
            # With hybrid sharding, the sum across groups follows the sum within a group.
            if sums and label == "all_reduce":
                event["after"] = self._sums[-1:]
            places.append(len(self.events))
            self.events.append(event)
            # DDP waits for the broadcast of its buffers in C++, which no hook sees.
            if label == "broadcast":
                self._record_waits(places[-1:])
        if sums:
            self._sums += places
        elif own.startswith("FSDP::") or "prefetch" in own:
            self._gathers.setdefault(self._unit_for_collective("all_gather", own), []).extend(
                places
            )
        if namespace == "c10d":
            for each in result if isinstance(result, tuple | list) else [result]:
                if isinstance(each, torch.ScriptObject):
                    work = Work.unbox(each)
                    self._works[id(work)] = work, places
        else:
            self._results |= {
                storage_id(each): places for each in tree_leaves(result) if isinstance(each, Tensor)
            }

    def _add_wait_recording(self, wait: Any) -> Any:
        """Wrap ``wait`` of a collective's handle to record its calls."""

        def record_and_wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            self._record_waits(self._works.pop(id(work), (work, []))[1])
            return wait(work, *args, **kwargs)

        return record_and_wait

    def _record_waits(self, places: Sequence[int]) -> None:
        held = {*self._sums, *(place for unit in self._gathers.values() for place in unit)}
        self.events += [{"wait": place} for place in places if place not in held]

    def _record_gather_waits(self) -> None:
        gathered, self._gathers = self._gathers, {}
        self._record_waits([place for places in gathered.values() for place in places])

    def _record_sum_waits(self, *, within_groups: bool = False) -> None:
        """Record waits for FSDP's pending reduce-scatters: all of them, or only those within
        groups.
        """
        waited = [
            place
            for place in self._sums
            if not within_groups or self.events[place]["call"] != "all_reduce"
        ]
        self._sums = [place for place in self._sums if place not in waited]
        self._record_waits(waited)

    def _innermost_range(self, ranges: tuple[str, ...]) -> str:
        """Return the innermost profiler range with this prefix, or ""."""
        return next((each for each in reversed(self._ranges) if each.startswith(ranges)), "")

    def _current_block(self) -> str:
        now = self._modules.parents if self._modules else set()
        if now != self._seen:
            begun = sorted(
                (name for name in now if name not in self._seen), key=lambda name: name.count(".")
            )
            self._order = [name for name in self._order if name in now] + begun
            self._seen, self._innermost = set(now), block_from_class_path(self._order[-1])
        return self._innermost

    def _unit_for_collective(self, label: str, own: str) -> str:
        """Name the unit of a collective: from FSDP's ranges; all-reduces of a backward pass are
        numbered.
        """
        if found := UNIT_RANGE_PATTERN.match(own):
            return unit_name(found[2])
        if label == "all_reduce" and self._phase == "backward":
            self._buckets += 1
            return f"bucket {self._buckets - 1}"
        return self._block

    def _group_index(self, ranks: Sequence[int]) -> int:
        return self._groups.setdefault(tuple(ranks), len(self._groups))

    def write_artifact(self, writer: RecordWriter) -> None:
        """Write the events into the run's folder."""
        if writer.folder:
            write_text(
                RunFolder(writer.folder).artifact(writer.rank, ARTIFACT_EVENTS),
                self.to_json_lines(),
            )

    def to_json_lines(self) -> str:
        """Return the events as JSON lines."""
        self._record_gather_waits()
        self._record_sum_waits()
        groups = [list(ranks) for ranks in self._groups]
        head = json.dumps({"model_flops": self.model_flops, "groups": groups})
        return "\n".join([head, *map(json.dumps, map(event_to_json, self.events))]) + "\n"


def event_to_json(event: StepEvent) -> StepEvent:
    """Convert an event to its JSON form."""
    operators = event.get("operators")
    return (
        event | {"operators": [[*key, count] for key, count in operators.items()]}
        if operators
        else event
    )


def participant_ranks(
    name: str, args: Sequence[Any], ranks: Sequence[int]
) -> Iterator[Sequence[int]]:
    """Return the ranks of a message: the group, or sender and receiver."""
    if name == "batch_p2p_ops":
        peers = args[1]
    elif name in ("send", "recv_"):
        peers = [args[2]]
    else:
        yield ranks
        return
    for peer in peers:
        yield sorted({distributed_c10d.get_rank(), ranks[peer]})


def block_from_class_path(name: str) -> str:
    """Return a module path up to its first number: layers.0 of Net.layers.0.mlp."""
    return block_name(unit_name(name).partition(".")[2])


def block_name(name: str) -> str:
    """Return a path without class name up to its first number: layers.0 of layers.0.mlp."""
    parts = [part for part in unit_name(name).split(".") if part not in ("module", ROOT_UNIT)]
    numbered = next((place for place, part in enumerate(parts, start=1) if part.isdecimal()), 1)
    return ".".join(parts[:numbered]) or ROOT_UNIT


def storage_id(tensor: Tensor) -> int:
    """Return a key that is unique among the living storages."""
    return tensor.untyped_storage()._cdata
