"""Name, write and read the files in the folder of one run.

| file                     | written by    | content                                               |
|--------------------------|---------------|-------------------------------------------------------|
| run.json                 | notebook      | program, params, versions, device, start, exit        |
| session.json             | rank 0        | device, backend, cores, threads, torch version, note  |
| verdict.json             | rank 0        | what a check compared, and its outcome                |
| rank_00003.jsonl         | each rank     | measurements (records.py)                             |
| rank_00003.log           | each rank     | everything it printed                                 |
| rank_00003.pid           | each worker   | process id, once it can dump its stacks               |
| rank_00003.stack         | each worker   | Python stacks of its threads, on request              |
| rank_00003.error.json    | each worker   | the exception that ended it                           |
| rank_00003.trace.json.gz | each rank     | a profiled step, for ui.perfetto.dev                  |
| rank_00003.NAME.txt      | each rank     | an artifact of the program                            |
| rank_00003.host          | each worker   | name of its host, with several hosts                  |
| rank_00003.gave.pt       | each rank     | values sent back to the notebook                      |
| given.pickle             | notebook      | functions and values for the ranks                    |
| exit.json                | torchrun      | how each failed rank ended; second host: exit_1.json  |
| torchrun.log             | torchrun      | its messages; second host: torchrun_1.log             |
| host_0.log               | hosts.py      | messages of ssh and of the first host's agent         |
| job.json                 | submission.py | what each host of a submitted job runs                |
| submitted.json           | submission.py | the cluster and the job's name there                  |
| cluster.log              | the cluster   | output of the job's script and agents, all attempts   |
| meeting_*                | agent.py      | messages by which the hosts of a job find each other  |
| attempt_0                | agent.py      | files of the first attempt, after a restart           |
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import partialmethod
from hashlib import sha256
from pathlib import Path
from typing import Any

from labkit.environment import ENV_PROCESS_RANKS, ENV_RUNS_FOLDER
from labkit.errors import LabError, ParameterError, RecordError
from labkit.runs import private_files

# The checkout of labkit, or the folder that contains the installed packages.
ROOT = Path(__file__).resolve().parents[2]
# Whether ROOT is a checkout, which has room for runs and copies.
IN_CHECKOUT = (ROOT / "pyproject.toml").is_file()
# The folder of labkit's own files among a learner's copies, by which these are known.
LABKIT_FOLDER_NAME = ".labkit"
JSON_FIX = "labkit writes this file as an object: mend it by hand, or run again"
MIN_FREE_DISK_BYTES = 64 * 1024
FULL_DISK_FIX = "delete old runs or other files, or set LABKIT_RUNS to another disk"


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
        """Write the payload for the ranks; ``payload_sha256`` is how they recognise it."""
        with private_files.open_file(self.payload, "wb") as file:
            file.write(content)
        self.payload_sha256 = sha256(content).hexdigest()

    def _host_file(self, node: int = 0, *, stem: str, ending: str = "") -> Path:
        return self.path / (f"{stem}_{node}{ending}" if node else f"{stem}{ending}")

    exit_json = partialmethod(_host_file, stem="exit", ending=".json")
    host_torchrun_log = partialmethod(_host_file, stem="torchrun", ending=".log")
    torchrun_folder = partialmethod(_host_file, stem="torchrun")

    def host_log(self, node: int) -> Path:
        """Path of the messages of ssh and of one host's agent."""
        return self.path / f"host_{node}.log"

    def remove_torchrun_files(self, node: int = 0) -> None:
        """Remove the files that only torchrun needed."""
        shutil.rmtree(self.torchrun_folder(node), ignore_errors=True)

    def remove_pids(self, ranks: int) -> None:
        """Remove the process ids of ranks that have ended."""
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
        """Return the path of a rank's text; raise ParameterError if no file can have its name."""
        # Names come from programs, and must neither leave the folder nor be too long for a disk.
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
            rule = "use letters, digits, - and _, at most 100"
            raise ParameterError(f"cannot keep a text as {name!r}: {rule}")
        return self._rank_file(rank, f"{name}.txt")

    def artifact_names(self, rank: int) -> list[str]:
        """Return the names of all texts that a rank stored."""
        return sorted(path.name.split(".")[1] for path in self.path.glob(f"rank_{rank:05d}.*.txt"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=1, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader finds the old file or the new one, never a part."""
    # With the process id in its name, two writers do not share a file.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with private_files.open_file(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
        unfinished.replace(path)
    # Of a text that UTF-8 cannot hold, a ValueError.
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


@contextlib.contextmanager
def explain_write_errors(path: Path, fix: str) -> Iterator[None]:
    """Turn an OSError into a LabError that names the file or folder and the fix."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror}, so it cannot be written"
        raise LabError(f"{path}: {why}; {fix}") from error


def read_json(path: Path, fix: str = JSON_FIX) -> dict[str, Any]:
    """Return the object in a JSON file, {} if it does not exist; raise RecordError otherwise."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror}). {fix}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not JSON ({error}). {fix}") from None
    if not isinstance(content, dict):
        raise RecordError(f"{path}: a JSON {type(content).__name__}, not an object. {fix}")
    return content


def require_fields(path: Path, content: Mapping[str, Any], types: Mapping[str, type]) -> None:
    """Raise RecordError naming the file unless its content has these fields, of these types."""
    for name, wanted in types.items():
        if name not in content:
            raise RecordError(f"{path}: holds no {name!r}. {JSON_FIX}")
        if not isinstance(content[name], wanted):
            what = f"{name} = {content[name]!r} is not {wanted.__name__}"
            raise RecordError(f"{path}: {what}. {JSON_FIX}")


def rank_of_process(index: int) -> int:
    """Return the rank of torchrun's ``index``-th process; a simulation starts only some ranks."""
    chosen = os.environ.get(ENV_PROCESS_RANKS)
    return int(json.loads(chosen)[index]) if chosen else index


def runs_folder() -> Path:
    """Return $LABKIT_RUNS, else runs/ in the workspace folder."""
    chosen = os.path.expanduser(os.environ.get(ENV_RUNS_FOLDER, ""))
    # Python leaves the ~ of an unknown user as it is.
    if chosen.startswith("~"):
        fix = "set it to a folder, such as ~/runs or /tmp/runs"
        raise LabError(f"{ENV_RUNS_FOLDER}={chosen}: there is no such user; {fix}")
    return Path(chosen).resolve() if chosen else workspace_folder() / "runs"


def workspace_folder() -> Path:
    """Return the folder of runs/ and my/: the checkout, or one around the current folder."""
    if IN_CHECKOUT:
        return ROOT
    # An installed labkit takes the folder of the learner's copies, if there are any.
    here = Path.cwd()
    for folder in (here, *here.parents):
        if private_files.is_own_folder(folder / LABKIT_FOLDER_NAME):
            return folder.parent
    return here


def disk_problem(path: Path, fix: str = FULL_DISK_FIX) -> str:
    """Say that the disk of this folder is full and what to do, or return ""."""
    # The folder may be gone.
    with contextlib.suppress(OSError):
        if shutil.disk_usage(path).free < MIN_FREE_DISK_BYTES:
            return f"the disk of {path} is full: {fix}"
    return ""
