"""The explorer of lab 5: every control alone, and what it predicts against real ranks."""

import pytest
from fixture_explorers import held_against_time, sentence

from labkit import requirements
from labkit.theory import two_dim as theory
from labkit_course.widgets import TwoAxesExplorer, two_axes
from labkit_course.widgets import explorer as explorer_module

EVERY = [(name, value) for name, control in TwoAxesExplorer.controls.items() for _, value in control.options]
TOO_LONG = {("tp", 16): "take tp 1 or 2 or 4 or 8", ("ranks", 2): "take tp 1 or 2"}


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
    assert sentence(TwoAxesExplorer(), ranks=64, host=8, overlap=True) == (
        "64 ranks, 4 along tp: a rank sends 503 MB along tp and 472 MB along data in a step, which is predicted to "
        "take 11.4 ms; least is 10.3 ms with 1 along tp"
    )
    said = "64 ranks with tp = 4 cannot share 8 texts of 2048 tokens evenly: take tp 8 or 16"
    with pytest.raises(ValueError, match=said):
        sentence(TwoAxesExplorer(), ranks=64, tokens=16384)


def test_what_this_machine_cannot_run_is_refused_with_what_to_take(monkeypatch):
    monkeypatch.setattr(requirements, "usable_cores", lambda: [0, 1])
    explorer = TwoAxesExplorer()
    assert explorer.refusal_reason(**explorer.chosen) == ""
    explorer.chosen |= {"ranks": 64}
    with pytest.raises(ValueError, match="64 ranks are theory here: to run it, take 8 or fewer"):
        explorer.run_current()
    explorer.chosen |= {"ranks": 8, "overlap": True}
    with pytest.raises(ValueError, match=r"FSDP waits for its messages.*choose that they are waited for"):
        explorer.run_current()


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("chosen", [{}, {"tp": 8}, {"tokens": 16384, "tp": 1}, {"ranks": 4}], ids=str)
def test_what_is_predicted_is_measured(chosen):
    explorer = TwoAxesExplorer()
    explorer.chosen |= chosen
    held_against_time(explorer, "step_ms", most=1.15)
    assert "H100s, 4 a host, cards of 50 GB/s, 1 s = " in explorer.result.stamp


def test_a_run_sends_what_the_chosen_stack_would_but_for_biases():
    explorer = TwoAxesExplorer()
    wires, _ = two_axes._steps(**explorer.chosen)
    axes = {"data": 2, "tp": 4}
    small = theory.step_collectives_by_axis(theory.mlp_pairs(two_axes.RUN_DIM), 131072 // 64 // 2, **axes)
    larger = two_axes._size_ratio(**explorer.chosen)
    for axis, size in theory.axis_wire_bytes(small, **axes).items():
        assert larger * size == pytest.approx(wires[4][axis], rel=0.02)


def test_the_answer_of_the_lab_is_what_the_explorer_shows():
    explorer = TwoAxesExplorer()
    assert sentence(explorer).endswith(" with 1 along tp")
    assert sentence(explorer, tokens=16384).endswith(" with 8 along tp")
    _, seconds = two_axes._steps(**explorer.chosen)
    assert 0.8 < seconds[1]["data"] / seconds[1]["compute"] < 1, "waiting nearly doubles the step"
    assert sentence(explorer, overlap=True).endswith(" with 1 along tp")


def test_the_panel_does_not_offer_a_run_that_this_machine_cannot_make(monkeypatch):
    monkeypatch.setattr(requirements, "usable_cores", lambda: [0, 1])
    panel = explorer_module._Panel(TwoAxesExplorer())
    assert not panel._run.disabled
    panel._knobs["ranks"].value = 64
    assert panel._run.disabled and "64 ranks are theory here: to run it, take 8 or fewer" in panel._line.value
    assert "<img" in panel._picture.value, "theory is drawn all the same"
    panel._knobs["ranks"].value = 4
    assert not panel._run.disabled and "theory here" not in panel._line.value
    panel._knobs["tp"].value = 16
    assert panel._run.disabled and "take tp 1 or 2" in panel._picture.value
