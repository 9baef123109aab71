"""labkit.parallel.saving: a run that was saved goes on as if it had never stopped, on any number of ranks."""

import enum
import itertools
import pathlib
import pickle
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from fixture_long import long_but
from torch.distributed.checkpoint import CheckpointException, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import labkit
from labkit import parity
from labkit.launcher import worker
from labkit.parallel.safe_checkpoint import SafeCheckpointReader, SafeLoadPlanner
from labkit.parallel.saving import CheckpointError, CheckpointFolder, _explain_errors, load_training, save_training
from launch import fsdp_matrix

HOW = {"model": "mlp_stack", "steps": 1, "device": "cpu"}
STEPS = 3  # of a run with steps=1: one to warm up, one timed, one traced


def losses(**how):
    """The mean loss over all ranks of each step in turn."""
    frame = labkit.run("fsdp_matrix", **HOW | how).frame.query("kind == 'scalar' and name == 'loss'")
    return frame.groupby("step").value.mean().to_list()


def train_alone(here, steps, begin=0, save=None, load=None):
    """Losses of these steps of the only rank, which may begin with what was saved, or save what it has."""
    config = fsdp_matrix.Config(model="mlp_stack")
    lab = fsdp_matrix.build_model(config, here.device, 0)
    fsdp_matrix.parallelize_model(config, here.mesh(data=1, alone=1), lab)
    optimizer, losses = torch.optim.Adam(lab.parameters(), lr=1e-2), []
    if load:
        assert load_training(load, lab, optimizer) == begin
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        inputs = parity.draw_samples(lab, here.device, step, 0)
        loss = lab.get_loss(inputs, lab(*inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if save:
        save_training(save, lab, optimizer, begin + steps)
    return losses


@pytest.mark.parametrize("name", ["folder", "file.pt"])
def test_a_rank_goes_on_where_it_has_stopped(lone_rank, tmp_path, name):
    whole, path = train_alone(lone_rank, 4), tmp_path / name
    assert train_alone(lone_rank, 2, save=path) == pytest.approx(whole[:2], rel=1e-6)
    assert train_alone(lone_rank, 2, begin=2, load=path) == pytest.approx(whole[2:], rel=1e-6)
    if name == "file.pt":
        state = torch.load(tmp_path / name, weights_only=True)
        assert type(state["model"]["layers.0.in_proj.weight"]) is torch.Tensor


def test_the_newest_complete_checkpoint_is_loaded_and_the_one_before_is_kept(lone_rank, tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    folder = CheckpointFolder(tmp_path)
    assert folder.load(model, optimizer) == 0
    for step in (8, 9, 10):
        torch.nn.init.constant_(model.bias, step)
        folder.save(model, optimizer, step)
    shutil.copytree(tmp_path / "step_00000010", tmp_path / ".step_00000011")  # as a killed run leaves it
    again = CheckpointFolder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000009", "step_00000010"]
    torch.nn.init.zeros_(model.bias)
    assert again.load(model, optimizer) == 10 and model.bias.tolist() == [10.0, 10.0]


@pytest.fixture(scope="module")
def unbroken():
    """Losses of a run of twice as many steps, by FSDP version."""
    return {fsdp: losses(nproc=4, fsdp=fsdp, steps=1 + STEPS) for fsdp in (1, 2)}


@pytest.fixture(
    scope="module",
    params=[
        (2, "folder"),
        pytest.param((2, "file.pt"), marks=pytest.mark.long),
        pytest.param((1, "folder"), marks=pytest.mark.long),
        (1, "file.pt"),
    ],
    ids=str,
)
def saved(request, tmp_path_factory, unbroken):
    """Where the first half of a run on 4 ranks was saved, its version and losses."""
    fsdp, name = request.param
    path = tmp_path_factory.mktemp("saved") / name
    first = losses(nproc=4, fsdp=fsdp, save=str(path))
    assert first == pytest.approx(unbroken[fsdp][:STEPS], rel=1e-6)
    return path, fsdp


@pytest.mark.parametrize("ranks", long_but([1], [4, 2, 1]))
def test_a_saved_run_goes_on_as_if_nothing_had_happened_on_any_number_of_ranks(saved, unbroken, ranks):
    path, fsdp = saved
    rest = losses(nproc=ranks, fsdp=fsdp, accumulate=4 // ranks, load=str(path))
    assert len(rest) == STEPS
    assert rest == pytest.approx(unbroken[fsdp][STEPS:], rel=1e-6)
    assert rest != pytest.approx(unbroken[fsdp][:STEPS], rel=1e-3), "a run from the beginning would give these"


@pytest.mark.long  # a save of each version is read daily by its own
def test_what_one_version_saved_the_other_loads_and_torch_reads(saved, unbroken):
    path, fsdp = saved
    other = 3 - fsdp
    rest = losses(nproc=2, fsdp=other, accumulate=2, load=str(path))
    assert rest == pytest.approx(unbroken[other][STEPS:], rel=1e-6)
    if path.suffix == ".pt":
        state = torch.load(path, weights_only=True)
        assert state["step"] == STEPS and state["model"]["layers.0.in_proj.weight"].shape == (48, 16)
        assert len(state["optimizer"]["state"]) == len(state["model"]) == 12


def test_checkpoints_are_gone_on_with_and_one_that_was_cut_off_is_not(tmp_path, unbroken):
    folder = tmp_path / "checkpoints"
    assert losses(nproc=4, checkpoints=str(folder)) == pytest.approx(unbroken[2][:STEPS], rel=1e-6)
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000002", "step_00000003"]
    cut_off = shutil.copytree(folder / "step_00000003", folder / ".step_00000004")
    (cut_off / ".metadata").unlink()
    rest = labkit.run("fsdp_matrix", nproc=2, accumulate=2, checkpoints=str(folder), **HOW | {"steps": 1 + STEPS})
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000005", "step_00000006"]
    found = rest.frame.query("kind == 'scalar' and name == 'loss'").groupby("step").value.mean()
    assert found.index.to_list() == [2, 3, 4], "they count on"
    assert found.to_list() == pytest.approx(unbroken[2][STEPS:], rel=1e-6)
    assert set(rest.frame.query("kind == 'span'").step) == {0}, "what was timed counts anew"


def look_into(folder):
    """Open a folder of checkpoints that only rank 0 sees; what the error says."""
    with pytest.raises(ValueError, match="do not see") as caught:
        CheckpointFolder(folder if dist.get_rank() == 0 else folder / "of another disk")
    return str(caught.value)


def test_a_folder_of_checkpoints_that_not_all_ranks_share_is_refused(ranks, tmp_path):
    message = f"ranks [1] do not see rank 0's folder {tmp_path}: take one on a disk that all share"
    assert ranks(2)(look_into, tmp_path)[0] == message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"checkpoints": "new", "save": "another"},
            "checkpoints save and load by themselves, and no scaler: leave out",
        ),
        ({"checkpoints": __file__}, "is a file: name a folder, which is made if need be"),
        ({"checkpoints": "new", "check": "parity"}, "parameters all ranks share: no moe, ignore or check"),
        ({"load": "/nowhere/at/all"}, "load '/nowhere/at/all' is not there: give what save wrote"),
        ({"load": "/tmp"}, r"load '/tmp' is no complete save, which is a folder with \.metadata: give what save wrote"),
        ({"load": __file__}, "is no complete save"),
        ({"save": "/nowhere/at/all"}, "save '/nowhere/at/all' must be a new name in a folder that there is"),
        ({"save": "/tmp"}, "save '/tmp' must be a new name"),
        ({"save": "new", "model": "moe"}, "parameters all ranks share: no moe, ignore or check"),
    ],
)
def test_a_place_that_cannot_be_is_refused_before_a_launch(params, message):
    with pytest.raises(labkit.ParameterError, match=message):
        labkit.run("fsdp_matrix", **params)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nothing_in_a_saved_folder_is_executed(tmp_path):
    state = {"step": 3, "weights": torch.ones(2), "rates": [0.1, (0.9, 0.99)]}
    state_dict_saver.save(state, checkpoint_id=tmp_path / "good", no_dist=True)
    found = {"step": 0, "weights": torch.zeros(2), "rates": [0.0, (0.0, 0.0)]}
    state_dict_loader.load(
        found, storage_reader=SafeCheckpointReader(tmp_path / "good"), planner=SafeLoadPlanner(), no_dist=True
    )
    assert found["step"] == 3 and found["rates"] == [0.1, (0.9, 0.99)] and found["weights"].sum() == 2

    table, bait = tmp_path / "good" / ".metadata", tmp_path / "bait"
    kept = pickle.loads(table.read_bytes())
    kept.planner_data = Touch(bait)
    table.write_bytes(pickle.dumps(kept))
    with pytest.raises(pickle.UnpicklingError, match=r"\.metadata names io\.open, which is no part of a checkpoint"):
        SafeCheckpointReader(tmp_path / "good").read_metadata()
    state_dict_saver.save(state | {"step": Touch(bait)}, checkpoint_id=tmp_path / "bad", no_dist=True)
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        state_dict_loader.load(
            found, storage_reader=SafeCheckpointReader(tmp_path / "bad"), planner=SafeLoadPlanner(), no_dist=True
        )
    assert not bait.exists()
    state_dict_loader.load(found, checkpoint_id=tmp_path / "bad", no_dist=True)
    assert bait.exists(), "as torch alone reads it"


class AsPython3112(pickle._Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do, and paths as Python 3.13 does."""

    def reducer_override(self, value):
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented

    def save_global(self, value, name=None):
        if value is pathlib.PosixPath:
            self.save("pathlib._local")
            self.save("PosixPath")
            self.write(pickle.STACK_GLOBAL)
        else:
            super().save_global(value, name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_table_of_contents_that_another_python_wrote_is_read_and_getattr_finds_nothing_else(tmp_path):
    state_dict_saver.save({"weights": torch.ones(2)}, checkpoint_id=tmp_path / "good", no_dist=True)
    table = tmp_path / "good" / ".metadata"
    kept = pickle.loads(table.read_bytes())
    kept.storage_meta.checkpoint_id = tmp_path
    with table.open("wb") as file:
        AsPython3112(file, 4).dump(kept)
    assert b"getattr" in table.read_bytes() and b"pathlib._local" in table.read_bytes()
    found = SafeCheckpointReader(tmp_path / "good").read_metadata()
    assert found.state_dict_metadata == kept.state_dict_metadata and found.storage_meta.checkpoint_id == tmp_path
    with table.open("wb") as file:
        AsPython3112(file, 4).dump(Lookup())
    with pytest.raises(pickle.UnpicklingError, match=r"\.metadata asks for mro of .*Metadata.*: do not load it"):
        SafeCheckpointReader(tmp_path / "good").read_metadata()


class Lookup:
    """Looks up an attribute of what a table of contents may name."""

    def __reduce__(self):
        return getattr, (Metadata, "mro")


def train(save, path, dims=16, layers=2):
    """Save a small training, or load it; what the error says."""
    sizes = [dims, *layers * [8]]
    model = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters())
    try:
        save_training(path, model, optimizer, 3) if save else load_training(path, model, optimizer)
    except CheckpointError as error:
        return str(error)
    return ""


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("name", ["folder", "file.pt"])
def test_a_save_of_another_model_is_refused_with_what_differs(ranks, tmp_path, name):
    path, on_two = tmp_path / name, ranks(2)
    assert on_two(train, True, path) == on_two(train, False, path) == ["", ""]
    told = "ValueError: 0.weight is [8, 16] there, and [8, 32] in this model; give a whole save of this model"
    assert on_two(train, False, path, 32) == [f"load {path}: {told}"] * 2
    (first, _) = on_two(train, False, path, 16, 3)
    assert "2.weight is absent there, and [8, 8] in this model" in first
    (first, _) = on_two(train, False, path, 16, 1)
    assert re.search(r"1\.(weight|bias) is \[8.*\] there, and absent in this model", first)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: cut(folder / ".metadata"), "pickle data was truncated"),
        (lambda folder: cut(folder / "__1_0.distcp"), "PytorchStreamReader failed"),
        (lambda folder: (folder / "__1_0.distcp").unlink(), "No such file or directory: '.*__1_0.distcp'"),
    ],
)
def test_a_damaged_save_is_refused_in_a_line(ranks, tmp_path, damage, says):
    ranks(2)(train, True, tmp_path / "folder")
    damage(tmp_path / "folder")
    for told in ranks(2)(train, False, tmp_path / "folder"):
        assert re.search(rf"^load {tmp_path}/folder: \w+: .*{says}", told) and "\n" not in told and len(told) < 600


def test_a_file_of_torch_save_that_is_no_training_is_refused_in_a_line(ranks, tmp_path):
    torch.save({"weights": torch.ones(2)}, tmp_path / "mine.pt")
    told = f"load {tmp_path}/mine.pt: KeyError: 'model'; give a whole save of this model"
    assert ranks(2)(train, False, tmp_path / "mine.pt") == [told] * 2


@pytest.mark.parametrize("name", ["folder", "file.pt"])
def test_a_disk_that_a_save_fills_is_told(ranks, small_disk, name):
    told = ranks(1)(train, True, small_disk / name, 100_000)[0]
    assert told == f"save {small_disk}/{name}: the disk of {small_disk} is full: make room, or save on another disk"
    assert not (small_disk / name / ".metadata").exists() and not (small_disk / "file.pt").exists()


def open_checkpoints(folder):
    CheckpointFolder(folder)


def test_what_else_lies_in_a_folder_of_checkpoints_stays_and_what_looks_like_a_save_is_named(ranks, tmp_path):
    for name in ("step_one", ".step_one"):
        (tmp_path / name).mkdir()
    ranks(1)(open_checkpoints, tmp_path)
    assert (tmp_path / "step_one").exists() and (tmp_path / ".step_one").exists()
    (tmp_path / "step_00000007").mkdir()
    fix = "move it away, or name another folder for checkpoints"
    with pytest.raises(AssertionError, match=rf"step_00000007 is no complete save, .*\.metadata: {fix}"):
        ranks(1)(open_checkpoints, tmp_path)
    assert (tmp_path / "step_00000007").exists()


def test_an_error_of_a_save_whose_peer_has_gone_is_an_echo():
    def save():
        with _explain_errors("save x", "name another"):
            raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1234")

    with pytest.raises(CheckpointError, match=r"save x: RuntimeError: .*closed by peer.*; name another") as caught:
        save()
    assert worker.is_echo(caught.value) and not worker.is_echo(CheckpointError("save x: no room"))
