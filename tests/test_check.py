"""labkit.check: a difference is a result with words for it, and only a run that failed raises."""

import json
import math
import subprocess
import sys

import pytest
import torch

import labkit
from labkit.errors import LabError, RankFailed
from labkit.parallel.halo import Strip, pad_with_halo
from labkit.runs import history
from labkit.runs.verdict import describe_error, describe_verdict

PROGRAM = """
from dataclasses import dataclass

from labkit import rank


@dataclass
class Config:
    check: str = "none"
    compared: int = 3
    ok: bool = False
    fails: str = ""


def main(config):
    with rank.session() as here:
        if config.fails == "before" and here.rank == 1:
            raise ValueError("rank 1 failed before the verdict")
        if config.check == "parity":
            try:
                here.finish_check(check="parity", compared=config.compared, ok=config.ok)
            except SystemExit:
                if config.fails == "after" and here.rank == 1:
                    raise ValueError("rank 1 failed after the verdict") from None
                raise


if __name__ == "__main__":
    rank.run_main(main, Config)
"""
FOUND = {"check": "parity", "compared": 5, "expected": 5, "max_rel_error": 0.034, "limit": 1e-5, "worst":
         "gradient fc1", "gradients_alive": True, "ok": False}  # fmt: skip


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "own_check.py"
    path.write_text(PROGRAM)
    return path


def from_the_other_side(strip, halo, rank, ranks):
    padded = pad_with_halo(strip, halo, Strip(3, None, rank, ranks))
    return torch.cat([padded[..., -halo:], strip, padded[..., :halo]], dim=-1)


def as_labkit_does(strip, halo, rank, ranks):
    return pad_with_halo(strip, halo, Strip(3, None, rank, ranks))


@pytest.mark.parametrize("launch", [labkit.check, lambda *words, **how: labkit.run(*words, check="parity", **how)])
def test_a_wrong_halo_exchange_is_a_result_that_names_what_differs(launch):
    use = {"exchange_halo": from_the_other_side}
    result = launch("convnext_spatial", device="cpu", strategy="yours", use=use)
    assert not result.ok and result.info["exit"] == "differs"
    worst = result.verdict["worst"]
    assert "stages." in worst and f"differ, most in {worst}" in result.verdict_text
    assert result.verdict["max_rel_error"] == result.value("max_rel_error") > 1e-3
    assert "[differs]: CPU · 2 ranks" in repr(result)
    for text in (repr(result), result._repr_html_()):
        assert "57 tensors compared with one device" in text and worst in text
        assert f"largest relative error {result.value('max_rel_error'):.2g}, tolerance 1e-05" in text
    again = labkit.load(result.folder)
    assert not again.ok and again.verdict == result.verdict
    assert json.loads(result.ranks[0].log().splitlines()[-1]) == result.verdict
    assert history.find_runs(limit=1)[0].state(set()) == "differs"


def test_a_right_halo_exchange_is_ok():
    use = {"exchange_halo": as_labkit_does}
    result = labkit.check("convnext_spatial", device="cpu", strategy="yours", use=use)
    assert result.ok and result.info["exit"] == "ok"
    assert result.verdict_text == "57 tensors compared with one device: all equal, to 1 part in 100,000"


def test_a_check_that_compares_nothing_is_not_ok(program):
    result = labkit.check(program, compared=0, ok=True)
    assert not result.ok and "nothing was compared" in result.verdict_text


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_fails_before_or_after_the_verdict_is_a_failure(program, when):
    with pytest.raises(RankFailed, match=f"rank 1 failed {when} the verdict") as caught:
        labkit.check(program, fails=when)
    result = labkit.load(caught.value.log.parent)
    assert result.info["exit"] == "failed" and not result.ok


def test_a_program_that_gives_no_verdict_is_told_how(program):
    with pytest.raises(LabError, match=r"own_check with check='other' has given no verdict: .*finish_check"):
        labkit.check(program, check="other")


def test_the_command_line_and_a_bare_launch_leave_with_status_1(program):
    words = [str(program), "--check", "parity"]
    for launch in (["-m", "labkit", "run"], []):
        done = subprocess.run([sys.executable, *launch, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"check": "parity", "compared": 3, "ok": False}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "5 tensors compared with one device: they differ, most in gradient fc1, by more than 1 %"),
        ({"max_rel_error": math.nan}, "they differ, most in gradient fc1, by nan"),
        ({"max_rel_error": math.inf}, "they differ, most in gradient fc1, by inf"),
        (
            {"reference": "plain training", "ok": True, "limit": 0.0},
            "5 tensors compared with plain training: all equal",
        ),
        ({"max_rel_error": 0.0, "expected": 9}, "5 tensors compared with one device: 9 were to be compared"),
        ({"max_rel_error": 0.0, "gradients_alive": False}, "a gradient of the reference is zero or missing"),
    ],
)
def test_a_verdict_says_why_in_words(changed, text):
    assert text in describe_verdict(FOUND | changed)
    assert f"tolerance {(FOUND | changed)['limit']:g}" in describe_error(FOUND | changed)


def test_a_verdict_without_errors_counts_values():
    found = {"check": "parity", "compared": 4096, "wrong": 3, "ok": False}
    assert describe_verdict(found) == "4,096 values compared with one device: 3 of rank 0's differ"
    assert describe_verdict({"check": "wire", "compared": 4, "ok": True}) == "wire: 4 values compared: all equal"
    assert describe_error(found) == describe_error({}) == describe_verdict({}) == ""
