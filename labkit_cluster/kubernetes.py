"""Kubernetes with Kubeflow Trainer, through kubectl. The job's manifest is launch/cluster/kubernetes.yaml."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any, ClassVar

from labkit.errors import ParameterError
from labkit.runs.folder import RunFolder, runs_folder
from labkit_cluster.asking import TEMPLATES, Request, Standing, ask

MANIFEST = TEMPLATES / "kubernetes.yaml"
KIND = "trainjobs.trainer.kubeflow.org"
DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""What Kubernetes takes as a name."""


@dataclass(frozen=True)
class Kubernetes:
    """A Kubernetes cluster with Kubeflow Trainer, which kubectl reaches by your own settings.

    Attributes:
        image: with Python, the same labkit and the same torch as here.
        claim: name of the PersistentVolumeClaim that is mounted here as the runs folder; pods get it at the same place.
        namespace: where the job is to run; "" for that of your settings.
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
                raise ParameterError(f"{field} = {value!r} is no name: give Kubernetes(image='…', claim='…')")
        if self.namespace and not re.fullmatch(DNS_LABEL, self.namespace):
            raise ParameterError(f"namespace = {self.namespace!r} is no name that Kubernetes takes")

    def check(self) -> None:
        """Whether Kubeflow Trainer is there, and this user may hand jobs to it."""
        self._ask("auth", "can-i", "create", KIND)

    def submit(self, request: Request, folders: Sequence[RunFolder]) -> list[str]:
        """One TrainJob for each folder."""
        handed_over: list[str] = []
        try:
            for folder in folders:
                self._ask("create", "--filename=-", given=self.manifest(request, folder))
                handed_over.append(name_of(folder))
        except BaseException:
            for name in handed_over:
                self.cancel(name)
            raise
        return handed_over

    def manifest(self, request: Request, folder: RunFolder) -> str:
        """The filled template. Every value is written as JSON, which YAML reads: none can mean anything else."""
        resources: dict[str, Any] = {"requests": {"cpu": str(request.nproc)}}
        if request.device == "cuda":
            resources["limits"] = {"nvidia.com/gpu": str(request.nproc)}
        values = {
            "name": name_of(folder),
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

    def standing(self, identity: str) -> Standing:
        """As the conditions of the TrainJob tell it."""
        answer = self._ask("get", KIND, identity, "--output=json", "--ignore-not-found")
        return standing_of(json.loads(answer).get("status", {})) if answer else Standing("unknown", "it is not there")

    def cancel(self, identity: str) -> None:
        self._ask("delete", KIND, identity, "--ignore-not-found")

    def _ask(self, *words: str, given: str = "") -> str:
        where = [f"--namespace={self.namespace}"] if self.namespace else []
        return ask("kubectl", *where, *words, given=given)


def standing_of(status: Mapping[str, Any]) -> Standing:
    """Where a TrainJob stands: by its conditions, else by whether its pods are ready."""
    holds = {each["type"]: each for each in status.get("conditions", []) if each["status"] == "True"}
    if "Complete" in holds:
        return Standing("completed")
    if failed := holds.get("Failed"):
        state = "timed out" if failed["reason"] == "DeadlineExceeded" else "failed"
        return Standing(state, f"{failed['reason']}: {failed['message']}")
    ready = any(each["ready"] for each in status.get("jobsStatus", []))
    waits = holds.get("Suspended", {}).get("message", "its pods are not ready")
    return Standing("running") if ready else Standing("pending", waits)


def name_of(folder: RunFolder) -> str:
    """What Kubernetes calls the run of a folder: short, since the names of its pods begin so."""
    day, second, *_, last = folder.path.name.split("-")
    return f"labkit-{day}-{second}-{last}".replace("_", "-")
