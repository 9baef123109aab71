"""labkit.theory.two_dim: against models on a fake group of four ranks, and by hand. Real ranks: test_two_dim."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from labkit.models.mlp import MLPStack
from labkit.rank.meter import by_category, tracker_of
from labkit.rank.traffic import CommunicationCounter
from labkit.theory import fsdp
from labkit.theory import two_dim as theory
from labkit.theory.collectives import wire_bytes
from launch import two_dim

DIM, BATCH = 16, 4
PLACES, PAIRS = 8 * BATCH, theory.mlp_pairs(DIM)
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
    two_dim.apply(two_dim.Config(seq=bool(cut), checkpointing=bool(again)), mesh, model)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    model.run_backward(model.get_loss(inputs, model(*inputs)))  # FSDP prepares in the first step
    with CommunicationCounter(mesh) as counter, tracker_of([model]) as tracker:
        loss = model.get_loss(inputs, model(*inputs))
        activations = by_category(tracker, "current", CPU)["activation"]
        model.run_backward(loss)
    how = {"sequence_parallel": bool(cut), "checkpointing": bool(again)}
    along = {axis: sent for axis, sent in counter.along.items() if axis}
    sent = {f"{axis}/{name}_count": count for axis, part in along.items() for name, count in part.counts.items()}
    sent |= {f"{axis}/{name}_bytes": size for axis, part in along.items() for name, size in part.bytes.items()}
    assert sent == theory.collectives(PAIRS, PLACES, data=4 // tp, tp=tp, **how)
    assert activations == theory.activation_bytes(PAIRS, PLACES, tp, **how) + 4, "and the loss"


def test_one_pair_by_hand():
    pair = [(10, 40)]
    assert theory.activations_sent(pair, 6, 2) == {"tp/all_reduce_count": 1, "tp/all_reduce_bytes": 240}
    assert theory.activations_sent(pair, 6, 2, sequence_parallel=True) == {
        "tp/all_gather_count": 3, "tp/all_gather_bytes": 3 * 120,
        "tp/reduce_scatter_count": 1, "tp/reduce_scatter_bytes": 240,
    }  # fmt: skip
    assert theory.activations_sent(pair, 6, 1) == {}
    layers = theory.rank_layers(pair, 4)
    assert [layer.shapes for layer in layers] == [((10, 10), (10,)), ((10, 10), (10,))]
    assert theory.parameters(layers) == 10 * 10 + 10 + 10 * 10 + 10


def test_along_dp_a_rank_sends_what_its_thin_model_has():
    half = theory.parameters(theory.rank_layers(PAIRS, 2))
    fsdp_sent = theory.parameters_sent(PAIRS, data=2, tp=2)
    assert fsdp_sent == {f"data/{k}": v for k, v in fsdp.collectives(theory.rank_layers(PAIRS, 2), 2).items()}
    assert fsdp_sent["data/reduce_scatter_bytes"] == 4 * half
    assert theory.parameters_sent(PAIRS, data=2, tp=2, plan="ddp_tp") == {"data/all_reduce_bytes": 4 * half}
    assert theory.parameters_sent(PAIRS, data=1, tp=4) == {}


def test_a_rank_of_ddp_keeps_its_thin_model_whole():
    kept = {plan: theory.resident_bytes(PAIRS, data=2, tp=2, plan=plan) for plan in ("ddp_tp", "fsdp_tp")}
    assert kept["ddp_tp"]["end_parameter_bytes"] == 2 * kept["fsdp_tp"]["end_parameter_bytes"]
    assert kept["ddp_tp"]["end_parameter_bytes"] == 4 * theory.parameters(theory.rank_layers(PAIRS, 2))


def test_on_the_wire_a_cut_sequence_costs_one_all_gather_more_at_each_end():
    plain, cut = (theory.activations_sent(PAIRS, PLACES, 4, sequence_parallel=cut) for cut in (False, True))
    wire = [theory.wire_bytes(sent, data=1, tp=4) for sent in (plain, cut)]
    assert wire[0] == {"data": 0, "tp": wire_bytes("all_reduce", plain["tp/all_reduce_bytes"], 4)}
    assert wire[1]["tp"] == wire[0]["tp"] * 12 / 10


def test_places_that_cannot_be_shared_are_refused():
    for sent_or_kept in (theory.activations_sent, theory.activation_bytes):
        assert sent_or_kept([(8, 16)], 6, 4), "a whole sequence need not be shared"
        with pytest.raises(ValueError, match="4 ranks cannot share places 6: 6 % 4 = 2"):
            sent_or_kept([(8, 16)], 6, 4, sequence_parallel=True)


def test_an_inner_width_that_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match="4 ranks cannot share the inner width 30: 30 % 4 = 2"):
        theory.rank_layers([(10, 30)], 4)
