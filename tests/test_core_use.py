"""Other programs that used the cores while steps were timed are seen, and named under every figure."""

import multiprocessing
import os
from pathlib import Path

import psutil
import pytest

import labkit
from labkit.runs.result import RunResult, stamp_text
from labkit.session import core_use
from notebooks.tools import build

STAT = """cpu  900 0 0 900 0 0 0 0 0 0
cpu0 100 20 3 9999 9999 4 5 6 100 20
cpu1 200 0 0 1 1 0 0 0 0 0
cpu12 300 0 0 1 1 0 0 0 0 0
intr 1 2 3
"""


def test_a_core_is_busy_with_all_but_idling_and_waiting(tmp_path, monkeypatch):
    path = tmp_path / "stat"
    path.write_text(STAT)
    monkeypatch.setattr(core_use, "STAT", path)
    ticks = os.sysconf("SC_CLK_TCK")
    assert core_use.busy_s([0]) == 138 / ticks
    assert core_use.busy_s([0, 12]) == 438 / ticks


def result_of(busy: float, own: tuple[float, ...], timed_s: float = 1.0) -> RunResult:
    """A run whose ranks used ``own`` cores while ``busy`` cores of two were busy."""
    lines = [
        {"v": 1, "rank": rank, "step": 5, "kind": "scalar", "name": name, "value": value, "unit": "cores"}
        for rank, cores in enumerate(own)
        for name, value in (("timed_s", timed_s), ("rank_cores", cores), ("busy_cores", busy))
    ]
    session = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "2.13.0"}
    info = {"program": "p", "params": {}, "nproc": len(own), "exit": "ok", "session": session}
    return RunResult(Path("none"), info, lines, [])


@pytest.mark.parametrize(
    ("busy", "own", "timed_s", "others"),
    [(1.9, (0.5, 0.4), 1, 1.0), (1.9, (1.0, 0.7), 1, 0), (1.0, (0.6,), 0.02, 0), (1.0, (0.6,), 2, 0.4)],
)
def test_what_others_used_is_what_the_ranks_did_not(busy, own, timed_s, others):
    result = result_of(busy, own, timed_s)
    assert result.cores_of_others == pytest.approx(others)
    assert ("disturbed" in result.stamp) == ("disturbed" in repr(result)) == bool(others)
    assert not set(result.summary().columns) & {"timed_s", "rank_cores", "busy_cores"}


def test_of_several_runs_those_that_were_disturbed_are_counted():
    quiet, loud = result_of(0.5, (0.5,)), result_of(1.75, (0.5,))
    said = "disturbed: other programs used up to 1.2 cores in 1 of 2 runs; run it again"
    assert stamp_text([quiet, loud]).splitlines()[-1] == said
    assert result_of(1.0, ()).cores_of_others == 0


def spin() -> None:
    while True:
        pass


@pytest.mark.alone
def test_a_run_beside_a_busy_core_is_marked():
    beside = psutil.cpu_percent(interval=1) / 100 * psutil.cpu_count()  # the tests may run beside another program
    process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    process.start()
    try:
        result = labkit.run("convnext_spatial", nproc=1, strategy="plain", steps=10)
    finally:
        process.kill()
    assert 0.5 < result.cores_of_others < 1.5 + beside


BUSY_NOTEBOOK = """\
# %%
import subprocess, sys
import labkit

busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
labkit.run("convnext_spatial", nproc=1, strategy="plain", steps=10)
busy.kill()
"""


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.notebook
def test_the_build_refuses_timings_that_were_disturbed(tmp_path, capsys):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "07_busy.py").write_text(BUSY_NOTEBOOK)
    assert build.main(folder=tmp_path) == 1
    assert "convnext_spatial" in (said := capsys.readouterr().err) and "was disturbed: other programs used" in said
    assert not (tmp_path / "solved" / "07_busy.ipynb").exists()


@pytest.mark.alone
def test_a_busy_core_slows_a_step_down_by_no_more_than_its_share():
    """Two threads, of which one has half a core, and no more: idle threads of OpenMP do not spin."""
    how = {"nproc": 1, "strategy": "plain", "steps": 10}
    alone = min(labkit.run("convnext_spatial", **how).value("step_ms") for _ in range(3))
    process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    process.start()
    try:
        beside = min(labkit.run("convnext_spatial", **how).value("step_ms") for _ in range(3))
    finally:
        process.kill()
    assert beside < 10 * alone, "it was 35 to 100 times"


@pytest.mark.alone
@pytest.mark.long
def test_ranks_that_end_a_step_one_after_the_other_do_not_disturb_themselves():
    runs = [labkit.run("two_dim", nproc=4, steps=3, warm=True) for _ in range(6)]
    assert sum(bool(result.cores_of_others) for result in runs) <= 1
