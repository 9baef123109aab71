"""labkit.parallel.spatial through its rank program: equal to one device, refused where it must be, and what it sends.

Bytes and counts are held against theory exactly, peak activations within 5 %.
"""

import json
import os
import subprocess
import sys
import types
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fixture_cells import run_cells
from programs.spatial_cases import CASES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import labkit
from labkit import requirements
from labkit.models import photo
from labkit.models.convnext import ConvNeXt
from labkit.parallel import spatial as parallel
from labkit.parallel.spatial import apply_spatial, axis_index, own_samples, shard_batch
from labkit.runs.records import RecordWriter, read_records
from labkit.session.meter import Meter
from labkit.theory import sizes, spatial
from launch import convnext_spatial

PROGRAMS = Path(__file__).parent / "programs"
LIMIT = 1e-5

PARITY = [  # every pair of strategy, dimension and mesh
    {"nproc": 4, "strategy": "local", "tensor_dim": 3, "mesh": "4"},
    {"nproc": 4, "strategy": "local", "tensor_dim": 2, "mesh": "2x2", "drop_path_rate": 0.5, "input_grad": True},
    {"nproc": 2, "strategy": "local", "tensor_dim": 3, "drop_path_rate": 0.5},
    {"nproc": 4, "strategy": "dtensor", "tensor_dim": 2, "mesh": "4", "drop_path_rate": 0.5},
    {"nproc": 4, "strategy": "dtensor", "tensor_dim": 3, "mesh": "2x2", "input_grad": True},
    {"nproc": 2, "strategy": "dtensor", "tensor_dim": 2},
    {"nproc": 2, "strategy": "dtensor", "mesh": "2x1", "input_grad": True},
    {"nproc": 1, "strategy": "local"},
    {"nproc": 1, "strategy": "dtensor"},
]


NATIVE = {"nproc": 4, "strategy": "native_unguarded"}
BIG = {"batch": 2, "height": 128, "width": 512, "depths": (2, 2, 2), "dims": (32, 64, 128)}
SMALL = {"batch": 4, "height": 64, "width": 128, "depths": (1, 2), "dims": (8, 16)}
RUNS = {
    "one device": {"nproc": 1, "strategy": "plain", **BIG},
    "local height": {"nproc": 2, "strategy": "local", "tensor_dim": 2, **BIG},
    "local width": {"nproc": 4, "strategy": "local", "tensor_dim": 3, **BIG},
    "local two axes": {"nproc": 4, "strategy": "local", "tensor_dim": 2, "mesh": "2x2", **SMALL},
    "dtensor height": {"nproc": 2, "strategy": "dtensor", "tensor_dim": 2, **SMALL},
    "dtensor two axes": {"nproc": 4, "strategy": "dtensor", "tensor_dim": 3, "mesh": "2x2", **SMALL},
}
SHARDED = [name for name in RUNS if name != "one device"]


def cell_name(cell):
    return "-".join(str(value) for value in cell.values())


class Results:
    """Of all cells by name. Those that check, or measure, on as many ranks share a launch, once one is asked for."""

    def __init__(self):
        self.cells = {cell_name(cell): cell | {"check": "parity"} for cell in [*PARITY, NATIVE]}
        self.cells |= {name: cell | {"steps": 1, "check": "none"} for name, cell in RUNS.items()}
        self.found = {}

    def __getitem__(self, name):
        if name not in self.found:
            nproc, check = (self.cells[name][option] for option in ("nproc", "check"))
            alike = [each for each, cell in self.cells.items() if (cell["nproc"], cell["check"]) == (nproc, check)]
            cells = [
                {option: value for option, value in self.cells[each].items() if option != "nproc"} for each in alike
            ]
            self.found |= dict(zip(alike, run_cells("convnext_spatial", nproc, cells), strict=True))
        return self.found[name]


@pytest.fixture(scope="module")
def results():
    return Results()


@pytest.mark.parametrize("cell", PARITY, ids=cell_name)
def test_program_computes_what_one_device_computes(results, cell):
    result = results[cell_name(cell)]
    assert result.value("ok")
    tensors = spatial.convnext_parameter_tensors((1, 1))
    assert result.value("compared") == 1 + 2 * tensors + cell.get("input_grad", False) > 50
    assert result.value("max_rel_error") <= LIMIT


def test_uneven_strips_compute_what_one_device_computes():
    sizes = {"width": 76, "height": 16, "depths": (1,), "dims": (8,)}  # strips of 16, 16, 16, 16 and 12 pixels
    how = {"check": "parity", "strategy": "local", "input_grad": True}
    result = labkit.run("convnext_spatial", nproc=5, device="cpu", **how, **sizes)
    assert result.value("compared") == 2 + 2 * spatial.convnext_parameter_tensors((1,))
    assert result.value("max_rel_error") <= LIMIT


@pytest.fixture(scope="module")
def two_steps():
    return labkit.run(PROGRAMS / "spatial_cases.py", nproc=4, device="cpu")


@pytest.mark.long  # steps on four ranks; the cells above compare them with one device, too
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_start_from_different_seeds_agree_and_drop_a_sample_together(two_steps, case):
    tensors = spatial.convnext_parameter_tensors((1, 2))
    assert two_steps.value(f"{case} compared") == 2 * (1 + 2 * tensors)
    assert two_steps.value(f"{case} error") < 1e-12  # float64


def torchrun(ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "launch.convnext_spatial", "--check", "parity", *arguments]
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=root)


@pytest.fixture
def recorded(tmp_path):
    """Records of a program that this process runs as the only rank."""

    def run(config):
        with mock.patch.dict(os.environ, LABKIT_RUN_FOLDER=str(tmp_path), LABKIT_DEVICE="cpu"):
            convnext_spatial.main(config)
        return read_records(tmp_path).lines

    return run


def test_a_run_is_a_loop_of_plain_training_with_one_step_to_warm_up(recorded):
    small = {"height": 16, "width": 16, "dims": (4, 4), "steps": 2, "learning_rate": 1e-2}
    config = convnext_spatial.Config(strategy="plain", **small)
    lines = recorded(config)
    images, labels = photo.image_batch("random", 2, 16, 16, 10, seed=0)
    model = convnext_spatial.build_model(config, torch.device("cpu"))
    optimizer, expected = torch.optim.Adam(model.parameters(), lr=1e-2), {}
    for step in (-1, 0, 1, 2):  # warm-up, timed, traced
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        expected[step] = pytest.approx(loss.item(), rel=1e-5)
    assert {line["step"]: line["value"] for line in lines if line["name"] == "loss"} == expected
    spans = Counter(line["name"] for line in lines if line["kind"] == "span")
    assert spans == dict.fromkeys(("forward", "backward", "optimizer", "step"), 2)


def test_the_gradient_of_the_images_is_that_of_the_last_step():
    config = convnext_spatial.Config(height=16, width=16, dims=(4, 4), learning_rate=1e-7)
    images, labels = photo.image_batch("random", 2, 16, 16, 10, seed=0)
    meter, seen = Meter(RecordWriter(None, 0), torch.device("cpu")), []
    for steps in (1, 2):
        model = convnext_spatial.build_model(config, meter.device)
        convnext_spatial.train(config, partial(meter.plain_steps, most=steps), model, images.requires_grad_(), labels)
        seen.append(images.grad.clone())
    assert torch.allclose(*seen, rtol=0.01, atol=1e-6)


def test_a_check_compares_several_steps(recorded, monkeypatch):
    updates, step = [], torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: updates.append(self) or step(self))
    recorded(convnext_spatial.Config(height=16, width=16, dims=(4, 4), strategy="plain", check="parity"))
    assert [updates.count(optimizer) for optimizer in dict.fromkeys(updates)] == [3, 3]


@pytest.mark.long
def test_last_line_of_the_bare_command_is_the_verdict():
    answer = torchrun(2, "--strategy", "local")
    assert answer.returncode == 0, answer.stderr
    verdict = json.loads(answer.stdout.splitlines()[-1])
    assert verdict.keys() >= {"check", "compared", "max_rel_error", "worst", "ok"}
    assert (verdict["check"], verdict["ok"]) == ("parity", True)
    assert verdict["compared"] > 50
    assert 0 < verdict["max_rel_error"] <= LIMIT


def test_a_broken_halo_exchange_is_found():
    result = labkit.run(PROGRAMS / "broken_halo.py", nproc=2, device="cpu")
    assert not result.ok
    assert result.value("max_rel_error") == result.verdict["max_rel_error"] > 100 * LIMIT


def test_native_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    with pytest.raises(labkit.ParameterError, match="without an error") as caught:
        labkit.run("convnext_spatial", nproc=4, strategy="native")
    assert "\n" not in str(caught.value)
    assert "use strategy local or dtensor" in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.long  # two processes that import torch
def test_native_is_refused_in_one_line_on_the_bare_command():
    answer = torchrun(2, "--strategy", "native")
    assert answer.returncode != 0
    assert answer.stdout == ""
    said = [line for line in answer.stderr.splitlines() if "strategy native" in line]
    assert said == [requirements.native_convolution_problem()]
    assert answer.stderr.count("Traceback") == 1  # torchrun's own: no rank has one


@pytest.mark.parametrize(
    ("version", "why"),
    [((2, 11), "drops gradients"), ((2, 13), "pytorch/pytorch#191926"), ((2, 14), "pytorch/pytorch#191926")],
)
def test_the_refusal_says_what_is_wrong_on_which_version(version, why):
    said = requirements.native_convolution_problem(version)
    assert why in said and f"torch {version[0]}.{version[1]}" in said and "\n" not in said


def test_native_gives_wrong_numbers_where_it_is_run_all_the_same(results):
    result = results[cell_name(NATIVE)]
    assert not result.value("ok")
    assert result.value("compared") > 50
    assert result.value("max_rel_error") > 100 * LIMIT


def local_setting(name):
    """Ranks along the image and along the samples, samples of a rank, and the feature maps of its strips."""
    setting = RUNS[name]
    axes = sizes.parse_mesh_axes(setting.get("mesh", ""), setting["nproc"])
    space, data = axes["space"], axes.get("data", 1)
    cut = {2: (setting["height"] // space, setting["width"]), 3: (setting["height"], setting["width"] // space)}
    stages = spatial.convnext_stages(*cut[setting.get("tensor_dim", 3)], setting["depths"], setting["dims"])
    return space, data, setting["batch"] // data, stages


@pytest.mark.parametrize("name", SHARDED)
def test_every_rank_sends_and_receives_what_theory_says(results, name):
    space, _, batch, stages = local_setting(name)
    setting, table = RUNS[name], results[name].summary()
    assert len(table) == setting["nproc"]
    for rank, row in table.iterrows():
        neighbours = (rank % space > 0) + (rank % space < space - 1)
        expected = spatial.spatial_send_bytes(
            stages=stages, batch=batch, neighbours=neighbours, tensor_dim=setting["tensor_dim"]
        )
        assert (row["send_count"], row["send_bytes"]) == (2 * neighbours * sum(setting["depths"]), expected)
        assert (row["recv_count"], row["recv_bytes"]) == (row["send_count"], row["send_bytes"])


@pytest.mark.parametrize("name", SHARDED)
def test_every_rank_reduces_what_theory_says(results, name):
    space, data, batch, _ = local_setting(name)
    network = {option: RUNS[name][option] for option in ("strategy", "depths", "dims")}
    expected = spatial.spatial_all_reduces(num_classes=10, batch=batch, space_ranks=space, data_ranks=data, **network)
    for _, row in results[name].summary().iterrows():
        assert (row["all_reduce_count"], row["all_reduce_bytes"]) == expected


@pytest.mark.parametrize("name", SHARDED)
def test_nothing_else_is_sent(results, name):
    comm = results[name].frame.query("kind == 'comm'")
    assert set(comm["name"]) == {"send", "recv", "all_reduce"}
    assert set(comm["step"]) == {1}, "traffic is recorded in the traced step alone"


def test_one_device_sends_nothing(results):
    assert results["one device"].frame.query("kind == 'comm'").empty


@pytest.mark.parametrize("name", RUNS)
def test_peak_activations_are_within_five_percent_of_theory(results, name):
    space, _, batch, stages = local_setting(name)
    dim = RUNS[name].get("tensor_dim", 3)
    expected = spatial.convnext_activation_bytes(stages=stages, batch=batch, ranks=space, tensor_dim=dim)
    for _, row in results[name].summary().iterrows():
        assert row["peak_activation_bytes"] == pytest.approx(expected, rel=0.05)


def test_four_ranks_hold_about_a_quarter_of_the_activations_each(results):
    four, one = (results[name].value("peak_activation_bytes") for name in ("local width", "one device"))
    assert 0.25 < four / one <= 0.27


@pytest.mark.parametrize(("depths", "dims"), [((1, 1), (32, 64)), ((2, 3, 2), (16, 32, 64))])
def test_a_checkpointed_step_keeps_what_theory_says_and_computes_the_same(depths, dims):
    network = {"strategy": "plain", "nproc": 1, "checkpointing": True, "depths": depths, "dims": dims}
    result = labkit.run("convnext_spatial", batch=2, height=64, width=128, steps=1, **network)
    expected = spatial.checkpointed_bytes(spatial.convnext_stages(64, 128, depths, dims), batch=2)
    assert expected < result.value("peak_activation_bytes") < 1.03 * expected
    strips = network | {"strategy": "local", "nproc": 2}
    assert labkit.check("convnext_spatial", height=64, width=128, **strips).ok


@pytest.fixture
def five_ranks():
    """A mesh of five ranks of which this process is the first, and the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=5)
    yield init_device_mesh("cpu", (5,), mesh_dim_names=("space",))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "global"}, "strategy 'global' is none of native, native_unguarded, dtensor, local"),
        ({"strategy": "local", "tensor_dim": 1}, r"tensor_dim 1 is neither 2 \(height\) nor 3 \(width\)"),
        ({"strategy": "local", "mesh_dim": "time"}, "mesh axis 'time' is none of 0, space"),
        ({"strategy": "local", "mesh_dim": 1}, "mesh axis 1 is none of 0, space"),
        ({"strategy": "local", "mesh_dim": -1}, "mesh axis -1 is none of 0, space"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(five_ranks, options, message):
    with pytest.raises(ValueError, match=message):
        apply_spatial(ConvNeXt(), five_ranks, **options)


def test_native_is_refused_by_the_function_itself(five_ranks):
    with pytest.raises(ValueError, match="without an error"):
        apply_spatial(ConvNeXt(), five_ranks, strategy="native")


def test_a_network_with_a_convolution_that_cannot_be_cut_is_refused(five_ranks):
    model = ConvNeXt()
    model.stages[1].depthwise = torch.nn.Conv2d(2, 2, kernel_size=4, padding=2)
    with pytest.raises(ValueError, match="kernel 4, stride 1, padding 2"):
        apply_spatial(model, five_ranks, strategy="local")


def test_uneven_strips_are_refused_as_dtensors_with_the_arithmetic(five_ranks):
    model = apply_spatial(ConvNeXt(depths=(1,), dims=(4,)), five_ranks, strategy="dtensor")
    images, _ = shard_batch(torch.zeros(1, 3, 16, 76), torch.zeros(1), five_ranks, stride=4)
    with pytest.raises(ValueError, match=r"5 ranks cannot share 76 along dim 3 as a DTensor: 76 % 5 = 1; use strategy"):
        model(images)


def test_a_batch_that_cannot_be_cut_is_refused_with_the_arithmetic(five_ranks):
    with pytest.raises(ValueError, match=r"5 ranks cannot share 64: a rank gets 13, 13 % 4 = 1"):
        shard_batch(torch.zeros(1, 3, 16, 64), torch.zeros(1), five_ranks, stride=4)


def test_a_batch_is_cut_where_the_mesh_says(five_ranks):
    whole = torch.arange(2 * 3 * 4 * 10.0).view(2, 3, 4, 10)
    images, labels = shard_batch(whole, torch.tensor([7, 8]), five_ranks)
    assert torch.equal(images.to_local(), whole[..., :2])
    assert (images.shape, labels.tolist()) == (whole.shape, [7, 8])
    assert own_samples(five_ranks, 2) == slice(0, 2)
    assert [axis_index(five_ranks, axis) for axis in (None, 0, "space")] == [0, 0, 0]


def test_strips_lie_along_the_axis_that_is_named():
    dist.init_process_group("fake", rank=3, world_size=6)
    try:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("space", "data"))  # 3 is the second strip's first
        whole = torch.arange(6 * 10.0).view(6, 1, 1, 10)
        images, labels = shard_batch(whole, torch.arange(6), mesh, mesh_dim="space")
    finally:
        dist.destroy_process_group()
    assert labels.tolist() == [0, 1]
    assert torch.equal(images.to_local(), whole[:2, ..., 5:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nproc": 4, "width": 64}, "4 ranks cannot share 64: .* 16 / 8 = 2, less than the halo of 3"),
        (
            {"nproc": 5, "strategy": "dtensor", "width": 76, "depths": (1,), "dims": (8,)},
            "5 ranks cannot share 76 along dim 3 as a DTensor: 76 % 5 = 1; use strategy local or a size that 5 divides",
        ),
        ({"nproc": 3}, "3 ranks cannot share 256: a rank gets 86, 86 % 8 = 6"),
        ({"nproc": 4, "mesh": "2x2", "batch": 3}, "2 ranks cannot share a batch of 3: 3 % 2 = 1"),
        ({"nproc": 4, "mesh": "3x2"}, "mesh 3x2 is for 6 ranks, but 4 are launched"),
        ({"nproc": 2, "strategy": "plain"}, "strategy plain is one device's training: it takes 1 rank, not 2"),
        ({"nproc": 2, "height": 30}, "height 30 is not a multiple of the total stride 8: 30 % 8 = 6"),
    ],
)
def test_program_refuses_what_cannot_work_before_anything_starts(arguments, message):
    with pytest.raises(labkit.ParameterError, match=message):
        labkit.run("convnext_spatial", **arguments)


@pytest.mark.parametrize(("version", "label"), [((2, 13), Replicate()), ((2, 14), Shard(3))])
def test_a_staged_native_run_takes_the_label_that_each_torch_gives_a_gradient(monkeypatch, version, label):
    """With the wrong one torch gathers the gradient: "returned an invalid gradient … [5, 256, 8, 32]"."""
    labels = types.SimpleNamespace(from_local=lambda strip, mesh, placements, grad_placements: grad_placements)
    conv = torch.nn.Conv2d(1, 1, 1)
    monkeypatch.setattr(parallel.requirements, "torch_version", lambda: version)
    monkeypatch.setattr(parallel, "DTensor", labels)
    parallel._relabel_as_strips(torch.nn.Sequential(conv))
    (relabel,) = conv._forward_pre_hooks.values()
    strip = types.SimpleNamespace(
        to_local=lambda: None, device_mesh=types.SimpleNamespace(ndim=1), placements=[Shard(3)]
    )
    assert relabel(conv, (strip,)) == [label]


def with_buffers_like_a_slice(strip, halo, rank, ranks):
    """Receive into zeros that keep the strides of a slice, which channels-last would make unfit for messages."""
    from_left, from_right = torch.zeros_like(strip[..., :halo]), torch.zeros_like(strip[..., :halo])
    handles = []
    if rank > 0:
        mine = strip[..., :halo].contiguous()
        handles += [dist.isend(mine, rank - 1), dist.irecv(from_left, rank - 1)]
    if rank < ranks - 1:
        mine = strip[..., -halo:].contiguous()
        handles += [dist.isend(mine, rank + 1), dist.irecv(from_right, rank + 1)]
    for handle in handles:
        handle.wait()
    return torch.cat([from_left, strip, from_right], dim=-1)


def test_an_answer_that_passed_with_contiguous_strips_trains_the_network_too():
    use = {"exchange_halo": with_buffers_like_a_slice}
    assert labkit.check("convnext_spatial", nproc=2, strategy="yours", use=use).ok
