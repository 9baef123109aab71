"""labkit.plots.two_dim: ranks in their groups, and bars as high as what they are given."""

from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch, Rectangle

from labkit import plots
from labkit.plots import style
from labkit.plots.two_dim import AXIS_COLOURS
from labkit.runs.result import RunResult
from labkit_course.widgets import two_axes

SESSION = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "9.9", "note": ""}
RUN = RunResult(Path("nowhere"), {"nproc": 4, "exit": "ok", "params": {}, "session": SESSION}, [], [])


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    pyplot.close("all")


@pytest.mark.parametrize(("data", "tp"), [(2, 2), (3, 4), (1, 2)])
def test_every_rank_lies_in_one_group_of_each_axis(data, tp):
    ax = plots.mesh_diagram(data, tp)
    frames = {axis: [] for axis in AXIS_COLOURS}
    for frame in (each for each in ax.patches if isinstance(each, FancyBboxPatch)):
        colour = to_hex(frame.get_edgecolor()).upper()
        frames[next(axis for axis in AXIS_COLOURS if AXIS_COLOURS[axis] == colour)].append(frame.get_bbox())
    assert {axis: len(found) for axis, found in frames.items()} == {"tp": data, "data": tp}
    ranks = {text.get_text(): text.get_position() for text in ax.texts if text.get_text().startswith("rank ")}
    assert set(ranks) == {f"rank {rank}" for rank in range(data * tp)}
    for name, place in ranks.items():
        rank = int(name.split()[1])
        inside = {axis: [i for i, box in enumerate(found) if box.contains(*place)] for axis, found in frames.items()}
        assert inside == {"tp": [rank // tp], "data": [rank % tp]}, "a row is a tp group, a column a data group"


def heights(ax):
    """Height of every bar that has one, by colour and whether it has a dashed frame, from left to right."""
    bars = sorted((bar.get_x(), to_hex(bar.get_facecolor()).upper(), bar.get_linestyle() == "--", bar.get_height())
                  for bar in ax.patches if bar.get_height())  # fmt: skip
    return [bar[1:] for bar in bars]


def test_traffic_is_stacked_by_axis_predicted_beside_measured():
    tp, data = AXIS_COLOURS["tp"], AXIS_COLOURS["data"]
    ax = plots.traffic_by_axis({"a": {"tp": 2e6, "data": 1e6}}, {"a": {"tp": 3e6}, "b": {"data": 4e6}}, results=[RUN])
    assert heights(ax) == [(tp, True, 2.0), (data, True, 1.0), (tp, False, 3.0), (data, False, 4.0)]
    bottoms = {
        bar.get_y() for bar in ax.patches if to_hex(bar.get_facecolor()).upper() == data and bar.get_height() == 1
    }
    assert bottoms == {2.0}, "on top of what goes along tp"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["a", "b"]
    assert ax.get_ylabel() == "on the wire from a rank in a step, MB"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["along tp", "along data", "predicted"]
    assert ax.figure.get_supxlabel() == "CPU · 4 ranks on 2 cores · mechanism, not speed · torch 9.9"


@pytest.mark.parametrize(("size", "unit"), [(5, "bytes"), (5e3, "kB"), (5e9, "GB"), (0, "bytes")])
def test_traffic_of_theory_alone_has_no_stamp_and_the_unit_that_reads_best(size, unit):
    ax = plots.traffic_by_axis({"1": {"data": size}}, xlabel="ranks along tp")
    assert ax.get_ylabel().endswith(unit) and ax.get_xlabel() == "ranks along tp"
    assert heights(ax) == ([(AXIS_COLOURS["data"], True, 5.0)] if size else [])
    assert ax.figure.get_supxlabel() == "" and len(ax.get_legend().get_texts()) == 2


@pytest.mark.parametrize(("data", "tp"), [(2, 2), (1, 4), (3, 1)])
def test_each_rank_of_a_mesh_keeps_its_own_piece_of_both_weights(data, tp):
    ax = plots.mesh_diagram(data, tp)
    boxes = [each for each in ax.patches if isinstance(each, Rectangle)]
    whole = [each for each in boxes if not each.get_fill()]
    dark = [each for each in boxes if to_hex(each.get_facecolor()).upper() == style.GREEN]
    assert len(whole) == len(dark) == 2 * data * tp
    for outline, own in zip(whole, dark, strict=True):
        part = own.get_width() * own.get_height() / (outline.get_width() * outline.get_height())
        assert part == pytest.approx(1 / (data * tp))
    corners = {
        (round(own.get_x() - out.get_x(), 6), round(own.get_y() - out.get_y(), 6)) for out, own in pieces(whole, dark)
    }
    assert len(corners) == data * tp, "no two ranks keep the same rows of the first weight"


def pieces(whole, dark):
    """Of the first weight of each pair."""
    return list(zip(whole, dark, strict=True))[::2]


def test_a_pair_shows_numbers_that_follow_from_each_other():
    ax = plots.pair_diagram([[1, 2]], [[1, 0], [0, 1], [1, 1], [1, -1]], [[1, 0, 2, 1], [0, 1, 1, 1]])
    shown = [text.get_text() for text in ax.texts]
    assert [number for number in shown if number.lstrip("-").isdigit()] == [
        *("1", "2", "1", "0", "0", "1", "1", "2", "1", "0", "0", "1", "1", "2"),
        *("1", "2", "1", "1", "1", "-1", "3", "0", "2", "1", "1", "1", "6", "3"),
        *("7", "5"),
    ]
    assert "first, rows 2–3, .T" in shown and "second, columns 0–1, .T" in shown


def test_the_backward_pass_of_a_pair_goes_back_through_the_pieces():
    ax = plots.pair_diagram(
        [[1, 2]], [[1, 0], [0, 1], [1, 1], [0, -1]], [[1, 0, 2, 1], [0, 1, 0, 1]], gradient=[[1, 2]]
    )
    shown = [text.get_text() for text in ax.texts]
    assert [number for number in shown if number.lstrip("-").isdigit()] == [
        *("1", "2", "1", "0", "0", "1", "1", "2", "1", "0", "0", "1", "1", "2"),
        *("1", "2", "2", "1", "0", "1", "2", "0", "1", "1", "0", "-1", "2", "2"),
        *("3", "4"),
    ]
    assert "first, rows 2–3" in shown and "second, columns 0–1" in shown and "gradient of x" in shown


def test_of_a_sequence_each_rank_holds_all_or_its_half_between_the_pairs():
    ax = plots.sequence_diagram()
    held = [each for each in ax.patches if isinstance(each, Rectangle) and each.get_fill()]
    sizes = [round(each.get_width() * each.get_height(), 6) for each in held]
    assert sizes == [1.4, 1.0, 1.4] * 2 + [0.7, 1.0, 0.7] * 2
    shown = [text.get_text() for text in ax.texts]
    assert {"as it is", "all-reduce", "all-gather", "reduce-scatter"} <= set(shown)


def test_a_steps_times_have_a_panel_a_way_and_one_scale():
    seconds = {"1": {"compute": 0.1, "tp": 0.0, "data": 0.05}, "2": {"compute": 0.1, "tp": 0.02, "data": 0.0}}
    first, second = plots.step_time_by_tp({"off": seconds, "on": seconds})
    assert first.get_ylim() == second.get_ylim() and first.get_title() == "off"
    assert sorted(round(height, 6) for *_, height in heights(first)) == [20, 50, 100, 100]
    assert first.get_ylabel() == "one step of a rank, ms"
    (legend,) = first.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["computing", "along tp", "along data"]


def test_times_by_split_name_the_best_one_and_what_was_measured_stands_beside_the_chosen_one():
    seconds = {
        1: {"compute": 0.002, "tp": 0.0, "data": 0.004},
        2: {"compute": 0.002, "tp": 0.001, "data": 0.002},
        4: {"compute": 0.002, "tp": 0.001, "data": 0.0},
    }
    ax = two_axes.step_time_by_split(seconds, chosen=2, measured_s=0.007)
    bars = [bar for bar in ax.patches if bar.get_height()]
    sums = [(bar.get_height(), bar.get_linestyle()) for bar in bars if not bar.get_fill()]
    assert sums == [(pytest.approx(size), "--") for size in (6, 5, 3)]
    (measured,) = [bar for bar in bars if to_hex(bar.get_facecolor()).upper() == style.GREEN]
    assert measured.get_height() == pytest.approx(7) and 1 < measured.get_x() < 1.5
    assert [text.get_text() for text in ax.texts] == ["6", "5", "7", "best: 3"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "4"]
    assert [label.get_weight() for label in ax.get_xticklabels()] == ["normal", "bold", "normal"]
    assert ax.get_ylabel() == "one step of a rank, ms"
    tiny = {1: {"compute": 2e-6, "tp": 0.0, "data": 0.0}}
    assert two_axes.step_time_by_split(tiny, chosen=1).get_ylabel() == "one step of a rank, µs"
