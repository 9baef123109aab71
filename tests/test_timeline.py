"""labkit.session.timeline: intervals by hand, made-up traces, and real steps of two ranks."""

from pathlib import Path

import pytest
import torch
from programs.timeline_cases import BLOCKS
from torch import nn

import labkit
from labkit.runs.folder import RunFolder
from labkit.runs.records import RecordWriter
from labkit.session import timeline
from labkit.session.timeline import LaneBar

PROGRAM = "timeline_cases.py"
DATA = Path(__file__).parent / "data"
UNITS = [f"layers.{index}" for index in range(BLOCKS)]
DELAY_MS = 10.0
pytestmark = pytest.mark.alone


def compute(start, end, unit="1"):
    return LaneBar("compute", unit, "forward", start, end - start)


def gather(start, end, unit="1"):
    return LaneBar("communication", unit, "all_gather", start, end - start)


@pytest.mark.parametrize(
    ("bars", "stretches"),
    [
        ([], []),
        ([compute(0, 5)], []),
        ([gather(0, 5)], [(0, 5)]),
        ([compute(0, 9), gather(2, 5)], []),
        ([compute(0, 3), gather(2, 5)], [(3, 5)]),
        ([compute(4, 9), gather(2, 5)], [(2, 4)]),
        ([compute(3, 4), gather(2, 5)], [(2, 3), (4, 5)]),
        ([compute(0, 2), gather(2, 5), compute(5, 6)], [(2, 5)]),
        ([compute(0, 3), compute(1, 2), gather(2, 5)], [(3, 5)]),
        ([compute(3, 4), compute(4, 5), gather(2, 6)], [(2, 3), (5, 6)]),
        ([gather(0, 4), gather(2, 6)], [(0, 4), (4, 6)]),
        ([gather(0, 6), gather(2, 4), compute(5, 9)], [(0, 5)]),
    ],
)
def test_exposed_is_what_no_compute_covers_and_counts_once(bars, stretches):
    for order in (bars, bars[::-1]):
        found = timeline.exposed_bars(order)
        assert [(bar.start_us, bar.end_us) for bar in found] == stretches
        assert timeline.exposed_us(order) == sum(end - start for start, end in stretches)
        assert {bar.lane for bar in found} <= {"exposed"}


def test_an_exposed_stretch_is_named_by_the_collective_that_started_first():
    assert [bar.name for bar in timeline.exposed_bars([gather(2, 6, "late"), gather(0, 4, "early")])] == [
        "early",
        "late",
    ]


def test_a_recording_adds_up_and_is_written_as_records():
    bars = [compute(0, 30, "layers.0"), gather(20, 60, "layers.1"), gather(50, 70, "layers.2")]
    assert (timeline.exposed_us(bars[1:]), timeline.exposed_us(bars)) == (50, 40)
    writer = RecordWriter(None, rank=1)
    timeline.write_profile(writer, 7, 100.0, bars)
    lines = [line for line in writer.lines if line["kind"] == "bar"]
    assert [(line["lane"], line["phase"], line["name"], line["start_us"], line["dur_us"]) for line in lines] == [
        ("compute", "forward", "layers.0", 0, 30),
        ("communication", "all_gather", "layers.1", 20, 40),
        ("communication", "all_gather", "layers.2", 50, 20),
        ("exposed", "all_gather", "layers.1", 30, 30),
        ("exposed", "all_gather", "layers.2", 60, 10),
    ]
    scalars = {line["name"]: (line["value"], line["unit"]) for line in writer.lines if line["kind"] == "scalar"}
    assert scalars == {
        "profiled_step": (0.1, "ms"),
        "communication": (0.05, "ms"),
        "exposed_communication": (0.04, "ms"),
    }
    assert {line["step"] for line in writer.lines} == {7}


def event(name, start, end, tid=1, cat="cpu_op", **args):
    return {"name": name, "cat": cat, "tid": tid, "ts": float(start), "dur": float(end - start), "args": args}


def bars_of(*events):
    """Bars of a step from 1000 to 9000, as tuples of lane, phase, unit, start and end."""
    step_us, bars = timeline.step_us_and_bars([event(timeline.STEP_MARK, 1000, 9000, cat="user_annotation"), *events])
    assert step_us == 8000
    return [(bar.lane, bar.phase, bar.name, bar.start_us, bar.end_us) for bar in bars]


def test_waiting_is_no_compute_and_starts_count_from_the_step():
    assert bars_of(
        event("aten::mm", 2000, 3000),
        event("FSDP::all_gather (layers.1)", 3000, 5000),
        event("c10d::_allgather_base_", 3200, 3300),
        event(timeline.WAIT_MARK, 3300, 4900),
        event("gloo:all_gather", 3400, 4800, tid=2),
        event("aten::copy_", 4700, 4800, tid=2),
    ) == [
        ("compute", "forward", "root", 1000, 2200),
        ("communication", "all_gather", "layers.1", 2400, 3800),
        ("compute", "forward", "root", 3900, 4000),
    ]


def test_compute_of_one_unit_is_one_bar_unless_a_wait_lies_between():
    operators = [event("aten::mm", 2000, 2100), event("aten::mm", 2105, 2200), event("aten::mm", 2250, 2300)]
    assert bars_of(*operators, event(timeline.WAIT_MARK, 2202, 2248)) == [
        ("compute", "forward", "root", 1000, 1200),
        ("compute", "forward", "root", 1250, 1300),
    ]


def test_reduce_scatter_is_named_by_the_call_though_gloo_calls_it_all_reduce():
    found = bars_of(
        event("FSDP::all_gather (a)", 1000, 1200),
        event("c10d::_allgather_base_", 1100, 1150),
        event("FSDP::post_backward_reduce (b._checkpoint_wrapped_module, head)", 1300, 1500),
        event("c10d::_reduce_scatter_base_", 1400, 1450),
        event("gloo:all_reduce", 1460, 1490, tid=3),  # overtakes the all-gather
        event("gloo:all_gather", 1480, 1700, tid=2),
    )
    assert [bar[1:3] for bar in found if bar[0] == "communication"] == [("reduce_scatter", "b"), ("all_gather", "a")]


def test_phases_and_units_follow_the_marks():
    found = bars_of(
        event("FSDP::pre_forward", 1000, 1100),
        event("FSDP::pre_forward (layers.0)", 2000, 2100),
        event("aten::mm", 2100, 2500),
        event("FSDP::post_forward (layers.0)", 2500, 2600),
        event("aten::mean", 3000, 3100),
        event("autograd::engine::evaluate_function: A", 4000, 4500),
        event("FSDP::pre_backward (layers.0)", 4000, 4100),
        event("FSDP::pre_backward", 4100, 4110),  # of the unit around it, on the same tensor
        event("autograd::engine::evaluate_function: B", 5000, 5500),
        event("FSDP::post_backward_reduce (layers.0)", 5200, 5300),
        event("Optimizer.step#Adam.step", 6000, 7000),
    )
    assert [bar[1:] for bar in found] == [
        ("forward", "root", 0, 100),
        ("forward", "layers.0", 1000, 1600),
        ("forward", "root", 2000, 2100),
        ("backward", "layers.0", 3000, 3500),
        ("backward", "layers.0", 4000, 4300),
        ("backward", "root", 4300, 4500),
        ("optimizer", "", 5000, 6000),
    ]


def test_kernels_are_led_back_to_what_launched_them():
    found = bars_of(
        event("FSDP::pre_forward (layers.0)", 1000, 1100),
        event("cudaLaunchKernel", 1200, 1210, cat="cuda_runtime", correlation=5),
        event("FSDP::all_gather (layers.1)", 1300, 1400),
        event("cudaLaunchKernelExC", 1350, 1360, cat="cuda_runtime", correlation=6),
        event("FSDP::post_forward (layers.0)", 1500, 1510),
        event("gemm", 2000, 3000, tid=7, cat="kernel", correlation=5),
        event("ncclDevKernel_AllGather_RING_LL(...)", 2500, 4000, tid=8, cat="kernel", correlation=6),
        event("nccl:all_gather", 2500, 4000, tid=8, cat="gpu_user_annotation"),
        event("FSDP::all_gather_copy_out (layers.1)", 1600, 1700),
        event("cudaLaunchKernel", 1650, 1660, cat="cuda_runtime", correlation=7),
        event("split_with_sizes_copy_out", 4000, 4500, tid=7, cat="kernel", correlation=7),
    )
    assert found == [
        ("compute", "forward", "layers.0", 1000, 2000),
        ("communication", "all_gather", "layers.1", 1500, 3000),
        ("communication", "copy", "layers.1", 3000, 3500),
    ]


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(ValueError, match=r"no range labkit::step among 1 events: record the trace with"):
        timeline.step_us_and_bars([event("aten::mm", 0, 1)])


def test_what_is_untimed_is_cut_out_of_an_emulated_step():
    drawn = [event("labkit::untimed", 10, 40), event("aten::randn", 15, 20), event("labkit::untimed", 60, 80)]
    events = [event("labkit::step", 0, 100), *drawn, event("gloo:all_reduce", 50, 110)]
    timeline.cut_untimed(events)
    assert [(each["ts"], each["dur"]) for each in events] == [(0, 50), (10, 0), (10, 0), (30, 0), (20, 40)]


def test_recording_leaves_nothing_behind(capfd, tmp_path):
    layer, wait, writer = nn.Linear(4, 4), torch.distributed.Work.wait, RecordWriter(tmp_path, rank=0)
    with timeline.profile_step(writer, 3, units={"layer": [layer]}):
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    bars = {(line["phase"], line["name"], line["step"]) for line in writer.lines if line["kind"] == "bar"}
    assert bars >= {("forward", "layer", 3), ("backward", "layer", 3)}
    assert timeline.read_trace(RunFolder(tmp_path).trace(0))
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks
    assert torch.distributed.Work.wait is wait
    print("seen", file=__import__("sys").stderr)
    assert capfd.readouterr().err == "seen\n", "kineto's lines are dropped, others are not"


def test_an_error_in_the_step_is_the_one_that_is_raised():
    layer = nn.Linear(4, 4)
    writer = RecordWriter(None, rank=0)
    with pytest.raises(RuntimeError, match="shapes"), timeline.profile_step(writer, 0, units={"layer": [layer]}):
        layer(torch.ones(2, 5))
    assert not layer._forward_hooks


@pytest.fixture(scope="module")
def programs(request):
    return request.path.parent / "programs"


def recorded(programs, technique, **params):
    """A run of the technique, and the bars of rank 0."""
    result = labkit.run(programs / PROGRAM, nproc=2, device="cpu", technique=technique, delay_ms=DELAY_MS, **params)
    return result, recorded_bars(result)


def recorded_bars(result, rank=0):
    """Lane, phase, name, start and length in ms of each bar of a rank."""
    rows = result.frame.query(f"kind == 'bar' and rank == {rank}")
    times = rows["start_us"] / 1000, rows["dur_us"] / 1000
    return list(zip(rows["lane"], rows["phase"], rows["name"], *times, strict=True))


def order(bars, *names):
    return [name for lane, phase, name, _, _ in bars if (lane, phase) == names]


def computed_ms(bars, what, unit):
    return sum(length for lane, phase, name, _, length in bars if (lane, phase, name) == ("compute", what, unit))


def test_a_trace_of_two_ranks_on_an_h100_has_the_gathers_that_were_counted():
    """Recorded by benchmarks/gpu.py with torch 2.11 and NCCL 2.28, fsdp_wrap with mlp_stack."""
    whole, bars = timeline.step_us_and_bars(timeline.read_trace(DATA / "h100_fsdp_two_ranks.trace.json.gz"))
    sent = [(bar.phase, bar.name) for bar in bars if bar.lane == "communication" and bar.phase != "copy"]
    layers = ["layers.0", "layers.1", "layers.2"]
    assert [name for phase, name in sent if phase == "all_gather"] == [*layers, *layers[::-1]]
    assert [name for phase, name in sent if phase == "reduce_scatter"] == layers[::-1]
    assert len(sent) == 9 and whole == pytest.approx(29_173, abs=1)
    assert {bar.name for bar in bars if bar.lane == "compute"} == {"", "root", *layers}, "no name: the optimizer"


def test_fsdp2_exposes_all_communication_on_a_cpu(programs):
    for _ in range(3):  # a rank that loses its core in mid-wait seems to compute there: then another step is looked at
        result, spans = recorded(programs, "fsdp2")
        if result.value("exposed_communication") > 0.9 * result.value("communication"):
            break
    assert order(spans, "communication", "all_gather") == ["root", *UNITS, *UNITS[::-1]]
    assert order(spans, "communication", "reduce_scatter") == [*UNITS[::-1], "root"]
    for unit in UNITS:
        for phase in ("forward", "backward"):
            assert computed_ms(spans, phase, unit) >= DELAY_MS, "a sleep in a block is the block's compute"
    assert computed_ms(spans, "backward", "root") < DELAY_MS
    exposed_ms, all_ms = result.value("exposed_communication"), result.value("communication")
    assert 0.9 * all_ms < exposed_ms <= all_ms < result.value("profiled_step")
    assert result.value("profiled_step") > 2 * BLOCKS * DELAY_MS
    raw = timeline.read_trace(RunFolder(result.folder).trace(0))
    assert timeline.exposed_us(timeline.step_us_and_bars(raw)[1]) > 0
    assert "USDT" not in result.ranks[0].log()
    assert "profiled_step" in result.summary()


def test_prefetched_gathers_hide_behind_the_block_before(programs):
    _, spans = recorded(programs, "fsdp2_async")
    forward = {
        unit: (start, start + length)
        for lane, what, unit, start, length in spans
        if (lane, what) == ("compute", "forward") and length > DELAY_MS / 2
    }
    gathers = [(unit, start) for lane, what, unit, start, _ in spans if (lane, what) == ("communication", "all_gather")]
    for (unit, start), before in zip(gathers[2:4], UNITS, strict=False):
        assert start < forward[before][1], f"{unit} is gathered before {before} is done"
    gathering = {"exposed": 0.0, "communication": 0.0}
    for lane, what, unit, _, length in spans:
        if what == "all_gather" and unit in UNITS[:2]:
            gathering[lane] += length
    assert gathering["exposed"] < 0.9 * gathering["communication"]


def test_buckets_of_ddp_travel_during_the_backward_pass(programs):
    _, spans = recorded(programs, "ddp")
    assert order(spans, "communication", "all_reduce") == ["bucket 0", "bucket 1"]
    for unit in UNITS:
        assert computed_ms(spans, "backward", unit) >= DELAY_MS
    first = next(start for lane, _, unit, start, _ in spans if unit == "bucket 0")
    last_backward = max(start + length for lane, what, _, start, length in spans if what == "backward")
    assert first < last_backward - DELAY_MS


def test_units_of_fsdp1_are_named_by_the_order_of_its_gathers(programs):
    _, spans = recorded(programs, "fsdp1")
    assert order(spans, "communication", "all_gather") == ["root", *UNITS, *UNITS[::-1]]
    assert order(spans, "communication", "reduce_scatter") == [*UNITS[::-1], "root"]


def test_a_compiled_backward_pass_runs_on_the_callers_thread_and_waits_by_operator():
    found = bars_of(
        event("aten::addmm", 1000, 2000),
        event("Torch-Compiled Region: 8/0", 2000, 3000),
        event("Torch-Compiled Region: !0/12/0", 4000, 8000),
        event("_c10d_functional::all_reduce_", 5000, 5100),
        event("c10d::allreduce_", 5010, 5090),
        event("gloo:all_reduce", 5200, 6600, tid=2),
        event("_c10d_functional::all_reduce_coalesced_", 6000, 6100),
        event("c10d::allreduce_coalesced_", 6010, 6090),
        event("gloo:all_reduce", 6200, 7500, tid=3),
        event("_c10d_functional::wait_tensor", 6500, 7500),
        event("_c10d_functional::wait_tensor", 7505, 7510),
    )
    assert [bar for bar in found if bar[0] == "communication"] == [
        ("communication", "all_reduce", "bucket 0", 4200, 5600),
        ("communication", "all_reduce", "bucket 1", 5200, 6500),
    ]
    assert [bar[1:] for bar in found if bar[0] == "compute"] == [
        ("forward", "root", 0, 2000),
        ("backward", "root", 3000, 5500),
        ("backward", "root", 6500, 6505),
        ("backward", "root", 6510, 7000),
    ]


@pytest.mark.long
def test_buckets_of_a_compiled_backward_pass_are_named_like_those_of_ddp(programs):
    result = labkit.run(programs / "compiled_timeline.py", nproc=2, device="cpu")
    for rank in range(2):
        spans = recorded_bars(result, rank)
        assert order(spans, "communication", "all_reduce") == ["bucket 0", "bucket 1"]
        assert "chain" in order(spans, "compute", "forward"), "the forward pass is not compiled here"
        forward_end = max(start + length for _, what, _, start, length in spans if what == "forward")
        backward = [start for _, what, _, start, _ in spans if what == "backward"]
        sent = [start for _, what, _, start, _ in spans if what == "all_reduce"]
        assert forward_end < min(backward) < min(sent) < max(backward)
    assert "will be ignored" not in result.ranks[0].log(), "no mark was compiled into the backward pass"
