"""labkit: launch real ranks from a notebook, measure them, compare with theory and with one device.

    result = labkit.run("convnext_spatial", nproc=4, strategy="local")

Folders are layers, from the ranks' own side to the learner's; none imports from one below it in this table
(`make lint` holds it, with the contract in pyproject.toml):

| folder or module                                | what it is for                                             |
|-------------------------------------------------|------------------------------------------------------------|
| theory, models, tensors, inductor, instrument,  | plain things that know nothing of ranks and runs           |
| local_ranks, requirements, environment, errors  |                                                            |
| torch_private                                   | torch's private names, each with its reason                |
| config, folder, records, result                 | the bridge between ranks and notebook                      |
| operators                                       | what a program runs, counted on tensors without content    |
| parallel                                        | one technique a file                                       |
| history                                         | recorded runs: listed, compared, removed                   |
| rank                                            | inside a rank: session, time, memory, traffic              |
| parity                                          | does a distributed step equal one device's?                |
| launcher                                        | outside the ranks: start them, watch them, stop them       |
| cluster                                         | the same runs on other hosts: Slurm, Kubernetes            |
| doctor                                          | what this machine can do                                   |
| plots                                           | results to figures                                         |
| course                                          | a learner's copies, verdicts and progress                  |
| checks                                          | exercises judged                                           |
| widgets                                         | explorers: controls over theory, and a run that confirms it |
| __main__                                        | the command line                                           |
"""

import importlib
from typing import TYPE_CHECKING, Any

from labkit.errors import (
    HostLost,
    LabError,
    NotAllHosts,
    ParameterError,
    RankFailed,
    RecordError,
    RunTimedOut,
)
from labkit.launcher.progress import in_kernel
from labkit.launcher.run import check, run, sweep
from labkit.launcher.warm_start import fork_server_manager
from labkit.runs.result import RunResult, load

if TYPE_CHECKING:
    from labkit_cluster.hosts import Host
    from labkit_cluster.submission import submit
    from labkit_simulate.planner import plan
    from labkit_simulate.run_simulation import simulate
    from labkit_simulate.search_result import SearchResult

__all__ = [
    "Host",
    "HostLost",
    "LabError",
    "NotAllHosts",
    "ParameterError",
    "RankFailed",
    "RecordError",
    "RunResult",
    "RunTimedOut",
    "SearchResult",
    "check",
    "load",
    "plan",
    "run",
    "simulate",
    "submit",
    "sweep",
]

# Found when they are first asked for, so that the core imports neither of the packages that stand beside it.
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
    """Register the cell magic ``%%torchrun`` (``%load_ext labkit``); importing labkit in a kernel does it."""
    from labkit.launcher.magic import TorchrunMagics

    shell.register_magics(TorchrunMagics)


if in_kernel():
    from IPython import get_ipython

    load_ipython_extension(get_ipython())
    fork_server_manager.start_in_background()
