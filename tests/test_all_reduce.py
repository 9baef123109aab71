"""launch/all_reduce and the fit of what it measures: right sums, every message timed and counted, alpha and beta."""

import json
import math

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.errors import ParameterError
from labkit.parallel.ring import ring_all_reduce_steps
from labkit.session.traffic import CommunicationCounter
from labkit.theory.collectives import WIRE_FRACTIONS, AlphaBeta, collective_wire_bytes, fit_alpha_beta

MESSAGES = {"message_bytes": (64, 4096), "total_bytes": 4096, "pieces": (1, 4)}


def test_every_sum_is_that_of_one_device():
    result = labkit.run("all_reduce", nproc=2, device="cpu", check="parity", **MESSAGES)
    said = json.loads(result.ranks[0].log().splitlines()[-1])
    assert said == {"check": "parity", "compared": (64 + 4096 + 4096 + 4096) // 4, "wrong": 0, "ok": True}


def test_every_message_is_timed_in_every_round_and_counted_once():
    result = labkit.run("all_reduce", nproc=2, device="cpu", repeats=3, **MESSAGES)
    spans = result.frame[result.frame["kind"] == "span"]
    for name in ("message_64", "message_4096", "pieces_1", "pieces_4"):
        assert len(spans[spans["name"] == name]) == 2 * 3, name
        assert result.value(f"{name}_ms") > 0
    assert result.value("all_reduce_count") == 2 + 1 + 4
    assert result.value("all_reduce_bytes") == 64 + 4096 + 2 * 4096


def test_pieces_that_are_asked_for_at_once_are_all_sent_and_all_waited_for():
    small = {"message_bytes": (8, 16), "total_bytes": 4000, "pieces": (10,), "repeats": 2, "at_once": True}
    result = labkit.run("all_reduce", nproc=2, device="cpu", **small)
    assert result.value("all_reduce_count") == 2 + 10
    assert result.value("all_reduce_bytes") == 8 + 16 + 4000
    assert result.value("pieces_10_ms") > 0


def test_bytes_handed_to_the_calls_and_on_the_wire_of_three_ranks_differ():
    result = labkit.run("all_reduce", nproc=3, device="cpu", repeats=1, **MESSAGES)
    assert result.value("all_reduce_bytes") == 64 + 4096 + 2 * 4096
    assert result.value("all_reduce_wire_bytes") == pytest.approx(4 / 3 * (64 + 4096 + 2 * 4096))


def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather_on_the_wire():
    whole, ranks = 1200, 4
    cost = {name: collective_wire_bytes(name, whole, ranks) for name in WIRE_FRACTIONS} | {
        "all_gather": collective_wire_bytes("all_gather", whole / ranks, ranks)  # which takes a part
    }
    assert cost["all_reduce"] == cost["reduce_scatter"] + cost["all_gather"] == 2 * cost["all_to_all"] == 1800
    assert (cost["broadcast"], cost["send"], cost["recv"]) == (900, 1200, 0)
    assert collective_wire_bytes("all_reduce", whole, 1) == 0, "alone there is nobody to send to"


@pytest.mark.parametrize(("name", "ranks"), [("gossip", 4), ("all_reduce", 0)])
def test_the_wire_of_an_unknown_collective_or_of_no_rank_is_refused(name, ranks):
    with pytest.raises(ValueError, match="take 1 rank or more, and one of all_reduce, reduce_scatter"):
        collective_wire_bytes(name, 8, ranks)


@pytest.mark.parametrize(
    ("nproc", "parameters", "message"),
    [
        (1, {}, "at least 2 ranks: with 1 nothing is sent"),
        (2, {"message_bytes": (64, 64)}, "take at least 2 sizes"),
        (2, {"message_bytes": (64, 65)}, "65 bytes are no whole number of float32: take a multiple of 4"),
        (2, {"total_bytes": 4096, "pieces": (1, 3)}, "4096 bytes cannot be cut into 3 equal .* that divide 1024"),
    ],
)
def test_what_cannot_work_is_refused_before_a_launch(nproc, parameters, message):
    with pytest.raises(ParameterError, match=message):
        labkit.run("all_reduce", nproc=nproc, device="cpu", **parameters)


def around_the_ring(length):
    mine = torch.arange(float(length)) + dist.get_rank()
    with CommunicationCounter() as traffic:
        held = list(ring_all_reduce_steps(mine))
    dist.all_reduce(mine)
    return held, mine, traffic.bytes["send"]


@pytest.mark.parametrize(("ranks_", "length"), [(4, 8), (3, 7), (2, 1)])
def test_a_ring_ends_with_the_sum_and_sends_what_theory_says(ranks, ranks_, length):
    sent = []
    for held, total, size in ranks(ranks_)(around_the_ring, length):
        assert len(held) == 2 * (ranks_ - 1)
        assert torch.equal(held[-1], total)
        done = (held[ranks_ - 2] == total).sum()
        assert done >= length // ranks_, "after a reduce-scatter a rank has a part of the sum"
        sent.append(size)
    assert sum(sent) == ranks_ * collective_wire_bytes("all_reduce", 4 * length, ranks_)


def test_messages_cost_a_latency_each_and_their_bytes_once():
    network = AlphaBeta(1e-4, 1e-9)
    assert network.seconds(10**6) == pytest.approx(1.1e-3)
    assert network.seconds(10**6, messages=100) == pytest.approx(11e-3)
    assert network.break_even_bytes == pytest.approx(1e5)
    assert AlphaBeta(1e-4, 0.0).break_even_bytes == math.inf
    assert network.seconds(network.break_even_bytes) == pytest.approx(2 * network.alpha_s)


def test_a_fit_finds_what_made_the_times():
    network = AlphaBeta(80e-6, 0.7e-9)
    found = fit_alpha_beta({size: network.seconds(size) for size in (1024, 65536, 2**20, 2**22)})
    assert found.alpha_s == pytest.approx(network.alpha_s)
    assert found.beta_s_per_byte == pytest.approx(network.beta_s_per_byte)


def test_a_fit_heeds_small_messages_as_much_as_large_ones():
    network = AlphaBeta(80e-6, 0.7e-9)
    times = {size: network.seconds(size) for size in (1024, 4096, 16384, 65536, 2**20, 2**22)}
    times[2**22] *= 1.2  # by absolute error this alone would decide, and alpha would be off by half and more
    found = fit_alpha_beta(times)
    assert found.alpha_s == pytest.approx(network.alpha_s, rel=0.1)


@pytest.mark.parametrize(
    ("times", "expected"),
    [({10: 1e-6, 1000: 2e-4}, (0, None)), ({10: 1e-3, 1000: 0.9e-3}, (None, 0))],
)
def test_neither_number_is_negative(times, expected):
    found = fit_alpha_beta(times)
    for value, wanted in zip((found.alpha_s, found.beta_s_per_byte), expected, strict=True):
        assert value == wanted if wanted is not None else value > 0


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({8: 1.0}, "1 sizes cannot tell latency from bytes"),
        ({8: 1.0, 16: 0.0}, "16 bytes in 0.0 s"),
        ({0: 1, 1: 1}, "0 b"),
    ],
)
def test_a_fit_refuses_what_it_cannot_use(times, message):
    with pytest.raises(ValueError, match=message):
        fit_alpha_beta(times)
