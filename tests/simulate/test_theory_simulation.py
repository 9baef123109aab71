"""The small rules of lab 6 against the models of labkit.theory that they stand for."""

import pytest

from labkit.theory.links import PLAIN
from labkit_simulate.theory import simulation
from labkit_simulate.theory.hardware import get_hardware
from labkit_simulate.theory.step_time import Group, UnitTimes, collective_s, fsdp_tasks, schedule_tasks


@pytest.mark.parametrize(("hosts", "shard"), [(1, 2.0e8), (2, 5e7), (128, 4e5), (128, 0.5)])
def test_the_ring_is_that_of_the_time_model(hosts, shard):
    gpus = get_hardware("h100-8x", call_s=0.0, tuning=PLAIN)
    expected = collective_s("all_gather", shard, Group(8 * hosts, hosts), gpus, algorithm="ring")
    assert simulation.ring_s(shard, hosts, 8, gpus.inside, gpus.between) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("gathers", [[1.0, 1.0, 1.0, 1.0], [3.0, 0.5, 2.0, 7.0], [0.1, 5.0, 0.2, 4.0]])
@pytest.mark.parametrize("computes", [[1.0, 1.0, 1.0, 1.0], [4.0, 1.0, 1.0, 2.0], [0.3, 0.2, 6.0, 0.1]])
def test_a_forward_pass_ends_where_the_program_of_fsdp_ends_its_own(gathers, computes):
    units = [UnitTimes(str(index), *each, 0.0, 0.0) for index, each in enumerate(zip(gathers, computes, strict=True))]
    bars = [bar for bar in schedule_tasks(fsdp_tasks(units)).bars if bar.name.startswith("forward")]
    assert simulation.forward_s(gathers, computes) == pytest.approx(bars[-1].end_s)


def test_the_fewest_hosts_are_enough_and_one_less_are_not():
    for shared, own in ((1e12, 1e10), (3e11, 7e10), (5e8, 1.0)):
        hosts = simulation.fewest_hosts(shared, own, 8e10)
        assert own + shared / (8 * hosts) <= 8e10
        assert hosts == 1 or own + shared / (8 * (hosts - 1)) > 8e10
    assert simulation.fewest_hosts(1.0, 9e10, 8e10) is None


def test_groups_cross_hosts_by_their_stride():
    assert [simulation.hosts_spanned(8, stride, 8) for stride in (1, 2, 4, 8, 16)] == [1, 2, 4, 8, 8]
    assert simulation.efficiencies([2, 4], [10.0, 10.0]) == [1.0, 0.5]
