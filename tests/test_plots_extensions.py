"""labkit.plots.extensions: the drawing of memory is what FSDP2 does, and points lie where runs put them."""

import functools
import weakref
from pathlib import Path

import numpy
import pytest
import torch.distributed as dist
from matplotlib import pyplot
from matplotlib.colors import to_hex
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labkit import plots
from labkit.parallel.extensions import apply_extension
from labkit.plots import extensions as figures
from labkit.runs.result import RunResult
from labkit.tensors import plain_tensors
from labkit_course.widgets import gather

SESSION = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "9.9", "note": ""}
NAMES = {"TwoTensor": "two_tensor", "int8": "int8"}


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    pyplot.close("all")


@pytest.fixture
def first_of_two():
    """A mesh of two ranks, of which the second does not exist."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def storages(tensors):
    return {plain.untyped_storage() for each in tensors for plain in plain_tensors(each)}


def addresses(tensors):
    return {storage.data_ptr() for storage in storages(tensors)}


def nbytes(tensors):
    return [storage.nbytes() for storage in storages(tensors)]


class Observer:
    """Wraps the two hooks of a shard and keeps what goes through them."""

    def __init__(self, shard):
        self.shard = shard
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            hook = getattr(shard, name)
            watch = getattr(self, name.removeprefix("fsdp_"))
            setattr(shard, name, functools.wraps(hook)(functools.partial(watch, hook)))

    def pre_all_gather(self, hook, *args):
        sent, metadata = hook(*args)
        self.sent = [weakref.ref(each) for each in sent]
        self.shares = {"sent": sharing(sent, {"local shard": [self.shard]})}
        return sent, metadata

    def post_all_gather(self, hook, gathered, metadata, dtype, *, out=None):
        answer = hook(gathered, metadata, dtype, out=out)
        self.is_first, self.gathered = out is None, gathered
        self.parameter = answer[0] if out is None else out
        others = {"local shard": [self.shard]}
        self.shares["gathered"] = sharing(gathered, others)
        self.shares["parameter"] = sharing([self.parameter], others | {"gathered": gathered})
        return answer


def sharing(tensors, others):
    """In whose memory tensors lie; "" for their own."""
    return next((name for name, other in others.items() if addresses(tensors) <= addresses(other)), "")


@pytest.mark.parametrize("extension", figures.TENSOR_LIVES)
def test_the_drawing_of_memory_is_what_fsdp_does(first_of_two, extension):
    model = apply_extension(nn.Sequential(nn.Linear(8, 6, bias=False)), first_of_two, NAMES[extension])
    seen = Observer(model[0].weight._local_tensor)
    drawn = {held.row: held.shares for held in figures.TENSOR_LIVES[extension] if held.first}
    for is_first in (True, False):
        model[0].unshard()
        assert seen.is_first is is_first
        assert seen.shares == drawn
        if not drawn["sent"]:
            assert not any(sent() is not None for sent in seen.sent), "gone after the all-gather"
        assert all(nbytes(seen.gathered)) and all(nbytes([seen.parameter]))
        model[0].reshard()
        assert not any(nbytes(seen.gathered)) and not any(nbytes([seen.parameter])), "freed"
        assert all(nbytes([seen.shard])), "always there"


@pytest.mark.parametrize("extension", figures.TENSOR_LIVES)
def test_each_tensor_is_drawn_in_its_row_for_its_time_and_in_both_gathers(extension):
    ax = plots.hook_memory(extension)
    lives = figures.TENSOR_LIVES[extension]
    rows = ["local shard", *(held.row for held in lives)]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == rows == list(figures.ROW_COLOURS)[: len(rows)]
    assert ax.yaxis_inverted()
    moments = [tick.get_text() for tick in ax.get_xticklabels()]
    assert moments == ["sharded", *figures.GATHER_MOMENTS, "sharded", *figures.GATHER_MOMENTS, "sharded"]
    assert not ax.get_title()
    shard, *blocks = ax.patches
    assert (shard.get_x(), shard.get_width()) == (0, len(moments))
    first = [held for held in lives if held.first]
    for block, held in zip(blocks, [*first, *lives], strict=True):
        assert round(block.get_y() + block.get_height() / 2) == list(figures.ROW_COLOURS).index(held.row)
        start, end = int(block.get_x()), int(block.get_x() + block.get_width())
        assert (moments[start], moments[end - 1]) == (held.start, held.end)
        assert bool(block.get_hatch()) == bool(held.shares)
        colour = block.get_edgecolor() if held.shares else block.get_facecolor()
        assert to_hex(colour) == figures.ROW_COLOURS[held.shares or held.row].lower()
    assert [block.get_x() for block in blocks[3:6]] == [block.get_x() + 5 for block in blocks[:3]]


def test_a_leaky_parameter_lives_on_from_its_first_gather():
    ax = plots.hook_memory("int8", leaky=True)
    (block,) = [each for each in ax.patches if round(each.get_y() + each.get_height() / 2) == 3]
    moments = [tick.get_text() for tick in ax.get_xticklabels()]
    assert moments[int(block.get_x())] == "post hook"
    assert block.get_x() + block.get_width() == len(moments)
    assert len(ax.patches) == len(plots.hook_memory("int8").patches) - 1
    assert not ax.get_legend() and plots.hook_memory("TwoTensor").get_legend(), "only hatches need one"


def test_what_is_said_fits_into_its_block():
    for extension in figures.TENSOR_LIVES:
        ax = plots.hook_memory(extension)
        ax.figure.canvas.draw()
        inside = {text.get_text(): text.get_window_extent() for text in ax.texts}
        lives = figures.TENSOR_LIVES[extension]
        for held, block in zip([*(held for held in lives if held.first), *lives], ax.patches[1:], strict=True):
            box = block.get_window_extent()
            said = inside[held.first if block.get_x() < 5 else held.again]
            assert said.width < box.width, (extension, held)


def run(sent, error, held=0, gather=(0.0, 0.0)):
    common = {"v": 2, "rank": 0}
    scalars = {"weight_error": error, "weight_rms_error": error / 2, "held_bytes": held}
    scalars |= dict(zip(("gather_ms", "hooks_ms"), gather, strict=True))
    lines = [common | {"step": 3, "kind": "comm", "name": "all_gather", "axis": "", "count": 2, "bytes": sent}]
    lines += [
        common | {"step": -1, "kind": "scalar", "name": name, "value": value, "unit": ""}
        for name, value in scalars.items()
    ]
    info = {"program": "made up", "nproc": 1, "exit": "ok", "params": {}, "session": SESSION}
    return RunResult(Path("nowhere"), info, lines, [])


RUNS = {
    "fp32": run(1000, 0.0, 4_000_000, (2.5, 0.0)),
    "bf16": run(500, 0.003, 6_000_000, (3.0, 0.5)),
    "int8": run(260, 0.002, 5_000_000, (4.0, 1.25)),
}


def points(ax):
    return [tuple(line.get_xydata()[0]) for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]


def dashed(ax):
    return [line for line in ax.lines if line.get_linestyle() == "--" and len(line.get_xdata())]


def test_a_point_a_run_and_the_bound_of_theory_beside_it():
    ax = plots.error_by_bytes(RUNS, bounds={"bf16": 0.004, "int8": 0.005})
    assert points(ax) == [(1.0, 0.0), (0.5, 0.003), (0.26, 0.002)]
    assert [set(line.get_ydata()) for line in dashed(ax)] == [{0.004}, {0.005}]
    assert [sum(line.get_xdata()) / 2 for line in dashed(ax)] == pytest.approx([0.5, 0.26])
    assert [text.get_text() for text in ax.texts] == ["fp32\n0", "bf16\n0.003", "int8\n0.002"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["measured", "theory: at most"]
    assert ax.get_ylim()[0] == 0, "float32's error has a place"
    assert ax.figure.get_supxlabel() == "CPU · 1 rank on 2 cores · torch 9.9"


def test_the_other_error_is_that_of_all_weights():
    ax = plots.error_by_bytes(RUNS, error="rms")
    assert points(ax) == [(1.0, 0.0), (0.5, 0.0015), (0.26, 0.001)]
    assert "RMS" in ax.get_ylabel()


def test_a_way_to_send_has_one_colour_in_all_figures():
    errors = plots.error_by_bytes(RUNS)
    colours = [line.get_color() for line in errors.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert colours == [figures.encoding_colour(label) for label in RUNS] and len(set(colours)) == 3
    # as the lines of losses, which come in this order
    names = ("bf16", "float8", "int8")
    assert [figures.encoding_colour(name) for name in names] == list(figures.style.RANK_COLOURS[:3])


def test_labels_do_not_meet():
    for error in ("largest", "rms"):
        ax = plots.error_by_bytes(RUNS, error=error)
        ax.figure.canvas.draw()
        boxes = [text.get_window_extent() for text in ax.texts]
        assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["measured"]


def test_without_float32_there_is_nothing_to_compare_with():
    with pytest.raises(ValueError, match="no run 'fp32' among bf16: add one"):
        plots.error_by_bytes({"bf16": RUNS["bf16"]})


def test_axes_that_were_given_are_used():
    _, (left, right) = pyplot.subplots(1, 2)
    before = len(pyplot.get_fignums())
    assert plots.hook_memory("int8", ax=left) is left
    assert plots.error_by_bytes(RUNS, ax=right) is right
    assert len(pyplot.get_fignums()) == before


def test_handed_bytes_are_numbers_and_scales_and_what_was_measured_beside_them():
    sent = {"fp32": {"numbers": 4e6}, "int8": {"numbers": 1e6, "scales": 5e5}}
    colours = {"numbers": "blue", "scales": "red", "measured": "grey"}
    ax = plots.byte_bars(sent, {"int8": {"measured": 1.5e6}}, colours, ylabel="handed")
    assert [text.get_text() for text in ax.texts] == ["4", "1.5", "1.5"]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["numbers", "scales", "measured", "predicted"]
    assert ax.get_ylim()[1] > 4


def test_a_histogram_of_errors_has_the_bound_of_theory_dashed_on_both_sides():
    errors = numpy.array([-0.004, 0.0, 0.0, 0.002])
    ax = gather.error_histogram(errors, 0.005, 0.004, label="int8")
    assert sorted(float(line.get_xdata()[0]) for line in dashed(ax)) == [-0.5, 0.5]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["theory: at most 0.5 %", "measured: at most 0.4 %"]
    tops = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert tops.max() == 50, "half of the weights have no error"
    assert to_hex(ax.collections[0].get_facecolor()[0]) == figures.encoding_colour("int8").lower()
    assert gather.error_histogram(numpy.zeros(3), 0.0).get_xlim()[1] > 0
