"""The explorer of lab 0: every control alone, and what it predicts against real ranks."""

import pytest
from fixture_explorers import drawn, held_against_time, one_moved, sentence
from fixture_long import long_but

from labkit.plots import style
from labkit_course.widgets import RingExplorer


@pytest.mark.parametrize("chosen", one_moved(RingExplorer), ids=str)
def test_every_value_of_every_control_is_predicted_and_drawn(chosen):
    figure, said = drawn(RingExplorer(), **chosen)
    by_ranks, by_size = figure.axes
    assert [row.get_text() for row in by_ranks.get_yticklabels()] == ["2", "4", "8", "64"]
    (bold,) = (row for row in by_ranks.get_yticklabels() if row.get_fontweight() == "bold")
    assert bold.get_text() == str(chosen["ranks"])
    (mark,) = (line for line in by_size.lines if line.get_marker() == "o")
    predicted_ms = RingExplorer().predict(**chosen)["all_reduce_ms"]
    assert mark.get_xdata()[0] == chosen["size"] and mark.get_ydata()[0] == pytest.approx(1e3 * predicted_ms)
    assert said.endswith(f"predicted to take {style.duration_text(predicted_ms / 1e3)}")


def test_a_ring_of_four_takes_six_steps_and_three_halves_of_the_bytes():
    explorer = RingExplorer()
    assert explorer.prediction["all_reduce_ms"] == pytest.approx(6 * 0.01 + 1.5 * 2**20 / 10e9 * 1e3)
    assert sentence(explorer, messages=8).startswith("48 steps of 10 µs and 157 µs for the bytes")


def test_the_answer_of_the_lab_is_what_the_explorer_shows():
    explorer = RingExplorer()
    assert sentence(explorer, ranks=64).startswith(
        "126 steps of 10 µs and 206 µs for the bytes are predicted to take 1.47"
    )
    start = explorer.predict(**explorer.chosen)["all_reduce_ms"]
    less_latency = explorer.predict(**explorer.chosen | {"latency_us": 1})["all_reduce_ms"]
    more_bandwidth = explorer.predict(**explorer.chosen | {"gb_per_s": 100})["all_reduce_ms"]
    assert less_latency < start / 4 < more_bandwidth


@pytest.mark.alone
@pytest.mark.parametrize(
    "chosen", long_but([{}], [{}, {"ranks": 2, "messages": 8}, {"size": 2**24}, {"messages": 64}]), ids=str
)
def test_what_is_predicted_is_measured(chosen):
    explorer = RingExplorer()
    explorer.chosen |= chosen
    held_against_time(explorer, "all_reduce_ms", most=1.15)
    assert "a ring of 10 µs and 10 GB/s, 1 s = " in explorer.result.stamp


@pytest.mark.parametrize(
    ("chosen", "said"), [({"ranks": 64}, "64 ranks are theory here"), ({"size": 2**30}, "1 GiB is theory here")]
)
def test_what_this_machine_cannot_measure_is_refused_with_what_to_change(chosen, said):
    explorer = RingExplorer()
    explorer.chosen |= chosen
    with pytest.raises(ValueError, match=f"{said}: to run it, take "):
        explorer.run_current()
