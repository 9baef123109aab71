"""Processes that come and go: wait for them, and tell the living from those that only have not been collected."""

import time

import psutil


def wait_for(condition, limit_s=60.0):
    """The first true value of condition(); fails the test after limit_s."""
    give_up = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"still waiting after {limit_s} s"
        time.sleep(0.02)
    return value


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
