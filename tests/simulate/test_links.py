"""labkit.theory.links against measured all-reduces, by hand, and against a network that is wrong."""

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labkit.theory.collectives import AlphaBeta, ring_s
from labkit.theory.links import LL128, MEASURED_LINKS, SIMPLE, Links, Tuning
from labkit_simulate.theory.hardware import get_hardware
from labkit_simulate.theory.reference_results import VTRAIN_RESULTS, VTRAIN_STEPS_MS
from labkit_simulate.theory.replicated import ReplicatedSetup
from labkit_simulate.theory.transformer import LLAMA_3_8B

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
spec = importlib.util.spec_from_file_location("benchmark_network", BENCHMARKS / "network.py")
network = importlib.util.module_from_spec(spec)
sys.modules["benchmark_network"] = network
spec.loader.exec_module(network)

INSIDE, BETWEEN = AlphaBeta(1e-6, 1e-9), AlphaBeta(1e-5, 8e-9)
PLAIN_LINKS = Links(INSIDE, BETWEEN, devices=4, cards=4)


@pytest.mark.parametrize("kind", network.FITTED)
def test_measured_links_are_within_a_quarter_of_what_was_measured_and_planted_ones_are_not(kind):
    rows = network.read_rows(kind)
    for hosts in {row.hosts for row in rows}:
        found = network.summary(network.errors(MEASURED_LINKS[kind], [row for row in rows if row.hosts == hosts]))
        assert found["median"] <= 0.1 and found["within_25"] >= 0.88, (hosts, found)
    wrong = network.summary(network.errors(MEASURED_LINKS[kind].slower(4), rows))
    assert wrong["within_25"] < 0.1


def test_the_fit_predicts_sizes_that_it_has_not_seen_and_no_network_that_it_has_not_seen():
    fitted, held = network.splits("b200-8x")["every second size"]
    found = network.summary(network.errors(network.fit_links("b200-8x", fitted), held))
    assert found["rows"] == 9 and found["median"] <= 0.1 and found["within_25"] >= 0.9
    fitted, held = network.splits("b200-8x")["4 hosts"]
    assert {row.hosts for row in fitted} == {1} and {row.hosts for row in held} == {4}
    assert network.summary(network.errors(network.fit_links("b200-8x", fitted), held))["median"] > 0.25


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize(("ranks", "hosts"), [(3, 1), (8, 2), (12, 3)])
def test_plain_links_are_the_ring_of_a_text_book(name, ranks, hosts):
    cards = AlphaBeta(BETWEEN.alpha_s, BETWEEN.beta_s_per_byte / 4)
    expected = ring_s(name, 1e6, ranks, inside=INSIDE, between=cards, hosts=hosts)
    assert PLAIN_LINKS.collective_s(name, 1e6, ranks, hosts, "ring") == pytest.approx(expected)


def test_the_quickest_protocol_is_taken_and_it_depends_on_the_size():
    def links(*protocols):
        return replace(PLAIN_LINKS, tuning=Tuning(protocols))

    both, simple, lines = links(SIMPLE, LL128), links(SIMPLE), links(LL128)
    for size, quick, slow in ((1e3, lines, simple), (1e9, simple, lines)):
        times = [each.collective_s("all_gather", size, 8, 2) for each in (both, quick, slow)]
        assert times[0] == times[1] < times[2]


def test_a_pass_over_the_tensor_is_whole_for_an_all_reduce_and_half_for_each_of_its_halves():
    copying = replace(PLAIN_LINKS, tuning=Tuning(copy_s_per_byte=1e-9))
    for name, handed, passes in (("all_reduce", 4e6, 1), ("reduce_scatter", 4e6, 0.5), ("all_gather", 1e6, 0.5)):
        more = copying.collective_s(name, handed, 4) - PLAIN_LINKS.collective_s(name, handed, 4)
        assert more == pytest.approx(passes * 4e6 * 1e-9), name


def test_the_switch_adds_only_on_one_full_host_and_rings_depend_on_the_ranks():
    switched = replace(PLAIN_LINKS, tuning=Tuning(nvls_s_per_byte=1e-12))
    quick = switched.collective_s("all_reduce", 1e9, 4)
    assert quick < 0.01 * switched.collective_s("all_reduce", 1e9, 3)
    assert switched.collective_s("all_gather", 1e9, 4) == PLAIN_LINKS.collective_s("all_gather", 1e9, 4)
    assert switched.collective_s("all_reduce", 1e9, 4, 4) == PLAIN_LINKS.collective_s("all_reduce", 1e9, 4, 4), (
        "a group of as many ranks as a host has devices, one on each of four hosts"
    )
    # V100s without a switch, measured: 22.5 GB/s between two of them, 134 between eight.
    v100 = MEASURED_LINKS["v100-8x"]
    speed = {ranks: 2 * (ranks - 1) / ranks * 1e9 / v100.collective_s("all_reduce", 1e9, ranks) for ranks in (2, 8)}
    assert speed[2] == pytest.approx(22.5e9, rel=0.05) and speed[8] == pytest.approx(134e9, rel=0.05)


def test_one_device_a_host_gathers_in_steps_that_double_and_other_groups_in_rings():
    nccl = replace(PLAIN_LINKS, tuning=Tuning((SIMPLE, LL128)))
    for name in ("all_gather", "reduce_scatter"):
        ring, doubling = (nccl.collective_s(name, 1e9, 8, 8, algorithm) for algorithm in ("ring", "best"))
        assert ring - doubling == pytest.approx((7 - 3) * BETWEEN.alpha_s), "it sends as many bytes"
        assert PLAIN_LINKS.collective_s(name, 1e9, 8, 8) == ring
        assert nccl.collective_s(name, 1e9, 8, 4) == nccl.collective_s(name, 1e9, 8, 4, "ring")


def test_published_steps_are_those_of_the_data_and_their_first_row_gave_the_share():
    with (BENCHMARKS / "data" / "vtrain.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    columns = ("tensor parallelism", "micro batch", "iteration time (ms)")
    assert [tuple(float(row[name]) for name in columns) for row in rows] == list(VTRAIN_STEPS_MS)
    for row, result in zip(rows, VTRAIN_RESULTS, strict=True):
        assert result.setup.tokens == int(row["global batch"]) * int(row["sequence length"])
        assert result.setup.parameters == pytest.approx(3.6e9, rel=0.05)
    first = VTRAIN_RESULTS[0]
    assert first.setup.estimate_step(first.hosts).step_s == pytest.approx(first.step_s, rel=0.01)


def test_replicas_sum_gradients_and_parts_of_a_model_sum_activations():
    hosts = get_hardware("a100-8x")
    alone, replicas, parts = (
        ReplicatedSetup(LLAMA_3_8B, 1, 2048, *mesh).estimate_step(hosts) for mesh in ((1, 1), (8, 1), (1, 8))
    )
    assert alone.exposed_s == 0 < min(replicas.exposed_s, parts.exposed_s)
    # Two sums a block in each pass, and two more at both ends, of tokens x width in two bytes.
    sums = (4 * 32 + 2) * hosts.links.collective_s("all_reduce", 2 * 2048 * 4096, 8)
    assert parts.exposed_s == pytest.approx(sums, rel=1e-9)
    assert parts.step_s - parts.exposed_s < 0.2 * alone.step_s


def test_zero_3_with_several_micro_batches_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"zero = 3 with accumulate = 2 .* take one micro batch, or zero = 1"):
        ReplicatedSetup(LLAMA_3_8B, 1, 2048, 8, accumulate=2, zero=3)
    ReplicatedSetup(LLAMA_3_8B, 1, 2048, 8, accumulate=2, zero=1)
