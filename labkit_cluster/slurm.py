"""Slurm: sbatch, squeue, scancel. The job's script is launch/cluster/slurm.sh."""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from labkit.environment import ENV_RUN_FOLDER
from labkit.errors import ParameterError
from labkit.runs.folder import ROOT, RunFolder
from labkit_cluster.cluster_command import (
    TEMPLATES,
    ClusterCommandError,
    JobRequest,
    JobStatus,
    run_cluster_command,
)

BATCH_SCRIPT = TEMPLATES / "slurm.sh"
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Variables that say which cluster; the others are those of a job, and a notebook may run in one of
its own.
"""
STATE_BY_SLURM_STATE = {
    "PENDING": "pending",
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "TIMEOUT": "timed out",
    "DEADLINE": "timed out",
    **dict.fromkeys(
        ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "PREEMPTED", "REVOKED"), "failed"
    ),
}
"""All others are of a job that runs, or whose processes are being ended."""


@dataclass(frozen=True)
class Slurm:
    """A Slurm cluster, whose commands this machine has.

    Attributes:
        partition: of the job; "" for the default.
        options: more options for sbatch, such as ``("--account=physics", "--gpus-per-node=4")``;
            they override labkit's.
    """

    name: ClassVar[str] = "slurm"
    partition: str = ""
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.partition, str):
            raise ParameterError(f"partition = {self.partition!r} is no name, such as 'gpu'")
        fits = isinstance(self.options, tuple | list) and all(map(_is_option, self.options))
        if not fits:
            raise ParameterError(
                f"options = {self.options!r} are no words for sbatch, such as"
                " ('--account=physics',)"
            )

    def check_available(self) -> None:
        """Raise LabError unless Slurm is installed, and knows the partition."""
        known = _run_slurm_command("sinfo", "--all", "--noheader", "--format=%R").split()
        if self.partition and self.partition not in known:
            raise ParameterError(
                f"Slurm has no partition {self.partition!r}, it has {', '.join(known) or 'none'}"
            )

    def submit(self, request: JobRequest, folders: Sequence[RunFolder]) -> list[str]:
        """Submit several runs as one job array; the names of their folders end in numbers from
        0.
        """
        first = str(folders[0].path)
        array = [f"--array=0-{len(folders) - 1}"] if len(folders) > 1 else []
        stem, output = first, _escape_output_path(first)
        if array:
            stem = first.removesuffix("_0")
            output = f"{_escape_output_path(stem)}_%a"
        words = [
            *_sbatch_options(request),
            *array,
            f"--output={output}/{folders[0].cluster_log.name}",
            *self._user_options(),
        ]
        answer = _run_slurm_command(
            "sbatch", "--parsable", *words, str(BATCH_SCRIPT), sys.executable, stem
        )
        identity = answer.partition(";")[0]
        return [f"{identity}_{index}" for index in range(len(folders))] if array else [identity]

    def _user_options(self) -> list[str]:
        return [*([f"--partition={self.partition}"] if self.partition else []), *self.options]

    def query_status(self, identity: str) -> JobStatus:
        """Return the state from squeue, which forgets a job some minutes after its end."""
        form = "--Format=State:.30,RestartCnt:.12,Reason:.200"
        try:
            answer = _run_slurm_command(
                "squeue", "--noheader", "--states=all", f"--jobs={identity}", form
            )
        except ClusterCommandError as error:
            if "Invalid job id" not in str(error):
                raise
            answer = ""
        if not (words := answer.split(maxsplit=2)):
            return JobStatus("unknown", "Slurm no longer knows this job")
        state, restarts, reason = words
        named = STATE_BY_SLURM_STATE.get(state, "running")
        if named == "pending" and restarts != "0":
            named = "requeued"
        return JobStatus(named, "" if reason == "None" else reason)

    def cancel(self, identity: str) -> None:
        _run_slurm_command("scancel", identity)


def _is_option(word: Any) -> bool:
    return isinstance(word, str) and word.isprintable() and bool(re.match("--[a-z]", word))


def _sbatch_options(request: JobRequest) -> list[str]:
    """Return the resources of each job. Its time limit is a last resort: the agents enforce their
    own.
    """
    minutes = math.ceil(request.limit_s / 60)
    options = [
        f"--job-name={request.program}",
        f"--nodes={request.nodes}",
        f"--cpus-per-task={request.nproc}",
    ]
    options += [f"--time={minutes}", "--export=ALL"]
    return [*options, f"--gpus-per-node={request.nproc}"] if request.device == "cuda" else options


def _escape_output_path(path: str) -> str:
    """Escape a path for --output, which replaces patterns such as %j."""
    if "\\" in path:
        raise ParameterError(
            f"Slurm takes no backslash in the path {path}: set LABKIT_RUNS to a folder without one"
        )
    return path.replace("%", "%%")


def _run_slurm_command(*words: str) -> str:
    return run_cluster_command(*words, environment=_slurm_environment())


def _slurm_environment() -> Mapping[str, str]:
    """Return this process's environment with labkit's path, without the variables of an enclosing
    job.
    """
    own = {
        name: text
        for name, text in os.environ.items()
        if (not name.startswith("SLURM_") or name in CLUSTER_VARIABLES)
        and name not in (ENV_RUN_FOLDER, "MPLBACKEND")
    }
    return own | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), own.get("PYTHONPATH")]))}
