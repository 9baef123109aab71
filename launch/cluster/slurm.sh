#!/bin/bash
# One run of labkit as a job of Slurm, on several nodes. labkit.submit hands it over; by hand, for a run's folder that
# labkit.submit has made (its run.json says how it was submitted):
#
#     sbatch --nodes=2 --cpus-per-task=4 --time=10 --output=FOLDER/cluster.log launch/cluster/slurm.sh PYTHON FOLDER

# One task a node: labkit's agent, which starts torchrun, which starts the ranks.
#SBATCH --ntasks-per-node=1
# A job whose node died, or that had to make way for another, runs again in the same folder. Its program goes on from
# what it has saved.
#SBATCH --requeue
# The log of the first attempt stays.
#SBATCH --open-mode=append

python=$1
folder=$2${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # each job of an array has a folder of its own

# The agents find each other through the folder, at an address that works, and give it to torchrun.
# --kill-on-bad-exit: where one node fails, none goes on alone.
# --cpus-per-task: srun does not take it from sbatch, and would give all ranks of a node one core.
srun --kill-on-bad-exit=1 --wait=5 --cpus-per-task="$SLURM_CPUS_PER_TASK" "$python" -P -m labkit_cluster.agent "$folder"
status=$?

# Where a node was lost in mid-run, the agent of the first has said so in run.json, minutes before Slurm knows it, which
# would call the job failed. The status does not tell: it is the largest of all nodes, those that srun ended included.
if ((status && ${SLURM_RESTART_COUNT:-0} < 5)) && grep -q '"exit": "host lost"' "$folder/run.json"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
