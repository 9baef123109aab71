"""labkit.submit to Kubernetes, without a cluster: the manifest against the published resource, the words for kubectl.

kubectl is a stand-in here, which writes down how it is called: what a real cluster does with the job is not tested.
"""

import json
import os
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

import labkit
import labkit_cluster
from labkit.errors import LabError, ParameterError
from labkit.runs.folder import read_json, write_json
from labkit_cluster import JobCancelled, Kubernetes
from labkit_cluster.kubernetes import train_job_status

RESOURCE = Path("shared", "schemas", "trainer.kubeflow.org_trainjobs.yaml")
STAND_IN = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done >> "$FOLDER/words"
echo -- >> "$FOLDER/words"
case "$*" in
    *create*--filename=-*) cat >> "$FOLDER/manifest" ;;
    *can-i*) [ ! -e "$FOLDER/refuses" ] || { echo no; exit 1; } ;;
    *"get trainjobs"*) [ ! -e "$FOLDER/status" ] || cat "$FOLDER/status" ;;
    *delete*) rm -f "$FOLDER/status" ;;
esac
"""
CLUSTER = Kubernetes(image='registry/labkit: "1" # $x {{y}}', claim="runs", namespace="lab")
JOB = {"cluster": CLUSTER, "nodes": 2, "nproc": 4}


@pytest.fixture
def kubectl(monkeypatch, tmp_path):
    """A folder with what a stand-in for kubectl was told, and from which it answers."""
    folder = tmp_path / "kubectl"
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "kubectl"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FOLDER", str(folder))
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "ru ns '\"$name"))
    return folder


def words(folder):
    return [call.splitlines() for call in (folder / "words").read_text().split("--\n") if call.strip()]


def schema(repository):
    """That of a TrainJob as its project publishes it; here without room for fields that it does not know."""
    found = next((parent / RESOURCE for parent in repository.parents if (parent / RESOURCE).exists()), None)
    if not found:
        pytest.skip(f"no {RESOURCE} beside the checkout: the TrainJob resource of kubeflow/trainer")
    (version,) = yaml.safe_load(found.read_text())["spec"]["versions"]
    return strict(version["schema"]["openAPIV3Schema"])


def strict(part):
    """A cluster drops a field that it does not know, without a word."""
    if isinstance(part, list):
        return [strict(each) for each in part]
    if not isinstance(part, dict):
        return part
    part = {name: strict(each) for name, each in part.items()}
    if "properties" in part and part.get("type") == "object" and "additionalProperties" not in part:
        part["additionalProperties"] = False
    return part


def submitted(kubectl, **arguments):
    job = labkit.submit("fsdp_wrap", **(JOB | arguments))
    return job, yaml.safe_load((kubectl / "manifest").read_text())


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_the_manifest_is_a_trainjob_as_published(kubectl, repository, device):
    _, manifest = submitted(kubectl, device=device)
    # the schema leaves these to Kubernetes
    assert manifest.pop("apiVersion") == "trainer.kubeflow.org/v1alpha1" and manifest.pop("kind") == "TrainJob"
    manifest.pop("metadata")
    problems = [
        f"{list(each.path)}: {each.message}" for each in Draft202012Validator(schema(repository)).iter_errors(manifest)
    ]
    assert not problems


def test_the_manifest_says_what_was_asked_for_whatever_the_names_are(kubectl):
    job, manifest = submitted(kubectl, timeout_s=60)
    spec, runs = manifest["spec"], str(job.folder.parent)
    assert manifest["metadata"]["name"] == job.id and len(job.id) < 40
    assert spec["trainer"]["image"] == CLUSTER.image and spec["trainer"]["numNodes"] == 2
    assert spec["trainer"]["command"] == ["python", "-P", "-m", "labkit_cluster.agent", str(job.folder)]
    assert spec["trainer"]["resourcesPerNode"] == {"requests": {"cpu": "4"}}
    assert 60 < spec["activeDeadlineSeconds"] <= 200
    (patch,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patch["template"]["spec"]["template"]["spec"]
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}, memory]
    mounts = [{"name": "runs", "mountPath": runs}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    assert pod["containers"] == [{"name": "node", "volumeMounts": mounts}]
    told = read_json(job.folder / "job.json")
    assert told["hosts"] == 2 and told["nproc"] == 4 and told["target"] == "launch.fsdp_wrap"


def test_a_gpu_a_rank_is_asked_for(kubectl):
    _, manifest = submitted(kubectl, device="cuda")
    assert manifest["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "4"}


def test_kubectl_is_told_which_job(kubectl):
    job, _ = submitted(kubectl)
    (kubectl / "status").write_text(json.dumps({"status": {"jobsStatus": [{"name": "node", "ready": 1}]}}))
    again = labkit_cluster.load_job(job.folder)
    assert again.state == "running"
    again.cancel()
    assert again.state == job.state == "cancelled"
    with pytest.raises(JobCancelled):
        job.result()
    kind = "trainjobs.trainer.kubeflow.org"
    assert [call[:4] for call in words(kubectl)[:2]] == [
        ["--namespace=lab", "auth", "can-i", "create"],
        ["--namespace=lab", "create", "--filename=-"],
    ]
    assert ["--namespace=lab", "delete", kind, job.id, "--ignore-not-found"] in words(kubectl)


def test_an_end_in_run_json_counts_for_more_than_what_the_cluster_says(kubectl):
    job, _ = submitted(kubectl)
    (kubectl / "status").write_text(json.dumps({"status": {}}))
    assert job.state == "pending" and "its pods are not ready" in repr(job)
    write_json(job.folder / "run.json", read_json(job.folder / "run.json") | {"exit": "ok"})
    assert job.state == "completed"


def test_a_cluster_that_refuses_leaves_no_folder(kubectl, tmp_path):
    (kubectl / "refuses").touch()
    with pytest.raises(LabError, match="kubectl refuses: no"):
        labkit.submit("fsdp_wrap", **JOB)
    assert not list(tmp_path.glob("ru ns*/*"))


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "pending"),
        (
            {"conditions": [{"type": "Suspended", "status": "True", "reason": "Suspended", "message": "by Kueue"}]},
            "pending",
        ),
        ({"jobsStatus": [{"name": "node", "ready": 0}]}, "pending"),
        ({"conditions": [{"type": "Suspended", "status": "False"}], "jobsStatus": [{"ready": 1}]}, "running"),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, "completed"),
        ({"conditions": [{"type": "Failed", "status": "True", "reason": "JobSetFailed", "message": ""}]}, "failed"),
        (
            {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": ""}]},
            "timed out",
        ),
    ],
)
def test_the_conditions_of_a_trainjob_are_read(status, state):
    assert train_job_status(status).state == state


@pytest.mark.parametrize("settings", [{"image": ""}, {"claim": 3}, {"image": "a\nb"}, {"namespace": "A b"}])
def test_a_setting_that_no_cluster_takes_is_refused(settings):
    with pytest.raises(ParameterError):
        Kubernetes(**({"image": "i", "claim": "c"} | settings))
