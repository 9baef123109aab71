"""The small rules of labs 6 and 6b against the models of labkit.theory that they stand for."""

import pytest

from labkit.theory.links import SIMPLE
from labkit_simulate.theory import simulation
from labkit_simulate.theory.hardware import get_hardware
from labkit_simulate.theory.reference_results import (
    IBM_RESULTS,
    TORCHTITAN_TENSOR_RESULTS,
    VTRAIN_RESULTS,
    estimated_over_published,
    published_by,
)
from labkit_simulate.theory.step_time import UnitTimes, fsdp_tasks, schedule_tasks


@pytest.mark.parametrize("gathers", [[1.0, 1.0, 1.0, 1.0], [3.0, 0.5, 2.0, 7.0], [0.1, 5.0, 0.2, 4.0]])
@pytest.mark.parametrize("computes", [[1.0, 1.0, 1.0, 1.0], [4.0, 1.0, 1.0, 2.0], [0.3, 0.2, 6.0, 0.1]])
def test_a_forward_pass_ends_where_the_program_of_fsdp_ends_its_own(gathers, computes):
    units = [UnitTimes(str(index), *each, 0.0, 0.0) for index, each in enumerate(zip(gathers, computes, strict=True))]
    bars = [bar for bar in schedule_tasks(fsdp_tasks(units)).bars if bar.name.startswith("forward")]
    assert simulation.forward_s(gathers, computes) == pytest.approx(bars[-1].end_s)


@pytest.mark.parametrize("gathers", [[1.0, 1.0, 1.0, 1.0], [3.0, 0.5, 2.0, 7.0], [0.1, 5.0, 0.2, 4.0]])
@pytest.mark.parametrize("computes", [[1.0, 1.0, 1.0, 1.0], [4.0, 1.0, 1.0, 2.0], [0.3, 0.2, 6.0, 0.1]])
@pytest.mark.parametrize("reduces", [[1.0, 1.0, 1.0, 1.0], [6.0, 0.2, 3.0, 5.0], [0.0, 7.0, 0.1, 2.0]])
def test_a_backward_pass_ends_where_the_program_of_fsdp_ends_its_own(gathers, computes, reduces):
    order = [*zip(gathers, computes, reduces, strict=True)]
    units = [
        UnitTimes(str(index), gather, 0.0, back, reduce) for index, (gather, back, reduce) in enumerate(order[::-1])
    ]
    step = schedule_tasks(fsdp_tasks(units))
    begins = max(bar.end_s for bar in step.bars if bar.name.startswith("forward"))
    assert simulation.backward_s(gathers, computes, reduces) == pytest.approx(step.step_s - begins)


def test_the_fewest_hosts_are_enough_and_one_less_are_not():
    for shared, own in ((1e12, 1e10), (3e11, 7e10), (5e8, 1.0)):
        hosts = simulation.fewest_hosts(shared, own, 8e10)
        assert own + shared / (8 * hosts) <= 8e10
        assert hosts == 1 or own + shared / (8 * (hosts - 1)) > 8e10
    assert simulation.fewest_hosts(1.0, 9e10, 8e10) is None


def test_a_way_is_ruled_out_by_one_that_is_nowhere_slower_and_somewhere_quicker_by_more_than_the_margin():
    steps = {"a": {"14": 1.0, "434": 9.0}, "b": {"14": 2.0, "434": 3.0}, "c": {"14": 2.0, "434": 3.5}}
    assert simulation.unbeaten(steps) == ["a", "b"], "c is as quick as b on one network and slower on the other"
    assert simulation.unbeaten(steps, margin=0.2) == [*"abc"], "and slower by only a sixth"
    steps["d"] = {"14": 1.1, "434": 2.0}
    assert simulation.unbeaten(steps) == ["a", "d"]
    assert simulation.unbeaten(steps, margin=0.2) == ["d"], "a gains a tenth on one network and loses on the other"


def test_groups_of_middle_size_are_quickest_where_the_network_is_slow():
    slow = get_hardware("h100-8x").with_network(latency_us=434)
    times = {size: simulation.sharded_step_s(size, 1024, 8, 2048, slow) for size in (None, 8, 64)}
    assert times[64] < times[8] < times[None]


def test_a_step_that_was_simulated_needs_about_as_much_memory_as_the_formula_says():
    # Lab 6 simulates one and four sequences on 64 GPUs: 19.8 and 59.4 GiB.
    assert simulation.sharded_step_gib(64, 2048) == pytest.approx(19.8, rel=0.1)
    assert simulation.sharded_step_gib(64, 2048, 4) == pytest.approx(59.4, rel=0.1)


def test_another_network_changes_what_it_is_asked_to_change_and_nothing_else():
    gpus = get_hardware("h100-8x")
    assert gpus.with_network() == gpus
    changed = gpus.with_network(latency_us=14, bandwidth_share=0.5, protocols=(SIMPLE,), measured=True)
    assert changed.between.alpha_s == pytest.approx(14e-6)
    assert changed.between.beta_s_per_byte == pytest.approx(2 * gpus.between.beta_s_per_byte)
    assert changed.tuning.protocols == (SIMPLE,) and changed.tuning.network_measured
    assert changed.inside == gpus.inside and changed.matmul_share == gpus.matmul_share


def test_each_published_row_but_the_fitted_one_has_its_ratio_and_slower_links_raise_it():
    ratios, slower = estimated_over_published(), estimated_over_published(4.0)
    assert len(ratios) == len(IBM_RESULTS) + len(VTRAIN_RESULTS) - 1 + len(TORCHTITAN_TENSOR_RESULTS)
    row = IBM_RESULTS[1]
    assert ratios[1] == (row.training.ranks // 8, pytest.approx(row.tokens_per_s / row.estimate_step().tokens_per_s))
    assert all(quick[1] < slow[1] for quick, slow in zip(ratios, slower, strict=True))


def test_each_row_has_its_publisher():
    for fitted, vtrain in ((True, 22), (False, 17)):
        sources, rows = published_by(fitted=fitted), estimated_over_published(fitted=fitted)
        assert len(sources) == len(rows) and sources.count("vTrain") == vtrain
        hosts = {source: {at for by, (at, _) in zip(sources, rows, strict=True) if by == source} for source in sources}
        assert hosts == {"IBM": {12, 16}, "vTrain": {8}, "torchtitan": {8, 32}}


def test_a_published_row_is_estimated_with_the_latency_that_is_asked_for():
    assert estimated_over_published(latency_us=78) == pytest.approx(estimated_over_published())
    row, slow = IBM_RESULTS[1], estimated_over_published(latency_us=434)
    step_s = row.training.estimate_step(row.hardware.with_network(latency_us=434)).time.step_s
    assert slow[1] == (row.training.ranks // 8, pytest.approx(step_s * row.tokens_per_s / row.training.tokens))
    assert slow[1][1] > estimated_over_published()[1][1]
