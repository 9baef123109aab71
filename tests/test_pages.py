"""Huge pages: a parent gathers its memory in them while nobody waits for it."""

import ctypes
import mmap
import os
import platform
import time
from pathlib import Path

import pytest
from fixture_processes import wait_for

from labkit.launcher import pages, warm

LIGHT_PARENT = Path(__file__).parent / "programs" / "light_parent.py"
RELEASE = tuple(int(each) for each in platform.release().split("-")[0].split(".")[:2])
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists() and RELEASE >= (6, 1)

pytestmark = pytest.mark.skipif(not HAS_HUGE_PAGES, reason="needs Linux 6.1 with transparent huge pages")


def huge_bytes(pid):
    """How much of a process's memory lies in huge pages."""
    line = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if "AnonHuge" in line)
    return int(line.split()[1]) * 1024


def test_memory_is_found_and_gathered_and_keeps_its_content():
    with mmap.mmap(-1, 8 * pages.HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        content = os.urandom(len(memory))
        memory[:] = content
        own = [each for each in pages.of_this_process() if begin <= each < begin + len(memory)]
        assert len(own) in (7, 8) and all(each % pages.HUGE_PAGE == 0 for each in own)
        before = huge_bytes("self")
        for address in own:
            pages.gather(address)
        assert huge_bytes("self") - before > 5 * pages.HUGE_PAGE
        assert memory[:] == content


def test_what_is_gone_or_was_never_there_is_left_alone():
    for address in (0, 1 << 46):
        pages.gather(address)


def test_a_parent_gathers_while_it_is_free_and_stands_still_beside_a_cold_run(monkeypatch):
    monkeypatch.setattr(warm, "PROGRAM", (str(LIGHT_PARENT),))
    parent = warm.Parent()
    pid = parent.process.pid
    assert parent.becomes_ready(60)
    parent.say(warm.STAND_STILL)
    time.sleep(0.1)
    before = huge_bytes(pid)
    time.sleep(0.5)
    assert huge_bytes(pid) == before
    parent.say(warm.GO_ON)
    wait_for(lambda: huge_bytes(pid) > before + 20 * pages.HUGE_PAGE, 10)
    parent.retire()
    assert parent.process.wait(5) == 0
