"""Runs on a cluster: handed over to Slurm or Kubernetes, watched from the notebook, and read as any
other run.

    job = labkit.submit("fsdp_wrap", cluster="slurm", nodes=2, nproc=4, timeout_s=600)
    job                    # what it is doing
    job.result()           # waits, shows progress, and gives what labkit.run gives

    labkit_cluster.job("runs/20260131-120000-fsdp_wrap-a1b2c3").cancel()  # from another kernel

The runs folder ($LABKIT_RUNS, else runs/ in the checkout) must be on a disk that the notebook and
all nodes see.
"""

from labkit_cluster.jobs import Job, JobCancelled, load_job
from labkit_cluster.kubernetes import Kubernetes
from labkit_cluster.slurm import Slurm
from labkit_cluster.submission import submit

__all__ = ["Job", "JobCancelled", "Kubernetes", "Slurm", "load_job", "submit"]
