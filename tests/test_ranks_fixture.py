"""The fixtures ``ranks`` and ``threads``: results in order, the failing rank's own words, no process left behind."""

import functools
import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from fixture_ranks import RankFailure


def total(start=0):
    number = torch.tensor(float(dist.get_rank() + start))
    dist.all_reduce(number)
    return number.item()


def own_rank():
    return dist.get_rank(), dist.get_world_size()


def own_process():
    return os.getpid()


def random_number():
    return torch.rand(1).item()


def shape_of(tensor):
    return tensor * (dist.get_rank() + 1)


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("this one is wrong")
    dist.barrier()


def fail_one_after_the_other():
    time.sleep(0.1 if dist.get_rank() == 1 else 0.25)
    raise ValueError(f"said rank {dist.get_rank()}")


def leave_on_rank_1():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(1000)


def a_generator():
    return (n for n in range(2))


def test_a_sum_over_processes(ranks):
    assert ranks(2)(total, 1) == [3.0, 3.0]


def test_results_come_in_the_order_of_the_ranks(ranks):
    assert ranks(2)(own_rank) == [(0, 2), (1, 2)]
    assert ranks(3)(own_rank) == [(0, 3), (1, 3), (2, 3)]
    assert ranks(1)(own_rank) == [(0, 1)]


def test_tensors_go_in_and_come_out(ranks):
    one, two = ranks(2)(shape_of, torch.ones(3))
    assert torch.equal(one, torch.ones(3))
    assert torch.equal(two, torch.full((3,), 2.0))


def test_processes_are_used_again_and_the_seed_is_not_inherited(ranks):
    assert ranks(2)(own_process) == ranks(2)(own_process)
    assert os.getpid() not in ranks(2)(own_process)
    assert ranks(2)(random_number) == ranks(2)(random_number)


def test_a_failing_rank_says_which_it_is_and_where(ranks):
    with pytest.raises(RankFailure) as raised:
        ranks(2)(fail_on_rank_1)
    text = str(raised.value)
    assert text.startswith("rank 1 of 2 failed:")
    assert 'raise ValueError("this one is wrong")' in text
    assert "ValueError: this one is wrong" in text
    assert "answer_of" not in text, "the fixture's own frames are of no use to a reader"
    assert ranks(2)(total) == [1.0, 1.0], "the next body must run"


def test_the_first_failure_is_reported_not_the_last(ranks):
    with pytest.raises(RankFailure, match="said rank 1"):
        ranks(2)(fail_one_after_the_other)


def test_a_killed_process_is_the_failure_not_the_lost_connection_of_another(ranks):
    with pytest.raises(RankFailure, match="rank 1 of 2 failed:\nits process ended with exit status -9"):
        ranks(2)(leave_on_rank_1)


def test_a_hanging_rank_is_killed_at_the_timeout_and_no_process_stays(ranks):
    pids = ranks(2)(own_process)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"no end after 1 s on 1 of 2 ranks") as raised:
        ranks(2, timeout_s=1)(hang_on_rank_1)
    assert time.monotonic() - start < 10
    assert "in hang_on_rank_1" in str(raised.value)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    "body", [lambda: 1, functools.partial(total, 1), total.__call__], ids=["lambda", "partial", "method"]
)
def test_what_a_process_cannot_find_is_refused(ranks, body):
    with pytest.raises(ValueError, match="a body for ranks"):
        ranks(2)(body)


def test_a_nested_function_is_refused(ranks):
    def inner():
        return 1

    with pytest.raises(ValueError, match=r"cannot find test_a_nested_function_is_refused\.<locals>\.inner"):
        ranks(2)(inner)


def test_a_result_that_cannot_be_sent_is_a_failure_with_a_reason(ranks):
    with pytest.raises(RankFailure, match="cannot pickle 'generator' object"):
        ranks(2)(a_generator)


def test_a_sum_over_threads(threads):
    seen = []

    def body(start):
        seen.append(dist.get_rank())
        return total(start)

    assert threads(4)(body, 1) == [10.0] * 4
    assert sorted(seen) == [0, 1, 2, 3]
    assert not dist.is_initialized()


def test_results_of_threads_come_in_order(threads):
    assert threads(3)(own_rank) == [(0, 3), (1, 3), (2, 3)]
    assert threads(3)(own_rank) == [(0, 3), (1, 3), (2, 3)], "a second time"


def test_a_failing_thread_says_which_it_is_and_where_and_ends_the_others(threads):
    start = time.monotonic()
    with pytest.raises(RankFailure, match="ValueError: this one is wrong") as raised:
        threads(3, timeout_s=9)(fail_on_rank_1)
    assert time.monotonic() - start < 8
    assert str(raised.value).startswith("rank 1 of 3 failed:")
    assert threads(2)(total) == [1.0, 1.0]


def test_a_thread_that_waits_for_a_rank_that_never_comes_is_ended(threads):
    def body():
        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(RankFailure, match="no end after 1 s on 1 of 2 ranks\nrank 0 is here:"):
        threads(2, timeout_s=1)(body)
    assert threads(2)(total) == [1.0, 1.0]
