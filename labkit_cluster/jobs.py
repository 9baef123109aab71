"""A run that was submitted to a cluster: its state, its progress, and its result."""

import time
from pathlib import Path
from typing import Any

from labkit.errors import HostLost, LabError, NotAllHosts, RankFailed
from labkit.launcher import failure, process
from labkit.launcher.progress import Display, RunMonitor, choose_display
from labkit.runs.folder import RunFolder, read_json, require_fields, write_json
from labkit.runs.result import RunFileNotFound, RunResult, load
from labkit.runs.verdict import FINISHED_EXITS
from labkit_cluster.cluster_command import JobStatus
from labkit_cluster.kubernetes import Kubernetes
from labkit_cluster.slurm import Slurm

Cluster = Slurm | Kubernetes
CLUSTERS: dict[str, Any] = {each.name: each for each in (Slurm, Kubernetes)}
JOB_POLL_PERIOD_S = 0.25
STATUS_QUERY_PERIOD_S = 2.0
"""How often the cluster is asked: its controller serves others, too."""
CLUSTER_SILENCE_LIMIT_S = 600.0
"""How long waiting goes on although the cluster does not answer: its controller may be starting
anew.
"""
CANCEL_TIMEOUT_S = 120.0
STATE_BY_EXIT = dict.fromkeys(FINISHED_EXITS, "completed") | {
    end: end for end in ("failed", "timed out", "cancelled")
}
"""What run.json says of a run that is over, as states. After any other word there may be another
attempt.
"""
SUBMISSION_TYPES = {"cluster": str, "settings": dict, "id": str}
"""What submitted.json has to hold."""


class JobCancelled(LabError):
    """The job was cancelled."""


class Job:
    """A run on a cluster. It continues without this process.

    Attributes:
        folder: the run's, like that of any other run.
        id: the cluster's id of it.
    """

    def __init__(self, folder: Path, cluster: Cluster, identity: str):
        self.folder, self.id = folder, identity
        self._cluster, self._files = cluster, RunFolder(folder)
        self._asked_at, self._heard_at, self._said = (
            -STATUS_QUERY_PERIOD_S,
            time.monotonic(),
            JobStatus("pending"),
        )

    @property
    def state(self) -> str:
        """The state of the job.

        One of "pending", "running", "requeued" (it waits for another attempt), "completed",
        "failed", "timed out" and "cancelled".
        """
        return self._query_status().state

    def wait(self) -> None:
        """Show progress until the job is over. An interrupt ends the waiting; only ``cancel`` ends
        the job.
        """
        if self._query_status().is_over:
            return
        display, attempts, outcome = choose_display(), 0, "interrupted"
        progress = self._make_monitor(display)
        try:
            while not (standing := self._last_known_status()).is_over:
                if (begun := self._read_run_info().get("attempts", 0)) != attempts:
                    # Each attempt writes other files.
                    attempts, progress = (
                        begun,
                        self._make_monitor(display),
                    )
                if standing.state == "running":
                    progress.update()
                else:
                    display.show_wait_reason(f"{self._program_name}: {standing}")
                time.sleep(JOB_POLL_PERIOD_S)
            outcome = self._read_run_info()["exit"]
        finally:
            progress.close(outcome)

    def result(self) -> RunResult:
        """Wait for the end; return what ``labkit.run`` returns, and raise what it raises.

        Raises:
            RankFailed: a rank failed; this is the first failure, not its consequences.
            RunTimedOut: the time limit passed; holds every rank's stacks.
            NotAllHosts: the nodes did not find each other; no rank was started.
            HostLost: a node was lost, and there was no other attempt.
            JobCancelled: it was cancelled.
            LabError: the cluster ended it; the message says why, as far as that is known.
        """
        self.wait()
        info = self._read_run_info()
        if info["exit"] not in FINISHED_EXITS:
            raise self._failure_error(info)
        return load(self.folder)

    def cancel(self) -> None:
        """Cancel the job; return once none of its processes is left.

        Raises:
            LabError: the cluster refuses, or has not ended it within two minutes.
        """
        if self._query_status().is_over:
            return
        self._cluster.cancel(self.id)
        give_up = time.monotonic() + CANCEL_TIMEOUT_S
        while not self._cluster.query_status(self.id).is_over:
            if time.monotonic() > give_up:
                raise LabError(
                    f"{self!r}: still not ended {CANCEL_TIMEOUT_S:g} s after its cancellation"
                )
            time.sleep(JOB_POLL_PERIOD_S)
        self._write_final_state(JobStatus("cancelled"))

    def __repr__(self) -> str:
        try:
            standing = self._query_status()
        except LabError as error:
            standing = JobStatus("unknown", str(error))
        progress = self._make_monitor(Display())
        progress.update()
        steps = f", step {progress.state.done_steps} of {progress.state.planned_steps}"
        done = steps if standing.state == "running" and progress.state.planned_steps else ""
        return (
            f"{self._program_name} on {self._cluster.name}, job {self.id}: {standing}{done};"
            f" {self.folder}"
        )

    @property
    def _program_name(self) -> str:
        return str(self._read_run_info()["program"])

    def _read_run_info(self) -> dict[str, Any]:
        return read_json(self._files.run_json)

    def _make_monitor(self, display: Display) -> RunMonitor:
        info = self._read_run_info()
        return RunMonitor(self._files, info["program"], range(info["nproc"]), display)

    def _query_status(self, old_s: float = 0.0) -> JobStatus:
        """Return the state from run.json once the job is over, otherwise the cluster's answer,
        which is cached for a moment.
        """
        if (end := self._read_run_info()["exit"]) in STATE_BY_EXIT:
            return JobStatus(STATE_BY_EXIT[end])
        if time.monotonic() - self._asked_at >= old_s:
            self._asked_at = time.monotonic()
            self._said = self._cluster.query_status(self.id)
            self._heard_at = time.monotonic()
        return self._write_final_state(self._said) if self._said.is_over else self._said

    def _last_known_status(self) -> JobStatus:
        """Return the last known state while the cluster does not answer."""
        try:
            return self._query_status(STATUS_QUERY_PERIOD_S)
        except LabError:
            if time.monotonic() - self._heard_at > CLUSTER_SILENCE_LIMIT_S:
                raise
            return self._said

    def _write_final_state(self, said: JobStatus) -> JobStatus:
        """Write into run.json how the job ended, if its agents were ended before they could."""
        # Read it again: the end may have been written since.
        info = self._read_run_info()
        if info["exit"] not in STATE_BY_EXIT:
            if info["exit"] != "host lost" or said.state == "cancelled":
                info["error"] = f"LabError: {self._end_reason(said)}"
            info["exit"] = said.state if said.state in STATE_BY_EXIT else "failed"
            write_json(self._files.run_json, info)
        return JobStatus(STATE_BY_EXIT[info["exit"]], said.reason)

    def _end_reason(self, said: JobStatus) -> str:
        """Return what is known about a job that its cluster ended."""
        log = failure.read_tail(self._files.cluster_log)
        where = (
            f"its log ends:\n{log}"
            if log
            else f"it left no log: does every node see {self.folder}?"
        )
        return f"{self._cluster.name} ended job {self.id}: {said}; {where}"

    def _failure_error(self, info: dict[str, Any]) -> LabError:
        """Return the exception that says how the job ended."""
        kind, _, message = str(info.get("error", "")).partition(": ")
        if info["exit"] == "cancelled":
            return JobCancelled(
                f"{self._program_name}: job {self.id} was cancelled; what it left is in"
                f" {self.folder}"
            )
        if info["exit"] == "timed out":
            stacks = process.read_stacks(self._files, range(info["nproc"]))
            return failure.timeout_failure(self._files, info["timeout_s"], stacks)
        if kind == RankFailed.__name__:
            return failure.first_failure(self._files, 1)
        return {each.__name__: each for each in (NotAllHosts, HostLost)}.get(kind, LabError)(
            message
        )


def load_job(folder: str | Path) -> Job:
    """Load a job by its run's folder, whether it was submitted from here or elsewhere.

    Raises:
        RunFileNotFound: the folder is not that of a submitted run. It is a FileNotFoundError.
    """
    files = RunFolder(Path(folder).resolve())
    if not files.submitted_json.exists():
        raise RunFileNotFound(
            f"{files.path} holds no {files.submitted_json.name}: give the folder of a run from"
            " labkit.submit"
        )
    handed_over = read_json(files.submitted_json)
    require_fields(files.submitted_json, handed_over, SUBMISSION_TYPES)
    settings = {
        name: tuple(each) if isinstance(each, list) else each
        for name, each in handed_over["settings"].items()
    }
    return Job(files.path, CLUSTERS[handed_over["cluster"]](**settings), handed_over["id"])
