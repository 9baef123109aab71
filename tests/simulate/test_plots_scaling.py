"""labkit_simulate.plots.scaling: marks, bars and words where the numbers put them."""

import pytest
from matplotlib import pyplot

from labkit_simulate import plots

SERIES = {"weak": {64: 640.0, 128: 1280.0, 1024: 5120.0}, "strong": {64: 600.0, 1024: 600.0}}


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    pyplot.close("all")


def test_parts_of_a_step_add_up_and_say_how_much_is_waiting():
    ax = plots.step_time_parts(
        {"8": {"compute": 0.3, "exposed": 0.0}, "16": {"compute": 0.3, "exposed": 0.1}}, note="x"
    )
    ends = {(round(bar.get_y() + bar.get_height() / 2), round(bar.get_x() + bar.get_width(), 9)) for bar in ax.patches}
    assert ends == {(0, 0.3), (1, 0.3), (1, 0.4)}
    assert [text.get_text().strip() for text in ax.texts] == ["300 ms, 0% waiting", "400 ms, 25% waiting"]
    assert ax.figure.get_supxlabel() == "estimated, nothing was run · x"


def test_all_together_is_logarithmic_and_one_of_them_begins_at_zero():
    together = plots.total_throughput(SERIES, note="x")
    assert (together.get_xscale(), together.get_yscale()) == ("log", "log")
    assert [list(line.get_ydata()) for line in together.lines] == [[640, 1280, 5120], [600, 600]]
    assert [label.get_text() for label in together.get_xticklabels()] == ["64", "128", "1,024"]
    each = plots.throughput_per_gpu({"weak": {64: 800.0, 128: 800.0, 1024: 400.0}}, note="x")
    assert each.get_ylim()[0] == 0 and [text.get_text().strip() for text in each.texts] == ["50% of 64"]
    assert each.get_ylim()[1] > 800 and each.get_ylabel() == "tokens/s of one GPU"


def test_predictions_stand_at_their_ratio_within_the_band():
    ax = plots.estimate_accuracy({"a": 2.0, "b": 3.0}, {"a": 1.0, "b": 3.0}, within=1.5, note="x")
    marks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if line.get_marker() == "o"]
    assert marks == [(2.0, 0), (1.0, 1)]
    assert [text.get_text() for text in ax.texts] == ["2.00", "1.00"]
    low, high = ax.get_xlim()
    assert low < 1 / 1.5 and high > 2.0
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert (ax.patches[0].get_x(), ax.patches[0].get_width()) == pytest.approx((1 / 1.5, 1.5 - 1 / 1.5))


def test_ratios_stand_over_their_number_of_hosts_the_labels_beside_each_other_and_sources_have_marks():
    ax = plots.accuracy_by_hosts(
        {"as it is": [(8, 1.0), (32, 0.5)], "slower": [(8, 2.0), (32, 3.0)], "far": [(8, 4.0), (32, 5.0)]},
        ["A", "B"],
        within=1.25,
    )
    cases = [line for line in ax.lines if line.get_linestyle() == "None"]
    assert [line.get_marker() for line in cases] == ["D", "o"] * 3
    assert [[*line.get_ydata()] for line in cases] == [[1.0], [0.5], [2.0], [3.0], [4.0], [5.0]]
    assert len({line.get_color() for line in cases}) == 3
    assert cases[0].get_color() == cases[1].get_color()
    for hosts, own in ((8, cases[::2]), (32, cases[1::2])):
        places = [line.get_xdata()[0] for line in own]
        assert places == sorted(places) and places[1] == hosts
        assert places == pytest.approx([hosts] * 3, rel=0.07)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["as it is", "slower", "far", "A", "B"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["8", "32"]
    assert (ax.patches[0].get_y(), ax.patches[0].get_height()) == pytest.approx((0.8, 0.45))
