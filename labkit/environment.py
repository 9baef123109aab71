"""Name labkit's environment variables. docs/environment.md explains those that people may set.

The comments say: who sets it -> who reads it: its values.
"""

import os

from labkit.errors import ParameterError

# Set by people.
ENV_RUNS_FOLDER = "LABKIT_RUNS"  # a person -> runs.folder: where runs are recorded
ENV_WARM = "LABKIT_WARM"  # a person -> launcher.warm_start: 0 never forks ranks, 1 always does
ENV_RECORDED = "LABKIT_RECORDED"  # a person -> launcher.backend: 1 takes recorded results
ENV_QUEUE = "LABKIT_QUEUE"  # a person -> launcher.run_queue: 0 waits for no other run, 1 does
ENV_NETWORK = "LABKIT_NETWORK"  # a person -> launcher.network_namespace: own
ENV_PROGRESS = "LABKIT_PROGRESS"  # a person -> launcher.progress: off, text, notebook
ENV_WIDGETS = "LABKIT_WIDGETS"  # a person -> widgets.explorer: 0 a figure, 1 controls
ENV_VERDICTS = "LABKIT_VERDICTS"  # a person -> course.verdict_store: the file of verdicts
ENV_SSH = "LABKIT_SSH"  # a person -> labkit_cluster.hosts: the ssh command with its options
ENV_DEVICE = "LABKIT_DEVICE"  # a person -> the launcher -> ranks: auto, cpu, cuda
ENV_SHARE_GPUS = "LABKIT_SHARE_GPUS"  # a person -> session: 1 lets several ranks share a GPU
ENV_STRICT_CLAIMS = "LABKIT_STRICT_CLAIMS"  # builds, tests -> checks.claims: 1 raises
ENV_TEST = "LABKIT_TEST"  # the Makefile -> tests: "today", "all" add tests that take long

# Set by labkit for torchrun, its ranks, and the processes that ranks start.
ENV_RUN_FOLDER = "LABKIT_RUN_FOLDER"  # the launcher -> all processes of a run: its folder
ENV_NOTEBOOK_PID = "LABKIT_NOTEBOOK_PID"  # the launcher -> torchrun: the process to end with
ENV_TORCHRUN_PID = "LABKIT_TORCHRUN_PID"  # torchrun -> ranks: the process to end with
ENV_PAYLOAD_SHA256 = "LABKIT_GIVEN"  # the launcher -> ranks: without it they unpickle nothing
ENV_EXPECTED_WORLD_SIZE = "LABKIT_RANKS"  # the launcher -> ranks: a smaller world must not train
ENV_SIMULATION = "LABKIT_SIMULATED"  # labkit.simulate -> ranks: JSON of ranks and world size
ENV_PROCESS_RANKS = "LABKIT_PROCESS_RANKS"  # labkit.simulate -> ranks: JSON, each process's rank
ENV_HOST_NAME = "LABKIT_HOST"  # labkit_cluster -> ranks: the name of their host
ENV_HOST_INDEX = "LABKIT_NODE"  # labkit_cluster -> torchrun: which host this is, from 0
ENV_TOTAL_CORES = "LABKIT_CORES"  # labkit_cluster -> ranks: cores of all hosts together
ENV_CLOCK_AHEAD_S = "LABKIT_AHEAD_S"  # labkit_cluster -> ranks: seconds that host 0 is ahead
ENV_LOCAL_HOST = "LABKIT_HOST_ON_THIS_MACHINE"  # labkit_cluster.local_hosts -> itself: whose host


def read_choice(name: str, *choices: str) -> str:
    """Return a variable's value, "" if unset; raise ParameterError unless a choice begins with it.

    Args:
        name: the variable.
        choices: each a value, with its meaning after a space, such as "0 (never)".
    """
    value = os.environ.get(name, "")
    if value and value not in [choice.split()[0] for choice in choices]:
        fix = "unset it to have labkit choose"
        raise ParameterError(f"{name}={value!r} is none of {', '.join(choices)}; {fix}")
    return value
