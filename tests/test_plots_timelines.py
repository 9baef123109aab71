"""labkit.plots.timelines: rows, bars, names and underlines as recorded."""

from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from labkit.plots import style
from labkit.plots import timelines as figures
from labkit.runs.result import RunResult

SESSION = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "9.9", "note": ""}
BARS = [  # lane, phase, name, start and length in ms
    ("compute", "forward", "layers.0", 0, 40),
    ("compute", "forward", "a.quite.longish_name_of_a_unit", 40, 2),
    ("compute", "optimizer", "", 90, 10),
    ("communication", "all_gather", "layers.1", 30, 20),
    ("communication", "broadcast", "", 60, 5),
    ("exposed", "all_gather", "layers.1", 42, 8),
    ("exposed", "broadcast", "", 60, 5),
]


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    pyplot.close("all")


def run(nproc=2, bars=BARS):
    lines = []
    for rank in range(nproc):
        common = {"v": 2, "rank": rank}
        lines.append(common | {"step": 0, "kind": "span", "name": "step", "start_us": 5e6, "dur_us": 1e5})
        for lane, phase, name, start, length in bars:
            times = {"start_us": start * 1e3, "dur_us": length * 1e3}
            lines.append(common | {"step": 3, "kind": "bar", "lane": lane, "phase": phase, "name": name} | times)
        for name, value in (("profiled_step", 100), ("communication", 25), ("exposed_communication", 13 + 2 * rank)):
            lines.append(common | {"step": 3, "kind": "scalar", "name": name, "value": value, "unit": "ms"})
    info = {"program": "made up", "nproc": nproc, "exit": "ok", "params": {}, "session": SESSION}
    return RunResult(Path("nowhere"), info, lines, [])


def rectangles(ax):
    """Colour, row, start and end of all that is drawn, in this order."""
    found = []
    for drawn in ax.collections:
        for path in drawn.get_paths():
            box = path.get_extents()
            found.append((to_hex(drawn.get_facecolor()[0]), (box.y0 + box.y1) / 2, box.x0, box.x1))
    return found


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_each_rank_has_a_row_of_compute_over_one_of_communication():
    ax = figures.timeline(run())
    labels = [tick.get_text() for tick in ax.get_yticklabels()]
    assert labels == ["rank 0 compute", "communication", "rank 1 compute", "communication"]
    rows = list(ax.get_yticks())
    assert rows == sorted(rows)
    assert ax.yaxis_inverted(), "rank 0 on top"
    assert ax.get_xlim() == (0, 100)
    assert ax.get_xlabel().endswith("ms")
    assert not ax.get_title()


def test_bars_have_their_place_and_the_colour_of_what_they_are():
    ax = figures.timeline(run(), ranks=[1])
    colours = figures.BAR_COLOURS
    found = rectangles(ax)
    bars = [found[index] for index in range(5)]
    spans = [(start, end) for _, _, start, end in bars]
    assert spans == [(0, 40), (40, 42), (90, 100), (30, 50), (60, 65)]
    assert [row for _, row, _, _ in bars] == pytest.approx([0, 0, 0, 1, 1])
    expected = [colours["forward"], colours["forward"], colours["optimizer"], colours["all_gather"], figures.style.GREY]
    assert [colour for colour, *_ in bars] == [colour.lower() for colour in expected]
    assert len(set(colours.values()) | {style.EXPOSURE_COLOUR, figures.style.GREY}) == len(colours) + 2


def test_what_runs_at_the_same_time_stands_one_above_the_other():
    buckets = [(0, 30), (20, 30), (40, 20), (60, 10), (69.995, 10)]
    bars = [("communication", "all_reduce", f"bucket {index}", *bucket) for index, bucket in enumerate(buckets)]
    ax = figures.timeline(run(bars=bars), ranks=[0])
    heights = [path.get_extents().height for drawn in ax.collections for path in drawn.get_paths()]
    rows = [row for _, row, _, _ in rectangles(ax)]
    assert rows[:5] == pytest.approx([0.8, 1.2, 0.8, 1, 1])
    assert heights[:5] == pytest.approx([0.4, 0.4, 0.4, 0.8, 0.8])
    assert texts(ax) == [f"bucket {index}" for index in range(5)]


def test_exposed_stretches_are_underlined_below_the_row_of_communication():
    found = [each for each in rectangles(figures.timeline(run())) if each[0] == style.EXPOSURE_COLOUR.lower()]
    assert [(start, end) for _, _, start, end in found] == [(42, 50), (60, 65)] * 2
    assert all(1.4 < row < 1.6 for _, row, _, _ in found[:2])
    assert all(3.8 < row < 4.0 for _, row, _, _ in found[2:])


def test_a_unit_is_named_where_its_bar_has_room():
    assert texts(figures.timeline(run(), ranks=[0])) == ["0", "1"]


def test_the_legend_has_what_there_is_and_stands_outside():
    ax = figures.timeline(run())
    ax.figure.canvas.draw()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["forward", "optimizer", "all-gather", "other", "exposed: 14% of the step"]
    assert ax.get_legend().get_window_extent().y0 >= ax.get_window_extent().y1
    assert ax.figure.get_supxlabel() == "CPU · 2 ranks on 2 cores · torch 9.9"


def test_axes_that_were_given_are_used():
    _, (left, right) = pyplot.subplots(1, 2)
    before = len(pyplot.get_fignums())
    assert figures.timeline(run(), ax=right) is right
    assert figures.timelines_by_run({"a": run()}, ax=left) is left
    assert len(pyplot.get_fignums()) == before


@pytest.mark.parametrize(("result", "ranks", "missing"), [(run(bars=[]), None, [0, 1]), (run(), [0, 2], [2])])
def test_a_run_without_a_timeline_is_refused(result, ranks, missing):
    with pytest.raises(ValueError) as caught:
        figures.timeline(result, ranks=ranks)
    assert str(caught.value).startswith(f"no timeline of ranks {missing}: ")


def test_runs_stand_below_each_other_on_one_scale_of_time():
    longer = [(lane, phase, name, 2 * start, 2 * length) for lane, phase, name, start, length in BARS]
    ax = figures.timelines_by_run({"one": run(), "two": run(bars=longer)})
    labels = [tick.get_text() for tick in ax.get_yticklabels()]
    assert labels == ["one", "messages", "two", "messages"] and ax.yaxis_inverted()
    assert ax.get_xlim()[1] > 200
    assert [text for text in texts(ax) if text.endswith("ms")] == [" 100 ms", " 200 ms"]
    exposed = [each for each in rectangles(ax) if each[0] == style.EXPOSURE_COLOUR.lower()]
    assert [(start, end) for _, _, start, end in exposed] == [(42, 50), (60, 65), (84, 100), (120, 130)]
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "exposed"
    with pytest.raises(ValueError, match="no timeline of rank 2: run it with its option timeline=True"):
        figures.timelines_by_run({"one": run()}, rank=2)


def test_a_run_without_marked_units_names_none():
    bars = [(lane, phase, "root" if lane == "compute" else name, *span) for lane, phase, name, *span in BARS]
    assert "root" not in texts(figures.timelines_by_run({"one": run(bars=bars)}))


def test_an_all_gather_too_short_for_its_name_has_it_above():
    short = [("communication", phase, "layers.7", 60, 0.3) for phase in ("all_gather", "reduce_scatter")]
    ax = figures.timeline(run(1, short))
    (label,) = ax.texts
    assert (label.get_text(), label.get_va()) == ("7", "bottom")
    assert label.get_position()[0] == pytest.approx(60.15)
    top = min(row for _, row, _, _ in rectangles(ax))
    assert label.get_position()[1] < top


def test_a_name_that_would_meet_the_one_before_goes_below():
    bars = [
        ("communication", "all_gather", f"layers.{each}", start, 0.1) for each, start in ((7, 30), (8, 30.5), (9, 60))
    ]
    labels = {text.get_text(): text for text in figures.timeline(run(1, bars)).texts}
    assert [labels[name].get_va() for name in "789"] == ["bottom", "top", "bottom"]
    assert labels["8"].get_position()[1] > labels["7"].get_position()[1], "the axis points down"


def test_a_name_that_has_no_room_above_and_below_is_left_out():
    starts = {"6": 30, "7": 30.2, "8": 30.4, "9": 60}
    bars = [("communication", "all_gather", f"layers.{each}", start, 0.1) for each, start in starts.items()]
    assert texts(figures.timeline(run(1, bars))) == ["6", "7", "9"]


def test_a_single_rank_is_said_to_send_nothing():
    said, bars = " one rank sends nothing", [each for each in BARS if each[0] == "compute"]
    assert said in texts(figures.timeline(run(1, bars)))
    assert said not in texts(figures.timeline(run(1))) + texts(figures.timeline(run(2, bars)))
