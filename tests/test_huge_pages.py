"""Huge pages: a parent gathers its memory in them while nobody waits for it."""

import ctypes
import mmap
import os
import platform
import time
from pathlib import Path

import pytest
from fixture_processes import wait_for

from labkit.launcher import huge_pages, warm_start

LIGHT_PARENT = Path(__file__).parent / "programs" / "light_parent.py"
RELEASE = tuple(int(each) for each in platform.release().split("-")[0].split(".")[:2])
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists() and RELEASE >= (6, 1)

pytestmark = pytest.mark.skipif(not HAS_HUGE_PAGES, reason="needs Linux 6.1 with transparent huge pages")


def huge_bytes(pid):
    """How much of a process's memory lies in huge pages."""
    line = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if "AnonHuge" in line)
    return int(line.split()[1]) * 1024


def test_memory_is_found_and_gathered_and_keeps_its_content():
    with mmap.mmap(-1, 8 * huge_pages.HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        content = os.urandom(len(memory))
        memory[:] = content
        own = [each for each in huge_pages.find_huge_page_addresses() if begin <= each < begin + len(memory)]
        assert len(own) in (7, 8) and all(each % huge_pages.HUGE_PAGE_BYTES == 0 for each in own)
        before = huge_bytes("self")
        for address in own:
            huge_pages.collapse_pages(address)
        assert huge_bytes("self") - before > 5 * huge_pages.HUGE_PAGE_BYTES
        assert memory[:] == content


def test_what_is_gone_or_was_never_there_is_left_alone():
    for address in (0, 1 << 46):
        huge_pages.collapse_pages(address)


def test_a_parent_gathers_while_it_is_free_and_stands_still_beside_a_cold_run(monkeypatch):
    monkeypatch.setattr(warm_start, "FORK_SERVER_ARGUMENTS", (str(LIGHT_PARENT),))
    parent = warm_start.ForkServer()
    pid = parent.process.pid
    assert parent.wait_until_ready(60)
    parent.send_command(warm_start.PAUSE)
    time.sleep(0.1)
    before = huge_bytes(pid)
    time.sleep(0.5)
    assert huge_bytes(pid) == before
    parent.send_command(warm_start.RESUME)
    wait_for(lambda: huge_bytes(pid) > before + 20 * huge_pages.HUGE_PAGE_BYTES, 10)
    parent.close()
    assert parent.process.wait(5) == 0
