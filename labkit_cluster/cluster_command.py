"""What labkit requests from a cluster of any kind, and the answers."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from labkit.errors import LabError
from labkit.runs.folder import ROOT

TEMPLATES = ROOT / "launch" / "cluster"
COMMAND_TIMEOUT_S = 60
FINAL_STATES = ("completed", "failed", "timed out", "cancelled", "unknown")
"""States of a job that does nothing any more; a cluster knows a job for some minutes after its
end.
"""


@dataclass(frozen=True)
class JobStatus:
    """The state of a job, as its cluster reports it.

    Attributes:
        state: "pending", "requeued" (pending again), "running", or a final state.
        reason: why, in the cluster's own words; "" if it gives none.
    """

    state: str
    reason: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in FINAL_STATES

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


@dataclass(frozen=True)
class JobRequest:
    """The resources that a cluster gives to each run of a job.

    Attributes:
        program: its name.
        nodes: the number of nodes, with one agent each.
        nproc: ranks of a node.
        device: "auto", "cpu" or "cuda".
        limit_s: seconds after which the cluster ends it, if labkit's own agents have failed to.
    """

    program: str
    nodes: int
    nproc: int
    device: str
    limit_s: float


class ClusterCommandError(LabError):
    """A command of the cluster failed; the message is its own."""


def run_cluster_command(
    *words: str, given: str = "", environment: Mapping[str, str] | None = None
) -> str:
    """Run one of the cluster's own commands, and return its output.

    Raises:
        ClusterCommandError: the command failed.
        LabError: this machine has no such command, or it does not answer.
    """
    if not shutil.which(words[0]):
        where = "work on a machine that has the cluster's own commands, such as its login node"
        raise LabError(f"this machine has no {words[0]}: {where}; labkit.run needs no cluster")
    try:
        done = subprocess.run(
            words,
            input=given,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise LabError(
            f"{words[0]} has not answered for {COMMAND_TIMEOUT_S} s: is the cluster up?"
        ) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ClusterCommandError(f"{words[0]} refuses: {said or f'exit status {done.returncode}'}")
    return done.stdout.strip()
