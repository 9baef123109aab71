"""The folder of one run: which files lie in it, who writes them, who reads them.

| file              | written by                 | holds                                                              |
|-------------------|----------------------------|--------------------------------------------------------------------|
| run.json          | the notebook's side        | program, parameters, versions, device, start, duration, exit       |
| session.json      | rank 0's session           | device used, backend, cores, threads, torch version, note          |
| verdict.json      | rank 0's session           | what its check compared and found, where there was one             |
| rank_00003.jsonl  | each rank's session        | its measurements, see records.py                                   |
| rank_00003.log    | each rank                  | all that it printed                                                |
| rank_00003.pid    | each rank's worker         | its process id, once it can answer a request for its stack         |
| rank_00003.stack  | each rank's worker         | the Python stacks of its threads, when they were asked for         |
| rank_00003.error.json | each rank's worker     | the exception that ended it                                        |
| rank_00003.trace.json.gz | each rank's session | its profiled step for ui.perfetto.dev, where asked for             |
| rank_00003.NAME.txt | each rank's program      | a text that it kept under a name of its own                        |
| given.pickle      | the notebook's side        | functions and values that the notebook gave to its ranks           |
| rank_00003.gave.pt | each rank's program       | values that it gave back                                           |
| rank_00003.host   | each rank's worker         | the name of its host, where there are several                      |
| exit.json         | torchrun.py                | how each failed rank ended, as torchrun saw it; of the second host |
|                   |                            | exit_1.json, and so on                                             |
| torchrun.log      | torchrun                   | its own messages, and what a rank printed before its worker ran;   |
|                   |                            | of the second host torchrun_1.log, and so on                       |
| host_0.log        | launcher/hosts.py          | what ssh and the agent of the first host said, and so on           |
| job.json          | cluster/submission.py      | what each host of a submitted job is to do                         |
| submitted.json    | cluster/submission.py      | which cluster has the job, and under what name                     |
| cluster.log       | the cluster                | what the job's script and labkit's agents printed, all attempts    |
| meeting_*         | cluster/agent.py           | a folder in which the hosts of a job find each other               |
| attempt_0         | cluster/agent.py           | what the first attempt left, where there was another; attempt_1, … |
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from functools import partialmethod
from hashlib import sha256
from pathlib import Path
from typing import Any

from labkit.environment import ENV_PROCESS_RANKS, ENV_RUNS_FOLDER
from labkit.errors import LabError, ParameterError, RecordError
from labkit.runs import private_files

ROOT = Path(__file__).resolve().parents[2]
"""Where labkit's checkout lies, or what stands in its place where labkit was installed."""
IN_CHECKOUT = (ROOT / "pyproject.toml").is_file()
"""Whether that is a checkout, which has room for runs and copies; an installed labkit has them where one works."""
LABKIT_FOLDER_NAME = ".labkit"
"""The folder of labkit's own files among a learner's copies, by which these are known."""

JSON_FIX = "labkit writes this file as an object: mend it by hand, or run again"
MIN_FREE_DISK_BYTES = 64 * 1024


class RunFolder:
    """Paths of the files of one run; ``path`` is absolute."""

    def __init__(self, path: Path):
        self.path = path
        self.run_json = path / "run.json"
        self.session_json = path / "session.json"
        self.verdict_json = path / "verdict.json"
        self.job_json = path / "job.json"
        self.submitted_json = path / "submitted.json"
        self.cluster_log = path / "cluster.log"
        self.payload = path / "given.pickle"
        self.payload_sha256 = ""
        self.torchrun_log = self.host_torchrun_log(0)

    def write_payload(self, content: bytes) -> None:
        """Leave for the ranks what the notebook gives them; ``given_sha256`` tells it from what anybody else left."""
        with private_files.open_file(self.payload, "wb") as file:
            file.write(content)
        self.payload_sha256 = sha256(content).hexdigest()

    def exit_json(self, node: int = 0) -> Path:
        """How the ranks of one host ended."""
        return self.path / (f"exit_{node}.json" if node else "exit.json")

    def host_torchrun_log(self, node: int) -> Path:
        """What torchrun said on one host."""
        return self.path / (f"torchrun_{node}.log" if node else "torchrun.log")

    def host_log(self, node: int) -> Path:
        """What ssh and the agent of one host said."""
        return self.path / f"host_{node}.log"

    def torchrun_folder(self, node: int = 0) -> Path:
        """Only during the run: what torchrun keeps for each rank of a host, which labkit does not use."""
        return self.path / (f"torchrun_{node}" if node else "torchrun")

    def remove_torchrun_files(self, node: int = 0) -> None:
        """Remove what nobody needs after the run."""
        shutil.rmtree(self.torchrun_folder(node), ignore_errors=True)

    def remove_pids(self, ranks: int) -> None:
        """Remove the ids of processes that have ended."""
        for rank in range(ranks):
            with contextlib.suppress(OSError):
                self.pid(rank).unlink()

    def _rank_file(self, rank: int, ending: str) -> Path:
        return self.path / f"rank_{rank:05d}.{ending}"

    log = partialmethod(_rank_file, ending="log")
    pid = partialmethod(_rank_file, ending="pid")
    stack = partialmethod(_rank_file, ending="stack")
    host = partialmethod(_rank_file, ending="host")
    error = partialmethod(_rank_file, ending="error.json")
    report = partialmethod(_rank_file, ending="gave.pt")
    trace = partialmethod(_rank_file, ending="trace.json.gz")

    def artifact(self, rank: int, name: str) -> Path:
        """A text that a rank's program keeps with its run.

        Raises:
            ParameterError: a name that is no part of a file's name everywhere.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
            raise ParameterError(
                f"cannot keep a text as {name!r}: use letters, digits, - and _, at most 100"
            )
        return self._rank_file(rank, f"{name}.txt")

    def artifact_names(self, rank: int) -> list[str]:
        """The names of all texts that a rank kept."""
        return sorted(path.name.split(".")[1] for path in self.path.glob(f"rank_{rank:05d}.*.txt"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file in one step, as ``write_text`` does."""
    write_text(path, json.dumps(content, indent=1, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: a reader finds the old file, the new one, or none, never half of one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with private_files.open_file(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or {} where there is no such file.

    Raises:
        RecordError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror}). {JSON_FIX}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not JSON ({error}). {JSON_FIX}") from None
    if not isinstance(content, dict):
        raise RecordError(f"{path}: a JSON {type(content).__name__}, not an object. {JSON_FIX}")
    return content


def require_fields(path: Path, content: Mapping[str, Any], types: Mapping[str, type]) -> None:
    """Raise RecordError, with the name of the file, unless its content has these fields, of these types."""
    for name, wanted in types.items():
        if name not in content:
            raise RecordError(f"{path}: holds no {name!r}. {JSON_FIX}")
        if not isinstance(content[name], wanted):
            raise RecordError(
                f"{path}: {name} = {content[name]!r} is not {wanted.__name__}. {JSON_FIX}"
            )


def rank_of_process(index: int) -> int:
    """The rank of torchrun's ``index``-th process: its index, unless the launcher has chosen others."""
    chosen = os.environ.get(ENV_PROCESS_RANKS)
    return int(json.loads(chosen)[index]) if chosen else index


def runs_folder() -> Path:
    """Where runs are kept: $LABKIT_RUNS, else runs/ in the checkout, or here where labkit was installed without one.

    Raises:
        LabError: LABKIT_RUNS begins with the home folder of a user who does not exist.
    """
    chosen = os.path.expanduser(os.environ.get(ENV_RUNS_FOLDER, ""))
    if chosen.startswith("~"):
        raise LabError(
            f"{ENV_RUNS_FOLDER}={chosen}: there is no such user; set it to a folder, such as ~/runs or /tmp/runs"
        )
    if chosen:
        return Path(chosen).resolve()
    return workspace_folder() / "runs"


def workspace_folder() -> Path:
    """Where runs/ and my/ lie: the checkout. Where labkit was installed without one, the current folder, or the one
    with the copies in which a notebook's kernel works.
    """
    if IN_CHECKOUT:
        return ROOT
    here = Path.cwd()
    return next(
        (
            folder.parent
            for folder in (here, *here.parents)
            if private_files.is_own_folder(folder / LABKIT_FOLDER_NAME)
        ),
        here,
    )


def disk_problem(path: Path) -> str:
    """What to do about the disk of this folder, or "" where it has room."""
    with contextlib.suppress(OSError):  # the folder is gone
        if shutil.disk_usage(path).free < MIN_FREE_DISK_BYTES:
            return f"the disk of {path} is full: delete old runs or other files, or set LABKIT_RUNS to another disk"
    return ""
