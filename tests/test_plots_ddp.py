"""labkit.plots.ddp: names in a compiled program, and bars by size of bucket."""

from pathlib import Path

import pytest
from matplotlib import pyplot

from labkit import plots
from labkit.runs.folder import RunFolder
from labkit.runs.result import RunResult
from labkit_course.widgets import buckets

CODE = (Path(__file__).parent / "data" / "ddp_coalesced.py.txt").read_text()
WEIGHT, BIAS = 16_000_000, 8000
TRAVELLED = [
    (0, "fc4.weight", WEIGHT),
    (1, "fc4.bias", BIAS),
    (1, "fc3.weight", WEIGHT),
    (1, "fc3.bias", BIAS),
    (1, "fc2.weight", WEIGHT),
    (2, "fc2.bias", BIAS),
    (2, "fc1.weight", WEIGHT),
    (2, "fc1.bias", BIAS),
]


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    pyplot.close("all")


def run(folder, travelled=TRAVELLED, code=CODE):
    """A run of two ranks that recorded what travels in each of two steps."""
    if code:
        RunFolder(folder).artifact(0, "code").write_text(code)
    lines = [
        {"v": 2, "rank": rank, "step": step, "kind": "bucket", "name": name, "index": index, "bytes": size}
        for rank in range(2)
        for step in range(2)
        for index, name, size in travelled
    ]
    session = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "9.9", "note": ""}
    info = {"program": "made up", "nproc": 2, "exit": "ok", "params": {}, "session": session}
    return RunResult(folder, info, lines, [])


def texts(ax):
    return [text.get_text().strip() for text in ax.texts]


@pytest.mark.parametrize(
    ("travelled", "code", "error", "problem"),
    [
        (TRAVELLED, "", FileNotFoundError, "rank 0 kept no 'code'"),
        (TRAVELLED[:-1], CODE, ValueError, "sends 8 gradients in 3 buckets, the run recorded 7"),
        ([*TRAVELLED[:-1], (2, "fc1.bias", 4000)], CODE, ValueError, "of other sizes: its records of buckets"),
        ([*TRAVELLED[:-1], (1, "fc1.bias", BIAS)], CODE, ValueError, "its records of buckets must follow"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, travelled, code, error, problem):
    with pytest.raises(error, match=problem):
        plots.backward_program(run(tmp_path, travelled, code))


def test_boxes_of_the_diagram_are_no_values_of_the_run(tmp_path):
    assert not list(run(tmp_path).summary().columns)


def test_the_program_of_a_run_has_the_names_that_it_recorded(tmp_path):
    shown = repr(plots.backward_program(run(tmp_path)))
    assert "mm(buf1: fc4.output.grad, arg4_1: fc4.weight, buf2: fc3.output.grad)" in shown
    assert "all_reduce_(buf4: fc4.weight.grad)  asks for bucket 0" in shown


def timed(folder, sizes_mb, *steps_ms):
    """A run of two ranks that took a step with each size in turn; the second rank took 1 ms longer."""
    lines = [
        {"v": 2, "rank": rank, "step": step, "kind": "span", "name": name, "start_us": 0.0, "dur_us": dur_us}
        for rank in range(2)
        for step, times_ms in enumerate(steps_ms)
        for name, dur_us in [
            *((f"{mb:g} MiB", 1000.0 * (ms + rank)) for mb, ms in zip(sizes_mb, times_ms, strict=True)),
            ("step", 9e9),
        ]
    ]
    session = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "9.9", "note": ""}
    info = {"program": "x", "nproc": 2, "exit": "ok", "params": {"sizes_mb": sizes_mb}, "session": session}
    return RunResult(folder, info, lines, [])


def test_bars_are_medians_by_size_the_fastest_is_bold_and_a_dashed_line_is_predicted(tmp_path):
    results = {"one": timed(tmp_path, [0.0001, 2], (20, 9), (30, 5), (22, 6)), "two": timed(tmp_path, [25], (4,))}
    assert plots.step_ms_by_size(results["one"]) == {"0.0001 MiB": 23, "2 MiB": 7}
    axes = plots.step_time_by_bucket_size(results, {"one": {"2 MiB": 8.0}, "two": {}})
    assert [ax.get_title(loc="left") for ax in axes] == ["one", "two"]
    assert [bar.get_height() for ax in axes for bar in ax.patches] == pytest.approx([23, 7, 5])
    (dashed,) = axes[0].lines
    assert dashed.get_linestyle() == "--" and list(dashed.get_ydata()) == pytest.approx([8, 8])
    assert [(text.get_text(), text.get_weight()) for text in axes[0].texts] == [("23", "normal"), ("7", "bold")]
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["each\nalone", "2"]


def test_a_run_that_compared_no_sizes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="this run compared no sizes of buckets: give it sizes_mb"):
        plots.step_ms_by_size(run(tmp_path))


def spans_of(collection):
    """Start and end of each stretch of a broken bar."""
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in collection.get_paths()]


def test_a_message_is_exposed_from_the_moment_on_when_nothing_is_computed():
    ax = buckets.backward_timeline([(0.001, 0.003), (0.003, 0.006)], 0.005)
    arithmetic, hidden, exposed = map(spans_of, ax.collections)
    assert arithmetic == [pytest.approx((0, 5))]
    assert hidden == [pytest.approx((1, 3)), pytest.approx((3, 5))]
    assert exposed == [pytest.approx((5, 6))]
    assert texts(ax) == ["predicted 6"]
    assert [line.get_linestyle() for line in ax.lines] == ["--"]


def test_a_measured_backward_pass_is_a_third_bar():
    ax = buckets.backward_timeline([(0.001, 0.003), (0.004, 0.005)], 0.004, measured_s=0.0095)
    assert [bar.get_width() for bar in ax.patches] == [pytest.approx(9.5)]
    assert texts(ax) == ["9.5", "predicted 5"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["computes", "2 buckets", "measured"]


def test_bars_by_size_are_arithmetic_and_what_is_exposed_and_the_chosen_one_is_bold():
    ax = buckets.backward_time_by_bucket_size(
        {"small": (0.005, 0.010), "large": (0.005, 0.001)}, "large", measured_s=0.007
    )
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([5, 10, 5, 1])
    assert texts(ax) == ["15", "6"]
    assert [label.get_weight() for label in ax.get_yticklabels()] == ["normal", "bold"]
    assert [list(line.get_xydata()[0]) for line in ax.lines] == [pytest.approx([7, 1])]


def test_the_smallest_size_that_keeps_up_is_a_dot_on_its_line_unless_it_is_infinite():
    lines = {"inside": [3.0, 1.0, 1.5], "across": [4.0, 2.0, 2.5]}
    ax = plots.exposure_by_bucket_size([1, 10, 100], lines, {"inside": 5.5, "across": float("inf")})
    inside, dot, across, guide = ax.lines
    assert [list(line.get_ydata()) for line in (inside, across)] == [*lines.values()]
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (5.5, pytest.approx(2.0))
    assert list(guide.get_ydata()) == [1, 1]
    assert texts(ax) == ["5.5 MB", "all hidden"]
