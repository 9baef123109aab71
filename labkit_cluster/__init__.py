"""Runs on a cluster: submitted to Slurm or Kubernetes, watched from the notebook, and read like any
other run.

    job = labkit.submit("fsdp_wrap", cluster="slurm", nodes=2, nproc=4, timeout_s=600)
    job                    # its state
    job.result()           # waits, shows progress, and returns what labkit.run returns

    # from another kernel
    labkit_cluster.load_job("runs/20260131-120000-fsdp_wrap-a1b2c3").cancel()

The runs folder ($LABKIT_RUNS, otherwise runs/ in the checkout) must be on a disk that the notebook
and all nodes share.
"""

from labkit_cluster.jobs import Job, JobCancelled, load_job
from labkit_cluster.kubernetes import Kubernetes
from labkit_cluster.slurm import Slurm
from labkit_cluster.submission import submit

__all__ = ["Job", "JobCancelled", "Kubernetes", "Slurm", "load_job", "submit"]
