"""The folder of one run: which files lie in it, who writes them, who reads them.

| file              | written by                 | holds                                                              |
|-------------------|----------------------------|--------------------------------------------------------------------|
| run.json          | the notebook's side        | program, parameters, versions, device, start, duration, exit       |
| session.json      | rank 0's session           | device used, backend, cores, threads, torch version, note          |
| rank_00003.jsonl  | each rank's session        | its measurements, see records.py                                   |
| rank_00003.log    | each rank                  | all that it printed                                                |
| rank_00003.pid    | each rank's worker         | its process id, once it can answer a request for its stack         |
| rank_00003.stack  | each rank's worker         | the Python stacks of its threads, when they were asked for         |
| rank_00003.error.json | each rank's worker     | the exception that ended it                                        |
| rank_00003.trace.json.gz | each rank's session | its profiled step for ui.perfetto.dev, where asked for  |
| rank_00003.code.txt | each rank, where it compiles | the program that the compiler wrote for its backward pass  |
| exit.json         | torchrun.py                | how each failed rank ended, as torchrun saw it                     |
| torchrun.log      | torchrun                   | its own messages, and whatever a rank printed before its worker ran |
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "LABKIT_RUN_FOLDER"
"""Environment variable that holds the folder of a run, in torchrun, in its ranks and in whatever these start."""
NOTEBOOK_PID = "LABKIT_NOTEBOOK_PID"
"""Environment variable for torchrun: the process with which the run is to end."""
TORCHRUN_PID = "LABKIT_TORCHRUN_PID"
"""Environment variable for the ranks: the process with which they are to end."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files of one run; ``path`` is absolute."""

    path: Path

    @property
    def run_json(self) -> Path:
        """What was run, and how it ended."""
        return self.path / "run.json"

    @property
    def session_json(self) -> Path:
        """What the ranks ran on."""
        return self.path / "session.json"

    @property
    def exit_json(self) -> Path:
        """How each failed rank ended, as torchrun saw it."""
        return self.path / "exit.json"

    @property
    def torchrun_log(self) -> Path:
        """Torchrun's own messages."""
        return self.path / "torchrun.log"

    @property
    def rendezvous(self) -> Path:
        """Where torchrun meets itself; only during the run."""
        return self.path / "rendezvous"

    @property
    def torchrun_folder(self) -> Path:
        """What torchrun keeps for each rank, which labkit does not use; only during the run."""
        return self.path / "torchrun"

    def remove_torchruns_files(self) -> None:
        """Remove what nobody needs after the run."""
        self.rendezvous.unlink(missing_ok=True)
        shutil.rmtree(self.torchrun_folder, ignore_errors=True)

    def log(self, rank: int) -> Path:
        """All that a rank printed."""
        return self.path / f"rank_{rank:05d}.log"

    def pid(self, rank: int) -> Path:
        """A rank's process id."""
        return self.path / f"rank_{rank:05d}.pid"

    def stack(self, rank: int) -> Path:
        """A rank's Python stacks."""
        return self.path / f"rank_{rank:05d}.stack"

    def trace(self, rank: int) -> Path:
        """A rank's profiled step, as torch.profiler exports it."""
        return self.path / f"rank_{rank:05d}.trace.json.gz"

    def code(self, rank: int) -> Path:
        """The program that the compiler wrote for a rank's backward pass, see generated/."""
        return self.path / f"rank_{rank:05d}.code.txt"

    def error(self, rank: int) -> Path:
        """The exception that ended a rank."""
        return self.path / f"rank_{rank:05d}.error.json"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file in one step: a reader finds the old file, the new one, or none, never half of one."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n")
    unfinished.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or {} where there is no such file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return content
