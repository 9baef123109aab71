"""labkit.submit on a real Slurm, whose nodes are all on this machine: jobs that end well and otherwise."""

import json
import re
from pathlib import Path

import pytest
from fixture_processes import is_alive, wait_for
from fixture_slurm import BLIND

import labkit
import labkit_cluster
from labkit.errors import LabError, ParameterError
from labkit_cluster import JobCancelled, Slurm
from labkit_cluster.host_rendezvous import NotAllHosts

pytestmark = [pytest.mark.calm, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(240)]
PROGRAMS = Path(__file__).parents[1] / "programs"
MISBEHAVE, RESUMING = (PROGRAMS / f"{name}.py" for name in ("misbehave", "resuming"))
TWO_BY_TWO = {"cluster": "slurm", "nodes": 2, "nproc": 2, "device": "cpu"}
SMALL = {"model": "mlp_stack", "dim": 16, "layers": 2, "steps": 1}
COUNTED = "kind == 'comm' or kind == 'memory' and name != 'resident'"
COLUMNS = ["rank", "step", "kind", "name", "count", "bytes"]


@pytest.fixture(scope="module", autouse=True)
def started(slurm, runs, tmp_path_factory):
    """All jobs that do not end well, started before the others: they mostly wait. One of them has lost a node."""
    pids = tmp_path_factory.mktemp("pids") / "pids"
    saves = tmp_path_factory.mktemp("saves")
    mortal = TWO_BY_TWO | {"cluster": Slurm(partition="mortal"), "nodes": 3, "nproc": 1}
    jobs = {
        "loses a node": labkit.submit(RESUMING, **mortal, hang_at=3, checkpoints=str(saves)),
        "array": labkit.submit(MISBEHAVE, **TWO_BY_TWO, rank=3, over={"how": ["raise", "exit", "finish"]}),
        "is cancelled": labkit.submit(MISBEHAVE, **TWO_BY_TWO, orphan=True, rank=2, pids=str(pids)),
    }
    wait_for((saves / "step_3" / ".metadata").exists, limit_s=120)
    # not before the ranks of the others have imported torch: its own are to do so within the limit
    jobs["takes too long"] = labkit.submit(MISBEHAVE, **TWO_BY_TWO, timeout_s=20)
    slurm.kill_node("n4")
    slurm.start_node("n4")
    yield jobs | {"pids": pids}
    for job in (*jobs.pop("array"), *jobs.values()):
        job.cancel()


@pytest.fixture(autouse=True)
def all_nodes(slurm, started):
    """A node that was lost for a reason of its own fails one test and not all that come after it."""
    slurm.mend()


def measured(result):
    return result.frame.query(COUNTED)[COLUMNS].sort_values(COLUMNS).reset_index(drop=True)


def losses(result):
    return result.frame.query("name == 'loss'").sort_values(["rank", "step"]).value.to_list()


@pytest.mark.long  # half a minute; the next one holds bytes, counts and losses against ranks here
def test_parity_holds_on_two_nodes_and_the_result_is_that_of_four_ranks_here():
    result = labkit.submit("fsdp_wrap", cluster="slurm", nodes=2, nproc=2, check="parity").result()
    verdict = json.loads(result.ranks[0].log().splitlines()[-1])
    assert verdict["ok"] and verdict["compared"] > 0 and verdict["max_rel_error"] < 1e-5
    here = labkit.run("fsdp_wrap", nproc=4, check="parity")
    assert result.value("compared") == here.value("compared")
    assert result.folder.stat().st_mode & 0o077 == 0, "its owner's alone"
    assert result.ok and result.world_size == 4 and result.params == here.params
    assert losses(result) == pytest.approx(losses(here), rel=1e-6)
    assert result.info["hosts"] == ["n1", "n2"]
    assert {path.read_text() for path in result.folder.glob("rank_*.host")} == {"n1", "n2"}


def test_bytes_counts_and_losses_are_those_of_a_run_here_and_progress_is_seen(capsys):
    job = labkit.submit("fsdp_wrap", **TWO_BY_TWO, **SMALL)
    result = job.result()
    assert job.state == "completed"
    assert "fsdp_wrap: ranks started 4/4, step 1 of 1" in capsys.readouterr().err
    here = labkit.run("fsdp_wrap", nproc=4, device="cpu", **SMALL)
    assert len(measured(here)) > 20 and measured(result).equals(measured(here))
    assert losses(result) == pytest.approx(losses(here), rel=1e-6)


def test_an_array_gives_a_job_for_each_value_in_order_and_tells_the_rank_that_failed_first(started):
    raises, leaves, finishes = started["array"]
    assert [job.id.partition("_")[2] for job in started["array"]] == ["0", "1", "2"]
    with pytest.raises(labkit.RankFailed, match="width 3 is not width 4") as caught:
        raises.result()
    assert caught.value.rank == 3 and caught.value.exc_type == "ValueError"
    with pytest.raises(labkit.RankFailed) as caught:
        leaves.result()
    assert caught.value.rank == 3 and caught.value.exc_type == "exit status 3"
    assert [job.state for job in started["array"][:2]] == ["failed", "failed"]
    assert finishes.result().params["how"] == "finish" and finishes.state == "completed"


def test_a_new_kernel_finds_the_job_by_its_folder(started):
    first = started["array"][0]
    again = labkit_cluster.load_job(first.folder)
    assert repr(again) == repr(first) and again.id == first.id
    with pytest.raises(labkit.RankFailed, match="width 3 is not width 4"):
        again.result()
    assert labkit.load(first.folder).info["exit"] == "failed"


@pytest.fixture
def unseen(slurm):
    """A folder that one node of the partition ``blind`` does not see."""
    if not slurm.is_up(BLIND):
        pytest.skip("no mounts may be made here")
    return slurm.unseen


def test_a_node_that_does_not_see_the_runs_is_named(unseen, monkeypatch):
    monkeypatch.setenv("LABKIT_RUNS", str(unseen))
    job = labkit.submit(MISBEHAVE, **TWO_BY_TWO | {"cluster": Slurm("blind")})
    alone = labkit.submit(MISBEHAVE, cluster=Slurm("blind", options=("--nodelist=n5",)), nodes=1, nproc=2)
    with pytest.raises(LabError, match=r"n5 does not see .*job\.json: set LABKIT_RUNS to a folder on a disk that"):
        job.result()
    with pytest.raises(LabError, match=r"it left no log: does every node see /.*\?"):
        alone.result()


def test_a_node_that_does_not_see_the_program_is_named(unseen):
    program = unseen / "program.py"
    program.write_text("raise SystemExit(3)")
    with pytest.raises(
        NotAllHosts, match=r"n5 does not see .*program\.py: put the program on a disk that all nodes share"
    ):
        labkit.submit(program, **TWO_BY_TWO | {"cluster": Slurm("blind")}).result()


def test_what_slurm_refuses_is_one_error_and_leaves_no_folder(runs):
    before = set(runs.iterdir())
    with pytest.raises(ParameterError, match=r"Slurm has no partition 'nowhere', it has .*good"):
        labkit.submit(MISBEHAVE, **TWO_BY_TWO | {"cluster": Slurm("nowhere")})
    with pytest.raises(LabError, match=r"sbatch refuses: .*Invalid feature specification"):
        labkit.submit(MISBEHAVE, **TWO_BY_TWO | {"cluster": Slurm(options=("--constraint=wings",))})
    assert set(runs.iterdir()) == before


@pytest.mark.long  # ten seconds of waiting; daily the limit of a run over hosts ends in stacks
def test_after_its_limit_a_job_ends_with_the_stacks_of_all_nodes(started):
    with pytest.raises(labkit.RunTimedOut) as caught:
        started["takes too long"].result()
    assert caught.value.timeout_s == 20 and len(caught.value.stacks) == 4
    assert all("wait_for_godot" in stack for stack in caught.value.stacks.values())


def test_cancel_returns_when_no_process_is_left(started, slurm):
    job = started["is cancelled"]
    pids = wait_for(lambda: len(names := started["pids"].read_text().split()) == 9 and names)
    assert job.state == "running"
    job.cancel()
    assert not [pid for pid in pids if is_alive(int(pid))]
    assert job.state == "cancelled" and repr(job).startswith(f"misbehave on slurm, job {job.id}: cancelled")
    with pytest.raises(JobCancelled):
        job.result()


@pytest.mark.long  # test_hosts.py kills a host, too, without Slurm
def test_a_job_whose_node_died_runs_again_from_its_newest_save(started):
    job = started["loses a node"]
    result = job.result()
    attempt = labkit.load(job.folder / "attempt_0")
    # on a busy machine Slurm may know it first
    told = r"HostLost: (n4 was lost|the cluster ended this attempt: a node was lost) in mid-run"
    assert re.match(told, attempt.info["error"]) and result.info["attempts"] == 2
    names = [[f"loss_{step}" for step in steps] for steps in ([0, 1, 2], [3, 4, 5])]
    assert [sorted(set(each.frame.name)) for each in (attempt, result)] == names, "it did not begin anew"
    unbroken = labkit.run(RESUMING, nproc=3, device="cpu")
    for name in names[1]:
        assert result.value(name) == pytest.approx(unbroken.value(name), rel=1e-5)
