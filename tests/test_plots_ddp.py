"""labkit.plots.buckets: boxes as wide as bytes, bars from request to last wait, as in the code."""

from pathlib import Path

import pytest
from matplotlib import pyplot

from labkit import inductor, plots
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


def boxes(ax):
    """Row, start and end of each rectangle."""
    return [
        (round(box.get_y() + box.get_height() / 2), box.get_x(), box.get_x() + box.get_width()) for box in ax.patches
    ]


def order_of(ax):
    """The axes on the right."""
    [inset] = ax.child_axes
    return inset


def texts(ax):
    return [text.get_text().strip() for text in ax.texts]


def test_gradients_of_a_bucket_stand_side_by_side_as_wide_as_their_bytes(tmp_path):
    ax = plots.bucket_schedule(run(tmp_path))
    assert [box for box in boxes(ax) if box[0] == 1] == [
        pytest.approx((1, start, end))
        for start, end in ((0, 0.008), (0.008, 16.008), (16.008, 16.016), (16.016, 32.016))
    ]
    assert len(ax.patches) == len(TRAVELLED)
    labels = [tick.get_text() for tick in ax.get_yticklabels()]
    assert labels == ["bucket 0\n16 MB", "bucket 1\n32 MB", "bucket 2\n16 MB"]
    assert ax.get_xlabel() == "gradients that travel together, MB"
    assert texts(ax) == [
        "fc4.weight", "fc3.weight", "fc2.weight", "also here: fc4.bias, fc3.bias", "fc1.weight",
        "also here: fc2.bias, fc1.bias",
    ]  # fmt: skip
    assert max(ax.get_xticks()) <= 32.016, "no scale under the right half"


def test_a_bar_reaches_from_the_request_to_the_last_wait_over_what_runs_between(tmp_path):
    order = order_of(plots.bucket_schedule(run(tmp_path)))
    assert boxes(order) == [(0, 23, 69), (1, 52, 77), (2, 66, 83)]
    drawn = [list(line.get_xdata()) for line in order.lines]
    assert drawn[:2] == [[27, 32, 37, 42, 50, 56, 64], [68]]
    assert drawn[2:4] == [[56, 64], [70, 72, 74, 76]]
    assert drawn[4:] == [[], [78, 80, 82]]
    assert texts(order) == ["7 in between", "2 in between", "nothing in between"]
    assert order.get_xlabel() == "line of the generated program"
    assert [text.get_text() for text in order.get_legend().get_texts()] == ["on its way", "compute", "wait"]


def test_a_figure_of_a_run_is_stamped_and_one_of_a_program_is_not(tmp_path):
    assert plots.bucket_schedule(run(tmp_path)).figure.get_supxlabel() == "CPU · 2 ranks on 2 cores · torch 9.9"
    ax = plots.bucket_schedule(inductor.find_buckets(CODE))
    assert ax.figure.get_supxlabel() == ""
    assert texts(ax)[0] == "buf4", "a program knows no names"


def test_a_bucket_that_is_never_waited_for_is_said_to_be_so():
    code = CODE.replace("torch.ops._c10d_functional.wait_tensor.default(buf4)", "pass")
    order = order_of(plots.bucket_schedule(inductor.find_buckets(code)))
    assert texts(order)[0] == "never waited for"
    assert boxes(order)[0] == (0, 23, 65)


def test_small_gradients_are_drawn_in_kilobytes_and_many_are_counted():
    code = CODE.replace("2000", "20")
    ax = plots.bucket_schedule(inductor.find_buckets(code))
    assert ax.get_xlabel().endswith("kB")
    assert boxes(ax)[0] == (0, 0, pytest.approx(1.6))
    [first, second, _] = inductor.find_buckets(CODE)
    many = inductor.Bucket(0, first.gradients + 20 * second.gradients[:1], first.request, (), ())
    assert texts(plots.bucket_schedule([many]))[-1] == "also here: 20 gradients"


def test_nothing_is_cut_off_at_the_width_of_a_notebook(tmp_path):
    figure = plots.bucket_schedule(run(tmp_path)).figure
    figure.canvas.draw()
    assert figure.get_size_inches()[0] == 7
    renderer = figure.canvas.get_renderer()
    for axes in (figure.axes[0], *figure.axes[0].child_axes):
        box = axes.get_tightbbox(renderer)
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height


def test_axes_that_were_given_are_used(tmp_path):
    _, (left, right) = pyplot.subplots(1, 2)
    before = len(pyplot.get_fignums())
    assert plots.bucket_schedule(run(tmp_path), ax=right) is right
    assert len(pyplot.get_fignums()) == before
    assert not left.has_data()


@pytest.mark.parametrize(
    ("travelled", "code", "error", "problem"),
    [
        (TRAVELLED, "", FileNotFoundError, "rank 0 kept no 'code'"),
        (TRAVELLED[:-1], CODE, ValueError, "sends 8 gradients in 3 buckets, the run recorded 7"),
        ([*TRAVELLED[:-1], (2, "fc1.bias", 4000)], CODE, ValueError, "of other sizes: its records of buckets"),
        ([*TRAVELLED[:-1], (1, "fc1.bias", BIAS)], CODE, ValueError, "its records of buckets must follow"),
        ([], CODE.replace("all_reduce", "broadcast"), ValueError, "no bucket to draw: the program holds no"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, travelled, code, error, problem):
    with pytest.raises(error, match=problem):
        plots.bucket_schedule(run(tmp_path, travelled, code))


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
