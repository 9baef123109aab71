"""Times of simulated steps: what was recorded is what was sent, the time line overlaps as a GPU would, sums agree."""

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import labkit
from labkit import plots
from labkit.__main__ import main
from labkit_simulate import plots as simulate_plots
from labkit_simulate.block_memory import block_memory_table, peak_phase_and_block, read_memory_curve
from labkit_simulate.estimate import KNOWN_LATENCIES_US, estimate_rank_step, operator_timer, read_events
from labkit_simulate.flop_counter import OperatorCounter
from labkit_simulate.link_traffic import link_traffic_table
from labkit_simulate.memory_fit import memory_fit
from labkit_simulate.run_simulation import make_simulation_request
from labkit_simulate.theory.hardware import get_hardware
from labkit_simulate.theory.step_time import COMPUTE_STREAM, Group, collective_s

PROGRAMS = Path(__file__).parents[1] / "programs"
PLAIN, DDP = PROGRAMS / "plain_training.py", PROGRAMS / "ddp_training.py"
H100 = get_hardware("h100-8x")
STACK = {"model": "mlp_stack", "dim": 2048, "batch": 2048, "precision": "bf16", "steps": 1}
LABS = {
    "fsdp": ("fsdp_wrap", STACK),
    "hybrid": ("fsdp_matrix", STACK | {"hybrid": 8}),
    "two_dim": ("two_dim", {"seq": True, "checkpointing": True, "steps": 1, "dim": 512, "batch": 64}),
    "spatial": ("convnext_spatial", {"steps": 1, "width": 2048}),
    "ddp": (DDP, {"bucket_mb": 0.5}),
    "plain": (PLAIN, {}),
}


@pytest.fixture(scope="module")
def simulated():
    """Results by lab, each simulated once."""
    results = {}

    def result_of(lab):
        if lab not in results:
            program, params = LABS[lab]
            results[lab] = labkit.simulate(program, world_size=16, rank=9, hardware="h100-8x", **params)
        return results[lab]

    return result_of


def bars_of(result, stream):
    """Bars of arithmetic or of communication, by start."""
    return [
        bar
        for bar in estimate_rank_step(result, "h100-8x").time.bars
        if (bar.stream == COMPUTE_STREAM) == (stream == COMPUTE_STREAM)
    ]


@pytest.mark.parametrize("lab", LABS)
def test_what_was_recorded_is_what_was_counted_and_every_call_is_waited_for(lab, simulated):
    result = simulated(lab)
    done = read_events(result)
    for name, calls in groupby(sorted(done.collective_calls, key=lambda call: call["call"]), lambda call: call["call"]):
        calls = list(calls)
        assert len(calls) == result.value(f"{name}_count")
        assert sum(call["bytes"] for call in calls) == result.value(f"{name}_bytes")
    waits = {event["wait"] for event in done.events if "wait" in event}
    assert waits == {place for place, event in enumerate(done.events) if "call" in event}
    assert sum("turn" in event for event in done.events) == 1
    assert all(9 in group for group in done.groups)


@pytest.mark.parametrize("lab", LABS)
def test_the_parts_of_a_step_add_up_and_are_recorded(lab, simulated):
    result = simulated(lab)
    step, compute, communication, exposed, overlapped = (
        result.value(f"reckoned_{part}_s") for part in ("step", "compute", "communication", "exposed", "overlapped")
    )
    assert 0 < compute < step < compute + communication
    assert communication == pytest.approx(exposed + overlapped) and step >= compute + exposed - 1e-12
    lanes = result.frame[result.frame["kind"] == "bar"].groupby("lane")["dur_us"].sum() / 1e6
    assert lanes["compute"] == pytest.approx(compute) and lanes["exposed"] == pytest.approx(exposed)
    on_wires = [
        collective_s(call["call"], call["bytes"], Group(len(group), 1 + (max(group) // 8 > min(group) // 8)), H100)
        for call in read_events(result).collective_calls
        for group in [read_events(result).groups[call["group"]]]
    ]
    assert lanes["communication"] == pytest.approx(sum(on_wires))


def test_a_unit_is_gathered_while_the_one_before_computes_and_its_sum_while_the_next_does(simulated):
    bars = estimate_rank_step(simulated("fsdp"), H100).time.bars
    begun = {bar.name: bar.start_s for bar in reversed(bars)}
    ended = {bar.name: bar.end_s for bar in bars}
    assert begun["forward layers.0"] <= begun["all_gather layers.1"] < ended["forward layers.0"]
    assert begun["forward layers.1"] >= begun["all_gather layers.1"]
    assert begun["backward layers.1"] < begun["reduce_scatter layers.2"] + H100.call_s * 10
    assert begun["optimizer "] >= max(bar.end_s for bar in bars if bar.name.startswith("reduce_scatter"))
    assert simulated("fsdp").value("reckoned_overlapped_s") > 3 * simulated("fsdp").value("reckoned_exposed_s")


def test_groups_of_hybrid_sharding_are_summed_after_their_members(simulated):
    bars = estimate_rank_step(simulated("hybrid"), H100).time.bars
    for layer in range(3):
        (within,), (across,) = (
            [bar for bar in bars if bar.name == f"{name} layers.{layer}"] for name in ("reduce_scatter", "all_reduce")
        )
        assert across.start_s >= within.end_s and across.stream != within.stream


def test_buckets_of_ddp_are_sent_beside_the_backward_pass_and_halos_are_waited_for(simulated):
    sums = [bar for bar in bars_of(simulated("ddp"), "communication") if bar.name.startswith("all_reduce bucket")]
    backward = [bar for bar in bars_of(simulated("ddp"), COMPUTE_STREAM) if bar.name.startswith("backward")]
    assert [bar.name[-1] for bar in sums] == ["0", "1", "2"]
    assert backward[0].end_s < sums[0].start_s < backward[-1].start_s - 1e-5
    halos = [bar for bar in bars_of(simulated("spatial"), "communication") if bar.name.startswith("send")]
    assert len(halos) == simulated("spatial").value("send_count") > 0
    assert {len(read_events(simulated("spatial")).groups[call["group"]])
            for call in read_events(simulated("spatial")).collective_calls
            if call["call"] == "send"} == {2}  # fmt: skip


def test_a_step_has_a_range_which_is_wide_where_its_network_was_not_measured(simulated):
    result = simulated("ddp")  # small arithmetic, and collectives between hosts
    widths = {}
    for name in ("h100-8x", "b200-8x"):
        estimate = estimate_rank_step(result, name)
        low, step, high = estimate.low_s, estimate.time.step_s, estimate.high_s
        assert low < step / 1.04 and high > 1.04 * step
        widths[name] = high / low
    assert widths["b200-8x"] <= 1.25**2 < 2.4 < widths["h100-8x"]
    assert result.value("reckoned_step_low_s") == estimate_rank_step(result, "h100-8x").low_s
    assert result.value("reckoned_step_high_s") == estimate_rank_step(result, "h100-8x").high_s


@pytest.mark.parametrize("latency_us", KNOWN_LATENCIES_US)
def test_the_range_of_a_guessed_network_holds_those_of_all_known_networks(simulated, latency_us):
    guessed = get_hardware("h100-8x")
    for program in ("ddp", "fsdp"):
        wide = estimate_rank_step(simulated(program), guessed)
        known = estimate_rank_step(simulated(program), guessed.with_network(latency_us=latency_us, measured=True))
        assert wide.low_s <= known.low_s * 1.0001 and known.high_s <= wide.high_s * 1.0001


def test_other_hardware_needs_no_other_simulation(simulated):
    first = simulated("fsdp")
    again = labkit.simulate("fsdp_wrap", world_size=16, rank=9, hardware=get_hardware("a100-8x"), **STACK)
    there = estimate_rank_step(first, "a100-8x")
    assert again.value("reckoned_step_s") == pytest.approx(there.time.step_s) != first.value("reckoned_step_s")
    info = json.loads((again.folder / "run.json").read_text())
    assert info["hardware"]["name"] == "a100-8x" and info["ranks_per_host"] == 8
    assert again.stamp.startswith("simulated · estimated for a100-8x · 16 ranks on 2 hosts")
    faster = estimate_rank_step(first, get_hardware("a100-8x", matmul_share=1.0))
    assert faster.time.step_s < there.time.step_s and faster.model_flops == there.model_flops
    alone = estimate_rank_step(first, "h100-8x", ranks_per_host=4)
    assert alone.time.communication_s > estimate_rank_step(first, "h100-8x").time.communication_s, (
        "cards of four hosts, half each"
    )


def test_what_is_computed_again_takes_time_and_is_no_part_of_the_model():
    how = {"world_size": 8, "hardware": "h100-8x"}
    plain = labkit.simulate("fsdp_wrap", **how, **STACK)
    again = labkit.simulate("fsdp_wrap", **how, **STACK, checkpointing=True)
    assert again.value("reckoned_model_flops") == plain.value("reckoned_model_flops")
    once, twice = (
        sum(count * each.flops for each, count in read_events(run).operator_counts) for run in (plain, again)
    )
    assert once == plain.value("reckoned_model_flops") and twice > 1.25 * once
    assert again.value("reckoned_compute_s") > plain.value("reckoned_compute_s")
    share = plain.value("reckoned_model_flops") / (plain.value("reckoned_step_s") * H100.flops_per_s["bfloat16"])
    assert plain.value("reckoned_model_flops_share") == pytest.approx(share) and 0.2 < share < H100.matmul_share


def test_a_figure_of_the_time_line_is_drawn_and_stamped(simulated):
    ax = plots.timeline(simulated("hybrid"))
    assert "estimated for h100-8x" in ax.figure.get_supxlabel()
    shown = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"forward", "backward", "optimizer", "all-gather", "reduce-scatter", "all-reduce"} < {*shown}
    assert any("exposed" in each for each in shown)
    unreckoned = labkit.simulate("all_reduce", world_size=2, repeats=1)
    with pytest.raises(ValueError, match="simulate it for a hardware"):
        plots.timeline(unreckoned)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"world_size": 16, "hardware": "h100"}, "'h100' is none of v100-8x, a100-8x, h100-8x"),
        ({"world_size": 12, "hardware": "h100-8x"}, "12 ranks do not fill hosts of 8 (h100-8x): 12 % 8 = 4"),
        ({"world_size": 32, "hardware": "h100-8x", "ranks_per_host": 16}, "16 ranks on a host of 8 devices (h100-8x)"),
        ({"world_size": 16, "hardware": 8}, "hardware 8 is none of"),
    ],
)
def test_hardware_that_cannot_be_is_refused_before_anything_starts(how, message):
    with pytest.raises(labkit.ParameterError) as refused:
        make_simulation_request("fsdp_wrap", **how)
    assert message in str(refused.value)
    assert make_simulation_request("fsdp_wrap", world_size=4, hardware="laptop").ranks_per_host == 2


def test_the_command_line_reckons(capsys):
    assert main(["simulate", "all_reduce", "--world-size", "16", "--hardware", "b200-8x", "--repeats", "1"]) == 0
    assert "reckoned_step_s" in capsys.readouterr().out
    assert main(["simulate", "all_reduce", "--world-size", "16", "--hardware", "b300", "--repeats", "1"]) == 2
    assert "b200-8x" in capsys.readouterr().err


def counted(function):
    """The operators of a call on tensors without content, by name."""
    with FakeTensorMode(), OperatorCounter() as operators:
        function()
    return {each.name: each for each in operators.operators}


def test_convolutions_of_float32_use_tf32_as_torch_does_by_default_and_products_do_not():
    def convolve_and_multiply():
        image = functional.conv2d(torch.ones(1, 4, 8, 8), torch.ones(4, 4, 3, 3, requires_grad=True))
        (image.flatten(1) @ torch.ones(144, 2)).sum().backward()

    found = counted(convolve_and_multiply)
    assert found["convolution"].dtype == found["convolution_backward"].dtype == "tf32"
    assert found["mm"].dtype == "float32" and found["convolution"].flops == 2 * 4 * 4 * 9 * 36


def test_attention_on_a_cpu_is_counted_and_half_of_it_where_nobody_looks_ahead():
    def attend(causal):
        query = torch.ones(2, 8, 64, 16, dtype=torch.bfloat16, requires_grad=True)
        key = torch.ones(2, 4, 64, 16, dtype=torch.bfloat16, requires_grad=True)
        mixed = functional.scaled_dot_product_attention(query, key, key, is_causal=causal, enable_gqa=True)
        mixed.sum().backward()

    name = "_scaled_dot_product_flash_attention_for_cpu"
    whole, half = counted(lambda: attend(False)), counted(lambda: attend(True))
    assert whole[name].flops == 2 * half[name].flops == 4 * 2 * 8 * 64 * 64 * 16
    assert half[f"{name}_backward"].flops == 2.5 * half[name].flops and half[name].dtype == "bfloat16"


def test_what_only_chooses_overwrites_or_makes_room_moves_no_more_than_that():
    def work():
        table = torch.ones(1000, 10)
        out = functional.embedding(torch.zeros(3, dtype=torch.int64), table)
        torch.empty(50)
        out.copy_(torch.ones(3, 10, dtype=torch.float64))
        torch.mul(out, out, out=torch.empty(3, 10))

    found = counted(work)
    assert found["embedding"].moved_bytes == 2 * 3 * 10 * 4 and found["empty"].moved_bytes == 0
    assert found["copy_"].moved_bytes == 3 * 10 * (8 + 4) and found["mul"].moved_bytes == 3 * 3 * 10 * 4


def test_a_view_is_no_kernel_of_a_gpu_and_has_its_price_on_cores():
    view, product = ("view", 0.0, 0, "float32"), ("mm", 2e9, 0, "float32")
    assert operator_timer(H100)(*view) == 0 < operator_timer(H100)(*product)
    laptop = get_hardware("laptop")
    assert operator_timer(laptop)(*view) == pytest.approx(laptop.operator_s)


@pytest.mark.parametrize("lab", ["fsdp", "two_dim", "ddp", "plain"])
def test_blocks_hold_all_of_the_peak_each_its_own_parameters(lab, simulated):
    result = simulated(lab)
    table, curve = block_memory_table(result), read_memory_curve(result)
    assert table["total"].sum() == max(curve.bytes_by_change) == curve.bytes_by_change[curve.peak]
    recorded = {name[5:-6]: size for name, size in result.summary().loc[9].items() if name.startswith("peak_")}
    held = {name: sum(table.get(name, [])) for name in recorded}
    assert held == recorded
    shares = table.loc[[block for block in table.index if block[-1:].isdecimal()], "parameter"]
    assert (shares[shares > 0] > 0).any() and shares.sum() > 0.9 * table["parameter"].sum()
    phase, block = peak_phase_and_block(result)
    assert phase == "optimizer" or table.loc[block, f"{phase}_peak"] == max(curve.bytes_by_change)


def test_each_link_has_its_bytes_and_seconds(simulated):
    result = simulated("hybrid")
    table = link_traffic_table(result, "h100-8x").set_index(["collective", "axis"])
    within, across = table.loc[("reduce_scatter", "data")], table.loc[("all_reduce", "replicate")]
    assert (within["link"], within["hosts"], within["between_hosts_bytes"]) == ("inside a host", 1, 0)
    assert (across["link"], across["ranks"], across["hosts"]) == ("between hosts", 2, 2)
    assert across["between_hosts_bytes"] == across["wire_bytes"] == result.value("all_reduce_wire_bytes")
    assert within["handed_bytes"] == result.value("reduce_scatter_bytes")
    communication = result.frame.query("kind == 'bar' and lane == 'communication'")["dur_us"].sum() / 1e6
    assert table["seconds"].sum() == pytest.approx(communication)
    whole = link_traffic_table(simulated("fsdp")).set_index("collective").loc["all_gather"]
    assert whole["between_hosts_bytes"] == whole["wire_bytes"] * 2 / 16 and "seconds" not in whole


def test_a_gather_ahead_is_added_where_most_is_held_in_the_forward_pass(simulated, tmp_path):
    assert (
        peak_phase_and_block(simulated("plain"))[0] == "backward" and memory_fit(simulated("plain")).prefetch_bytes == 0
    )
    large = tmp_path / "large.py"
    large.write_text(PLAIN.read_text().replace(".square().mean()", ".square().mean() + 0 * torch.ones(10**7).sum()"))
    result = labkit.simulate(large, world_size=16)
    assert peak_phase_and_block(result)[0] == "forward"
    without, ahead = memory_fit(simulated("plain")), memory_fit(result)
    assert ahead.prefetch_bytes == 4 * (64 * 64 + 64) and "gathered ahead" in str(ahead)
    assert (
        without.margin_bytes - ahead.margin_bytes
        == ahead.allocator_bytes - without.allocator_bytes + ahead.prefetch_bytes
    )


def test_figures_of_memory_name_the_peak(simulated):
    ax = simulate_plots.memory_curve(simulated("fsdp"))
    assert any(text.get_text().startswith("peak 1.68 GiB, backward root") for text in ax.texts)
    ax = simulate_plots.memory_by_block(simulated("fsdp"))
    assert "layers.1" in [label.get_text() for label in ax.get_yticklabels()]
    assert "simulated" in ax.figure.get_supxlabel()
