"""Execute notebooks in fresh kernels, and tell which of their exercises pass there."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.environment import ENV_VERDICTS
from labkit.errors import LabError
from labkit.runs import private_files
from labkit_course import copies, lab_catalog, verdict_store
from labkit_course.verdict_store import LabProgress


@dataclass(frozen=True)
class Judgement:
    """What the checks of a notebook said, and the error that stopped its execution, or ""."""

    progress: LabProgress
    error: str

    @property
    def ok(self) -> bool:
        """Whether every cell ran, and every exercise passed."""
        return not (self.error or self.progress.pending_exercises)

    def __str__(self) -> str:
        lines = [self.progress.pass_count_text]
        for exercise in self.progress.pending_exercises:
            state = self.progress.states.get(exercise.name, "never checked")
            lines.append(f"  {exercise.number} {exercise.title}: {state}")
        return "\n".join([*lines, *([self.error] if self.error else [])])


def judge_notebook(path: Path, cell_timeout_s: float) -> Judgement:
    """Execute a notebook from top to bottom, without changing its file or kept verdicts.

    Raises:
        LabError: the file is no learner's notebook, has no exercises, or nbclient is missing.
    """
    lab, notebook = lab_catalog.read_lab(path), copies.read_notebook(path)
    if not lab.exercises:
        raise LabError(f"{path} has no exercises: give a copy of a lab")
    try:
        from nbclient import NotebookClient
        from nbclient.exceptions import CellControlSignal
    except ImportError:
        raise LabError("no nbclient here: pip install 'labkit[notebook]'") from None
    options: dict[str, Any] = {
        "timeout": cell_timeout_s,
        "resources": {"metadata": {"path": str(path.parent)}},
        # The kernel would warn of its unencrypted ports, each time.
        "extra_arguments": ["--IPKernelApp.log_level=CRITICAL"],
    }
    client = NotebookClient(notebook, **options)
    error = ""
    with private_files.temporary_folder() as folder:
        # A file of its own, because a pass in the learner's is never taken back.
        verdicts = folder / verdict_store.PROGRESS_FILE
        try:
            client.execute(env=os.environ | {ENV_VERDICTS: str(verdicts)})
        # A RuntimeError is that of a kernel that died, or never started.
        except (CellControlSignal, RuntimeError) as stopped:
            # The text has the colours of a terminal.
            error = re.sub(r"\x1b\[[0-9;]*m", "", str(stopped)).strip()
        said = verdict_store.read_verdicts(verdicts)
    return Judgement(verdict_store.lab_progress(lab, said), error)
