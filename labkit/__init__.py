"""Launch real ranks from a notebook, measure them, and compare with theory and with one device.

    result = labkit.run("convnext_spatial", nproc=4, strategy="local")

Folders are layers: none imports from one below it in this table. The contract in pyproject.toml is
checked by ``make lint``.

| folder or module                  | purpose                                                   |
|-----------------------------------|-----------------------------------------------------------|
| torch_private, errors             | private names of torch with their reasons; exceptions     |
| pause                             | what happens where a module's passes begin                |
| theory, models, tensors, inductor | formulas and single-device code without ranks or runs     |
| instrument, local_ranks           | what FSDP calls; all ranks in one process                 |
| requirements, environment         | limits of the machine, LABKIT_ variables                  |
| program_source, config            | parameters of a rank program, checked before a launch     |
| runs                              | files of a run, read by the notebook; recorded runs       |
| parallel                          | one technique per file                                    |
| session, rank                     | inside a rank: process group, time, memory, traffic       |
| parity                            | does a distributed step equal one device's?               |
| launcher                          | outside the ranks: start, watch and stop them             |
| doctor                            | what this machine can do                                  |
| plots                             | figures from results                                      |
| old_names                         | modules that learners' copies import by earlier names     |
| __main__                          | the command line                                          |

``labkit_simulate`` and ``labkit_cluster`` are packages beside this one; ``simulate``, ``plan`` and
``submit`` below import them on first use. ``labkit_course`` judges the exercises of the labs, and
holds their explorers and a learner's progress.
"""

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from labkit import old_names  # noqa: F401  (imports find earlier names from here on)
from labkit.hidden_modules import hiding_files

try:
    from labkit.environment import ENV_RUN_FOLDER
    from labkit.errors import (
        HostLost,
        LabError,
        NotAllHosts,
        ParameterError,
        RankFailed,
        RecordError,
        RunTimedOut,
    )
    from labkit.launcher.comparison import compare
    from labkit.launcher.progress import in_kernel
    from labkit.launcher.run import check, run, use_one_device
    from labkit.launcher.warm_start import fork_server_manager
    from labkit.requirements import untested_torch_problem
    from labkit.runs.result import RunResult, load
    from labkit.theory.emulated import Emulated
except (ImportError, AttributeError) as error:
    # A random.py in the current folder is imported instead of Python's own.
    if hiding := hiding_files(sys.path):
        error.add_note(hiding)
    raise

if TYPE_CHECKING:
    from labkit_cluster.hosts import Host
    from labkit_cluster.submission import submit
    from labkit_simulate.planner import plan
    from labkit_simulate.run_simulation import simulate
    from labkit_simulate.search_result import SearchResult

__all__ = ["HostLost", "LabError", "NotAllHosts", "ParameterError", "RankFailed", "RecordError"]
__all__ += ["Emulated", "Host", "RunResult", "RunTimedOut", "SearchResult"]
__all__ += ["check", "compare", "load", "plan", "run", "simulate", "submit"]
__all__ += ["use_one_device"]

# Imported when they are first asked for, so that the core imports no package beside it.
_ELSEWHERE = {
    "Host": "labkit_cluster.hosts",
    "SearchResult": "labkit_simulate.search_result",
    "plan": "labkit_simulate.planner",
    "simulate": "labkit_simulate.run_simulation",
    "submit": "labkit_cluster.submission",
}


def __getattr__(name: str) -> Any:
    """Import a public name of labkit_simulate or labkit_cluster on first use."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ELSEWHERE[name]), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """Register the cell magic ``%%torchrun``, as importing labkit in a kernel does."""
    from labkit.launcher.magic import TorchrunMagics

    shell.register_magics(TorchrunMagics)


# Ranks need not repeat what the process that launched them has said.
if ENV_RUN_FOLDER not in os.environ and (_problem := untested_torch_problem()):
    warnings.warn(_problem, stacklevel=2)

# A notebook gets its cell magic, and torch is imported for its ranks before the first run.
if in_kernel():
    from IPython import get_ipython

    load_ipython_extension(get_ipython())
    fork_server_manager.start_in_background()
