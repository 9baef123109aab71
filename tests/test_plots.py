"""labkit.plots: what a figure says, on which axes, and where it says its numbers come from."""

import inspect
import re
from pathlib import Path

import numpy
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from labkit import plots
from labkit.plots import style
from labkit.plots.runs import relative_error_text
from labkit.runs.result import RunResult, UnknownValue
from labkit.theory.collectives import AlphaBeta
from labkit.theory.placements import local_piece
from labkit.theory.spatial import ConvNeXtStage

SESSION = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "9.9", "note": ""}


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    pyplot.close("all")


def line(kind, name, step, rank=0, **fields):
    return {"v": 2, "rank": rank, "step": step, "kind": kind, "name": name, **fields}


def run(nproc=2, factor=1.0, **session):
    """A run whose spans, memory and loss are multiples of a factor; the last rank is the slowest and fullest."""
    lines = []
    for rank in range(nproc):
        share = factor * (rank + 1) / nproc
        for step in range(3):
            for name, milliseconds in (("forward", 10), ("backward", 20), ("optimizer", 5), ("step", 36)):
                lines.append(line("span", name, step, rank, start_us=0.0, dur_us=1000 * milliseconds * share))
            lines.append(line("scalar", "loss", step, rank, value=factor * (2.0 - step / 2) + rank, unit=""))
        lines.append(line("scalar", "loss", -1, rank, value=100.0, unit=""))
        for name, megabytes in (("activation", 8), ("parameter", 4), ("optstate", 2), ("gradient", 1), ("temp", 3)):
            lines.append(line("memory", f"peak_{name}", 3, rank, bytes=int(1e6 * megabytes * share)))
        lines.append(line("comm", "send", 3, rank, axis="", count=4, bytes=1536))
    info = {"program": "made up", "nproc": nproc, "exit": "ok", "params": {}, "session": SESSION | session}
    return RunResult(Path("nowhere"), info, lines, [])


PEAKS = {"one": {"parameter": 4e6, "activation": 8e6}, "two": {"parameter": 2e6, "all_gather": 1e6}}
MOMENTS = [{"parameter": 2e6}, {"parameter": 2e6, "activation": 4e6}, {"parameter": 2e6, "temp": 1e6}]
DRAWINGS = {
    "latency_bars": lambda **more: plots.latency_bars({"one": run(1), "two": run(2)}, **more),
    "memory_by_category": lambda **more: plots.memory_by_category({"one": run(1), "two": run(2)}, **more),
    "loss_curves": lambda **more: plots.loss_curves({"one": run(1), "two": run(2)}, **more),
    "memory_comparison": lambda **more: plots.memory_comparison(PEAKS, {"one": run(1), "two": run(2)}, **more),
    "loss_difference_curves": lambda **more: plots.loss_difference_curves({"two": run(2)}, run(1), **more),
    "memory_over_step": lambda **more: plots.memory_over_step(MOMENTS, 2, run(2), **more),
    "halo_diagram": lambda **more: plots.halo_diagram(numpy.zeros((20, 40, 3), numpy.uint8), ranks=4, halo=2, **more),
    "convnext_diagram": lambda **more: plots.convnext_diagram([ConvNeXtStage(8, 16, 32, depth=1)], 64, 128, **more),
    "placement_picture": lambda **more: placed(["Shard(0)", "Partial()"], **more),
    "strip_layout": lambda **more: plots.strip_layout(numpy.zeros((4, 16, 3), numpy.uint8), (2, 2), 4, 0.1, **more),
    "byte_bars": lambda **more: plots.byte_bars({"a": {"x": 2e6}}, {}, {"x": style.BLUE}, ylabel="held", **more),
}
MEASURED = [
    name
    for name in DRAWINGS
    if name
    not in (
        "halo_diagram",
        "convnext_diagram",
        "placement_picture",
        "strip_layout",
        "byte_bars",
    )
]


def placed(placements, **more):
    """A picture of 4 x 6 pixels on 2 x 2 ranks."""
    picture = numpy.arange(72, dtype=numpy.uint8).reshape(4, 6, 3)
    pieces = {rank: local_piece(picture.shape, (2, 2), placements, rank) for rank in range(4)}
    held = {
        rank: picture[piece.indices[0].start : piece.indices[0].stop, piece.indices[1].start : piece.indices[1].stop]
        for rank, piece in pieces.items()
    }
    return plots.placement_picture(picture, pieces, held, 2, **more)


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_plot_returns_new_axes_or_those_it_was_given(name):
    made = DRAWINGS[name]()
    assert isinstance(made, Axes)
    _, (left, right) = pyplot.subplots(1, 2)
    before = len(pyplot.get_fignums())
    assert DRAWINGS[name](ax=right) is right
    assert len(pyplot.get_fignums()) == before, "no other figure"
    assert right.has_data()
    assert not left.has_data()
    right.figure.canvas.draw()


def stamp_of(ax):
    """What stands below a figure, if it is drawn."""
    drawn = [text.get_text() for text in ax.figure.texts]
    assert ax.figure.get_supxlabel() in drawn
    return ax.figure.get_supxlabel()


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_figure_says_where_its_numbers_come_from(name):
    stamp = stamp_of(DRAWINGS[name]())
    assert stamp.endswith("2 ranks on 2 cores · torch 9.9")
    assert "mechanism" not in stamp


def test_ranks_beyond_the_cores_are_mechanism_and_not_speed():
    stamp = stamp_of(plots.latency_bars({"two": run(2), "four": run(4)}))
    assert stamp == "CPU · 2 and 4 ranks on 2 cores · 4 ranks: mechanism, not speed · torch 9.9", "one line"


def test_a_note_of_the_session_is_on_the_figure():
    result = run(device="cpu", note="1 GPU for 2 ranks: ran on CPU")
    assert stamp_of(plots.loss_curves({"a": result})).endswith("torch 9.9 · 1 GPU for 2 ranks: ran on CPU")
    gpu = run(device="cuda", device_name="NVIDIA H200", cores=2)
    assert stamp_of(plots.loss_curves({"a": gpu})) == "NVIDIA H200 · 2 ranks · torch 9.9"


def test_a_figure_with_two_plots_names_each_origin_once_and_keeps_its_title():
    figure, (left, right) = pyplot.subplots(1, 2)
    figure.suptitle("two plots")
    plots.latency_bars({"a": run(1), "b": run(1)}, ax=left)
    assert stamp_of(left) == "CPU · 1 rank on 2 cores · torch 9.9"
    plots.latency_bars({"a": run(1), "c": run(2)}, ax=right)
    assert stamp_of(right) == "CPU · 1 and 2 ranks on 2 cores · torch 9.9"
    assert figure.get_suptitle() == "two plots"
    assert sorted(text.get_text() for text in figure.texts) == sorted([stamp_of(left), "two plots"])


def labels_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def texts_of(ax):
    return [text.get_text().strip() for text in ax.texts]


def test_table_holds_predicted_against_measured():
    table = plots.comparison_table(
        run(2), {"send_bytes": 1536, "send_count": 5, "peak_activation_bytes": 8.2e6}, tolerance=0.03
    )
    assert list(table.columns) == ["predicted", "measured", "ratio", "verdict"]
    assert list(table["verdict"]) == ["equal", "differs", "within 3%"]
    assert list(table["ratio"]) == [1, 0.8, 0.9756]
    assert list(plots.comparison_table(run(2), {"send_count": 4.0001})["verdict"]) == ["differs"], (
        "0 tolerance wants equality"
    )


def test_ones_own_predictions_come_first_and_are_off_by_a_factor():
    yours = {"send_bytes": 768, "send_count": None, "peak_activation_bytes": 16e6}
    predicted = {"send_bytes": 1536, "send_count": 5, "peak_activation_bytes": 8.2e6, "forward_ms": 10}
    table = plots.comparison_table(run(2), predicted, yours=yours, tolerance=0.03)
    assert list(table.columns) == ["yours", "theory", "measured", "yours is", "theory is"]
    assert list(table["yours"]) == ["768", "–", "16,000,000", "–"]
    assert list(table["yours is"]) == ["2 × too small", "–", "2 × too large", "–"]
    assert list(table["theory is"]) == ["right", "1.25 × too large", "within 3%", "right"]
    with pytest.raises(ValueError, match="yours has count, which theory has not: send_bytes"):
        plots.comparison_table(run(2), {"send_bytes": 1}, yours={"count": 1})


@pytest.mark.parametrize(
    ("predicted", "measured", "said"),
    [(0, 0, "right"), (3, 0, "too large"), (0, 3, "too small"), (-1, 2, "too small"), (-4, -2, "2 × too large"),
     (1_318_000, 1_317_376, "within 1%"), (990, 1000, "1.01 × too small")],
)  # fmt: skip
def test_how_far_off_is_said_of_any_number(predicted, measured, said):
    assert relative_error_text(predicted, measured) == said


def test_a_table_takes_what_was_measured_as_a_mapping_and_yours_alone():
    measured, yours = {"a": 2.0, "b": 8}, {"a": 1, "b": None}
    table = plots.comparison_table(measured, {"a": 2, "b": 4}, yours=yours)
    assert list(table["measured"]) == ["2", "8"] and list(table["theory is"]) == ["right", "2 × too small"]
    assert list(plots.comparison_table(measured, {"b": 4})["verdict"]) == ["differs"]
    alone = plots.comparison_table(measured, yours=yours, column="simulated")
    assert list(alone.columns) == ["yours", "simulated", "yours is"]
    assert alone.loc["a"].tolist() == ["1", "2", "2 × too small"] and alone.loc["b"].tolist() == ["–", "8", "–"]
    with pytest.raises(ValueError, match=r"nothing to compare with .*: give predicted, yours, or both"):
        plots.comparison_table(measured)


def test_a_prediction_of_zero_is_compared_as_well():
    result = run(2)
    result.lines.append(line("memory", "peak_buffer", 3, bytes=0))
    table = plots.comparison_table(result, {"peak_buffer_bytes": 0, "send_bytes": 0}, tolerance=0.5)
    assert list(table["verdict"]) == ["equal", "differs"]


def test_a_prediction_of_something_that_was_not_measured_is_an_error():
    with pytest.raises(UnknownValue, match="no value 'receive_bytes'; it has: "):
        plots.comparison_table(run(2), {"receive_bytes": 1})


def test_latency_stacks_forward_backward_and_optimizer():
    ax = plots.latency_bars({"one": run(1), "two": run(2, factor=2.0)})
    assert labels_of(ax) == ["forward", "backward", "optimizer"]
    assert "ms" in ax.get_xlabel()
    bars = [(patch.get_x(), patch.get_width()) for patch in ax.patches]
    assert [bar[1] for bar in bars] == pytest.approx([10, 20, 5, 20, 40, 10])
    assert [bar[0] for bar in bars] == pytest.approx([0, 10, 30, 0, 20, 60])
    assert texts_of(ax) == ["36 ms", "72 ms"], "the steps, not the sums of their phases"
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["one", "two"]
    assert ax.get_xlim()[1] > 70


def test_what_a_phase_takes_beyond_its_arithmetic_is_hatched():
    ax = plots.latency_bars({"one": run(1), "two": run(2, factor=2.0)}, arithmetic={"forward": 12, "backward": 15})
    hatched = [(bar.get_x(), bar.get_width()) for bar in ax.patches if bar.get_hatch() and bar.get_width()]
    assert hatched == pytest.approx([(25, 5), (12, 8), (35, 25)]), "the optimizer's part has no arithmetic"
    assert labels_of(ax) == ["forward", "backward", "optimizer", "beyond arithmetic"]


def test_a_step_without_phases_is_drawn_whole():
    whole = run(1)
    whole.lines[:] = [line for line in whole.lines if line["name"] not in ("forward", "backward", "optimizer")]
    ax = plots.latency_bars({"whole": whole})
    assert labels_of(ax) == ["step"]
    assert [bar.get_width() for bar in ax.patches] == [whole.value("step_ms")]


def test_theory_is_dashed_across_the_bars_of_latency():
    ax = plots.latency_bars({"one": run(1), "two": run(2)}, predicted={"two": 90.0})
    (line,) = ax.lines
    assert list(line.get_xdata()) == [90, 90] and line.get_linestyle() == "--"
    assert line.get_ydata().mean() == 1, "the second bar"
    assert labels_of(ax) == ["forward", "backward", "optimizer", "theory"]
    assert ax.get_xlim()[1] > 90


def bars_at(ax, middle):
    """The bars around a place on the x axis, from the bottom up; those without a height left out."""
    found = [bar for bar in ax.patches if bar.get_height() and bar.get_x() < middle < bar.get_x() + bar.get_width()]
    return sorted(found, key=lambda bar: bar.get_y())


def test_memory_stacks_categories_and_marks_the_prediction_with_a_dashed_line():
    ax = plots.memory_by_category({"one": run(1), "two": run(2, factor=0.5)}, predicted={"one": 8e6, "two": 4.1e6})
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == [
        *("activations", "parameters", "optimizer state", "gradients", "temporary", "activations, predicted")
    ]
    assert ax.get_ylabel() == "peak memory of a rank, MB"
    assert [bar.get_height() for bar in bars_at(ax, 0)] == pytest.approx([8, 4, 2, 1, 3])
    assert [bar.get_height() for bar in bars_at(ax, 1)] == pytest.approx([4, 2, 1, 0.5, 1.5])
    assert [to_hex(bar.get_facecolor()).upper() for bar in bars_at(ax, 0)][:2] == [style.GREEN, style.BLUE]
    assert texts_of(ax) == ["18", "9", "8", "4"], "the sum above, the activations inside"
    assert [list(mark.get_ydata()) for mark in ax.lines] == [[8, 8], [4.1, 4.1]]
    assert [mark.get_linestyle() for mark in ax.lines] == ["--", "--"]
    assert [numpy.mean(mark.get_xdata()) for mark in ax.lines] == pytest.approx([0, 1])


def test_breakdown_puts_what_was_predicted_beside_what_was_measured():
    ax = plots.memory_comparison({"one": {"parameter": 4e6, "activation": 8e6}}, {"one": run(1), "two": run(2)})
    tops = {}
    for bar in ax.patches:
        middle = round(bar.get_x() + bar.get_width() / 2, 3)
        tops[middle] = max(tops.get(middle, 0), bar.get_y() + bar.get_height())
    assert tops == {-0.2: pytest.approx(12), 0.2: pytest.approx(18), 1.0: pytest.approx(18)}, "MB, the fullest rank"
    assert {bar.get_linestyle() for bar in ax.patches if bar.get_x() < -0.1} == {"--"}
    assert {bar.get_linestyle() for bar in ax.patches if bar.get_x() > -0.1} == {"solid"}
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["activations", "parameters", "optimizer state", "gradients", "temporary", "predicted"]
    assert texts_of(ax) == ["12", "18", "18"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["one", "two"]


def test_a_bound_is_a_dotted_line_with_its_size():
    ax = plots.memory_comparison(PEAKS, unit="GB", bound=6e6)
    (line,) = ax.lines
    assert (line.get_linestyle(), list(line.get_ydata())) == (":", [pytest.approx(0.006)] * 2)
    assert "bound\n0.006 GB" in texts_of(ax)
    assert ax.get_ylabel() == "peak memory of a rank, GB"


def test_the_curve_of_a_step_is_theirs_that_are_held_and_its_peak_and_budget_are_named():
    ax = plots.memory_over_step(MOMENTS, 2, run(1), budget=5e6)
    curve = next(line for line in ax.lines if line.get_linestyle() == "--")
    assert list(curve.get_ydata()) == [2, 2, 6, 6, 3, 3], "MB, predicted is dashed"
    assert texts_of(ax) == ["peak 6 MB", "18", "budget\n5 MB"]
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in ax.collections]
    assert tops == [4, 6, 6], "activations, parameters, temporary"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["activations", "parameters", "temporary"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["forward pass", "backward pass", "measured"]
    assert ax.get_ylim()[1] > 18 and ax.get_xlim()[1] > 3


def test_what_is_sent_stands_beside_what_was_measured():
    look = {"colours": style.COLLECTIVE_COLOURS, "ylabel": "sent"}
    sent = {"DDP": {"all_reduce": 2e6}, "FSDP": {"all_gather": 2e6, "reduce_scatter": 1e6}}
    ax = plots.byte_bars(sent, {}, **look)
    assert texts_of(ax) == ["2", "3"] and ax.get_ylim()[1] > 3
    ax = plots.byte_bars({"DDP": {"all_reduce": 2e6}}, {"DDP": {"all_reduce": 4e6}}, **look)
    assert texts_of(ax) == ["2", "4"]
    assert {bar.get_linestyle() for bar in ax.patches if bar.get_height() == 2} == {"--"}


def test_breakdown_of_theory_alone_has_no_stamp_and_is_dashed():
    ax = plots.memory_comparison({"stage 0": {"parameter": 4e9, "optimizer": 8e9, "gradient": 0}}, ylabel="held")
    assert ax.figure.get_supxlabel() == ""
    assert max(bar.get_y() + bar.get_height() for bar in ax.patches) == pytest.approx(12_000)
    assert [bar.get_linestyle() for bar in ax.patches] == ["--", "--"], "and nothing frames an empty part"
    (one,) = {bar.get_facecolor()[3] for bar in ax.patches}
    assert one == 1, "pale only beside what was measured"


def test_loss_is_the_mean_of_all_ranks_by_step_without_the_warm_up():
    ax = plots.loss_curves({"one": run(1), "two": run(2)}, chance=2.3)
    assert labels_of(ax) == ["one", "two"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("timed step, after those of warm-up", "loss (cross-entropy, nats)")
    assert [list(curve.get_xdata()) for curve in ax.lines[:2]] == [[0, 1, 2]] * 2
    assert list(ax.lines[0].get_ydata()) == [2, 1.5, 1]
    assert list(ax.lines[1].get_ydata()) == [2.5, 2, 1.5]
    assert list(ax.lines[2].get_ydata()) == [2.3, 2.3]
    assert texts_of(ax) == ["guessing"]


@pytest.mark.parametrize(("rank", "sources"), [(0, [1]), (1, [0, 2]), (3, [2])])
def test_halos_come_from_the_neighbours_that_there_are(rank, sources):
    ax = plots.halo_diagram(numpy.zeros((20, 40, 3), numpy.uint8), ranks=4, halo=2, rank=rank)
    texts = texts_of(ax)
    assert [text for text in texts if text.startswith("rank")] == [f"rank {index}" for index in range(4)]
    assert [text for text in texts if text.startswith("halo")] == [
        f"halo: 2 columns\nfrom rank {one}" for one in sources
    ]
    frames = [patch for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_width() == 2]
    above = [frame for frame in frames if frame.get_y() == 0]
    assert [frame.get_x() for frame in above] == [10 * (rank + 1) if one > rank else 10 * rank - 2 for one in sources]
    assert len(frames) == 2 * len(above), "where they come from, and where they go"
    colours = [to_hex(frame.get_edgecolor()) for frame in above]
    assert colours == [style.RANK_COLOURS[one].lower() for one in sources], "a halo has the colour of its owner"
    assert not any(frame.get_fill() for frame in frames), "the pixels that travel can be seen"


@pytest.mark.parametrize(("backward", "ends"), [(False, (20, 25.2)), (True, (25.2, 20))])
def test_halos_come_down_and_their_gradients_go_home(backward, ends):
    ax = plots.halo_diagram(numpy.zeros((20, 40, 3), numpy.uint8), ranks=4, halo=2, backward=backward)
    arrows = [(each.xyann[1], each.xy[1]) for each in ax.texts if isinstance(each, Annotation)]
    assert arrows == [pytest.approx(ends)] * 2
    assert texts_of(ax).count("+") == 2 * backward, "what goes home is added"
    assert texts_of(ax).count("gradient: added\non rank 2") == backward


def test_halos_show_the_very_pixels_that_travel():
    picture = numpy.arange(40, dtype=numpy.uint8)[None, :, None].repeat(20, 0).repeat(3, 2)
    ax = plots.halo_diagram(picture, ranks=4, halo=2)
    shown = [set(numpy.unique(image.get_array())) for image in ax.images]
    assert shown == [set(range(40)), set(range(10, 20)), {8, 9}, {20, 21}]


def test_shards_show_every_number_where_it_belongs_and_replicas_in_one_colour():
    matrix = numpy.arange(4.0).reshape(2, 2)
    held = {
        "rows": {0: matrix[:1], 1: matrix[1:], 2: matrix[:1], 3: matrix[1:]},
        "summands": {rank: matrix - rank for rank in range(4)},
    }
    panels = plots.shard_panels(matrix, held)
    assert [panel.get_title(loc="left") for panel in panels] == ["the matrix", "rows", "summands"]
    assert texts_of(panels[0]) == ["0", "1", "2", "3"]
    both = ["rank 0", "0", "1", "rank 1", "2", "3"]
    assert texts_of(panels[1]) == [*both, "rank 2", "0", "1", "rank 3", "2", "3"]
    cells = [patch for patch in panels[1].patches if patch.get_width() == 1]
    assert [cell.get_y() for cell in cells[:4]] == [0, 0, 1, 1], "rank 1 holds the second row"
    colours = [to_hex(cell.get_facecolor()) for cell in cells]
    assert colours[:4] == colours[4:] and len(set(colours)) == 2
    assert len({to_hex(patch.get_facecolor()) for patch in panels[2].patches if patch.get_width() == 1}) == 4
    assert len({(cell.get_x(), cell.get_y()) for cell in cells}) == 8, "no cell hides another"


def test_shards_draw_on_given_axes():
    _, (whole, panel, other) = pyplot.subplots(1, 3)
    ones = numpy.ones((2, 2))
    drawn = plots.shard_panels(ones, {"a": dict.fromkeys(range(4), ones)}, axes=[whole, panel])
    assert list(drawn) == [whole, panel]
    assert panel.has_data()
    assert not other.has_data()


def test_the_sketch_of_a_convnext_has_every_shape_and_a_block():
    stages = [ConvNeXtStage(8, 16, 32, depth=2), ConvNeXtStage(16, 8, 16, depth=1)]
    texts = texts_of(plots.convnext_diagram(stages, 64, 128))
    for said in (
        "image\n3 × 64 × 128",
        "stem: 4 × 4,\n/4, norm\n8 × 16 × 32",
        "2 blocks\n8 × 16 × 32",
        "1 block\n16 × 8 × 16",
        "7 × 7\ndepthwise",
        "stage 1: C = 16",
    ):
        assert said in texts, said


def test_parts_name_the_ranks_that_hold_the_same_and_those_whose_terms_make_a_sum():
    assert {"0\n+ 1", "2\n+ 3"} <= set(texts_of(placed(["Shard(0)", "Partial()"])))
    assert {"0 or 1", "2 or 3"} <= set(texts_of(placed(["Shard(1)", "Replicate()"])))
    assert "0 or 1\n+ 2 or 3" in texts_of(placed(["Partial()", "Replicate()"]))


def test_the_same_part_has_the_same_colour_dashed_until_it_is_measured():
    ax = placed(["Shard(1)", "Replicate()"], rank=2)
    frames = [patch for patch in ax.patches if to_hex(patch.get_edgecolor()) in map(str.lower, style.RANK_COLOURS)]
    first, second = (to_hex(colour) for colour in style.RANK_COLOURS[:2])
    assert [to_hex(frame.get_edgecolor()) for frame in frames] == [first, first, second, second, second]
    assert {frame.get_linestyle() for frame in frames} == {"--"}
    assert [text for text in texts_of(ax) if "×" in text and "rows" not in text] == ["4 × 3"] * 4
    assert "rows 0–3, columns 3–5" in texts_of(ax), "of rank 2"
    ax = placed(["Shard(1)", "Replicate()"], measured=dict.fromkeys(range(4), (8, 9)))
    assert texts_of(ax).count("8 × 9") == 4
    assert "rows × columns, measured" in texts_of(ax)


def test_strips_shade_what_goes_to_a_neighbour():
    ax = plots.strip_layout(numpy.zeros((4, 16, 3), numpy.uint8), (2, 4), 6, 0.1)
    shaded = [patch for patch in ax.patches if patch.get_alpha()]
    assert [round(patch.get_x(), 3) for patch in shaded[:6]] == [0.15, 0.25, 0.4, 0.5, 0.65, 0.75]
    assert len(shaded) == 12
    assert {"images 0 to 2", "images 3 to 5", "rank 0", "rank 7"} <= set(texts_of(ax))
    ax = plots.strip_layout(numpy.zeros((4, 16, 3), numpy.uint8), (1, 2), 1, 0.2, tensor_dim=2)
    upper, lower = [patch for patch in ax.patches if patch.get_alpha()]
    assert (upper.get_y(), lower.get_y()) == pytest.approx((0.075, 0.125)), "of a height of 0.25"


def test_amounts_have_a_budget_in_their_unit():
    measured = {"b": {"x": 3e6}}
    ax = plots.byte_bars({"a": {"x": 2e6}, "b": {"x": 4e6}}, measured, {"x": style.BLUE}, budget=8e6, ylabel="held")
    assert texts_of(ax) == ["2", "4", "3", "budget\n8 MB"]
    assert ax.get_ylabel() == "held, MB"
    assert ax.lines[0].get_ydata()[0] == 8 < ax.get_ylim()[1]
    assert plots.byte_bars({"a": {"x": 0}}, {}, {"x": style.BLUE}, ylabel="held").get_ylim()[1] > 0, (
        "nothing is no error"
    )


def test_the_difference_of_losses_is_a_part_of_the_reference():
    ax = plots.loss_difference_curves({"same": run(1), "half more": run(1, factor=1.5)}, run(1))
    assert list(ax.lines[0].get_ydata()) == [1e-9] * 3, "nothing, on a logarithmic axis"
    assert list(ax.lines[1].get_ydata()) == pytest.approx([0.5] * 3)
    assert ax.get_yscale() == "log"


def test_an_all_reduce_by_ranks_is_latency_and_bytes_and_the_chosen_one_has_the_dot():
    parts = {"2": (2e-5, 1e-4), "4": (6e-5, 1.5e-4)}
    ax = plots.all_reduce_time_by_ranks(parts, "4", measured_s=3e-4)
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([20, 100, 60, 150])
    assert texts_of(ax) == ["120", "210"] and ax.get_xlabel() == "time, µs"
    (dot,) = ax.lines
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (pytest.approx(300), 1)
    assert [row.get_fontweight() for row in ax.get_yticklabels()] == ["normal", "bold"]


def test_a_predicted_time_by_size_is_the_sum_of_latency_and_bytes():
    network = AlphaBeta(1e-5, 1e-9)
    ax = plots.predicted_time_by_size(network, [2**10, 2**20], 2**20, messages=3, measured_s=2e-3)
    both, latency, sent, mark, dot = ax.lines
    assert latency.get_ydata()[0] == latency.get_ydata()[-1] == pytest.approx(30)
    assert both.get_ydata() == pytest.approx(
        [a + b for a, b in zip(latency.get_ydata(), sent.get_ydata(), strict=True)]
    )
    assert mark.get_ydata()[0] == pytest.approx(30 + 2**20 / 1e3) and dot.get_ydata()[0] == pytest.approx(2000)


def test_every_public_plot_has_a_name_of_its_own_and_each_figure_stands_in_a_test():
    folder = Path(plots.__file__).parent
    heads = [name for path in folder.glob("[!_]*.py") if path.stem != "style" for name in functions_in(path)]
    assert sorted(heads) == plots.__all__, "one name stands in two modules"
    texts = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    figures = [name for name in plots.__all__ if "ax" in inspect.signature(getattr(plots, name)).parameters]
    assert len(figures) > 20
    assert [name for name in figures if not re.search(rf"\b{name}\b", texts)] == []


def functions_in(path):
    """The public functions of a module."""
    return re.findall(r"^def ([a-z]\w*)", path.read_text(), flags=re.MULTILINE)
