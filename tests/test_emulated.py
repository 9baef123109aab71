"""Emulated links and devices: real values, and the times of a ring on the links that were asked for."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import labkit
from labkit import Emulated
from labkit.environment import ENV_DEVICE
from labkit.errors import ParameterError
from labkit.launcher.run import make_run_request
from labkit.runs.records import RecordWriter
from labkit.session.emulated_device import EmulatedDevice
from labkit.session.emulated_wire import Wire
from labkit.session.meter import Meter
from labkit.session.session import Session
from labkit.theory import emulated_steps, two_dim
from labkit.theory.emulated import read_emulated
from labkit_simulate.emulated_hardware import slow_motion
from labkit_simulate.theory.hardware import get_hardware
from labkit_simulate.theory.step_time import Group, collective_s

CALLS = Path(__file__).resolve().parent / "programs" / "emulated_calls.py"


def test_a_collective_takes_the_time_of_a_ring_on_its_slowest_link():
    hardware = Emulated(latency_us=100, gb_per_s=1, ranks_per_host=2, between_latency_us=1000, between_gb_per_s=0.1)
    # On one host: 2 steps of 100 µs, and the whole tensor once.
    assert hardware.collective_s("all_reduce", 1e6, 2) == pytest.approx(2e-4 + 1e-3)
    # Over two hosts: 4 steps on a host, 2 between them; 1.5 tensors over two cards.
    assert hardware.collective_s("all_reduce", 1e6, 4, hosts=2) == pytest.approx(4e-4 + 2e-3 + 1.5e6 / 0.2e9)
    assert hardware.collective_s("send", 1e6, 2, hosts=2) == pytest.approx(1e-3 + 1e-2)
    assert hardware.collective_s("scatter", 1e6, 4) == hardware.collective_s("all_gather", 1e6, 4)
    assert hardware.count_hosts([0, 1]) == 1 and hardware.count_hosts([1, 2]) == 2
    assert Emulated(latency_us=5).collective_s("all_gather", 1e12, 3) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    "wrong", [{"latency_us": -1}, {"gb_per_s": 0}, {"forward_ms": math.nan}, {"ranks_per_host": 1.5}, {"slower": True}]
)
def test_what_is_no_hardware_is_refused_with_its_value(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ParameterError, match=f"{name} = {value!r} is not a"):
        Emulated(**wrong)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"emulate": "h1000"}, "hardware 'h1000' is none of"),
        ({"emulate": 3}, "emulate = 3 is no hardware: give labkit.Emulated"),
        ({"emulate": Emulated(), "device": "cuda"}, "cannot go with device='cuda': leave one out"),
        ({"emulate": Emulated(), "hosts": ["a"]}, "cannot go with hosts=: leave one out"),
    ],
)
def test_a_run_that_cannot_be_emulated_is_refused_before_it_starts(how, said):
    with pytest.raises(ParameterError, match=said):
        labkit.run("all_reduce", **how)


def test_where_gpus_are_the_default_hardware_is_emulated_on_the_cpu(monkeypatch):
    monkeypatch.setenv(ENV_DEVICE, "cuda")
    request = make_run_request("all_reduce", emulate=Emulated())
    assert request.device == "cpu"


def test_a_step_with_an_extension_encodes_and_decodes_in_both_passes():
    hardware = Emulated(gb_per_s=1e-6, forward_ms=1000, memory_gb_per_s=1e-6)
    # A unit of 8 rows of 4 numbers on 2 ranks. In float32 a rank sends 64 bytes, in int8 16 and a scale for each row.
    plain_s = emulated_steps.extension_step_s(hardware, 2, [[(8, 4)]], "fp32")
    assert plain_s == pytest.approx(3 + 3 * 0.064)
    sent = 16 + 4 * 4
    coded_s = emulated_steps.extension_step_s(hardware, 2, [[(8, 4)]], "int8")
    assert coded_s == pytest.approx(3 + 0.064 + 2 * sent / 1e3 + 2 * 3 * (64 + sent) / 1e3)


def test_a_gather_ahead_hides_its_bytes_but_not_its_coding():
    hardware, units = Emulated(gb_per_s=1e-6, forward_ms=1000, memory_gb_per_s=1e-6), [[(8, 4)]] * 2
    # Two units of the test above. Only the first gather of each pass is exposed, and both reduce-scatters.
    plain_s = emulated_steps.extension_step_s(hardware, 2, units, "fp32", prefetch=True)
    assert plain_s == pytest.approx(2 * 3 + 2 * 0.064 + 2 * 0.064)
    coded_s = emulated_steps.extension_step_s(hardware, 2, units, "int8", prefetch=True)
    assert coded_s == pytest.approx(2 * 3 + 2 * 0.064 + 2 * 0.032 + 4 * 3 * 0.096)


@pytest.mark.parametrize(
    ("mesh", "messages"),
    # Two all-reduces of a ring, and halos of each neighbour in two passes; data parallelism has one all-reduce.
    [({"space": 4}, 2 * 6 + 2 * 2 * 3), ({"space": 2}, 2 * 2 + 2 * 3), ({"data": 4}, 6), ({}, 0)],
)
def test_strips_wait_for_halos_and_data_parallelism_for_one_all_reduce(mesh, messages):
    hardware, ranks = Emulated(latency_us=1e6, forward_ms=1000), math.prod(mesh.values())
    image = {"height": 32, "width": 256, "depths": (2, 1), "dims": (4, 8), "batch": 4}
    step_s = emulated_steps.spatial_step_s(hardware, **image, **mesh)
    assert step_s == pytest.approx(3 * 3 / ranks + messages)


def test_slow_motion_keeps_the_ratios_of_the_hardware():
    kind, slow = get_hardware("h100-8x"), slow_motion("h100-8x", slower=50)
    assert slow.inside.alpha_s == pytest.approx(50 * kind.inside.alpha_s)
    assert slow.between.beta_s_per_byte == pytest.approx(50 * kind.between.beta_s_per_byte)
    # Collectives are those of a simulation, fifty times slower.
    for name, hosts in (("all_gather", 1), ("all_reduce", 4)):
        simulated_s = collective_s(name, 4e8, Group(8 * hosts, hosts), kind)
        assert slow.collective_s(name, 4e8, 8 * hosts, hosts=hosts) == pytest.approx(50 * simulated_s)
    # A block of Llama 2 has 202 million weights.
    arithmetic_s = 2 * 2048 * (202e6 + 2 * 2048 * 4096) / (0.436 * 989.4e12)
    assert slow.forward_ms / 1e3 == pytest.approx(50 * arithmetic_s, rel=0.01)
    assert slow.describe() == "emulated: NVIDIA H100 SXM, 80 GB, 1 s = 20 ms"
    assert read_emulated(json.loads(json.dumps(vars(slow)))) == slow


def test_messages_of_small_units_count_as_those_of_full_size_ones():
    device = EmulatedDevice(Wire(Emulated(unit_bytes=8000)))
    device.add_units([nn.Linear(10, 10, bias=False), nn.Linear(10, 2)])
    assert device.wire.size_factor == 20


def test_real_arithmetic_is_a_part_of_a_units_time():
    device = EmulatedDevice(Wire(Emulated()))
    begun = time.monotonic()
    device.start_step()
    for _ in range(3):
        time.sleep(0.02)
        device.compute(50)
    assert 0.15 <= time.monotonic() - begun < 0.2


def test_neither_samples_nor_the_profilers_start_are_a_part_of_a_units_time():
    device, layer, writer = EmulatedDevice(Wire(Emulated(forward_ms=50))), nn.Linear(4, 4), RecordWriter(None, rank=0)
    device.add_units([layer])
    for step in Meter(writer, torch.device("cpu"), device).steps(1, units={"layer": [layer]}):
        with step.untimed():
            time.sleep(0.1)
        layer(torch.ones(2, 4))
    (forward,) = (line for line in writer.lines if line["kind"] == "bar" and line["name"] == "layer")
    assert forward["start_us"] < 20_000 and forward["start_us"] + forward["dur_us"] > 48_000
    assert next(line["dur_us"] for line in writer.lines if line["kind"] == "span") > 48_000


def test_a_unit_begins_when_what_it_waited_for_has_arrived():
    wire = Wire(Emulated())
    device = EmulatedDevice(wire)
    begun = time.monotonic()
    device.start_step()
    wire.sleep_until(begun + 0.1)
    device.compute(50)
    assert 0.15 <= time.monotonic() - begun < 0.19


def test_links_carry_one_message_after_another():
    wire = Wire(Emulated())
    first, second, card = wire.occupy("inside", 0.5), wire.occupy("inside", 0.5), wire.occupy("card", 0.5)
    assert second == first + 0.5
    assert card == pytest.approx(first, abs=0.1)


@pytest.mark.alone
def test_every_call_is_held_back_and_leaves_what_it_leaves_without():
    # A step of 50 ms: on two ranks an all-reduce has two steps, every other call one.
    plain = labkit.run(CALLS, nproc=2)
    result = labkit.run(CALLS, nproc=2, emulate=Emulated(latency_us=50_000))
    expected_s = dict.fromkeys(("all_gather", "reduce_scatter", "broadcast", "around", "one_way"), 0.05)
    expected_s |= dict.fromkeys(("all_reduce", "functional", "in_background", "by_future"), 0.1)
    expected_s["two_at_once"] = 0.2
    for own, without in zip(result.ranks, plain.ranks, strict=True):
        calls = own.reported["calls"]
        assert {name: value for name, (_, value) in calls.items()} == {
            name: value for name, (_, value) in without.reported["calls"].items()
        }
        for name, (took_s, _) in calls.items():
            assert expected_s[name] - 0.001 <= took_s < expected_s[name] + 0.045, name
    assert result.device == "emulated"
    assert result.stamp.startswith("emulated: 50000 µs and no limit · 2 ranks · torch")


def test_messages_are_counted_without_the_stamps_of_the_wire():
    image = {"batch": 1, "height": 8, "width": 64, "dims": (8, 8), "depths": (1, 1), "steps": 1}
    plain, emulated = (
        labkit.run("convnext_spatial", nproc=2, **image, **how) for how in ({}, {"emulate": Emulated(latency_us=10)})
    )
    for name in ("send_count", "send_bytes", "recv_count"):
        assert emulated.value(name) == plain.value(name) > 0


@pytest.mark.parametrize("program", ["fsdp_wrap", "ddp_compile"])
def test_gradients_equal_one_devices_to_the_last_bit(program):
    how = {"mode": "yours", "dim": 64} if program == "ddp_compile" else {"prefetch": True}
    hardware = Emulated(latency_us=300, gb_per_s=0.5, forward_ms=1)
    verdict = labkit.check(program, emulate=hardware, **how).verdict
    assert verdict["ok"] and verdict["max_rel_error"] == 0.0


@pytest.mark.alone
def test_both_ends_of_ddps_curve_lose_as_predicted():
    hardware = Emulated(latency_us=2000, gb_per_s=0.02, forward_ms=5, backward_ms=15)
    chain = {"dim": 128, "layers": 16}
    took_s, predicted_s = {}, {}
    for bucket_mb in (0.0001, 0.25, 100):
        how = {"mode": "ddp", "bucket_mb": bucket_mb, "batch": 2, "steps": 3, **chain}
        result = labkit.run("ddp_compile", nproc=4, emulate=hardware, **how)
        assert "deprecated" not in result.ranks[0].log()
        took_s[bucket_mb] = result.value("step_ms") / 1e3
        predicted_s[bucket_mb] = emulated_steps.ddp_step_s(hardware, 4, bucket_mb=bucket_mb, **chain)
    assert took_s == pytest.approx(predicted_s, rel=0.15)
    assert took_s[0.25] < min(took_s[0.0001], took_s[100])


@pytest.mark.long
@pytest.mark.alone
def test_a_compiled_ddp_hides_its_messages_where_its_graph_is_cut_and_not_as_one_graph():
    chain = {"dim": 600, "layers": 6}
    hardware = emulated_steps.ddp_hardware(2, alpha_ms=5, bytes_ms=120, forward_ms=60, backward_ms=180, **chain)
    how = {"mode": "ddp", "bucket_mb": 1.0, "batch": 2, "steps": 1, "emulate": hardware}
    cut, whole = (labkit.run("ddp_compile", graph=graph, **how, **chain) for graph in ("split", "whole"))
    assert (cut.value("graphs"), whole.value("graphs")) == (6, 1)
    predicted_s = emulated_steps.ddp_step_s(hardware, 2, bucket_mb=1.0, way="compiled", **chain)
    assert cut.value("step_ms") == pytest.approx(1e3 * predicted_s, rel=0.1)
    assert whole.value("step_ms") == pytest.approx(60 + 180 + 7 * 5 + 120, rel=0.1)


@pytest.mark.alone
@pytest.mark.long  # that compiled DDP hides its messages is looked at daily just above
@pytest.mark.parametrize(("fuse", "bucket_mb"), [("concat", 0.25), ("none", 0.0001)])
def test_a_compiled_program_waits_and_hides_its_messages_too(fuse, bucket_mb):
    hardware, chain = Emulated(latency_us=1000, gb_per_s=0.04, forward_ms=5, backward_ms=20), {"dim": 256, "layers": 12}
    how = {"mode": "compiled", "fuse": fuse, "bucket_mb": bucket_mb, "batch": 2, "steps": 3, **chain}
    result = labkit.run("ddp_compile", emulate=hardware, **how)
    predicted_s = emulated_steps.ddp_step_s(hardware, 2, bucket_mb=bucket_mb, way="compiled", **chain)
    assert result.value("step_ms") / 1e3 == pytest.approx(predicted_s, rel=0.15)
    sent = {name: result.value(name) for name in ("all_reduce_count", "all_reduce_bytes")}
    all_s = emulated_steps.collectives_s(hardware, sent, 2, 1)
    assert predicted_s < 12 * 0.025 + all_s / 2, "more than half of the messages are hidden"


@pytest.mark.alone
def test_a_time_line_shows_messages_on_the_emulated_link():
    hardware = Emulated(latency_us=20_000, forward_ms=60)
    how = {"model": "mlp_stack", "prefetch": True, "timeline": True, "steps": 1}
    result = labkit.run("fsdp_wrap", emulate=hardware, **how)
    bars = result.frame.query("kind == 'bar' and rank == 0")
    sent = bars[bars["lane"] == "communication"].sort_values("start_us")
    # Six gathers and three reduce-scatters of one step of the ring, of which four gathers are hidden.
    assert len(sent) == 9
    assert sent["dur_us"].tolist() == pytest.approx([20_000] * 9, rel=0.01)
    assert list(sent["name"])[:3] == ["layers.0", "layers.1", "layers.2"]
    assert result.value("communication") == pytest.approx(180, rel=0.02)
    assert result.value("exposed_communication") == pytest.approx(100, rel=0.15)


def test_a_small_stack_on_slow_h100s_has_the_shares_of_a_wide_one():
    pairs, tokens = two_dim.mlp_pairs(64), 1728
    for data, tp, speed in ((1, 4, 450e9), (1, 8, 4 * 50e9), (2, 4, 450e9)):
        gpus = emulated_steps.slow_h100s(pairs, tokens, 2048, step_ms=1800, ranks_per_host=4)
        step_s = emulated_steps.mesh_step_s(gpus, pairs, tokens // data, data=data, tp=tp)
        arithmetic_s = 1.8 / (data * tp)
        share = 5 / 6 * two_dim.message_share(2048, tp, 400e12, speed, 2)  # the first pair saves one of six messages
        # FSDP's messages between hosts: lab 2's ratio for as many tokens as the stack has beside its width.
        real = tokens / data * 2048 / (64 * 10 / 3)
        share += (data - 1) / data * 2 * 400e12 / (2 * 50e9) / real if data > 1 else 0
        assert step_s == pytest.approx(arithmetic_s * (1 + share), rel=0.01)
    assert gpus.describe() == "emulated: H100s in slow motion, 4 a host"


def test_two_wires_take_as_long_beside_arithmetic_as_on_h100s():
    options, step_ms, forward_ms = emulated_steps.two_wires(2, 128)
    assert list(options) == list(step_ms) == list(forward_ms)
    assert [each["prefetch"] for each in options.values()] == [False, True, False, True]
    # 444 and 4000 tokens would hide a gather, of 2048 that there are; blocks differ in size, here by a third.
    assert forward_ms["NVLink, no prefetch"] == pytest.approx(6 * (20 + 20 * 444.4 / 2048), rel=0.001)
    assert forward_ms["NVLink, prefetch"] == pytest.approx(6 * 20 + 20 * 444.4 / 2048, rel=0.01)
    assert forward_ms["network card, no prefetch"] == pytest.approx(6 * (20 + 20 * 4000 / 2048), rel=0.001)
    assert forward_ms["network card, prefetch"] == pytest.approx(6 * 20 * 4000 / 2048 + 20, rel=0.01)
    gathered_and_reduced_ms = 3 * 6 * 20 * 4000 / 2048
    assert step_ms["network card, no prefetch"] == pytest.approx(6 * 60 + gathered_and_reduced_ms, rel=0.001)
    assert options["NVLink, prefetch"]["emulate"].describe() == "emulated: 2 H100s, NVLink, 1 s = 102.4 ms"


def test_hardware_takes_no_time_in_a_step_that_nobody_times():
    device = EmulatedDevice(Wire(Emulated()))
    here = Session(0, 1, torch.device("cpu"), RecordWriter(None, 0), device)
    begin_s = time.monotonic()
    with here.without_waiting():
        device.compute(60_000)
        assert device.wire.occupy("inside", 60.0) - begin_s < 1
    assert device.wire.occupy("inside", 60.0) - begin_s > 59


def test_prefetching_hides_gathers_and_no_more():
    hardware = Emulated(latency_us=1000, forward_ms=10)
    units = [emulated_steps.FSDPUnit(1000)] * 4
    plain_s, ahead_s = (emulated_steps.fsdp_step_s(hardware, 3, units, prefetch=each) for each in (False, True))
    # Eight gathers and four reduce-scatters of two steps; three gathers of each pass are hidden.
    assert plain_s == pytest.approx(4 * 0.03 + 12 * 0.002)
    assert ahead_s == pytest.approx(plain_s - 6 * 0.002)
    forward_s = [emulated_steps.fsdp_forward_s(hardware, 3, units, prefetch=each) for each in (False, True)]
    assert forward_s == pytest.approx([4 * 0.01 + 4 * 0.002, 4 * 0.01 + 0.002])
    slow = Emulated(latency_us=10_000, forward_ms=10)
    assert emulated_steps.fsdp_forward_s(slow, 3, units, prefetch=True) == pytest.approx(4 * 0.02 + 0.01)
    root_s = emulated_steps.fsdp_step_s(hardware, 3, [], root=emulated_steps.FSDPUnit(4000, 4))
    assert root_s == pytest.approx(4 * 0.03 + 2 * 0.002)
