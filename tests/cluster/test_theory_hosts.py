"""labkit_cluster.theory against counting by hand and against a simulation."""

import random

import pytest

from labkit_cluster import theory


@pytest.mark.parametrize(("hosts", "nproc"), [(2, 2), (3, 4), (8, 1)])
def test_what_leaves_a_host_is_what_rings_carry_over_its_border(hosts, nproc):
    """Each ring is walked: a rank sends as many parts to the next as its collective has steps, one n-th each."""
    ranks, size = hosts * nproc, 7 * 8 * 9 * 10 * 11.0

    def crossing(ring, steps_of, total):
        parts = steps_of(len(ring)) * total / len(ring)
        return sum(parts for a, b in zip(ring, ring[1:] + ring[:1], strict=True) if a // nproc == 0 != b // nproc)

    flat = crossing([*range(ranks)], lambda n: 3 * (n - 1), size)
    across = [[host * nproc + local for host in range(hosts)] for local in range(nproc)]
    hybrid = sum(crossing(ring, lambda n: 2 * (n - 1), size / nproc) for ring in across)
    assert theory.host_egress_bytes(size, hosts, nproc, hybrid=False) == pytest.approx(flat)
    assert theory.host_egress_bytes(size, hosts, nproc, hybrid=True) == pytest.approx(hybrid)


def test_one_host_sends_nothing_to_others():
    assert [theory.host_egress_bytes(100.0, 1, 8, hybrid=each) for each in (False, True)] == [0.0, 0.0]


def test_no_other_interval_loses_less():
    best = theory.checkpoint_interval_s(30.0, 20_000.0)
    least = theory.checkpoint_overhead_share(best, 30.0, 20_000.0)
    assert all(
        theory.checkpoint_overhead_share(best * factor, 30.0, 20_000.0) > least for factor in (0.5, 0.9, 1.1, 2.0)
    )


def test_the_lost_share_is_that_of_a_simulated_run():
    """Failures at random; each costs what was trained since the last save."""
    draw, save_s, between_s, interval_s = random.Random(0), 20.0, 5_000.0, 400.0
    lost = trained = 0.0
    while trained < 4e7:
        until_failure = draw.expovariate(1 / between_s)
        saves, rest = divmod(until_failure, interval_s + save_s)
        trained += saves * interval_s
        lost += saves * save_s + rest
    assert lost / (lost + trained) == pytest.approx(
        theory.checkpoint_overhead_share(interval_s, save_s, between_s), rel=0.1
    )
