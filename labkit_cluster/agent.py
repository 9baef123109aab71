"""One host's part of a submitted job: meet the others, run torchrun to its end, tell each other how it went.

    python -P -m labkit_cluster.agent FOLDER        # what the job's template starts, once on every host

FOLDER is the run's, on a disk that all hosts see; its job.json says what to do. Host 0 completes run.json, so that the
result is whole although no notebook may be watching any more.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from labkit.errors import HostLost, NotAllHosts, RunTimedOut
from labkit.launcher import failure, process
from labkit.launcher.run import FAILURE_GRACE_S, outcome_of, this_moment, write_end
from labkit.runs.folder import RunFolder, read_json, write_json
from labkit_cluster import node
from labkit_cluster.doors import Company
from labkit_cluster.meeting import COMES_WITHIN_S, POLL_PERIOD_S, FolderBoard, Guest

LOOK_PERIOD_S = 0.5
"""How often a host looks whether another one has failed."""
STACKS_GRACE_S = 2.0
"""How long a host out of time leaves its ranks alone, until the others, with clocks of their own, have their stacks."""
SAID_WITHIN_S = 8.0
"""How long host 0 waits for the others to say how they ended; one that says nothing is lost."""
FAILED, NO_MEETING, HOST_LOST, OUT_OF_TIME = 1, 3, 75, 124
"""Exit statuses. With "host lost" in run.json, the job's template asks for another attempt."""
RECORDS = ("rank_*", "session.json", "exit*.json", "torchrun*", "meeting_*")
"""What an attempt leaves in the folder."""


def main() -> NoReturn:
    """Be the agent of this host; leaves with status 0 where all went well."""
    folder = RunFolder(Path(sys.argv[1]))
    if not folder.job_json.is_file():
        fix = "set LABKIT_RUNS to a folder on a disk that the notebook and all nodes share, and submit again"
        sys.exit(f"{name_of_this_host()} does not see {folder.job_json}: {fix}")
    signal.signal(signal.SIGTERM, _interrupt)
    agent = Agent(folder)
    sys.exit(agent.lead() if agent.guest.index == 0 else agent.follow())


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt("the cluster ended it: it was cancelled, preempted or out of time")


class Agent:
    """One host in one attempt at a job."""

    def __init__(self, folder: RunFolder):
        self._folder, self._job = folder, read_json(folder.job_json)
        hosts, token = self._job["hosts"], self._job["token"]
        self.guest = Guest(index_of_this_host(), hosts, name_of_this_host(), token)
        self._place = folder.path / f"meeting_{attempt()}"
        self._place.mkdir(exist_ok=True)
        self._board = FolderBoard(self._place)

    def follow(self) -> int:
        """Take part as any host but the first; returns this process's exit status."""
        self._word("begun", COMES_WITHIN_S)  # by then host 0 has put aside what an earlier attempt had left
        try:
            return self._take_part()
        except NotAllHosts as error:
            print(error, file=sys.stderr)
            return NO_MEETING
        finally:
            self._word("over", SAID_WITHIN_S + STACKS_GRACE_S)  # with the first that leaves, the cluster may end all

    def lead(self) -> int:
        """Take part as host 0, and write into run.json how it ended for all; returns this process's exit status."""
        info = self._begin()
        started, status = time.monotonic(), 0
        try:
            self._judge(self._take_part())
            info["exit"] = "ok"
        except BaseException as error:
            info |= {"exit": outcome_of(error), "error": f"{type(error).__name__}: {error}"}
            statuses = {NotAllHosts: NO_MEETING, HostLost: HOST_LOST, RunTimedOut: OUT_OF_TIME}
            status = statuses.get(type(error), FAILED)
            if status == HOST_LOST:
                info["exit"] = "host lost"  # there may be another attempt
            print(info["error"], file=sys.stderr)
        names = [self._board.get(f"host_{index}").get("name", "") for index in range(self.guest.hosts)]
        write_end(info | {"hosts": names}, self._folder, started)
        self._board.put("over", {"exit": info["exit"]})
        return status

    def _begin(self) -> dict[str, Any]:
        """Put aside what an earlier attempt has left, and say in run.json that this one runs."""
        kept = keep_aside(self._folder, self._place)
        info = read_json(self._folder.run_json) | {"exit": "running", "start": this_moment(), "attempts": kept + 1}
        info.pop("error", None)
        write_json(self._folder.run_json, info)
        self._board.put("begun", {"attempt": kept})
        return info

    def _take_part(self) -> int:
        """Meet the others, run torchrun, tell how it ended; returns its status, or OUT_OF_TIME."""
        self._refuse_a_missing_program()
        running, company = node.start(self._folder, self._job, self.guest, self._board)
        try:
            with contextlib.closing(company):
                status = self._watch(running, company)
        finally:
            process.stop(self._folder.path, running.pid, str(self.guest.index))
            self._folder.remove_torchruns_files(self.guest.index)
        self._board.put(f"end_{self.guest.index}", {"status": status})
        if status:
            self._board.put("stop", {"because": f"{self.guest.name} ended with status {status}"})
        return status

    def _refuse_a_missing_program(self) -> None:
        """Let nobody start unless all see the program."""
        program = self._job["target"]
        if program.endswith(".py") and not Path(program).is_file():
            missing = f"{self.guest.name} does not see {program}: put the program on a disk that all nodes share"
            self._board.put("failed", {"message": missing})
            raise NotAllHosts(missing)

    def _watch(self, running: process.Running, company: Company) -> int:
        """Wait for torchrun's end, for the limit, or for a failure elsewhere that it does not notice."""
        limit = time.monotonic() + self._job["timeout_s"]
        look_at, failed_at = 0.0, 0.0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return running.wait(POLL_PERIOD_S)
            now = time.monotonic()
            if now > limit:
                process.stacks_of(self._folder, range(self._job["hosts"] * self._job["nproc"]), self.guest.name)
                time.sleep(STACKS_GRACE_S)
                return OUT_OF_TIME
            is_alone = bool(company.lost())
            if not failed_at and (is_alone or now > look_at):
                look_at = now + LOOK_PERIOD_S
                failed_at = now if is_alone or failure.errors_of(self._folder) or self._board.get("stop") else 0.0
            if failed_at and now - failed_at > FAILURE_GRACE_S:
                return FAILED

    def _judge(self, status: int) -> None:
        """Raise the run's failure, if it has failed on any host."""
        give_up = time.monotonic() + SAID_WITHIN_S
        ends = {0: status}
        for index in range(1, self.guest.hosts):
            ends[index] = self._word(f"end_{index}", give_up - time.monotonic()).get("status", HOST_LOST)
        lost = [self._board.get(f"host_{index}")["name"] for index, end in ends.items() if end == HOST_LOST]
        if OUT_OF_TIME in ends.values():
            raise failure.timed_out(self._folder, self._job["timeout_s"], self._job["hosts"] * self._job["nproc"])
        if lost and all(error["echo"] for error in failure.errors_of(self._folder)):
            raise HostLost(f"{' and '.join(lost)} was lost in mid-run: the others' ranks were stopped")
        if any(ends.values()):
            raise failure.first_failure(self._folder, next(end for end in ends.values() if end))

    def _word(self, name: str, within_s: float) -> dict[str, Any]:
        """A word on the board, {} where nobody leaves it in time."""
        give_up = time.monotonic() + within_s
        while not (found := self._board.get(name)) and time.monotonic() < give_up:
            time.sleep(POLL_PERIOD_S)
        return found


def keep_aside(folder: RunFolder, current: Path) -> int:
    """Move what an earlier attempt has left into attempt_0, the next one's into attempt_1; returns how many there are.

    Each is a run's folder of its own, which ``labkit.load`` reads.
    """
    kept = len(list(folder.path.glob("attempt_*")))
    left = [path for pattern in RECORDS for path in folder.path.glob(pattern) if path != current]
    if not left:
        return kept
    aside = RunFolder(folder.path / f"attempt_{kept}")
    aside.path.mkdir()
    info = read_json(folder.run_json)
    if info["exit"] == "running":  # its agents were killed before they could say anything
        ended = "HostLost: the cluster ended this attempt: a node was lost in mid-run, or the job had to make way"
        info |= {"exit": "host lost", "error": ended}
    write_json(aside.run_json, info)
    for path in left:
        path.rename(aside.path / path.name)
    return kept + 1


def attempt() -> str:
    """What tells this attempt from earlier ones in the same folder."""
    job, restarts = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
    return f"{job}_{os.environ.get('JOBSET_RESTART_ATTEMPT', restarts)}"


def index_of_this_host() -> int:
    """Which of a job's hosts this is, from 0, as its cluster says.

    Raises:
        NotAllHosts: it says nothing that is known here.
    """
    for variable in ("SLURM_NODEID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX"):
        if variable in os.environ:
            return int(os.environ[variable])
    raise NotAllHosts("neither Slurm nor Kubernetes says which host this is: start it through labkit.submit")


def name_of_this_host() -> str:
    """What the cluster calls this host, else its own name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


if __name__ == "__main__":
    main()
