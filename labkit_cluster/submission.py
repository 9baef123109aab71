"""Submit a run, or one for each of several values, to a cluster."""

import math
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, overload

from labkit.errors import ParameterError
from labkit.launcher.run import (
    RunRequest,
    argument_combinations,
    git_revision,
    initial_run_info,
    make_run_folder,
    make_run_name,
    make_run_request,
    require_positive,
)
from labkit.runs.folder import RunFolder, write_json
from labkit_cluster.cluster_command import JobRequest
from labkit_cluster.hosts import Host
from labkit_cluster.jobs import CLUSTERS, Cluster, Job
from labkit_cluster.kubernetes import Kubernetes
from labkit_cluster.slurm import Slurm

STARTUP_MARGIN_S = 120.0
"""What the cluster allows beyond the limit, for the agents to meet before and to write down the end
after.
"""


@overload
def submit(
    program: str | Path,
    *,
    cluster: str | Slurm | Kubernetes,
    nodes: int,
    nproc: int,
    timeout_s: float = 300,
    device: str = "auto",
    over: None = None,
    **params: Any,
) -> Job: ...


@overload
def submit(
    program: str | Path,
    *,
    cluster: str | Slurm | Kubernetes,
    nodes: int,
    nproc: int,
    timeout_s: float = 300,
    device: str = "auto",
    over: Mapping[str, Iterable[Any]],
    **params: Any,
) -> list[Job]: ...


def submit(
    program: str | Path,
    *,
    cluster: str | Slurm | Kubernetes,
    nodes: int,
    nproc: int,
    timeout_s: float = 300,
    device: str = "auto",
    over: Mapping[str, Iterable[Any]] | None = None,
    **params: Any,
) -> Job | list[Job]:
    """Submit a rank program to a cluster, ``nproc`` ranks on each of its ``nodes``; return at once.

    Args:
        program: a name in launch/, or the path of a .py file that all nodes see.
        cluster: "slurm"; or ``Slurm`` or ``Kubernetes`` with settings of your own.
        nodes: the number of nodes.
        nproc: the number of ranks on each.
        timeout_s: each run is stopped this many seconds after its start; time in the queue does not
            count.
        device: "auto" uses GPUs if a node has one for each of its ranks, otherwise the CPU; "cuda"
            requests them from the cluster; or "cpu".
        over: for some parameters, several values: one run for every combination, of which the last
            parameter varies fastest. On Slurm they are one job array.
        **params: parameters of the program, checked against its Config before anything is
            submitted.

    Returns:
        The job, with ``state``, ``wait()``, ``cancel()`` and ``result()``, a RunResult like that of
        ``labkit.run``; with ``over`` a list of jobs in the order of the values.

    Raises:
        ParameterError: a bad argument; nothing was submitted.
        LabError: this machine has no such cluster, the cluster refuses, or the run's folder cannot
            be written.
    """
    there = resolve_cluster(cluster)
    nodes = require_positive("nodes", nodes, int, "number of nodes")
    fixed = {"nproc": nproc, "timeout_s": timeout_s, "device": device, **params}
    varied = [{}] if over is None else argument_combinations(over, {"nodes": nodes, **fixed})
    if not varied:
        raise ParameterError(f"over = {over!r} holds no value to take: give some, or leave it out")
    # The cluster decides which hosts these are.
    places = [Host(f"node {index}") for index in range(nodes)]
    plans = [
        make_run_request(program, **fixed, **each, hosts=places, warm=False) for each in varied
    ]
    if not math.isfinite(plans[0].timeout_s):
        raise ParameterError(
            f"timeout_s = {timeout_s!r}: a cluster wants to know a limit, give a number of seconds"
        )
    there.check_available()
    jobs = submit_requests(there, plans)
    return jobs if over is not None else jobs[0]


def resolve_cluster(cluster: Any) -> Cluster:
    """Return the cluster of this name. Raises ParameterError for an unknown one."""
    if isinstance(cluster, Slurm | Kubernetes):
        return cluster
    if cluster == Slurm.name:
        return Slurm()
    if cluster == Kubernetes.name:
        raise ParameterError(
            "Kubernetes has to know an image and the claim of the runs folder: "
            "give cluster=labkit_cluster.Kubernetes(image='…', claim='…')"
        )
    raise ParameterError(f"cluster = {cluster!r} is none of {', '.join(CLUSTERS)}")


def submit_requests(cluster: Cluster, plans: list[RunRequest]) -> list[Job]:
    """Make a folder for each run, and submit them together. If the cluster refuses, no folder is
    left.
    """
    name = make_run_name(plans[0].program)
    names = [f"{name}_{index}" for index in range(len(plans))] if len(plans) > 1 else [name]
    revision = git_revision()
    folders: list[RunFolder] = []
    try:
        for each, plan in zip(names, plans, strict=True):
            folders.append(_make_job_folder(plan, each, revision))
        first = plans[0]
        limit_s = first.timeout_s + STARTUP_MARGIN_S
        request = JobRequest(
            first.program, len(first.hosts), first.local_world_size, first.device, limit_s
        )
        identities = cluster.submit(request, folders)
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    handed_over = {"cluster": cluster.name, "settings": asdict(cluster)}
    for folder, identity in zip(folders, identities, strict=True):
        write_json(folder.submitted_json, handed_over | {"id": identity})
    return [
        Job(folder.path, cluster, identity)
        for folder, identity in zip(folders, identities, strict=True)
    ]


def _make_job_folder(plan: RunRequest, name: str, revision: str | None) -> RunFolder:
    """Make the run's folder with all that the agents need. It is private, because job.json holds
    the run's secret.
    """
    info = initial_run_info(plan) | {"exit": "submitted", "hosts": [], "git_revision": revision}
    folder = make_run_folder(info, b"", name)
    names = ("target", "device", "timeout_s")
    job = {name: getattr(plan, name) for name in names}
    job |= {
        "hosts": len(plan.hosts),
        "nproc": plan.local_world_size,
        "token": secrets.token_hex(16),
    }
    write_json(folder.job_json, job)
    return folder
