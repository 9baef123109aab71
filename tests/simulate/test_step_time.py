"""labkit_simulate.theory.step_time by hand, against walks of rings and simulations, and against what others
have published.
"""

import random
from dataclasses import replace

import pytest
from fixture_long import long_but

import labkit
from labkit.theory import ddp
from labkit.theory.collectives import AlphaBeta
from labkit_simulate.estimate import COMPUTE_ERROR
from labkit_simulate.theory.hardware import Hardware, get_hardware
from labkit_simulate.theory.reference_results import (
    A100_RESULTS,
    GIB,
    H100_RESULTS,
    IBM_RESULTS,
    NANOTRON_RESULTS,
    TORCHTITAN_TENSOR_RESULTS,
    VTRAIN_RESULTS,
    fit_matmul_share,
)
from labkit_simulate.theory.step_time import (
    COMMUNICATION_STREAM,
    COMPUTE_STREAM,
    BackwardEvent,
    CollectiveEvent,
    ComputeEvent,
    Group,
    Operator,
    Task,
    UnitTimes,
    WaitEvent,
    collective_s,
    fsdp_tasks,
    make_group,
    operator_s,
    schedule_tasks,
    scheduled_s,
    tasks_from_events,
)
from labkit_simulate.theory.transformer import LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, TrainingSetup

INSIDE, BETWEEN = AlphaBeta(1e-6, 1e-9), AlphaBeta(1e-5, 8e-9)


def hosts(devices=4, cards=4, shared=False, call_s=0.0):
    return Hardware(
        name="test",
        device="device",
        devices=devices,
        flops_per_s={"float32": 1e9},
        memory_bytes=1,
        memory_bytes_per_s=1e8,
        inside=INSIDE,
        between=BETWEEN,
        cards=cards,
        call_s=call_s,
        operator_s=1e-5,
        matmul_share=0.5,
        shared=shared,
    )


def test_an_operator_takes_the_longer_of_arithmetic_and_memory():
    rank = hosts()
    assert operator_s(Operator("mm", 1e6, 1e3), rank) == pytest.approx(1e-5 + 1e6 / 0.5e9)
    assert operator_s(Operator("add", 0, 1e6), rank) == pytest.approx(1e-5 + 1e6 / 1e8)
    assert operator_s(Operator("thin mm", 1e6, 1e6), rank) == pytest.approx(1e-5 + 1e-2)


@pytest.mark.parametrize(("name", "rounds"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_inside_a_host_is_its_steps_one_after_another(name, rounds, ranks):
    handed = 1200.0
    part = handed if name == "all_gather" else handed / ranks
    walked = sum(INSIDE.seconds(part) for _ in range(rounds * (ranks - 1)))
    assert collective_s(name, handed, Group(ranks), hosts(), algorithm="ring") == pytest.approx(walked)
    assert collective_s(name, handed, Group(1), hosts()) == 0.0


@pytest.mark.parametrize(("cards", "on_host"), [(4, 4), (1, 4), (4, 2), (4, 1), (1, 1)])
def test_the_busiest_card_or_link_holds_a_ring_up(cards, on_host):
    """Every group of the axis runs its rings at once; bytes over each host's border are added up, card by card."""
    devices, machines, size = 4, 3, 10e9
    ranks = machines * on_host
    groups = devices // on_host
    leaving_a_rank = size * (ranks - 1) / ranks
    leaving_a_host = groups * leaving_a_rank  # each group's rings cross a border once
    slowest = max(leaving_a_rank * INSIDE.beta_s_per_byte, leaving_a_host / cards * BETWEEN.beta_s_per_byte)
    found = collective_s("reduce_scatter", size, Group(ranks, machines), hosts(devices, cards))
    assert found == pytest.approx(slowest, rel=1e-3)


def test_latency_of_a_ring_counts_the_steps_between_hosts_apart():
    ring = collective_s("all_gather", 1e-9, Group(8, 2), hosts(call_s=1e-3))
    assert ring == pytest.approx(1e-3 + 6 * INSIDE.alpha_s + 1 * BETWEEN.alpha_s)
    alike = [
        collective_s("all_reduce", 1e-9, Group(512, 64), hosts(8, 8), algorithm=way) for way in ("ring", "tree", "best")
    ]
    assert alike[1] == alike[2] < alike[0] / 5, "many ranks and few bytes are a tree's"
    large = [
        collective_s("all_reduce", 1e10, Group(512, 64), hosts(8, 8), algorithm=way) for way in ("ring", "tree", "best")
    ]
    assert large[0] == large[2] < large[1], "many bytes are a ring's"


def test_an_all_to_all_leaves_by_the_ranks_own_card():
    size = 1e9
    assert collective_s("all_to_all", size, Group(8, 2), hosts()) == pytest.approx(size / 2 * 8e-9, rel=1e-3)
    inside = collective_s("all_to_all", size, Group(4), hosts())
    assert inside == pytest.approx(size * 3 / 4 * 1e-9, rel=1e-3)


def test_groups_know_their_hosts_and_errors_the_arithmetic():
    assert make_group(range(8), 4) == Group(8, 2)
    assert make_group([1, 5, 9], 4) == Group(3, 3) and make_group([4, 5], 4) == Group(2, 1)
    with pytest.raises(ValueError, match=r"16 ranks on a host of 4 devices \(test\): spread them over 4 hosts"):
        collective_s("all_gather", 1.0, Group(16), hosts())
    with pytest.raises(ValueError, match="2 ranks on 3 hosts"):
        Group(2, 3)
    with pytest.raises(ValueError, match="all_gather by 'tree'"):
        collective_s("all_gather", 1.0, Group(2), hosts(), algorithm="tree")
    with pytest.raises(ValueError, match="'gossip' is none of all_reduce"):
        collective_s("gossip", 1.0, Group(2), hosts())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hidden", [True, False])
def test_streams_overlap_as_the_buckets_of_lab_4_do(seed, hidden):
    draw = random.Random(seed)
    ready, takes = sorted(draw.random() for _ in range(6)), [draw.random() / 3 for _ in range(6)]
    program = []
    for place, (moment, message) in enumerate(zip(ready, takes, strict=True)):
        since = moment - (ready[place - 1] if place else 0.0)
        program.append(Task(COMPUTE_STREAM, f"part {place}", since))
        program.append(Task(COMMUNICATION_STREAM, f"bucket {place}", message, (len(program) - 1,)))
    step = schedule_tasks(program, overlaps=hidden)
    found = [(bar.start_s, bar.end_s) for bar in step.bars if bar.stream == COMMUNICATION_STREAM]
    if not hidden:
        # The computation stands still while a bucket travels, which delays all later ones.
        ready = [moment + sum(takes[:place]) for place, moment in enumerate(ready)]
    assert found == [pytest.approx(each) for each in ddp.bucket_transfer_times(ready, takes)]
    assert step.exposed_s + step.overlap_s == pytest.approx(sum(takes))
    assert step.step_s == pytest.approx(step.compute_s + step.exposed_s)
    if not hidden:
        assert step.overlap_s == pytest.approx(0.0)


def test_a_program_with_other_seconds_ends_when_its_time_line_would():
    program = fsdp_tasks([UnitTimes(f"{i}", 2.0 + i, 3.0, 5.0, 1.0, replicate_s=i) for i in range(4)], update_s=1.0)
    seconds = [1.5 * task.seconds if task.stream == COMPUTE_STREAM else task.seconds / 3 for task in program]
    changed = [replace(task, seconds=own) for task, own in zip(program, seconds, strict=True)]
    for overlaps in (True, False):
        whole = schedule_tasks(changed, overlaps=overlaps).step_s
        assert scheduled_s(program, seconds, overlaps=overlaps) == whole
        assert whole != schedule_tasks(program, overlaps=overlaps).step_s
    assert scheduled_s([], [], overlaps=True) == 0


def test_a_task_waits_only_for_what_came_before_it():
    with pytest.raises(ValueError, match=r"task 0 \(first\) waits for \(1,\)"):
        schedule_tasks([Task(COMPUTE_STREAM, "first", 1.0, (1,)), Task(COMPUTE_STREAM, "second", 1.0)])
    assert schedule_tasks([]).step_s == 0.0


def starts(step):
    return {bar.name: round(bar.start_s, 6) for bar in step.bars}


def test_units_are_gathered_one_ahead():
    """Three units, gather 2, forward 3, backward 6, reduce 2: each moment by hand."""
    units = [UnitTimes(name, 2, 3, 6, 2, regathered=name != "c") for name in "abc"]
    step = schedule_tasks(fsdp_tasks(units, update_s=1.0))
    moments = [(bar.stream, bar.name, bar.start_s) for bar in step.bars]
    assert moments == [
        (COMMUNICATION_STREAM, "all_gather a", 0),
        (COMMUNICATION_STREAM, "all_gather b", 2),
        (COMPUTE_STREAM, "forward a", 2),
        (COMMUNICATION_STREAM, "all_gather c", 5),  # room for it once a is done
        (COMPUTE_STREAM, "forward b", 5),
        (COMPUTE_STREAM, "forward c", 8),
        (COMMUNICATION_STREAM, "all_gather b", 11),
        (COMPUTE_STREAM, "backward c", 11),
        (COMMUNICATION_STREAM, "reduce_scatter c", 17),
        (COMPUTE_STREAM, "backward b", 17),
        (COMMUNICATION_STREAM, "all_gather a", 19),  # asked for with backward b, by then c's gradients are on their way
        (COMMUNICATION_STREAM, "reduce_scatter b", 23),
        (COMPUTE_STREAM, "backward a", 23),
        (COMMUNICATION_STREAM, "reduce_scatter a", 29),
        (COMPUTE_STREAM, "optimizer", 31),
    ]
    assert (step.step_s, step.compute_s, step.exposed_s, step.overlap_s) == (32, 28, 4, 12)


def test_a_step_recorded_on_one_device_overlaps_as_its_program_would():
    """As a CPU records it: each unit gathered when it is needed, and each sum of gradients waited for at the end."""
    units = [UnitTimes(name, 2, 3, 6, 2, regathered=name != "c") for name in "abc"]
    events = []
    for unit in units:
        events += [
            CollectiveEvent(f"all_gather {unit.name}", 2, early=True),
            WaitEvent(len(events)),
            ComputeEvent(f"forward {unit.name}", 3),
        ]
    events.append(BackwardEvent())
    reduced = []
    for unit in reversed(units):
        if unit.regathered:
            events += [CollectiveEvent(f"all_gather {unit.name}", 2, early=True), WaitEvent(len(events))]
        events.append(ComputeEvent(f"backward {unit.name}", 6))
        reduced.append(len(events))
        events.append(CollectiveEvent(f"reduce_scatter {unit.name}", 2))
    events += [*map(WaitEvent, reduced), ComputeEvent("optimizer", 1)]
    recorded, written = schedule_tasks(tasks_from_events(events)), schedule_tasks(fsdp_tasks(units, update_s=1.0))
    assert starts(recorded) == starts(written) and recorded.step_s == written.step_s


def test_what_was_just_computed_cannot_be_sent_early():
    """A layer of tensor parallelism: its sum waits for the product before it, and the next product for the sum."""
    step = schedule_tasks(
        tasks_from_events(
            [ComputeEvent("one", 3), CollectiveEvent("all_reduce", 2), WaitEvent(1), ComputeEvent("two", 3)]
        )
    )
    assert (step.step_s, step.exposed_s) == (8, 2)
    with pytest.raises(ValueError, match="event 1 waits for event 0, which is no call"):
        tasks_from_events([ComputeEvent("one", 3), WaitEvent(0)])


def test_without_gathering_ahead_every_gather_is_waited_for():
    units = [UnitTimes(name, 2, 3, 6, 2) for name in "abc"]
    step = schedule_tasks(fsdp_tasks(units, ahead=0))
    assert step.exposed_s >= 6 * 2, "all six gathers"
    slow = schedule_tasks(fsdp_tasks(units), overlaps=False)
    assert slow.step_s == pytest.approx(3 * (2 + 3 + 2 + 6 + 2)) and slow.overlap_s == 0


def test_hybrid_sharding_replicates_after_each_reduction():
    units = [UnitTimes(name, 1, 3, 6, 1, replicate_s=4) for name in "ab"]
    step = schedule_tasks(fsdp_tasks(units, update_s=1.0))
    begun = starts(step)
    ends = {bar.name: bar.end_s for bar in step.bars}
    assert begun["all_reduce b"] == ends["reduce_scatter b"] and begun["optimizer"] == ends["all_reduce a"]


def test_shapes_have_as_many_parameters_as_their_names_say():
    assert LLAMA_3_8B.parameters == 8_030_261_248 and LLAMA_3_70B.parameters == 70_553_706_496
    # torchtitan states 33 % MFU for 5762 tokens a second, of 989 TFLOP/s
    assert 5762 * LLAMA_3_8B.model_flops(8192) / 989e12 == pytest.approx(0.337, abs=0.001)


@pytest.mark.parametrize("rows", [H100_RESULTS, A100_RESULTS], ids=["h100", "a100"])
def test_published_speeds_are_predicted_from_one_row(rows):
    assert get_hardware(rows[0].hosts).matmul_share == pytest.approx(fit_matmul_share(rows[0]), abs=0.001)
    ratios = [row.estimate_step().tokens_per_s / row.tokens_per_s for row in rows[1:]]
    assert all(0.9 < ratio < 1.1 for ratio in ratios), ratios


def hidden_rows():
    """Estimated over published time of the held-out steps that wait for less than 5 % of it."""
    for row in (*H100_RESULTS[1:], *A100_RESULTS[1:], *IBM_RESULTS):
        step = row.estimate_step()
        if step.time.exposed_s < 0.05 * step.time.step_s:
            yield row.tokens_per_s / step.tokens_per_s
    for row in VTRAIN_RESULTS[1:]:
        step = row.setup.estimate_step(row.hosts)
        if step.exposed_s < 0.05 * step.step_s:
            yield step.step_s / row.step_s


def test_nine_in_ten_steps_that_hide_their_network_lie_in_the_range_of_arithmetic():
    ratios = list(hidden_rows())
    inside = [1 / COMPUTE_ERROR <= ratio <= COMPUTE_ERROR for ratio in ratios]
    assert len(ratios) >= 20 and 0.9 <= sum(inside) / len(inside) < 1


def test_other_trainers_are_met_and_would_tell_a_slower_network():
    for row in IBM_RESULTS:
        slow = row.hardware.with_links(row.hardware.links.slower(4))
        tokens_per_s = [row.estimate_step().tokens_per_s, row.training.estimate_step(slow).tokens_per_s]
        assert 0.8 < tokens_per_s[0] / row.tokens_per_s < 1.25 < row.tokens_per_s / tokens_per_s[1], row.name
    for row in TORCHTITAN_TENSOR_RESULTS:
        slow = row.hosts.with_links(row.hosts.links.slower(4))
        steps = [row.setup.estimate_step(hosts).step_s for hosts in (row.hosts, slow)]
        assert 0.8 < steps[0] / row.step_s < 1.25 < steps[1] / row.step_s, row.name


def test_a_product_that_costs_more_than_its_arithmetic_tells_small_micro_batches_apart():
    hosts, seen = VTRAIN_RESULTS[0].hosts, [row.setup for row in VTRAIN_RESULTS if row.setup.tensor == 1]
    added = [
        replace(setup, product_s=1e-4).estimate_step(hosts).step_s - setup.estimate_step(hosts).step_s for setup in seen
    ]
    # 7 products and attention forward, all but one of them again, 14 products and attention backward.
    assert added == pytest.approx([1e-4 * 30 * (8 + 7 + 15) * setup.accumulate for setup in seen])
    for row in NANOTRON_RESULTS:
        assert 0.8 < row.setup.estimate_step(row.hosts).step_s / row.step_s < 1.25, row.name


def test_hsdp_gathers_inside_its_groups_and_holds_as_much_as_one_of_them():
    whole, groups, alone = (
        TrainingSetup(LLAMA_2_7B, 1, 1024, ranks, "full", shard_ranks=shard)
        for ranks, shard in ((128, None), (128, 8), (8, None))
    )
    assert groups.peak_memory_bytes() == alone.peak_memory_bytes() > whole.peak_memory_bytes()
    hosts = get_hardware("a100-8x", cards=1)
    alone_bars, bars = (setup.estimate_step(hosts).time.bars for setup in (alone, groups))
    within, beside = (sum(bar.dur_s for bar in each if bar.stream != "compute") for each in (alone_bars, bars))
    units = [LLAMA_2_7B.root_parameters, *[LLAMA_2_7B.block_parameters] * LLAMA_2_7B.layers]
    sums = [collective_s("all_reduce", 4 * unit / 8, Group(16, 16), hosts) for unit in units]
    assert beside - within == pytest.approx(sum(sums)), "between hosts a shard is summed, and nothing is gathered"
    summing = [bar for bar in bars if bar.name.startswith("all_reduce")]
    assert {bar.stream for bar in summing} == {"replicate"}, "a sum does not hold up the next gather"
    gathers = [bar for bar in bars if bar.name.startswith("all_gather")]
    assert any(one.start_s < other.start_s < one.end_s for one in summing for other in gathers)


def test_published_memory_is_what_tensors_take_and_what_the_allocator_keeps_beside():
    shares = [row.estimate_step().memory_bytes / GIB / row.memory_gib for row in H100_RESULTS]
    assert all(0.8 < share < 1.0 for share in shares), shares


MOMENTS = {
    "loss": (LLAMA_3_8B, 4096, 64, "selective", True),
    "loss, all kept": (LLAMA_3_8B, 4096, 64, "none", True),
    "feedforward of the last block but one": (LLAMA_2_7B, 4096, 64, "full", False),
    "gradients of the last block but one": (LLAMA_2_7B, 1024, 256, "selective", False),
    "gradients of the second block": (LLAMA_2_7B, 1024, 4, "full", False),
    "end": (LLAMA_3_8B, 256, 8, "full", False),
}
"""Shape, tokens, ranks, checkpointing, and whether the peak is at the loss: there the formula has one block more."""


@pytest.mark.parametrize("moment", long_but(["loss", "gradients of the last block but one", "end"], MOMENTS))
def test_memory_is_what_a_simulated_decoder_holds_at_each_of_its_moments(moment):
    shape, tokens, ranks, checkpointing, at_loss = MOMENTS[moment]
    model = "llama_2_7b" if shape is LLAMA_2_7B else "llama_3_8b"
    params = {"sequence": tokens, "batch": 1, "layers": 4, "precision": "bf16", "steps": 2}
    simulated = labkit.simulate("decoder", world_size=ranks, model=model, checkpointing=checkpointing, **params)
    training = TrainingSetup(replace(shape, layers=4), 1, tokens, ranks, checkpointing)
    last = 2 * shape.block_parameters if at_loss else 0  # it is gathered again after the loss in the decoder
    assert training.peak_memory_bytes() - last == pytest.approx(simulated.value("peak_total_bytes"), rel=1e-3)


def test_a_network_that_is_too_slow_shows():
    training = TrainingSetup(LLAMA_3_8B, 1, 2048, 128)
    fast = training.estimate_step(get_hardware("h100-8x")).time
    slow = training.estimate_step(get_hardware("h100-8x", cards=1)).time
    assert slow.exposed_s > 10 * fast.exposed_s and slow.compute_s == pytest.approx(fast.compute_s)
    with pytest.raises(ValueError, match="12 ranks do not fill hosts of 8: 12 % 8 = 4"):
        TrainingSetup(LLAMA_3_8B, 1, 2048, 12).estimate_step(get_hardware("h100-8x"))
