"""labkit.session.meter and labkit.session.traffic: what is counted, what is timed, and what is left to
the traced step.
"""

import itertools
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from labkit.runs.records import RecordWriter
from labkit.session.meter import Meter, bytes_by_category, resident_peak_bytes
from labkit.session.traffic import CommunicationCounter, collective_inputs

RANKS = 4


@pytest.fixture(scope="module")
def group():
    """A process group of four of which this process is rank 1, and the others do not exist."""
    dist.init_process_group("fake", rank=1, world_size=RANKS)
    yield dist.group.WORLD
    dist.destroy_process_group()


def ten():
    return torch.ones(2, 5)  # 40 bytes


def lists():
    return [ten() for _ in range(RANKS)]


def wait_for(*tensors):
    for tensor in tensors:
        functional.wait_tensor(tensor)


COLLECTIVES = {
    "all_reduce": (lambda: dist.all_reduce(ten()), "all_reduce", 40),
    "all_reduce in flight": (lambda: dist.all_reduce(ten(), async_op=True).wait(), "all_reduce", 40),
    "all_reduce of bfloat16": (lambda: dist.all_reduce(ten().bfloat16()), "all_reduce", 20),
    "all_reduce_coalesced": (lambda: dist.all_reduce_coalesced([ten(), ten()]), "all_reduce", 80),
    "broadcast": (lambda: dist.broadcast(ten(), src=0), "broadcast", 40),
    "reduce": (lambda: dist.reduce(ten(), dst=0), "reduce", 40),
    "all_gather": (lambda: dist.all_gather(lists(), ten()), "all_gather", 40),
    "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(torch.ones(8, 5), ten()), "all_gather", 40),
    "reduce_scatter": (lambda: dist.reduce_scatter(ten(), lists()), "reduce_scatter", 160),
    "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(ten(), torch.ones(8, 5)), "reduce_scatter", 160),
    "all_to_all": (lambda: dist.all_to_all(lists(), lists()), "all_to_all", 160),
    "all_to_all_single": (lambda: dist.all_to_all_single(torch.ones(8), torch.ones(8)), "all_to_all", 32),
    "gather": (lambda: dist.gather(ten(), None, dst=0), "gather", 40),
    "scatter": (lambda: dist.scatter(ten(), lists(), src=1), "scatter", 160),
    "send": (lambda: dist.send(ten(), 0), "send", 40),
    "isend": (lambda: dist.isend(ten(), 0).wait(), "send", 40),
    "recv": (lambda: dist.recv(ten(), 0), "recv", 40),
    "functional all_reduce": (
        lambda: wait_for(functional.all_reduce(ten(), "sum", dist.group.WORLD)), "all_reduce", 40,
    ),
    "functional all_gather": (
        lambda: wait_for(functional.all_gather_tensor(ten(), 0, dist.group.WORLD)), "all_gather", 40,
    ),
    "functional all_gather_coalesced": (
        lambda: wait_for(*functional.all_gather_into_tensor_coalesced([ten(), ten()], dist.group.WORLD)),
        "all_gather", 80,
    ),
    "functional reduce_scatter": (
        lambda: wait_for(functional.reduce_scatter_tensor(torch.ones(8, 5), "sum", 0, dist.group.WORLD)),
        "reduce_scatter", 160,
    ),
    "functional reduce_scatter_coalesced": (
        lambda: wait_for(*functional.reduce_scatter_tensor_coalesced([torch.ones(8, 5)], "sum", [0], dist.group.WORLD)),
        "reduce_scatter", 160,
    ),
    "functional all_reduce_coalesced": (
        lambda: wait_for(*functional.all_reduce_coalesced([ten(), ten()], "sum", dist.group.WORLD)), "all_reduce", 80,
    ),
    "functional all_to_all": (
        lambda: wait_for(functional.all_to_all_single(torch.ones(8), None, None, dist.group.WORLD)), "all_to_all", 32,
    ),
    "functional broadcast": (lambda: wait_for(functional.broadcast(ten(), 0, dist.group.WORLD)), "broadcast", 40),
}  # fmt: skip


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_counted_with_the_bytes_handed_in(name):
    call, label, size = COLLECTIVES[name]
    with CommunicationCounter() as traffic:
        call()
    assert dict(traffic.counts) == {label: 1}
    assert dict(traffic.bytes) == {label: size}


@pytest.mark.usefixtures("group")
def test_messages_in_a_batch_are_counted_one_by_one():
    calls = [
        dist.P2POp(dist.isend, ten(), 0),
        dist.P2POp(dist.irecv, torch.ones(3), 2),
        dist.P2POp(dist.isend, ten(), 2),
    ]
    with CommunicationCounter() as traffic:
        for work in dist.batch_isend_irecv(calls):
            work.wait()
    assert dict(traffic.counts) == {"send": 2, "recv": 1}
    assert dict(traffic.bytes) == {"send": 80, "recv": 12}


@pytest.mark.usefixtures("group")
def test_a_barrier_and_plain_arithmetic_are_no_traffic():
    with CommunicationCounter() as traffic:
        dist.barrier()
        (ten() @ ten().T).sum()
    assert not traffic.counts


@pytest.mark.parametrize(
    ("namespace", "name", "args", "messages"),
    [
        ("c10d", "recv_any_source_", (["got"], "group"), [("recv", ["got"])]),
        ("c10d", "allgather_coalesced_", ([["out"]], ["given"]), [("all_gather", ["given"])]),
        ("c10d", "allgather_into_tensor_coalesced_", (["out"], ["given"]), [("all_gather", ["given"])]),
        ("c10d", "reduce_scatter_tensor_coalesced_", (["out"], ["given"]), [("reduce_scatter", ["given"])]),
        ("_c10d_functional", "all_gather_into_tensor_out", ("given", 4, "group"), [("all_gather", "given")]),
        ("_c10d_functional", "all_reduce_coalesced_", (["given"], "sum", "group"), [("all_reduce", ["given"])]),
        ("_c10d_functional", "isend", ("given", 0, 0, "group"), [("send", "given")]),
        (
            "_c10d_functional", "batch_p2p_ops", (["isend", "irecv"], [0, 2], [0, 0], ["out", "in"], "group"),
            [("send", "out"), ("recv", "in")],
        ),
    ],
)  # fmt: skip
def test_rare_operations_have_the_same_names(namespace, name, args, messages):
    assert collective_inputs(namespace, name, args) == messages


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("held", "wanted", "label"),
    [
        (Shard(0), Replicate(), "all_gather"),
        (Partial(), Replicate(), "all_reduce"),
        (Partial(), Shard(0), "reduce_scatter"),
        (Replicate(), Shard(0), None),
        (Shard(0), Shard(0), None),
    ],
)
def test_collectives_of_dtensors_are_counted(held, wanted, label):
    tensor = DTensor.from_local(torch.ones(4, 5), init_device_mesh("cpu", (RANKS,)), [held])
    with CommunicationCounter() as traffic:
        tensor.redistribute(placements=[wanted]).to_local()
    assert dict(traffic.counts) == ({label: 1} if label else {})
    assert dict(traffic.bytes) == ({label: 80} if label else {})


@pytest.mark.usefixtures("group")
def test_operations_on_dtensors_are_counted_as_the_collectives_that_they_need():
    parts = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (RANKS,)), [Partial()])
    with CommunicationCounter() as traffic:
        torch.relu(parts)  # of the sum, not of each part
    assert dict(traffic.counts) == {"all_reduce": 1}
    assert dict(traffic.bytes) == {"all_reduce": 24}


@pytest.mark.usefixtures("group")
def test_what_runs_along_a_mesh_axis_is_counted_for_that_axis_as_well():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    data, tp = (mesh.get_group(axis) for axis in ("data", "tp"))
    with CommunicationCounter(mesh) as traffic:
        dist.all_reduce(ten(), group=tp)
        dist.all_gather_into_tensor(torch.ones(4, 5), ten(), group=data)
        wait_for(functional.all_reduce(ten(), "sum", (mesh, 1)), functional.all_reduce(ten(), "sum", (mesh, 0)))
        dist.all_reduce(ten())
    assert {axis: dict(sent.counts) for axis, sent in traffic.along.items()} == {
        "": {"all_reduce": 4, "all_gather": 1},
        "data": {"all_reduce": 1, "all_gather": 1},
        "tp": {"all_reduce": 2},
    }
    assert traffic.counts == traffic.along[""].counts
    for sent in traffic.along.values():
        assert sent.bytes == {name: 40 * count for name, count in sent.counts.items()}
    assert traffic.along[""].calls == {("all_reduce", 2, 1): 3, ("all_reduce", 4, 1): 1, ("all_gather", 2, 1): 1}
    assert traffic.along["tp"].input_bytes == {("all_reduce", 2, 1): 80}


def train(meter, steps=3, warmup=2, track=True):
    """Some measured steps of a tiny network; their indices, and all records."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    indices = []
    for step in meter.steps(steps, warmup=warmup, track=[model, optimizer] if track else []):
        indices.append((step.index, step.timed))
        with step.span("forward"):
            loss = model(torch.ones(1000, 64)).square().mean()
        with step.span("backward"):
            loss.backward()
            dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        step.record_scalar("loss", loss, "nats")
    return indices, meter.writer.lines


@pytest.fixture
def meter(group):
    return Meter(RecordWriter(None, rank=1), torch.device("cpu"))


def test_a_loop_runs_its_warm_up_then_timed_steps_then_one_traced_step(meter):
    indices, _ = train(meter)
    assert indices == [(-1, False), (-1, False), (0, True), (1, True), (2, True), (3, False)]


def test_spans_are_recorded_for_timed_steps_alone(meter):
    _, lines = train(meter)
    spans = [line for line in lines if line["kind"] == "span"]
    assert [(line["step"], line["name"]) for line in spans] == [
        (step, name) for step in range(3) for name in ("forward", "backward", "step")
    ]
    for forward, backward, step in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        assert step["start_us"] <= forward["start_us"] <= backward["start_us"]
        assert step["dur_us"] >= forward["dur_us"] + backward["dur_us"] > 0


def test_what_is_untimed_is_in_no_span_around_it(meter):
    for step in meter.steps(1):
        with step.untimed():
            time.sleep(0.3)
        with step.span("forward"):
            time.sleep(0.02)
            with step.untimed():
                time.sleep(0.3)
    spans = {line["name"]: line["dur_us"] / 1e6 for line in meter.writer.lines if line["kind"] == "span"}
    assert 0.02 <= spans["forward"] <= spans["step"] < 0.2


def test_scalars_are_recorded_in_every_step(meter):
    _, lines = train(meter)
    losses = [line for line in lines if line["name"] == "loss"]
    assert [line["step"] for line in losses] == [-1, -1, 0, 1, 2, 3]
    assert losses[0]["value"] > losses[-1]["value"] > 0
    assert {line["unit"] for line in losses} == {"nats"}
    planned = [line for line in lines if line["name"] == "planned_steps"]
    assert [(line["step"], line["value"]) for line in planned] == [(-1, 3.0)]
    assert lines[0] is planned[0], "a progress bar needs it first"


def test_communication_and_memory_by_category_are_recorded_in_the_traced_step_alone(meter):
    _, lines = train(meter)
    traffic = [(line["step"], line["name"], line["count"], line["bytes"]) for line in lines if line["kind"] == "comm"]
    assert traffic == [(3, "all_reduce", 1, 64 * 64 * 4)]
    memory = {line["name"]: line for line in lines if line["kind"] == "memory"}
    assert {line["step"] for line in memory.values()} == {3}
    parameters = 64 * 64 * 4 + 64 * 4
    assert memory["peak_parameter"]["bytes"] == parameters
    assert memory["peak_optstate"]["bytes"] == 2 * parameters + 2 * 4  # Adam's two means, and a count of steps for each
    assert memory["peak_activation"]["bytes"] >= 1000 * 64 * 4
    assert memory["peak_total"]["bytes"] == sum(
        line["bytes"] for name, line in memory.items() if name.startswith("peak_") and name != "peak_total"
    )
    assert memory["end_parameter"]["bytes"] == parameters
    assert memory["resident"]["bytes"] > 50e6, "in bytes: a process with torch holds more than 50 MB"


def test_what_another_thread_holds_for_a_moment_is_not_there_at_the_end(meter):
    model, held = nn.Linear(2, 2), []
    model.weight.register_hook(lambda gradient: held.append(torch.ones(480)))
    for step in meter.steps(1, warmup=0, track=[model]):
        held.clear()
        model(torch.ones(2)).sum().backward()
        if not step.timed:
            threading.Timer(0.05, held.clear).start()
    assert [line["bytes"] for line in meter.writer.lines if line["name"] == "end_temp"] == [0]


def test_timed_steps_carry_no_tracing(meter):
    modes = []
    for step in meter.steps(1, track=[nn.Linear(2, 2)]):
        modes.append((step.index, torch.utils._python_dispatch._get_current_dispatch_mode() is not None))
    assert modes == [(-1, False), (0, False), (1, True)]


def test_memory_is_not_traced_where_nothing_is_to_be_tracked(meter):
    _, lines = train(meter, track=False)
    assert {line["name"] for line in lines if line["kind"] == "memory"} == {"resident"}
    assert [line["name"] for line in lines if line["kind"] == "comm"] == ["all_reduce"]


class Event:
    """A CUDA event of a GPU whose clock ticks once a millisecond, whenever it is asked."""

    clock = itertools.count()

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.ms = next(self.clock)

    def elapsed_time(self, end):
        return float(end.ms - self.ms)


def test_on_a_gpu_events_are_the_clock_and_peaks_are_those_of_the_timed_steps(monkeypatch, group):
    happened = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: happened.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7)
    meter = Meter(RecordWriter(None, rank=1), torch.device("cuda", 0))
    for step in meter.steps(2):
        happened.append(step.index)
        with step.span("forward"):
            pass
    assert happened == ["wait", -1, "wait", "wait", "reset", 0, "wait", "wait", 1, "wait", 2, "wait"]
    memory = {line["name"]: line["bytes"] for line in meter.writer.lines if line["kind"] == "memory"}
    assert memory == {"max_allocated": 5, "max_reserved": 7}
    spans = [line for line in meter.writer.lines if line["kind"] == "span"]
    assert [(line["name"], line["dur_us"]) for line in spans] == [("forward", 1000.0), ("step", 3000.0)] * 2


def in_flight():
    return functional.all_reduce(ten(), "sum", dist.group.WORLD)


def rests(wait):
    start = time.perf_counter()
    wait()
    return time.perf_counter() - start > 0.002


def test_in_the_traced_step_alone_every_wait_for_a_collective_ends_with_a_rest(meter):
    waits = [(dist.Work, "wait"), (functional.AsyncCollectiveTensor, "wait"),
             (functional.AsyncCollectiveTensor, "trigger_wait")]  # fmt: skip
    originals = [getattr(*wait) for wait in waits]
    for step in meter.steps(1, warmup=0):
        assert [getattr(*wait) is original for wait, original in zip(waits, originals, strict=True)] == [step.timed] * 3
        if not step.timed:
            assert rests(in_flight().wait)
            assert rests(partial(torch.add, in_flight(), 1)), "its first use waits"
    assert [getattr(*wait) for wait in waits] == originals


def test_a_loop_that_is_left_early_leaves_no_tracing_behind(meter):
    for step in meter.steps(1, warmup=0, track=[nn.Linear(2, 2)]):
        if step.index == 1:
            break
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_by_category_of_another_device_is_empty():
    class Tracker:
        def get_tracker_snapshot(self, kind):
            assert kind == "peak"
            return {torch.device("cuda", 0): {"Total": 5}}

    assert bytes_by_category(Tracker(), "peak", torch.device("cpu")) == {}
    assert bytes_by_category(Tracker(), "peak", torch.device("cuda", 1)) == {"total": 5}


def test_resident_peak_grows_with_what_the_process_holds():
    before = resident_peak_bytes()
    block = torch.ones(before // 4)  # as many bytes as the process has ever held
    assert before < resident_peak_bytes() <= before + 2 * block.nbytes
