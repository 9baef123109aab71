"""labkit.theory.two_dim: against models on a fake group of four ranks, and by hand. Real ranks: test_two_dim."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from labkit.models.mlp import MLPStack
from labkit.session.meter import bytes_by_category, make_memory_tracker
from labkit.session.traffic import CommunicationCounter
from labkit.theory import fsdp
from labkit.theory import two_dim as theory
from labkit.theory.collectives import AlphaBeta, collective_wire_bytes
from launch import two_dim

DIM, BATCH = 16, 4
TOKENS, PAIRS = 8 * BATCH, theory.mlp_pairs(DIM)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def meshes():
    """Meshes of four ranks by their length along tp; this process is the first rank, the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4)
    yield {tp: init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("data", "tp")) for tp in (1, 2, 4)}
    dist.destroy_process_group()


@pytest.mark.parametrize(("tp", "cut", "again"), [*itertools.product((2, 4), (False, True), (False, True)), (1, 0, 0)])
def test_a_step_sends_and_keeps_what_the_formulas_say(meshes, tp, cut, again):
    mesh = meshes[tp]
    model = MLPStack(DIM, batch=BATCH)
    inputs = model.get_input(CPU)
    two_dim.parallelize_model(two_dim.Config(seq=bool(cut), checkpointing=bool(again)), mesh, model)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    model.run_backward(model.get_loss(inputs, model(*inputs)))  # FSDP prepares in the first step
    with CommunicationCounter(mesh) as counter, make_memory_tracker([model]) as tracker:
        loss = model.get_loss(inputs, model(*inputs))
        activations = bytes_by_category(tracker, "current", CPU)["activation"]
        model.run_backward(loss)
    how = {"sequence_parallel": bool(cut), "checkpointing": bool(again)}
    along = {axis: sent for axis, sent in counter.along.items() if axis}
    sent = {f"{axis}/{name}_count": count for axis, part in along.items() for name, count in part.counts.items()}
    sent |= {f"{axis}/{name}_bytes": size for axis, part in along.items() for name, size in part.bytes.items()}
    assert sent == theory.step_collectives_by_axis(PAIRS, TOKENS, data=4 // tp, tp=tp, **how)
    assert activations == theory.tp_activation_bytes(PAIRS, TOKENS, tp, **how) + 4, "and the loss"


def test_one_pair_by_hand():
    pair = [(10, 40)]
    assert theory.activation_collectives(pair, 6, 2) == {"tp/all_reduce_count": 1, "tp/all_reduce_bytes": 240}
    assert theory.activation_collectives(pair, 6, 2, sequence_parallel=True) == {
        "tp/all_gather_count": 3, "tp/all_gather_bytes": 3 * 120,
        "tp/reduce_scatter_count": 1, "tp/reduce_scatter_bytes": 240,
    }  # fmt: skip
    assert theory.activation_collectives(pair, 6, 1) == {}
    layers = theory.rank_layers(pair, 4)
    assert [layer.shapes for layer in layers] == [((10, 10), (10,)), ((10, 10), (10,))]
    assert theory.parameter_count(layers) == 10 * 10 + 10 + 10 * 10 + 10


def test_along_dp_a_rank_sends_what_its_thin_model_has():
    half = theory.parameter_count(theory.rank_layers(PAIRS, 2))
    fsdp_sent = theory.parameter_collectives(PAIRS, data=2, tp=2)
    assert fsdp_sent == {f"data/{k}": v for k, v in fsdp.step_collectives(theory.rank_layers(PAIRS, 2), 2).items()}
    assert fsdp_sent["data/reduce_scatter_bytes"] == 4 * half
    assert theory.parameter_collectives(PAIRS, data=2, tp=2, plan="ddp_tp") == {"data/all_reduce_bytes": 4 * half}
    assert theory.parameter_collectives(PAIRS, data=1, tp=4) == {}


def test_a_rank_of_ddp_keeps_its_thin_model_whole():
    kept = {plan: theory.mesh_resident_bytes(PAIRS, data=2, tp=2, plan=plan) for plan in ("ddp_tp", "fsdp_tp")}
    assert kept["ddp_tp"]["end_parameter_bytes"] == 2 * kept["fsdp_tp"]["end_parameter_bytes"]
    assert kept["ddp_tp"]["end_parameter_bytes"] == 4 * theory.parameter_count(theory.rank_layers(PAIRS, 2))


def test_on_the_wire_a_cut_sequence_costs_one_all_gather_more_at_each_end():
    plain, cut = (theory.activation_collectives(PAIRS, TOKENS, 4, sequence_parallel=cut) for cut in (False, True))
    wire = [theory.axis_wire_bytes(sent, data=1, tp=4) for sent in (plain, cut)]
    assert wire[0] == {"data": 0, "tp": collective_wire_bytes("all_reduce", plain["tp/all_reduce_bytes"], 4)}
    assert wire[1]["tp"] == wire[0]["tp"] * 12 / 10


def test_tokens_that_cannot_be_shared_are_refused():
    for sent_or_kept in (theory.activation_collectives, theory.tp_activation_bytes):
        assert sent_or_kept([(8, 16)], 6, 4), "a whole sequence need not be shared"
        with pytest.raises(ValueError, match="4 ranks cannot share tokens 6: 6 % 4 = 2"):
            sent_or_kept([(8, 16)], 6, 4, sequence_parallel=True)


def test_an_inner_width_that_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match="4 ranks cannot share the inner width 30: 30 % 4 = 2"):
        theory.rank_layers([(10, 30)], 4)


@pytest.mark.parametrize("how", [{}, {"checkpointing": True}, {"checkpointing": True, "sequence_parallel": True}])
def test_the_peak_of_tensor_parallelism_alone_lies_where_the_backward_pass_begins(meshes, how):
    model = MLPStack(DIM, batch=32)  # activations outweigh parameters
    config = two_dim.Config(
        tp=4, seq=how.get("sequence_parallel", False), checkpointing=how.get("checkpointing", False)
    )
    two_dim.parallelize_model(config, meshes[4], model)
    optimizer, inputs = torch.optim.Adam(model.parameters()), model.get_input(CPU)
    model.get_loss(inputs, model(*inputs)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with make_memory_tracker([model, optimizer]) as tracker:
        model.get_loss(inputs, model(*inputs)).backward()
    peak = {name: size for name, size in bytes_by_category(tracker, "peak", CPU).items() if size and name != "total"}
    predicted = theory.tp_step_peak(PAIRS, 8 * 32, 4, **how)
    assert peak.keys() == predicted.keys()
    assert all(abs(peak[name] - size) <= 64 for name, size in predicted.items()), "but for scalars of the loss"


def test_a_wide_pair_is_cheap_to_share_and_tokens_do_not_matter():
    share = theory.message_share(100, 4, flops_per_s=6e9, wire_bytes_per_s=1e6, number_bytes=4)
    assert share == pytest.approx(3 * 4 * 6e9 / (3 * 100 * 1e6))
    assert theory.message_share(100, 1, 6e9, 1e6, 4) == 0
    pairs, link = [(8, 100)] * 1000, AlphaBeta(0.0, 1e-6)  # so many that the first one's missing all-reduce is nothing
    for tokens in (7, 70):
        seconds = theory.step_seconds(
            pairs, tokens, data=1, tp=4, flops_per_s=6e9, links={"tp": link, "data": link}, number_bytes=4
        )
        assert seconds["tp"] / seconds["compute"] == pytest.approx(share, rel=1e-3)


def test_a_step_by_hand():
    links = {"tp": AlphaBeta(1.0, 0.5), "data": AlphaBeta(10.0, 0.25)}
    seconds = theory.step_seconds([(2, 4)], 3, data=2, tp=2, flops_per_s=8.0, links=links, number_bytes=2)
    assert seconds["compute"] == 6 * (2 * 2 * 4) / 2 * 3 / 8
    assert seconds["tp"] == 1.0 + 0.5 * (3 * 2 * 2), "one all-reduce forward, none backward"
    thin = 2 * 2 + 2 + 2 * 2 + 2  # a pair's numbers on a rank of tp
    assert seconds["data"] == 3 * 10.0 + 0.25 * 3 * (thin * 2 / 2), "two all-gathers and a reduce-scatter"


def test_only_data_hides_and_only_behind_computing():
    seconds = {"compute": 3.0, "tp": 5.0, "data": 4.0}
    assert theory.seconds_after_overlap(seconds, overlap=False) == seconds
    assert theory.seconds_after_overlap(seconds, overlap=True) == {"compute": 3.0, "tp": 5.0, "data": 1.0}
    assert theory.seconds_after_overlap(seconds | {"data": 2.0}, overlap=True)["data"] == 0


def test_a_group_uses_as_many_cards_as_it_has_ranks_in_a_host():
    card, inside = AlphaBeta(2.0, 1 / 50), AlphaBeta(1.0, 1 / 450)
    assert theory.host_link(card, inside, 8, 1, 8) is inside
    assert theory.host_link(card, inside, 4, 2, 8) is inside
    for group, apart, cards in ((64, 1, 8), (32, 2, 4), (8, 8, 1), (4, 16, 1), (16, 1, 8)):
        assert 1 / theory.host_link(card, inside, group, apart, 8).beta_s_per_byte == pytest.approx(50 * cards)
    quick = AlphaBeta(0.0, 1 / 100)
    assert theory.host_link(quick, inside, 64, 1, 8).beta_s_per_byte == inside.beta_s_per_byte, "not faster than inside"


def test_a_split_leaves_every_line_as_many_samples():
    assert theory.valid_tp_sizes(4, 64, (1, 2, 4, 8)) == [1, 2, 4]
    assert theory.valid_tp_sizes(64, 16, (1, 2, 4, 8, 16)) == [4, 8, 16], "more ranks than samples"
    assert theory.valid_tp_sizes(6, 4, (1, 2, 3, 4)) == [3]


def test_all_ranks_together_do_the_same_operations_whatever_the_split():
    pairs, link = theory.mlp_pairs(8), AlphaBeta(0.0, 1.0)
    for tp in (1, 2, 4):
        how = {"data": 4 // tp, "tp": tp, "flops_per_s": 10.0, "links": {"tp": link, "data": link}}
        seconds = theory.step_seconds(pairs, 24 * tp // 4, **how)
        assert seconds["compute"] == pytest.approx(theory.step_flops_per_token(pairs) * 24 / 4 / 10)
    assert theory.step_flops_per_token([(2, 4)]) == 6 * 2 * 2 * 4


def test_a_clusters_steps_are_those_of_its_links_in_bfloat16():
    pairs = [(8, 32)] * 3
    wires, seconds = theory.cluster_steps(pairs, 640, (1, 4, 16), ranks=64, host=8)
    for tp in (1, 4, 16):
        axes, own = {"data": 64 // tp, "tp": tp}, 10 * tp
        handed = theory.step_collectives_by_axis(pairs, own, **axes)
        assert wires[tp] == {axis: size / 2 for axis, size in theory.axis_wire_bytes(handed, **axes).items()}
        links = theory.cluster_links(50e9, 8, **axes)
        how = {"flops_per_s": 400e12, "links": links, "number_bytes": 2}
        assert seconds[tp] == theory.step_seconds(pairs, own, **axes, **how)
    speeds = {tp: theory.cluster_links(50e9, 8, data=64 // tp, tp=tp) for tp in (4, 16)}
    gb_per_s = {tp: {axis: 1e-9 / each.beta_s_per_byte for axis, each in links.items()} for tp, links in speeds.items()}
    assert gb_per_s[4] == pytest.approx({"tp": 450, "data": 2 * 50}), "two GPUs of each data group are in a host"
    assert gb_per_s[16] == pytest.approx({"tp": 8 * 50, "data": 50})
