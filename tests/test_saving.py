"""labkit.parallel.saving: a run that was saved goes on as if it had never stopped, on any number of ranks."""

import pytest
import torch

import labkit

HOW = {"model": "mlp_stack", "steps": 1, "device": "cpu"}
STEPS = 3  # of a run with steps=1: one to warm up, one timed, one traced


def losses(**how):
    """The mean loss over all ranks of each step in turn."""
    frame = labkit.run("fsdp_wrap", **HOW | how).frame.query("kind == 'scalar' and name == 'loss'")
    return frame.groupby("step").value.mean().to_list()


@pytest.fixture(scope="module")
def unbroken():
    """Losses of a run of twice as many steps, by FSDP version."""
    return {fsdp: losses(nproc=4, fsdp=fsdp, steps=1 + STEPS) for fsdp in (1, 2)}


@pytest.fixture(scope="module", params=[(2, "folder"), (2, "file.pt"), (1, "folder"), (1, "file.pt")], ids=str)
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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"load": "/nowhere/at/all"}, "load '/nowhere/at/all' is not there: give what save wrote"),
        ({"save": "/nowhere/at/all"}, "save '/nowhere/at/all' must be a new name in a folder that there is"),
        ({"save": "/tmp"}, "save '/tmp' must be a new name"),
        ({"save": "new", "model": "moe"}, "parameters all ranks share: no moe, ignore or check"),
    ],
)
def test_a_place_that_cannot_be_is_refused_before_a_launch(params, message):
    with pytest.raises(labkit.ParameterError, match=message):
        labkit.run("fsdp_wrap", **params)
