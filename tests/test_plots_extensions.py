"""labkit.plots.extensions: the drawing of memory is what FSDP2 does, and points lie where runs put them."""

import functools
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist
from matplotlib import pyplot
from matplotlib.colors import to_hex
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labkit import plots
from labkit.parallel.extensions import apply_extension
from labkit.plots import extensions as figures
from labkit.result import RunResult
from labkit.tensors import plain_tensors

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


@pytest.mark.parametrize("extension", figures.LIVES)
def test_the_drawing_of_memory_is_what_fsdp_does(first_of_two, extension):
    model = apply_extension(nn.Sequential(nn.Linear(8, 6, bias=False)), first_of_two, NAMES[extension])
    seen = Observer(model[0].weight._local_tensor)
    drawn = {held.row: held.shares for held in figures.LIVES[extension]}
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


@pytest.mark.parametrize("extension", figures.LIVES)
def test_each_tensor_is_drawn_in_its_row_for_its_time_and_in_both_gathers(extension):
    ax = plots.hook_memory(extension)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == list(figures.COLOURS)
    assert ax.yaxis_inverted()
    moments = [tick.get_text() for tick in ax.get_xticklabels()]
    assert moments == ["sharded", *figures.GATHER, "sharded", *figures.GATHER, "sharded"]
    assert not ax.get_title()
    shard, *blocks = ax.patches
    assert (shard.get_x(), shard.get_width()) == (0, len(moments))
    lives = figures.LIVES[extension]
    for block, held in zip(blocks, lives * 2, strict=True):
        assert round(block.get_y() + block.get_height() / 2) == list(figures.COLOURS).index(held.row)
        start, end = int(block.get_x()), int(block.get_x() + block.get_width())
        assert (moments[start], moments[end - 1]) == (held.start, held.end)
        assert bool(block.get_hatch()) == bool(held.shares)
        colour = block.get_edgecolor() if held.shares else block.get_facecolor()
        assert to_hex(colour) == figures.COLOURS[held.shares or held.row].lower()
    assert [block.get_x() for block in blocks[3:]] == [block.get_x() + 5 for block in blocks[:3]]


def test_what_is_said_fits_into_its_block():
    for extension in figures.LIVES:
        ax = plots.hook_memory(extension)
        ax.figure.canvas.draw()
        inside = {text.get_text(): text.get_window_extent() for text in ax.texts}
        for held, block in zip(figures.LIVES[extension] * 2, ax.patches[1:], strict=True):
            box = block.get_window_extent()
            said = inside[held.first if block.get_x() < 5 else held.again]
            assert said.width < box.width, (extension, held)


def run(sent, error):
    common = {"v": 2, "rank": 0}
    lines = [
        common | {"step": 3, "kind": "comm", "name": "all_gather", "axis": "", "count": 2, "bytes": sent},
        common | {"step": -1, "kind": "scalar", "name": "weight_error", "value": error, "unit": ""},
    ]
    info = {"program": "made up", "nproc": 1, "exit": "ok", "params": {}, "session": SESSION}
    return RunResult(Path("nowhere"), info, lines, [])


RUNS = {"fp32": run(1000, 0.0), "bf16": run(500, 0.003), "int8": run(260, 0.002)}


def test_a_point_a_run_and_the_bound_of_theory_beside_it():
    ax = plots.bytes_against_error(RUNS, bounds={"bf16": 0.004, "int8": 0.005})
    points = [tuple(line.get_xydata()[0]) for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert points == [(1.0, 0.0), (0.5, 0.003), (0.26, 0.002)]
    bounds = [line for line in ax.lines if line.get_marker() != "o" and len(line.get_xdata())]
    assert [set(line.get_ydata()) for line in bounds] == [{0.004}, {0.005}]
    assert [sum(line.get_xdata()) / 2 for line in bounds] == pytest.approx([0.5, 0.26])
    assert [text.get_text() for text in ax.texts] == ["fp32\n1", "bf16\n0.5", "int8\n0.26"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["measured", "theory: at most"]
    assert ax.get_ylim()[0] == 0, "float32's error has a place"
    assert ax.figure.get_supxlabel() == "CPU · 1 rank on 2 cores · torch 9.9"


def test_labels_do_not_meet():
    ax = plots.bytes_against_error(RUNS)
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["measured"]


def test_without_float32_there_is_nothing_to_compare_with():
    with pytest.raises(ValueError, match="no run 'fp32' among bf16: add one"):
        plots.bytes_against_error({"bf16": RUNS["bf16"]})


def test_axes_that_were_given_are_used():
    _, (left, right) = pyplot.subplots(1, 2)
    before = len(pyplot.get_fignums())
    assert plots.hook_memory("int8", ax=left) is left
    assert plots.bytes_against_error(RUNS, ax=right) is right
    assert len(pyplot.get_fignums()) == before
