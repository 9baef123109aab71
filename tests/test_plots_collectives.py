"""labkit.plots.collectives: fastest rounds, the fitted line and predictions stand where the numbers say."""

import json
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

import labkit
from labkit.plots import collectives as figures
from labkit.runs.folder import RunFolder
from labkit.runs.result import RunResult
from labkit.theory.collectives import AlphaBeta

SESSION = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "9.9", "note": ""}
NETWORK = AlphaBeta(1e-4, 1e-9)
SIZES, TOTAL, COUNTS = (1024, 65536, 1048576), 1048576, (1, 16)


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    pyplot.close("all")


def run(program="all_reduce"):
    """Two ranks, three rounds, of which two were disturbed; rank 0 has less to wait than rank 1."""
    times = {f"message_{size}": NETWORK.seconds(size) for size in SIZES}
    times |= {f"pieces_{count}": NETWORK.seconds(TOTAL, messages=count) for count in COUNTS}
    span = {"v": 2, "kind": "span", "start_us": 0}
    lines = [
        span | {"rank": rank, "step": step, "name": name, "dur_us": 1e6 * time * factor * (0.5, 1)[rank]}
        for name, time in (times if program == "all_reduce" else {"forward": 1.0}).items()
        for rank in range(2)
        for step, factor in enumerate((2, 30, 1))
    ]  # fmt: skip
    info = {"program": program, "nproc": 2, "exit": "ok", "params": {"total_bytes": TOTAL}, "session": SESSION}
    return RunResult(Path("nowhere"), info, lines, [])


def test_message_times_are_those_of_the_fastest_round_by_size_in_order():
    times = figures.fastest_all_reduce_times(run())
    assert list(times.index) == list(SIZES)
    assert list(times) == pytest.approx([NETWORK.seconds(size) for size in SIZES])
    assert list(figures.fastest_all_reduce_times(run(), "pieces").index) == list(COUNTS)


def test_the_line_goes_through_the_fastest_rounds():
    ax = figures.all_reduce_time_by_size(run())
    rounds, times, line, latency, break_even = ax.get_lines()
    assert len(rounds.get_xdata()) == 3 * len(SIZES)
    assert list(times.get_ydata()) == pytest.approx([1e6 * NETWORK.seconds(size) for size in SIZES])
    assert line.get_ydata()[0] == pytest.approx(times.get_ydata()[0])
    assert line.get_ydata()[-1] == pytest.approx(times.get_ydata()[-1])
    assert latency.get_ydata()[0] == pytest.approx(100)
    assert break_even.get_xdata()[0] == pytest.approx(1e5)
    assert [text.get_text() for text in ax.texts] == [" α / β = 97.7 KiB"]
    assert line.get_label() == "α + bytes x β, α = 100 µs, β = 1000 µs a MB"
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_ylabel().endswith("µs")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1 KiB", "64 KiB", "1 MiB"]
    assert ax.figure.get_supxlabel() == "CPU · 2 ranks on 2 cores · torch 9.9"


def test_pieces_are_drawn_beside_what_the_fit_predicts():
    ax = figures.all_reduce_time_by_count(run())
    expected = [1e3 * NETWORK.seconds(TOTAL, messages=count) for count in COUNTS]
    assert [bar.get_height() for bar in ax.patches] == pytest.approx(expected)
    assert [line.get_ydata()[0] for line in ax.get_lines()] == pytest.approx(expected)
    assert {line.get_linestyle() for line in ax.get_lines()} == {"--"}, "what is predicted is dashed"
    assert [text.get_text() for text in ax.texts] == [f"{time:.1f} ({time:.1f})" for time in expected]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1 x 1 MiB", "16 x 64 KiB"]
    assert ax.get_ylabel().endswith("ms")


def test_pieces_are_predicted_from_other_numbers_where_they_are_given():
    slower = AlphaBeta(2e-4, 2e-9)
    marks = [line.get_ydata()[0] for line in figures.all_reduce_time_by_count(run(), network=slower).get_lines()]
    assert marks == pytest.approx([1e3 * slower.seconds(TOTAL, messages=count) for count in COUNTS])


@pytest.fixture
def traded(tmp_path):
    """Two ranks: an all-gather, and an all-reduce."""
    info = {"program": "cell", "nproc": 2, "exit": "ok", "params": {}, "session": SESSION}
    (tmp_path / "run.json").write_text(json.dumps(info))
    for rank, (own, both) in enumerate(((1, 3), (2, 4))):
        gather = {"before": torch.tensor([float(own)]), "after": torch.tensor([1.0, 2.0])}
        reduce = {"before": [own, both], "after": [3.5, 7]}
        torch.save({"gather": gather, "reduce": reduce}, RunFolder(tmp_path).report(rank))
    return labkit.load(tmp_path)


def test_every_number_has_the_colour_of_the_rank_that_had_it_first_and_sums_their_own(traded):
    gather, reduce = figures.values_by_rank(traded, {"gather": "all-gather", "reduce": "all-reduce"})
    assert gather.get_title() == "all-gather"
    first, second, sums = (to_rgba(each) for each in (*figures.style.RANK_COLOURS[:2], figures.SUM_COLOUR))
    assert [cell.get_facecolor() for cell in gather.patches if isinstance(cell, Rectangle)] == [
        *(first, second),
        *(first, second, first, second),
    ]
    assert [cell.get_facecolor() for cell in reduce.patches if isinstance(cell, Rectangle)].count(sums) == 4
    shown = [text.get_text() for text in reduce.texts if text.get_text()]
    assert shown == ["rank 0", "rank 1", "1", "3", "2", "4", "before", "3.5", "7", "3.5", "7", "after"]


def test_a_sum_over_some_ranks_has_another_colour_than_the_one_over_all(traded):
    for rank, (start, between) in enumerate((((1, 10), (1, 10)), ((2, 20), (3, 20)))):
        ring = {"start": start, "between": between, "end": (3.5, 30)}
        torch.save({"ring": ring}, RunFolder(traded.folder).report(rank))
    (ax,) = figures.values_by_rank(labkit.load(traded.folder), {"ring": "in a ring"})
    faces = [cell.get_facecolor() for cell in ax.patches if isinstance(cell, Rectangle)]
    assert faces.count(to_rgba(figures.PARTIAL_SUM_COLOUR)) == 1 and faces.count(to_rgba(figures.SUM_COLOUR)) == 4
    labels = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert labels == ["from rank 0", "from rank 1", "sum over all ranks", "sum over some ranks"]


def test_axes_that_were_given_are_used():
    _, (left, right) = pyplot.subplots(1, 2)
    assert figures.all_reduce_time_by_size(run(), ax=left) is left
    assert figures.all_reduce_time_by_count(run(), ax=right) is right


def test_a_run_of_another_program_is_refused():
    with pytest.raises(ValueError, match="this run of fsdp_wrap timed no message: take a run of all_reduce"):
        figures.all_reduce_time_by_size(run("fsdp_wrap"))


def steps(ranks, step_ms):
    """A run whose steps take this long."""
    span = {"v": 2, "kind": "span", "name": "step", "start_us": 0, "dur_us": 1e3 * step_ms, "step": 1}
    info = {"program": "ddp_compile", "nproc": ranks, "exit": "ok", "params": {}, "session": SESSION}
    return RunResult(Path("nowhere"), info, [span | {"rank": rank} for rank in range(ranks)], [])


def test_step_time_by_ranks_has_a_dot_a_run_and_the_predictions_that_are_numbers():
    runs = {"near": [steps(1, 480), steps(2, 250)]}
    ax = figures.step_time_by_ranks(runs, {"near": {1: 0.48, 2: 0.245, 4: None}})
    dots, dashed = ax.lines
    assert [list(each) for each in dots.get_data()] == [[1, 2], [480, 250]]
    assert [list(each) for each in dashed.get_data()] == [[1, 2], [480, 245]]
    assert [text.get_text() for text in ax.texts] == ["480", "250"]
