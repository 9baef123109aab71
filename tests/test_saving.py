"""labkit.parallel.saving: a run that was saved goes on as if it had never stopped, on any number of ranks."""

import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, state_dict_loader, state_dict_saver

import labkit
from labkit import parity
from labkit.parallel.safe_checkpoint import SafeCheckpointReader, SafeLoadPlanner
from labkit.parallel.saving import CheckpointFolder, load_training, save_training
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


@pytest.mark.parametrize("ranks", [4, 2, 1])
def test_a_saved_run_goes_on_as_if_nothing_had_happened_on_any_number_of_ranks(saved, unbroken, ranks):
    path, fsdp = saved
    rest = losses(nproc=ranks, fsdp=fsdp, accumulate=4 // ranks, load=str(path))
    assert len(rest) == STEPS
    assert rest == pytest.approx(unbroken[fsdp][STEPS:], rel=1e-6)
    assert rest != pytest.approx(unbroken[fsdp][:STEPS], rel=1e-3), "a run from the beginning would give these"


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
