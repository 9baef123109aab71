"""Variants run in turn; of each, a typical run that nothing disturbed is kept."""

import itertools
import sys
from types import SimpleNamespace

import pytest
from fixture_messages import words

import labkit
from labkit.errors import ParameterError

PROGRAM, VARIANTS = "fsdp_wrap", {"block": {"wrap": "block"}, "root": {"wrap": "root", "nproc": 4}}


@pytest.fixture
def ran(monkeypatch):
    """What was run, in order; the test says how long steps took and what others used of the cores."""
    asked, outcomes = [], []

    def run(program, **given):
        asked.append(given)
        step_ms, others, duration_s = outcomes.pop(0)
        return SimpleNamespace(value={"step_ms": step_ms}.get, cores_of_others=others, info={"duration_s": duration_s})

    monkeypatch.setattr(sys.modules["labkit.launcher.comparison"], "run", run)
    return asked, outcomes


def test_variants_run_in_turn_and_the_median_of_each_is_kept(ran):
    asked, outcomes = ran
    outcomes += [(each, 0.0, 1.0) for each in (5, 50, 9, 70, 6, 40)]
    kept = labkit.compare(PROGRAM, VARIANTS, steps=2)
    assert [given["wrap"] for given in asked] == ["block", "root"] * 3
    assert asked[1] == {"wrap": "root", "nproc": 4, "steps": 2}
    assert {label: result.value("step_ms") for label, result in kept.items()} == {"block": 6, "root": 50}


def test_a_disturbed_run_counts_only_where_there_is_no_other(ran):
    _, outcomes = ran
    outcomes += [(90, 1.0, 1.0), (50, 0.0, 1.0), (91, 0.5, 1.0), (20, 1.0, 1.0), (8, 0.0, 1.0), (51, 0.0, 1.0)]
    kept = labkit.compare(PROGRAM, VARIANTS)
    assert {label: result.value("step_ms") for label, result in kept.items()} == {"block": 8, "root": 51}


def test_what_was_always_disturbed_runs_again_within_the_budget(ran):
    asked, outcomes = ran
    outcomes += [(90, 1.0, 1.0), (50, 0.0, 1.0), (91, 1.0, 1.0), (7, 0.0, 1.0)]
    kept = labkit.compare(PROGRAM, VARIANTS, rounds=1)
    assert [given["wrap"] for given in asked] == ["block", "root", "block", "block"]
    assert kept["block"].value("step_ms") == 7
    outcomes += [(90, 1.0, 3.0), (50, 0.0, 1.0)]
    kept = labkit.compare(PROGRAM, VARIANTS, rounds=1, budget_s=2)
    assert len(asked) == 6, "a run of 3 s is longer than the budget"
    assert kept["block"].cores_of_others == 1.0, "it stays marked"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"rounds": 0}, words("rounds = 0 … at least 1")),
        ({"wrap": "block"}, words("wrap: … 'block' … all … leave one out")),
        ({"dimm": 3}, words("dimm")),
    ],
)
def test_what_is_wrong_is_refused_before_the_first_run(ran, how, said):
    asked, _ = ran
    with pytest.raises(ParameterError, match=said):
        labkit.compare(PROGRAM, VARIANTS, **how)
    assert not asked


@pytest.mark.alone
def test_the_faster_of_two_emulated_links_is_faster():
    links = {name: {"emulate": labkit.Emulated(latency_us=each)} for name, each in (("near", 1000), ("far", 20_000))}
    kept = labkit.compare("ddp_compile", links, rounds=1, mode="ddp", dim=8, steps=2)
    near, far = (kept[name].value("step_ms") for name in links)
    # Two steps of a ring.
    assert far - near == pytest.approx(38, abs=10)
    assert list(itertools.chain(kept)) == ["near", "far"]
