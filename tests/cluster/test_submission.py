"""labkit.submit before anything is handed over: what it refuses, and what it says where no cluster is."""

import os
import subprocess
import sys
import time

import pytest
from fixture_processes import wait_for

import labkit
import labkit_cluster
from labkit.errors import LabError, ParameterError
from labkit.launcher import process
from labkit.runs.folder import RunFolder, read_json, write_json
from labkit_cluster import Kubernetes, Slurm
from labkit_cluster.agent import archive_attempt
from labkit_cluster.host_rendezvous import FolderMailbox

JOB = {"cluster": "slurm", "nodes": 2, "nproc": 2}


@pytest.fixture
def no_commands(monkeypatch, tmp_path):
    """A machine without any cluster's commands, and no run's folder afterwards."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    yield
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("no_commands")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stpes": 3}, "fsdp_wrap: no parameter is called 'stpes'; did you mean 'steps'"),
        ({"hybrid": 3}, "fsdp_wrap: no parameter is called 'hybrid'. It is a parameter of"),
        ({"nodes": 0}, "nodes = 0 is not a number of nodes"),
        ({"nproc": 0}, "nproc = 0 is not a number of ranks"),
        ({"timeout_s": float("inf")}, "timeout_s = inf: a cluster wants to know a limit"),
        ({"over": {"steps": [1, "two"]}}, "fsdp_wrap: steps = 'two' is not int"),
        ({"over": {"steps": 3}}, "over: steps = 3 is no list of values"),
        ({"over": {"steps": []}}, "over = {'steps': []} holds no value to take"),
        ({"over": {"nproc": [1, 2]}}, "nproc: given both in over= and as a fixed value"),
        ({"cluster": "lsf"}, "cluster = 'lsf' is none of slurm, kubernetes"),
        ({"cluster": "kubernetes"}, "Kubernetes has to know an image and the claim of the runs folder"),
    ],
)
def test_a_bad_argument_is_refused_before_a_cluster_is_asked(arguments, message):
    with pytest.raises(ParameterError) as caught:
        labkit.submit("fsdp_wrap", **(JOB | arguments))
    assert message in str(caught.value)


@pytest.mark.usefixtures("no_commands")
@pytest.mark.parametrize(("cluster", "command"), [("slurm", "sinfo"), (Kubernetes(image="i", claim="c"), "kubectl")])
def test_a_machine_without_the_clusters_commands_says_where_to_work(cluster, command):
    with pytest.raises(LabError, match=f"this machine has no {command}: work on a machine that has the cluster's own"):
        labkit.submit("fsdp_wrap", **(JOB | {"cluster": cluster}))


@pytest.mark.parametrize("options", ["--account=me", ("account",), ("--x\n",), (3,)])
def test_an_option_is_a_word_for_sbatch(options):
    with pytest.raises(ParameterError, match="such as"):
        Slurm(options=options)


def test_the_folder_of_a_run_that_was_not_submitted_is_no_job(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"holds no submitted\.json: give the folder of a run from labkit\.submit"
    ):
        labkit_cluster.load_job(tmp_path)


@pytest.fixture
def second_host(tmp_path, monkeypatch):
    """The agent of a job's second host, as a process, which came before that of the first."""
    job = {"hosts": 2, "nproc": 1, "token": "secret", "target": "labkit.nothing", "device": "cpu"}
    write_json(RunFolder(tmp_path).job_json, job | {"timeout_s": 9})
    environment = os.environ | {"SLURM_NODEID": "1", "SLURMD_NODENAME": "host1"}
    agent = subprocess.Popen([sys.executable, "-m", "labkit_cluster.agent", str(tmp_path)], env=environment)
    yield agent
    agent.kill()
    agent.wait()
    process.kill_run_processes(tmp_path)


def test_a_host_begins_when_the_first_has_put_aside_what_an_earlier_attempt_had_left(second_host, tmp_path):
    (tmp_path / "rank_00000.log").touch()
    folder = wait_for(lambda: [*tmp_path.glob("meeting_*")], 20)[0]
    time.sleep(0.5)
    assert second_host.poll() is None and not list(tmp_path.glob("torchrun*"))
    FolderMailbox(folder).put("begun", {"attempt": 1})
    wait_for(lambda: list(tmp_path.glob("torchrun*")), 20)


def test_an_attempt_whose_agents_were_killed_is_put_aside_as_lost(tmp_path):
    folder = RunFolder(tmp_path)
    write_json(folder.run_json, {"exit": "running", "program": "resuming"})
    folder.log(0).touch()
    assert archive_attempt(folder, tmp_path / "meeting_7_1") == 1
    told = read_json(RunFolder(tmp_path / "attempt_0").run_json)
    assert told["exit"] == "host lost" and told["error"].startswith("HostLost: the cluster ended this attempt")
    assert not folder.log(0).exists() and read_json(folder.run_json)["exit"] == "running"
