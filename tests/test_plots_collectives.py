"""labkit.plots.collectives: fastest rounds, the fitted line and predictions stand where the numbers say."""

from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_rgba

from labkit.plots import collectives as figures
from labkit.result import RunResult
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
    times = figures.message_times(run())
    assert list(times.index) == list(SIZES)
    assert list(times) == pytest.approx([NETWORK.seconds(size) for size in SIZES])
    assert list(figures.message_times(run(), "pieces").index) == list(COUNTS)


def test_the_line_goes_through_the_fastest_rounds():
    ax = figures.messages(run())
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
    ax = figures.pieces(run())
    expected = [1e3 * NETWORK.seconds(TOTAL, messages=count) for count in COUNTS]
    heights = {label: [bar.get_height() for bar in ax.patches if bar.get_facecolor() == to_rgba(colour)]
               for label, colour in (("predicted", figures.style.GREY), ("measured", figures.style.BLUE))}  # fmt: skip
    assert heights == {"predicted": pytest.approx(expected), "measured": pytest.approx(expected)}
    assert [text.get_text() for text in ax.texts] == [f"{time:.1f}" for time in expected] * 2
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1 x 1 MiB", "16 x 64 KiB"]
    assert ax.get_ylabel().endswith("ms")


def test_axes_that_were_given_are_used():
    _, (left, right) = pyplot.subplots(1, 2)
    assert figures.messages(run(), ax=left) is left
    assert figures.pieces(run(), ax=right) is right


def test_a_run_of_another_program_is_refused():
    with pytest.raises(ValueError, match="this run of fsdp_wrap timed no message: take a run of all_reduce"):
        figures.messages(run("fsdp_wrap"))
