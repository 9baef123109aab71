"""One host's part of a submitted job: find the other hosts, run torchrun, and report how it ended.

    python -P -m labkit_cluster.agent FOLDER  # the job's template starts it once on every host

FOLDER is the run's, on a disk that all hosts share; its job.json says what to do. Host 0 completes
run.json, so that the record is complete even if no notebook is watching any more.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from labkit.errors import HostLost, NotAllHosts, RunTimedOut
from labkit.launcher import failure, process
from labkit.launcher.run import exit_label, timestamp_now, write_run_end
from labkit.launcher.watch import EXIT_FAILED, watch_ranks
from labkit.runs.folder import RunFolder, read_json, write_json
from labkit.runs.verdict import finished_exit
from labkit_cluster.host_rendezvous import (
    JOIN_TIMEOUT_S,
    POLL_PERIOD_S,
    FolderMailbox,
    RendezvousMember,
)
from labkit_cluster.host_torchrun import start_and_rendezvous
from labkit_cluster.listeners import Heartbeats

FAILURE_POLL_PERIOD_S = 0.5
# After the time limit, ranks stay this long, until hosts with slower clocks have their stacks.
STACKS_GRACE_S = 2.0
# Host 0 waits this long for the others' exit statuses; a silent host is lost.
HOST_EXIT_TIMEOUT_S = 8.0
# With "host lost" in run.json, the job's template asks for another attempt.
EXIT_NO_RENDEZVOUS, EXIT_HOST_LOST, EXIT_TIMED_OUT = 3, 75, 124
# The files of an attempt.
ATTEMPT_FILE_PATTERNS = (
    "rank_*",
    "session.json",
    "verdict.json",
    "exit*.json",
    "torchrun*",
    "meeting_*",
)


def main() -> NoReturn:
    """Run the agent of this host; exit with status 0 if all went well."""
    folder = RunFolder(Path(sys.argv[1]))
    if not folder.job_json.is_file():
        fix = (
            "set LABKIT_RUNS to a folder on a disk that the notebook and all nodes share, and"
            " submit again"
        )
        sys.exit(f"{this_host_name()} does not see {folder.job_json}: {fix}")
    signal.signal(signal.SIGTERM, _raise_interrupt)
    agent = JobAgent(folder)
    sys.exit(agent.run_leader() if agent.member.index == 0 else agent.run_follower())


def _raise_interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt("the cluster ended it: it was cancelled, preempted or out of time")


class JobAgent:
    """One host in one attempt at a job."""

    def __init__(self, folder: RunFolder):
        self._folder, self._job = folder, read_json(folder.job_json)
        hosts, token = self._job["hosts"], self._job["token"]
        self.member = RendezvousMember(this_host_index(), hosts, this_host_name(), token)
        self._place = folder.path / f"meeting_{attempt_id()}"
        self._place.mkdir(exist_ok=True)
        self._mailbox = FolderMailbox(self._place)

    def run_follower(self) -> int:
        """Take part as any host but the first; return this process's exit status."""
        # By then host 0 has put aside the files of an earlier attempt.
        self._wait_for_message("begun", JOIN_TIMEOUT_S)
        try:
            return self._run_this_host()
        except NotAllHosts as error:
            print(error, file=sys.stderr)
            return EXIT_NO_RENDEZVOUS
        finally:
            # The cluster may end all hosts as soon as the first one leaves.
            self._wait_for_message("over", HOST_EXIT_TIMEOUT_S + STACKS_GRACE_S)

    def run_leader(self) -> int:
        """Take part as host 0, write the job's end into run.json, and return the exit status."""
        info = self._begin_attempt()
        started, status = time.monotonic(), 0
        try:
            self._raise_run_failure(self._run_this_host())
            info["exit"] = finished_exit(self._folder)
        except BaseException as error:
            info |= {"exit": exit_label(error), "error": f"{type(error).__name__}: {error}"}
            statuses = {
                NotAllHosts: EXIT_NO_RENDEZVOUS,
                HostLost: EXIT_HOST_LOST,
                RunTimedOut: EXIT_TIMED_OUT,
            }
            status = statuses.get(type(error), EXIT_FAILED)
            if status == EXIT_HOST_LOST:
                # There may be another attempt.
                info["exit"] = "host lost"
            print(info["error"], file=sys.stderr)
        names = [
            self._mailbox.get(f"host_{index}").get("name", "") for index in range(self.member.hosts)
        ]
        write_run_end(info | {"hosts": names}, self._folder, started)
        self._mailbox.put("over", {"exit": info["exit"]})
        return status

    def _begin_attempt(self) -> dict[str, Any]:
        """Put aside the files of an earlier attempt, and write into run.json that this one runs."""
        kept = archive_attempt(self._folder, self._place)
        info = read_json(self._folder.run_json) | {
            "exit": "running",
            "start": timestamp_now(),
            "attempts": kept + 1,
        }
        info.pop("error", None)
        write_json(self._folder.run_json, info)
        self._mailbox.put("begun", {"attempt": kept})
        return info

    def _run_this_host(self) -> int:
        """Find the others, run torchrun, and report its status or EXIT_TIMED_OUT."""
        self._refuse_missing_program()
        running, heartbeats = start_and_rendezvous(
            self._folder, self._job, self.member, self._mailbox
        )
        try:
            with contextlib.closing(heartbeats):
                status = self._watch_torchrun(running, heartbeats)
        finally:
            process.kill_run_processes(self._folder.path, running.pid, str(self.member.index))
            self._folder.remove_torchrun_files(self.member.index)
        self._mailbox.put(f"end_{self.member.index}", {"status": status})
        if status:
            self._mailbox.put("stop", {"because": f"{self.member.name} ended with status {status}"})
        return status

    def _refuse_missing_program(self) -> None:
        """Raise NotAllHosts unless all hosts see the program, before any rank starts."""
        program = self._job["target"]
        if program.endswith(".py") and not Path(program).is_file():
            missing = (
                f"{self.member.name} does not see {program}: put the program on a disk that all"
                " nodes share"
            )
            self._mailbox.put("failed", {"message": missing})
            raise NotAllHosts(missing)

    def _watch_torchrun(self, running: process.TorchrunProcess, heartbeats: Heartbeats) -> int:
        """Wait for torchrun's end, the time limit, or a failure on another host."""
        look_at = 0.0

        def has_failed() -> bool:
            nonlocal look_at
            if heartbeats.unreachable_peers():
                return True
            if time.monotonic() < look_at:
                return False
            look_at = time.monotonic() + FAILURE_POLL_PERIOD_S
            return bool(failure.read_rank_errors(self._folder) or self._mailbox.get("stop"))

        def collect_stacks() -> int:
            ranks = range(self._job["hosts"] * self._job["nproc"])
            process.collect_stacks(self._folder, ranks, self.member.name)
            time.sleep(STACKS_GRACE_S)
            return EXIT_TIMED_OUT

        return watch_ranks(
            running.wait,
            has_failed,
            poll_period_s=POLL_PERIOD_S,
            timeout_s=self._job["timeout_s"],
            on_timeout=collect_stacks,
        )

    def _raise_run_failure(self, status: int) -> None:
        """Raise the run's failure, if it has failed on any host."""
        give_up = time.monotonic() + HOST_EXIT_TIMEOUT_S
        ends = {0: status}
        for index in range(1, self.member.hosts):
            ends[index] = self._wait_for_message(f"end_{index}", give_up - time.monotonic()).get(
                "status", EXIT_HOST_LOST
            )
        lost = [
            self._mailbox.get(f"host_{index}")["name"]
            for index, end in ends.items()
            if end == EXIT_HOST_LOST
        ]
        if EXIT_TIMED_OUT in ends.values():
            ranks = range(self._job["hosts"] * self._job["nproc"])
            stacks = process.read_stacks(self._folder, ranks)
            raise failure.timeout_failure(self._folder, self._job["timeout_s"], stacks)
        if lost and all(error["echo"] for error in failure.read_rank_errors(self._folder)):
            raise HostLost(
                f"{' and '.join(lost)} was lost in mid-run: the others' ranks were stopped"
            )
        if any(ends.values()):
            raise failure.first_failure(self._folder, next(end for end in ends.values() if end))

    def _wait_for_message(self, name: str, within_s: float) -> dict[str, Any]:
        """Return a message from the mailbox, {} if none is left in time."""
        give_up = time.monotonic() + within_s
        while not (found := self._mailbox.get(name)) and time.monotonic() < give_up:
            time.sleep(POLL_PERIOD_S)
        return found


def archive_attempt(folder: RunFolder, current: Path) -> int:
    """Move an earlier attempt's files into a run folder of their own, attempt_0 and so on.

    Returns:
        The number of attempts so far.
    """
    kept = len(list(folder.path.glob("attempt_*")))
    left = [
        path
        for pattern in ATTEMPT_FILE_PATTERNS
        for path in folder.path.glob(pattern)
        if path != current
    ]
    if not left:
        return kept
    aside = RunFolder(folder.path / f"attempt_{kept}")
    aside.path.mkdir()
    info = read_json(folder.run_json)
    # The agents were killed before they could report.
    if info["exit"] == "running":
        cause = "a node was lost in mid-run, or the job had to make way"
        info |= {
            "exit": "host lost",
            "error": f"HostLost: the cluster ended this attempt: {cause}",
        }
    write_json(aside.run_json, info)
    for path in left:
        path.rename(aside.path / path.name)
    return kept + 1


def attempt_id() -> str:
    """Return an id that distinguishes this attempt from earlier ones in the same folder."""
    job, restarts = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
    return f"{job}_{os.environ.get('JOBSET_RESTART_ATTEMPT', restarts)}"


def this_host_index() -> int:
    """Return which of a job's hosts this is, from 0, as its cluster says.

    Raises:
        NotAllHosts: the environment has none of the known variables.
    """
    for variable in ("SLURM_NODEID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX"):
        if variable in os.environ:
            return int(os.environ[variable])
    raise NotAllHosts(
        "neither Slurm nor Kubernetes says which host this is: start it through labkit.submit"
    )


def this_host_name() -> str:
    """Return the cluster's name for this host, or the host's own name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


if __name__ == "__main__":
    main()
