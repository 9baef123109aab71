"""The explorer of lab 4b: every control alone, and what it predicts against real ranks."""

import pytest
from fixture_explorers import held_against_time, sentence
from fixture_long import long_but

from labkit_course.widgets import BucketExplorer

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
        "15 buckets, 1.66 MB; the backward pass is predicted to take 5.17 ms, of which 0.175 ms are exposed messages"
    ), "the last bucket"
    assert sentence(explorer, bucket_mb=100.0).startswith("1 bucket, ")


@pytest.mark.alone
@pytest.mark.parametrize("chosen", long_but([{}], [{}, {"network": (24, 256), "bucket_mb": 100.0}]), ids=str)
def test_what_is_predicted_is_measured(chosen):
    explorer = BucketExplorer()
    explorer.chosen |= chosen
    held_against_time(explorer, "backward_ms", most=1.15)
    assert "a card of 100 µs and 2 GB/s, 1 s = " in explorer.result.stamp


def test_the_answer_of_the_lab_is_what_the_explorer_shows():
    explorer, times_ms = BucketExplorer(), {}
    for label, size in explorer.controls["bucket_mb"].options:
        said = sentence(explorer, alpha_us=400, bucket_mb=size)
        times_ms[label] = float(said.partition("predicted to take ")[2].partition(" ms")[0])
    assert min(times_ms, key=times_ms.get) == "1 MiB"
    assert times_ms["one gradient"] > 4 * 5 and times_ms["100 MiB"] > times_ms["1 MiB"]
