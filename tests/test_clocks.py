"""Lab 4's clock, on its own."""

import time

import pytest
import torch.distributed as dist

from labkit_course import clocks

SLEEP_S = 0.02


@pytest.fixture
def events(monkeypatch):
    """What a rank does, in order; its barriers need no process group."""
    noted = []
    monkeypatch.setattr(dist, "barrier", lambda: noted.append("barrier"))
    return noted


def test_all_ranks_begin_each_call_together(events):
    clocks.median_ms(events.append, "call", calls=3)
    assert events == ["barrier", "call"] * 3


@pytest.mark.usefixtures("events")
def test_sleep_takes_time_on_the_clock_and_none_of_the_cpu():
    whole_ms, cpu_ms = clocks.median_ms(time.sleep, SLEEP_S)
    assert whole_ms >= 1e3 * SLEEP_S
    assert cpu_ms < 1e3 * SLEEP_S / 2


@pytest.mark.usefixtures("events")
def test_one_slow_call_does_not_count():
    sleeps = iter([SLEEP_S, 20 * SLEEP_S, SLEEP_S])
    whole_ms, _ = clocks.median_ms(lambda: time.sleep(next(sleeps)), calls=3)
    assert 1e3 * SLEEP_S <= whole_ms < 5e3 * SLEEP_S


def test_a_gpu_is_through_before_and_after_each_call(events, monkeypatch):
    monkeypatch.setattr(clocks.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(clocks.torch.cuda, "synchronize", lambda: events.append("synchronize"))
    clocks.median_ms(events.append, "call", calls=1)
    assert events == ["barrier", "synchronize", "call", "synchronize"]
