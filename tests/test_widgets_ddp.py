"""The explorer of lab 4: every control alone, and what it predicts against real ranks."""

import pytest
from fixture_cells import run_cells
from fixture_explorers import held_against_time, sentence

import labkit
from labkit.widgets import BucketExplorer

EVERY = [(name, value) for name, control in BucketExplorer.controls.items() for _, value in control.options]


@pytest.mark.parametrize(("name", "value"), EVERY)
def test_every_value_of_every_control_is_predicted_and_sentence(name, value):
    explorer = BucketExplorer()
    said = sentence(explorer, **{name: value})
    assert said == sentence(explorer), "the sentence is the same every time"
    assert f"{explorer.prediction['all_reduce_count']} bucket" in said


def test_the_sentence_says_what_theory_says():
    explorer = BucketExplorer()
    assert sentence(explorer) == (
        "15 buckets, 1.66 MB; the backward pass is predicted to take 7.33 ms, of which 2.33 ms are exposed messages"
    )
    assert "take 5.17 ms, of which 0.175 ms are exposed" in sentence(explorer, hidden=True), "the last bucket"
    assert sentence(explorer, bucket_mb=100.0).startswith("1 bucket, ")


@pytest.mark.alone
@pytest.mark.parametrize("chosen", [{}, {"network": (24, 256), "bucket_mb": 1.0}], ids=["default", "wider"])
def test_what_is_predicted_is_measured(chosen):
    explorer = BucketExplorer()
    explorer.chosen |= chosen
    held_against_time(explorer, "backward_ms", most=1.5)


def test_costs_are_timed_beside_steps_and_not_counted():
    (result,) = run_cells("ddp_compile", 2, [{"mode": "ddp", "dim": 8, "steps": 2, "costs": True}])
    assert {"alone_ms", "pieces_1_ms", "pieces_64_ms"} <= set(result.summary())
    assert (result.value("all_reduce_count"), result.value("all_reduce_bytes")) == (1, 4 * 4 * (64 + 8))


@pytest.mark.parametrize("other", [{}, {"mode": "ddp", "case": "bf16"}, {"mode": "ddp", "check": "parity"}])
def test_costs_are_those_of_the_reducer(other):
    with pytest.raises(labkit.ParameterError, match="use mode ddp, case cpu, check none and no race"):
        labkit.run("ddp_compile", costs=True, **other)


def test_the_answer_of_the_lab_is_what_the_explorer_shows():
    explorer, times_ms = BucketExplorer(), {}
    for label, size in explorer.controls["bucket_mb"].options:
        said = sentence(explorer, hidden=True, alpha_us=100, bucket_mb=size)
        times_ms[label] = float(said.partition("predicted to take ")[2].partition(" ms")[0])
    assert min(times_ms, key=times_ms.get) == "0.1 MiB"
    assert times_ms["one gradient"] > 4 * 5 and times_ms["100 MiB"] > times_ms["1 MiB"]
