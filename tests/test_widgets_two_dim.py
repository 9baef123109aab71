"""The explorer of lab 5: every control alone, and what it predicts against real ranks."""

import pytest
from fixture_cells import run_cells
from fixture_explorers import held_against_time, sentence

import labkit
from labkit import requirements
from labkit.widgets import TwoAxesExplorer
from labkit.widgets import explorer as explorer_module

EVERY = [(name, value) for name, control in TwoAxesExplorer.controls.items() for _, value in control.options]
TOO_LONG = {("tp", 8): "take tp 1 or 2 or 4", ("tp", 16): "take tp 1 or 2 or 4"}


@pytest.mark.parametrize(("name", "value"), EVERY)
def test_every_value_of_every_control_is_predicted_and_drawn_or_says_what_to_take(name, value):
    explorer = TwoAxesExplorer()
    if (name, value) in TOO_LONG:
        with pytest.raises(ValueError, match=TOO_LONG[name, value]):
            sentence(explorer, **{name: value})
        return
    said = sentence(explorer, **{name: value})
    assert said == sentence(explorer), "the sentence is the same every time"
    assert f"{explorer.chosen['ranks']} ranks, {explorer.chosen['tp']} along tp" in said


def test_the_sentence_says_what_theory_says():
    cluster = {"ranks": 64, "tp": 4, "dim": 4096, "tokens": 131072}
    assert sentence(TwoAxesExplorer(), **cluster, overlap=True) == (
        "64 ranks, 4 along tp: a rank sends 1.01 GB along tp and 944 MB along data in a step, which is predicted to "
        "take 21.1 ms; least is 15.5 ms with 8 along tp"
    )
    with pytest.raises(ValueError, match="64 ranks with tp = 2 cannot share 16 samples evenly: take tp 4 or 8 or 16"):
        sentence(TwoAxesExplorer(), ranks=64, tokens=128)


def test_what_this_machine_cannot_run_is_refused_with_what_to_take(monkeypatch):
    monkeypatch.setattr(requirements, "usable_cores", lambda: [0, 1])
    explorer = TwoAxesExplorer()
    assert explorer.refusal_reason(**explorer.chosen) == ""
    explorer.chosen |= {"ranks": 64}
    with pytest.raises(ValueError, match="64 ranks are theory here: to run it, take 4 or fewer"):
        explorer.run_current()
    explorer.chosen |= {"ranks": 4, "dim": 4096}
    with pytest.raises(ValueError, match="operations is theory here: to run it, take a smaller width or fewer tokens"):
        explorer.run_current()


@pytest.mark.alone
@pytest.mark.parametrize("chosen", [{}, {"ranks": 2, "dim": 64}], ids=["default", "tp alone"])
def test_what_is_predicted_is_measured(chosen):
    explorer = TwoAxesExplorer()
    explorer.chosen |= chosen
    crowded = explorer.chosen["ranks"] > len(requirements.usable_cores())
    most = 2.5 if crowded else 1.5  # ranks that share a core wait for each other at every message
    held_against_time(explorer, "passes_ms", most=most)


def test_costs_are_timed_beside_steps_and_not_counted():
    cell = {"dim": 32, "batch": 16, "steps": 1}
    plain, timed = run_cells("two_dim", 4, [cell, cell | {"costs": True}])
    assert {"alone_ms", "passes_ms", "tp_4096_ms", "data_1048576_ms"} <= set(timed.summary())
    counted = [name for name in plain.summary() if name.endswith(("_count", "all_reduce_bytes"))]
    assert len(counted) == 8
    for name in counted:
        assert timed.value(name) == plain.value(name), name


@pytest.mark.parametrize("other", [{"plan": "ddp_tp"}, {"check": "parity", "compile": False}, {"seq": True}])
def test_costs_are_those_of_the_plan_of_pytorch(other):
    with pytest.raises(labkit.ParameterError, match="use plan fsdp_tp, layers dtensor, no seq, check none"):
        labkit.run("two_dim", nproc=4, costs=True, **other)


def test_the_answer_of_the_lab_is_what_the_explorer_shows():
    cluster = {"ranks": 64, "tp": 4, "dim": 4096, "tokens": 131072, "tp_gb_per_s": 450, "data_gb_per_s": 50}
    explorer = TwoAxesExplorer()
    assert sentence(explorer, **cluster).endswith(" with 8 along tp")
    assert sentence(explorer, data_gb_per_s=400, overlap=True).endswith(" with 1 along tp")


def test_the_panel_does_not_offer_a_run_that_this_machine_cannot_make(monkeypatch):
    monkeypatch.setattr(requirements, "usable_cores", lambda: [0, 1])
    panel = explorer_module._Panel(TwoAxesExplorer())
    assert not panel._run.disabled
    panel._knobs["ranks"].value = 64
    assert panel._run.disabled and "64 ranks are theory here: to run it, take 4 or fewer" in panel._line.value
    assert "<img" in panel._picture.value, "theory is drawn all the same"
    panel._knobs["ranks"].value = 2
    assert not panel._run.disabled and "theory here" not in panel._line.value
    panel._knobs["tp"].value = 8
    assert panel._run.disabled and "take tp 1 or 2" in panel._picture.value
