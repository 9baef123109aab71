"""Kubernetes with Kubeflow Trainer, through kubectl. The job's manifest is
launch/cluster/kubernetes.yaml.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any, ClassVar

from labkit.errors import ParameterError
from labkit.runs.folder import RunFolder, runs_folder
from labkit_cluster.cluster_command import TEMPLATES, JobRequest, JobStatus, run_cluster_command

MANIFEST = TEMPLATES / "kubernetes.yaml"
TRAINJOB_KIND = "trainjobs.trainer.kubeflow.org"
DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""What Kubernetes takes as a name."""


@dataclass(frozen=True)
class Kubernetes:
    """A Kubernetes cluster with Kubeflow Trainer, which kubectl reaches with your settings.

    Attributes:
        image: with Python, the same labkit and the same torch as here.
        claim: name of the PersistentVolumeClaim that is mounted here as the runs folder; pods mount
            it at the same path.
        namespace: of the job; "" for that of your settings.
        runtime: name of the ClusterTrainingRuntime for PyTorch.
        python: the image's Python.
    """

    name: ClassVar[str] = "kubernetes"
    image: str
    claim: str
    namespace: str = ""
    runtime: str = "torch-distributed"
    python: str = "python"

    def __post_init__(self) -> None:
        for field in ("image", "claim", "runtime", "python"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value or not value.isprintable():
                raise ParameterError(
                    f"{field} = {value!r} is no name: give Kubernetes(image='…', claim='…')"
                )
        if self.namespace and not re.fullmatch(DNS_LABEL, self.namespace):
            raise ParameterError(f"namespace = {self.namespace!r} is no name that Kubernetes takes")

    def check_available(self) -> None:
        """Raise LabError unless Kubeflow Trainer is installed, and this user may submit jobs."""
        self._run_kubectl("auth", "can-i", "create", TRAINJOB_KIND)

    def submit(self, request: JobRequest, folders: Sequence[RunFolder]) -> list[str]:
        """Submit a TrainJob for each folder."""
        handed_over: list[str] = []
        try:
            for folder in folders:
                self._run_kubectl(
                    "create", "--filename=-", given=self.fill_manifest(request, folder)
                )
                handed_over.append(train_job_name(folder))
        except BaseException:
            for name in handed_over:
                self.cancel(name)
            raise
        return handed_over

    def fill_manifest(self, request: JobRequest, folder: RunFolder) -> str:
        """Fill in the template. Values are written as JSON, which YAML reads without another
        meaning.
        """
        resources: dict[str, Any] = {"requests": {"cpu": str(request.nproc)}}
        if request.device == "cuda":
            resources["limits"] = {"nvidia.com/gpu": str(request.nproc)}
        values = {
            "name": train_job_name(folder),
            "limit_s": math.ceil(request.limit_s),
            "runtime": self.runtime,
            "image": self.image,
            "nodes": request.nodes,
            "resources": resources,
            "command": [self.python, "-P", "-m", "labkit_cluster.agent", str(folder.path)],
            "claim": self.claim,
            "runs": str(runs_folder()),
        }
        written = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
        return Template(MANIFEST.read_text()).substitute(written)

    def query_status(self, identity: str) -> JobStatus:
        """Return the state from the conditions of the TrainJob."""
        answer = self._run_kubectl(
            "get", TRAINJOB_KIND, identity, "--output=json", "--ignore-not-found"
        )
        return (
            train_job_status(json.loads(answer).get("status", {}))
            if answer
            else JobStatus("unknown", "it is not there")
        )

    def cancel(self, identity: str) -> None:
        self._run_kubectl("delete", TRAINJOB_KIND, identity, "--ignore-not-found")

    def _run_kubectl(self, *words: str, given: str = "") -> str:
        where = [f"--namespace={self.namespace}"] if self.namespace else []
        return run_cluster_command("kubectl", *where, *words, given=given)


def train_job_status(status: Mapping[str, Any]) -> JobStatus:
    """Return a TrainJob's state: from its conditions, otherwise from whether its pods are ready."""
    holds = {
        each["type"]: each for each in status.get("conditions", []) if each["status"] == "True"
    }
    if "Complete" in holds:
        return JobStatus("completed")
    if failed := holds.get("Failed"):
        state = "timed out" if failed["reason"] == "DeadlineExceeded" else "failed"
        return JobStatus(state, f"{failed['reason']}: {failed['message']}")
    ready = any(each["ready"] for each in status.get("jobsStatus", []))
    waits = holds.get("Suspended", {}).get("message", "its pods are not ready")
    return JobStatus("running") if ready else JobStatus("pending", waits)


def train_job_name(folder: RunFolder) -> str:
    """Return the TrainJob's name for a run's folder; short, because the names of its pods begin
    with it.
    """
    day, second, *_, last = folder.path.name.split("-")
    return f"labkit-{day}-{second}-{last}".replace("_", "-")
